"""Checksums of files as the store has them: of a small one, of one in parts, of none."""

import xxhash

from mooncake_store.fs.plan import run
from mooncake_store.fs.plans import Plans
from mooncake_store.fs.sums import Span, sums


def test_the_spans_of_files_are_whole_and_theirs(fs, store):
    small, large = b"small", bytes(range(256)) * 40
    fs.pipe({"small": small, "large": large, "empty": b""})
    found = run(store, sums(Plans(4096, {}), ["small", "large", "missing", "empty"]))

    def spans(data, size=4096):
        cuts = [(at, min(at + size, len(data))) for at in range(0, max(1, len(data)), size)]
        return [Span(a, b, xxhash.xxh3_64_intdigest(data[a:b])) for a, b in cuts]

    assert found[0] == spans(small)
    assert found[1] == spans(large)
    assert found[2] is None
    assert found[3] == []
    # Of a file whose last part is gone nothing is said.
    parts = sorted(item.key for item in store.list("\0"))
    store.remove(parts[-1], force=True)
    assert run(store, sums(Plans(4096, {}), ["large"])) == [None]

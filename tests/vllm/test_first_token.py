"""Time to the first token of a long shared prefix: computed, and fetched from the store."""

import statistics

from tests.vllm.conftest import ours
from tests.vllm.model import make_model

PREFIX = 2048
RATIO = 3.0


def test_shared_prefix_is_fetched_faster_than_computed(start, vllm, store_at, tmp_path, capsys):
    cluster = store_at()
    model = make_model(tmp_path / "larger", hidden=512, layers=8)
    prefixes = [[3 + (n * 7 + 11 * k) % 250 for n in range(PREFIX)] for k in range(3)]
    first = start(model, **ours(cluster.url), max_model_len=4096)
    first("generate", prompts=[[5] * 40])
    computed = [
        first("generate", prompts=[[*each, 7, 8, 9]], tokens=1)["seconds"] for each in prefixes
    ]
    first("settle")
    first.close()

    second = start(model, **ours(cluster.url), max_model_len=4096)
    second("generate", prompts=[[5] * 40])
    answers = [second("generate", prompts=[[*each, 7, 8, 9]], tokens=1) for each in prefixes]
    assert [each["cached"] for each in answers] == [[PREFIX]] * 3
    fetched = [each["seconds"] for each in answers]
    second.close()
    slow, fast = statistics.median(computed), statistics.median(fetched)
    with capsys.disabled():
        print(
            f"\nfirst token after {PREFIX} shared tokens: computed {slow * 1e3:.0f} ms, "
            f"from the store {fast * 1e3:.0f} ms, {slow / fast:.1f} times faster"
        )
    assert slow > RATIO * fast

"""Many files at once, between a folder and what lies below a prefix of a pool.

    with connected() as store:
        remote = Remote(store, "runs/1")
        send(Folder("./out"), remote, sizes, say)
        failed = fetch(remote, Folder("./copy"), remote.files(), say)

Files are stored as the filesystem and a mount store them (`mooncake_store.fs`), so all three see
the same. Small ones travel in batches, a request or two for many; large ones one after the other,
in pieces, so none need fit into memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mooncake_store.cli.shared.client import Stopwatch
from mooncake_store.cli.shared.folder import reason_of
from mooncake_store.errors import InvalidArgumentError, NotFoundError, StoreError
from mooncake_store.fs import listing
from mooncake_store.fs.files import PoolReader, PoolWriter
from mooncake_store.fs.paths import clean
from mooncake_store.fs.plan import run
from mooncake_store.fs.plans import Plans
from mooncake_store.fs.sums import sums
from mooncake_store.units import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from mooncake_store.cli.shared.folder import Folder
    from mooncake_store.client import Client
    from mooncake_store.fs.sums import Span

__all__ = ["Remote", "different", "fetch", "send"]

PART_BYTES = 8 * MIB
"""What the filesystem stores as one object unless it is told otherwise."""
BATCH_BYTES, BATCH_FILES = 64 * MIB, 1024
PIECE_BYTES = 64 * MIB


class Remote:
    """What lies below a prefix, by names relative to it. `options` are those of puts."""

    def __init__(self, store: Client, prefix: str, **options: Any) -> None:
        self.prefix = clean(prefix)
        self.client = store
        self.plans = Plans(PART_BYTES, options)

    def files(self) -> dict[str, int]:
        """The size of every file by its name; raises NotFoundError where there is none."""
        found = self.files_so_far()
        if not found:
            raise NotFoundError(f"no object lies below {self.prefix!r}", advice="see `mooncake ls`")
        return found

    def files_so_far(self) -> dict[str, int]:
        """The size of every file by its name; none where nothing lies there yet."""
        entries = run(self.client, listing.find(self.plans, self.prefix, None, withdirs=False))
        if list(entries) == [self.prefix] and self.prefix:
            raise InvalidArgumentError(
                f"{self.prefix!r} is an object, nothing lies below it",
                advice="leave out -r for a single object",
            )
        skip = len(self.prefix) + 1 if self.prefix else 0
        return {path[skip:]: entry["size"] for path, entry in entries.items()}

    def path(self, name: str) -> str:
        """The path of a file in the pool."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def write(self, files: Mapping[str, bytes]) -> None:
        """Store a batch of small files."""
        named = {self.path(name): data for name, data in files.items()}
        run(self.client, self.plans.write_many(named, exclusive=False))

    def read(self, names: Sequence[str]) -> list[bytes | Exception]:
        """A batch of small files, or why not."""
        return run(self.client, self.plans.read_many([self.path(name) for name in names]))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; those that are gone already do not matter."""
        run(self.client, self.plans.remove([self.path(name) for name in names], strict=False))

    def sums(self, names: Sequence[str]) -> list[list[Span] | None]:
        """The checksums of files, by spans."""
        return run(self.client, sums(self.plans, [self.path(name) for name in names]))


def send(
    folder: Folder, remote: Remote, sizes: Mapping[str, int], say: Callable[[str], None]
) -> None:
    """Store files of a folder; raises for the first that cannot be, those before it stay."""
    tell = _Teller("stored", sizes, say)
    for batch in _batches(sizes):
        if sizes[batch[0]] > PART_BYTES:
            (name,) = batch
            with folder.open(name) as source, PoolWriter(remote, remote.path(name)) as target:
                while piece := source.read(PIECE_BYTES):
                    target.write(piece)
                    tell.more(0, len(piece))
            tell.more(1, 0)
            continue
        contents = {}
        for name in batch:
            with folder.open(name) as source:
                contents[name] = source.read()
        remote.write(contents)
        tell.more(len(batch), sum(map(len, contents.values())))


def fetch(
    remote: Remote, folder: Folder, sizes: Mapping[str, int], say: Callable[[str], None]
) -> dict[str, str]:
    """Write files of the pool into a folder; returns why those failed that could not be."""
    tell, failed = _Teller("wrote", sizes, say), dict[str, str]()
    for batch in _batches(sizes):
        large = sizes[batch[0]] > PART_BYTES
        values: list[Any] = [None] if large else remote.read(batch)
        for name, value in zip(batch, values, strict=True):
            try:
                if isinstance(value, Exception):
                    raise value
                with folder.create(name) as target:
                    if not large:
                        target.write(value)
                        continue
                    with PoolReader(remote, remote.path(name)) as source:
                        while piece := source.read(PIECE_BYTES):
                            target.write(piece)
                            tell.more(0, len(piece))
            except (OSError, InvalidArgumentError, NotFoundError) as error:
                if isinstance(error, StoreError) and not isinstance(
                    error, InvalidArgumentError | NotFoundError
                ):
                    raise  # the store is away, or refuses: no other file would fare better
                failed[name] = reason_of(error)
        tell.more(len(batch), 0 if large else sum(sizes[name] for name in batch))
    return failed


def different(folder: Folder, remote: Remote, sizes: Mapping[str, int]) -> list[str]:
    """Which files of a folder, with these sizes there and in the pool, have another content."""
    out = []
    for batch in _batches(sizes):
        for name, spans in zip(batch, remote.sums(batch), strict=True):
            if spans is None or not _matches(folder, name, spans):
                out.append(name)
    return out


def _matches(folder: Folder, name: str, spans: list[Span]) -> bool:
    import xxhash

    with folder.open(name) as file:
        for span in spans:
            total, left = xxhash.xxh3_64(), span.last - span.first
            while left and (piece := file.read(min(left, PIECE_BYTES))):
                total.update(piece)
                left -= len(piece)
            if left or total.intdigest() != span.checksum:
                return False
    return True


def _batches(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Small files together, as many as fit into a batch; each large one alone."""
    batch: list[str] = []
    room = BATCH_BYTES
    for name, size in sizes.items():
        if size > PART_BYTES:
            yield [name]
            continue
        if batch and (size > room or len(batch) == BATCH_FILES):
            yield batch
            batch, room = [], BATCH_BYTES
        batch.append(name)
        room -= size
    if batch:
        yield batch


class _Teller:
    """Says how far a transfer is."""

    def __init__(self, done: str, sizes: Mapping[str, int], say: Callable[[str], None]) -> None:
        self._done, self._say = done, say
        self._of = f"{len(sizes):,} files, {format_size(sum(sizes.values()))}"
        self._files = self._bytes = 0
        self._watch = Stopwatch()

    def more(self, files: int, nbytes: int) -> None:
        """So much more is done."""
        self._files += files
        self._bytes += nbytes
        self._say(
            f"{self._done} {self._files:,} of {self._of}: {format_size(self._bytes)}, "
            f"{self._watch.rate(self._bytes)}"
        )

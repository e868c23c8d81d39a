"""The journals in a master's state directory, for somebody who only looks.

    journals = KeptJournals.of(path)
    journals.kept.cluster, journals.shards
    journals.look(0).contents           # what shard 0 wrote down until now

Nothing is locked, changed or waited for, so it does not matter whether the master runs: files are
read as they are, and the memory beside them is copied first, so that what a shard writes meanwhile
looks neither lost nor damaged. O(bytes).
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncake_store.core.ring import AHEAD
from mooncake_store.journal.layout import journal_names
from mooncake_store.journal.origin import Origin
from mooncake_store.journal.reading import read_journal
from mooncake_store.master.kept_files import unusable
from mooncake_store.master.losses import Left, judge
from mooncake_store.master.state_directory import read_kept
from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from mooncake_store.journal.reading import Contents
    from mooncake_store.master.losses import Judgement
    from mooncake_store.master.state_directory import Kept

__all__ = ["KeptJournals", "Seen"]

TRIES = 5
"""How often one look may meet a file that is just being deleted, or a ring in the middle of a step;
a master deletes files some minutes apart."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one shard has kept."""

    folder: Path
    contents: Contents
    files: int
    nbytes: int
    """Of the files, without the ring."""
    ring: Path | None
    """The memory of this boot that its words were read from as well."""
    no_ring: str
    """Why there is none."""
    judgement: Judgement
    """What a master that is started now makes of it."""
    ahead_ns: int
    """How far the time of the shard is ahead of the clock of this host."""


class KeptJournals:
    """The journals of all shards of one master."""

    def __init__(self, path: Path, kept: Kept, shards: int) -> None:
        self.path = path
        self.kept = kept
        self.shards = shards

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return those in a state directory; raises ConfigError where none is kept."""
        try:
            names = os.listdir(path)
            kept = read_kept(path)
        except FileNotFoundError:
            raise ConfigError(
                f"there is no state directory {path}",
                advice="name the one of the master with --state, or the port it has with --port",
            ) from None
        except OSError as error:
            raise unusable(path, error) from error
        shards = sum(re.fullmatch("shard-[0-9]+", name) is not None for name in names)
        if kept is None or not shards:
            raise ConfigError(
                f"{path} has no journal of a master",
                advice="name the directory that its --state names; with --journal none there is no"
                " journal",
            )
        return cls(path, kept, shards)

    def look(self, shard: int) -> Seen:
        """Read what a shard has kept. Raises ConfigError for what is not readable, or another's."""
        folder = self.path / f"shard-{shard}"
        origin = Origin(self.kept.cluster, shard, self.shards)
        tries = 0
        while True:
            tries += 1
            try:
                return _look(folder, origin)
            except ConfigError as error:
                if tries == TRIES or not isinstance(error.__cause__, FileNotFoundError):
                    raise


def _look(folder: Path, origin: Origin) -> Seen:
    for _ in range(TRIES):
        left = Left.find(folder, origin)
        if left.file is not None or "contradict" not in left.why:
            break
    # Before the ring, which so tells of all that was noted.
    noted = left.noted and left.noted._replace(words=left.noted.words.copy())
    if left.rows is not None:
        left.rows.close()
    ring = left.ring if left.file is None else left.file.copied()
    contents = read_journal(folder, origin, ring, live=left.ring)
    files, nbytes = 0, 0
    for name in journal_names(os.listdir(folder)):
        with suppress(FileNotFoundError):
            nbytes += (folder / name).stat().st_size
            files += 1
    path = None if left.file is None else left.file.path
    known = contents.same_boot and left.ring is not None
    ahead_ns = int(left.ring.header[AHEAD]) if known and left.ring is not None else 0
    return Seen(folder, contents, files, nbytes, path, left.why, judge(contents, noted), ahead_ns)

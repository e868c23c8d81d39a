"""`mooncake sync`: make a prefix of the pool like a folder, or a folder like a prefix."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import ExitCode, JsonOption, command, emit, progress
from mooncake_store.cli.shared.client import Stopwatch, connected, store_options
from mooncake_store.errors import InvalidArgumentError
from mooncake_store.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake_store.client import Client


POOL = "pool:"
"""Before a prefix, so that it is told from a folder."""


@command(
    ("mooncake sync ./models pool:models", "store what is new or changed in the folder"),
    ("mooncake sync pool:models ./models", "the other way round"),
    ("mooncake sync ./models pool:models --delete", "and remove what the folder has not"),
    ("mooncake sync ./models pool:models --dry-run", "only say what would be done"),
)
@store_options
def sync(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A folder, or pool:PREFIX.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="The other one of the two.")],
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove what the source has not.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Change nothing, say what.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Copy what is new or changed from a folder to a prefix of the pool, or back.

    Files are the same if size and content are; the pool's checksums tell, so only files of this
    machine are read for it. A source with no file in it is refused: an emptied pool empties no
    folder. Symbolic links of a folder are left out.
    """
    if source.startswith(POOL) == target.startswith(POOL):
        raise InvalidArgumentError(
            "one of the two is a folder and the other a prefix of the pool",
            advice=f"write {POOL}PREFIX for the latter",
        )
    with connected() as store, progress("comparing") as say:
        work = _Work(store, source, target)
        watch = Stopwatch()
        failed = {} if dry_run else work.carry_out(say, delete=delete)
        seconds = watch.seconds
    value = {
        "copied": {name: size for name, size in work.changed.items() if name not in failed},
        "deleted": work.extra if delete and not failed else [],
        "unchanged": work.unchanged,
        "failed": failed,
        "seconds": seconds,
        "dry_run": dry_run,
    }
    emit(value, as_json=as_json, human=lambda: _told(value))
    return ExitCode.FAILED if failed else ExitCode.OK


class _Work:
    """What has to be done, and how; `changed` and `unchanged` are of the source."""

    def __init__(self, store: Client, source: str, target: str) -> None:
        from mooncake_store.cli.shared.bulk import Remote, different
        from mooncake_store.cli.shared.folder import Folder

        self._upwards = target.startswith(POOL)
        folder, prefix = (source, target) if self._upwards else (target, source)
        self._folder = Folder(folder)
        self._remote = Remote(store, prefix.removeprefix(POOL))
        here = self._here(folder)
        there = self._remote.files_so_far() if self._upwards else self._remote.files()
        old, new = (there, here) if self._upwards else (here, there)
        same_size = {name: size for name, size in new.items() if old.get(name) == size}
        other = set(different(self._folder, self._remote, same_size))
        self.changed = {
            name: size for name, size in new.items() if name not in same_size or name in other
        }
        self.unchanged = len(new) - len(self.changed)
        self.extra = sorted(old.keys() - new.keys())

    def _here(self, folder: str) -> dict[str, int]:
        if not self._upwards and not os.path.lexists(folder):
            return {}
        found, _ = self._folder.files()
        if self._upwards and not found:
            raise InvalidArgumentError(f"the folder {folder} holds no file")
        return found

    def carry_out(self, say: Callable[[str], None], *, delete: bool) -> dict[str, str]:
        """Copy and, if nothing failed, delete; returns why some files could not be written."""
        from mooncake_store.cli.shared.bulk import fetch, send

        if self._upwards:
            send(self._folder, self._remote, self.changed, say)
            failed: dict[str, str] = {}
        else:
            failed = fetch(self._remote, self._folder, self.changed, say)
        if delete and self.extra and not failed:
            (self._remote if self._upwards else self._folder).remove(self.extra)
        return failed


def _told(value: dict[str, Any]) -> str:
    from mooncake_store.units import format_size

    copy, delete = ("would copy", "would delete") if value["dry_run"] else ("copied", "deleted")
    lines = [f"not written: {name}: {why}" for name, why in value["failed"].items()]
    if value["dry_run"]:
        lines += [f"{copy} {name}" for name in value["copied"]]
        lines += [f"{delete} {name}" for name in value["deleted"]]
    sizes = value["copied"].values()
    counts = [
        f"{copy} {len(sizes):,} files ({format_size(sum(sizes))})",
        f"{delete} {len(value['deleted']):,}",
        f"{value['unchanged']:,} are the same",
    ]
    return "\n".join([*map(printable, lines), ", ".join(counts)])

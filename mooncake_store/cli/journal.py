"""`mooncake journal`: what a master wrote down of its objects, read from its state directory."""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import ExitCode, JsonOption, emit, examples, make_app, note
from mooncake_store.cli.shared.client import key_of, shown, text_of
from mooncake_store.errors import ConfigError, NotFoundError, StoreError

if TYPE_CHECKING:
    from mooncake_store.journal.reading import Damage
    from mooncake_store.master.kept_journals import KeptJournals, Seen

app = make_app("Look into what a master keeps of its objects; it may run or not.")

StateOption = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help="The state directory of the master."),
]
PortOption = Annotated[
    int | None,
    typer.Option(
        "--port",
        metavar="N",
        help="The port of the master, whose state is where it is by default.",
        show_default="50051",
    ),
]


class Naming(StrEnum):
    """How keys become digests, as the master's `--identity` says."""

    KEYED = "keyed"
    XXH3 = "xxh3"


@app.command(
    epilog=examples(
        ("mooncake journal show greeting", "when it was put, moved, replaced and removed"),
        ("mooncake journal show greeting --state /var/lib/mooncake --json", "for a program"),
        ("mooncake journal show kv1/0 --port 50052 --namespace team-a", "of another pool"),
    )
)
def show(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Name of the object.")],
    state: StateOption = None,
    port: PortOption = None,
    namespace: Annotated[
        str, typer.Option("--namespace", metavar="NAME", help="The namespace of the key.")
    ] = "default",
    identity: Annotated[
        Naming, typer.Option("--identity", help="How the master names keys.")
    ] = Naming.KEYED,
    as_json: JsonOption = False,
) -> None:
    """Show what happened to a key, oldest first, as far as the journal goes back.

    What was written before the newest whole snapshot is deleted at some time. Positions count words
    of 8 bytes; places are the number of a segment and an offset in it. Nothing is changed.
    """
    from mooncake_store import ids
    from mooncake_store.identity import identity_of, secret_of

    journals = _journals(state, port)
    name = key_of(key)
    secret = secret_of(bytes.fromhex(journals.kept.secret), namespace)
    digest = identity_of(identity.value, secret, namespace).digest(name)
    shard = ids.shard_of_one(digest, journals.shards)
    seen = journals.look(shard)
    contents = seen.contents
    if contents.void:
        raise StoreError(
            f"the journal in {seen.folder} may not be believed: {contents.void}",
            advice="see `mooncake journal verify`",
        )
    begin = contents.positions[0] if contents.positions else contents.end
    lines = [
        {"position": position, "shard": shard, "what": what}
        for position, what in _history(seen, digest)
    ]
    if not lines:
        raise NotFoundError(
            f"the journal of shard {shard}, from {begin} to {contents.end}, says nothing of "
            f"{text_of(name)!r} in the namespace {namespace!r}",
            advice="look whether the namespace is right, and --identity, if the master has one",
        )
    value = {
        "key": text_of(name),
        "namespace": namespace,
        "shard": shard,
        "begin": begin,
        "end": contents.end,
        "damages": len(contents.damages),
        "lines": lines,
    }
    width = len(str(contents.end))
    emit(
        value,
        as_json=as_json,
        human=lambda: "\n".join(
            [
                f"{shown(name)}, shard {shard}, positions {begin} to {contents.end}:",
                *(f"{line['position']:>{width}}  shard {shard}  {line['what']}" for line in lines),
            ]
        ),
    )
    if contents.damages and not as_json:
        note("parts of the journal are missing; see `mooncake journal verify`")


def _history(seen: "Seen", digest: bytes) -> Iterator[tuple[int, str]]:
    """What happened to a key, with the position; a snapshot repeats what was said before."""
    import numpy as np

    from mooncake_store.core.cell_text import About

    about, last = About(np.frombuffer(digest, np.uint64)), ""
    for run, position in zip(seen.contents.runs, seen.contents.positions, strict=True):
        for place, what in about.read(run):
            row = what.partition(":")[0]
            yield position + place, f"{row}: as before" if what == last else what
            last = what


@app.command(
    epilog=examples(
        ("mooncake journal verify", "of the master on the usual port; ends with 1 when damaged"),
        ("mooncake journal verify --state /var/lib/mooncake --json", "for a program"),
    )
)
def verify(
    state: StateOption = None,
    port: PortOption = None,
    as_json: JsonOption = False,
) -> int:
    """Read all of a journal, tell what is damaged, and what a master would do with it.

    Ends with 1 when anything is missing or not as it was written. Nothing is changed.
    """
    journals = _journals(state, port)
    shards = [_verified(journals, shard) for shard in range(journals.shards)]
    whole = all(shard["whole"] for shard in shards)
    value = {"state": str(journals.path), "cluster": journals.kept.cluster, "whole": whole}
    emit(
        value | {"shards": shards},
        as_json=as_json,
        human=lambda: "\n".join(line for shard in shards for line in _told(shard)),
    )
    return ExitCode.OK if whole else ExitCode.FAILED


def _journals(state: Path | None, port: int | None) -> "KeptJournals":
    """The journals that the options name."""
    from mooncake_store.config.settings import MasterConfig
    from mooncake_store.master.kept_journals import KeptJournals
    from mooncake_store.master.state_directory import default_path

    if state is not None and port is not None:
        raise ConfigError("--state and --port each name a state directory", advice="say one")
    try:
        if state is not None:
            return KeptJournals.of(state.expanduser())
        return KeptJournals.of(default_path(MasterConfig().port if port is None else port))
    except RuntimeError as error:
        raise ConfigError(f"no home: {error}", advice="name the directory with --state") from error


def _verified(journals: "KeptJournals", shard: int) -> dict[str, Any]:
    seen = journals.look(shard)
    contents = seen.contents
    unused, empty = contents.unusable, contents.facts is None
    return {
        "shard": shard,
        "folder": str(seen.folder),
        "begin": contents.positions[0] if contents.positions else contents.end,
        "end": contents.end,
        "files": seen.files,
        "bytes": seen.nbytes,
        "memory": None if seen.ring is None else str(seen.ring),
        "whole": empty or contents.complete,
        "damages": [_damage(each) for each in contents.damages],
        "torn": None if contents.torn is None else _damage(contents.torn),
        "kept": not unused and not empty,
        "why": unused or ("nothing was written down yet" if empty else ""),
    }


def _damage(damage: "Damage") -> dict[str, Any]:
    return damage._asdict() | {"told": str(damage)}


def _told(shard: dict[str, Any]) -> Iterator[str]:
    from mooncake_store.units import format_size

    files = "1 file" if shard["files"] == 1 else f"{shard['files']} files"
    yield (
        f"shard {shard['shard']}: positions {shard['begin']} to {shard['end']}, "
        f"{files} of {format_size(shard['bytes'])}"
        f"{' and memory of this boot' if shard['memory'] else ''}, "
        f"{'whole' if shard['whole'] else 'not whole'}"
    )
    for damage in shard["damages"]:
        yield f"  damaged: {damage['told']}"
    if shard["torn"]:
        yield f"  torn tail, no damage: {shard['torn']['told']}"
    kept = "keeps all" if shard["kept"] else f"begins with nothing because {shard['why']}"
    yield f"  a master started now {kept}"

"""`mooncake journal`: what a master wrote down of its objects, read from its state directory."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import ExitCode, JsonOption, emit, examples, make_app, note
from mooncake_store.cli.shared.client import key_of, shown, text_of
from mooncake_store.cli.shared.state_options import PortOption, StateOption, state_path
from mooncake_store.errors import InvalidArgumentError, NotFoundError

if TYPE_CHECKING:
    from mooncake_store.journal.reading import Damage
    from mooncake_store.master.kept_journals import KeptJournals, Seen
    from mooncake_store.master.replaying import Replayed

app = make_app("Look into what a master keeps of its objects; it may run or not.")


class Naming(StrEnum):
    """How keys become digests, as the master's `--identity` says."""

    KEYED = "keyed"
    XXH3 = "xxh3"


IdentityOption = Annotated[Naming, typer.Option("--identity", help="How the master names keys.")]


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
    identity: IdentityOption = Naming.KEYED,
    as_json: JsonOption = False,
) -> None:
    """Show what happened to a key, oldest first, as far as the journal goes back.

    What was written before the newest whole snapshot is deleted at some time. Positions count words
    of 8 bytes; places are the number of a segment and an offset in it. Nothing is changed.
    """
    from mooncake_store import ids
    from mooncake_store.identity import identity_of, secret_of
    from mooncake_store.master.replaying import believed

    journals = _journals(state, port)
    name = key_of(key)
    secret = secret_of(bytes.fromhex(journals.kept.secret), namespace)
    digest = identity_of(identity.value, secret, namespace).digest(name)
    shard = ids.shard_of_one(digest, journals.shards)
    seen = journals.look(shard)
    contents = believed(seen)
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


@app.command(
    epilog=examples(
        ("mooncake journal replay", "what a master that is started now would know"),
        (
            "mooncake journal replay --shard 0 --until 340310",
            "as it was before the word at that position, which `journal show` tells",
        ),
        (
            "mooncake journal replay --shard 0 --interactive",
            "look into the shard with Python: `shard`, `stat(key, namespace)`",
        ),
    )
)
def replay(
    state: StateOption = None,
    port: PortOption = None,
    shard: Annotated[
        int | None, typer.Option("--shard", metavar="N", help="This shard only.", min=0)
    ] = None,
    until: Annotated[
        int | None,
        typer.Option(
            "--until",
            metavar="POSITION",
            help="As it was before the word at this position was written.",
            min=1,
        ),
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", help="Open Python with the shard.")
    ] = False,
    identity: IdentityOption = Naming.KEYED,
    as_json: JsonOption = False,
) -> int:
    """Make shards anew of all that is kept, in this process, and tell what came of it.

    Ends with 1 when a shard contradicts itself. Each needs a whole snapshot and all words since it
    began, so a position that lies before that cannot be shown. Nothing is changed.
    """
    from mooncake_store.master import replaying

    journals = _journals(state, port)
    if shard is None and journals.shards > 1 and (until is not None or interactive):
        raise InvalidArgumentError(
            f"--until and --interactive are for one of {journals.shards} shards",
            advice="say which with --shard",
        )
    if interactive and as_json:
        raise InvalidArgumentError("--interactive is for a person, --json for a program")
    found = []
    for number in range(journals.shards) if shard is None else (shard,):
        replayed = replaying.replay(journals, number, until, identity=identity.value)
        found.append(_replayed(replayed, replayed.broken()))
    sound = all(each["sound"] for each in found)
    value = {"state": str(journals.path), "cluster": journals.kept.cluster, "sound": sound}
    emit(
        value | {"shards": found},
        as_json=as_json,
        human=lambda: "\n".join(line for each in found for line in _summed(each)),
    )
    if interactive:
        sys.stdout.flush()
        _interact(replayed)
    return ExitCode.OK if sound else ExitCode.FAILED


def _replayed(replayed: "Replayed", broken: str) -> dict[str, Any]:
    shard, restored = replayed.shard, replayed.restored
    figures = shard.stats()
    return {
        "shard": replayed.number,
        "snapshot": replayed.snapshot,
        "end": replayed.end,
        "objects": restored.objects,
        "bytes": restored.nbytes,
        "unfinished": restored.unfinished,
        "dropped": restored.dropped,
        "lost": restored.lost,
        "free_bytes": max(0, figures.bytes_total - figures.bytes_allocated),
        "waiting_bytes": figures.quarantined_bytes,
        "clients": len(shard.clients),
        "sound": not broken,
        "broken": broken,
        "unused": replayed.unused,
        "segments": [
            {
                "number": segment.index,
                "name": segment.name,
                "host": segment.host,
                "state": segment.state.name.lower(),
                "bytes": segment.nbytes,
                "free_bytes": segment.nbytes - segment.used,
            }
            for segment in shard.segments()
        ],
        "namespaces": [
            {
                "name": tenant.name,
                "objects": shard.tenant_objects(number),
                "bytes": shard.tenant_bytes(number),
                "quota_bytes": tenant.quota_bytes,
            }
            for number, tenant in sorted(shard.tenant_by_number.items())
        ],
    }


def _summed(shard: dict[str, Any]) -> Iterator[str]:
    from mooncake_store.units import format_size

    yield (
        f"shard {shard['shard']}: positions {shard['snapshot']} to {shard['end']}, "
        f"{'sound' if shard['sound'] else 'contradicts itself: ' + shard['broken']}"
    )
    yield (
        f"  {shard['objects']} objects, {shard['unfinished']} unfinished, "
        f"{format_size(shard['bytes'])}; {shard['dropped']} dropped that could not be true, "
        f"{shard['lost']} lost with what is damaged"
    )
    yield (
        f"  {format_size(shard['free_bytes'])} free, "
        f"{format_size(shard['waiting_bytes'])} waiting for readers and writers of before, "
        f"{shard['clients']} clients"
    )
    for segment in shard["segments"]:
        yield (
            f"  segment {segment['number']} {segment['name']} of {segment['host']}: "
            f"{segment['state']}, {format_size(segment['bytes'])}, "
            f"{format_size(segment['free_bytes'])} free"
        )
    for name in shard["namespaces"]:
        quota = "" if name["quota_bytes"] is None else f" of {format_size(name['quota_bytes'])}"
        yield (
            f"  namespace {name['name']}: {name['objects']} objects, "
            f"{format_size(name['bytes'])}{quota}"
        )
    if shard["unused"]:
        yield f"  a master started now begins with nothing because {shard['unused']}"


def _interact(replayed: "Replayed") -> None:
    """Let a person look into a shard until they have had enough."""
    import code

    known = {"shard": replayed.shard, "stat": replayed.stat, "replayed": replayed}
    with suppress(SystemExit):
        code.interact(
            banner="shard, stat(key, namespace='default') and replayed; Ctrl-D ends",
            local=known,
            exitmsg="",
        )


def _journals(state: Path | None, port: int | None) -> "KeptJournals":
    """The journals that the options name."""
    from mooncake_store.master.kept_journals import KeptJournals

    return KeptJournals.of(state_path(state, port))


def _verified(journals: "KeptJournals", shard: int) -> dict[str, Any]:
    seen = journals.look(shard)
    contents, judgement = seen.contents, seen.judgement
    unused, empty = judgement.unusable, contents.facts is None
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
        "cut": contents.cut,
        "lost": judgement.lost,
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
    kept = "keeps all" if not shard["lost"] else f"keeps all but {shard['lost']} objects"
    if shard["cut"]:
        kept += ", as it was when the disk had it last: the host was started anew since"
    if not shard["kept"]:
        kept = f"begins with nothing because {shard['why']}"
    yield f"  a master started now {kept}"

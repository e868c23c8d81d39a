"""`mooncake secret`: the credentials and keys of a pool: made, listed, exchanged, taken back."""

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mooncake_store.cli.shared.app import JsonOption, emit, examples, make_app, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mooncake_store.credentials import Entry

app = make_app("Make the credentials and keys of a pool, list them, and take them back.")

DirectoryArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR", help="The directory that masters and workers are given as --credentials."
    ),
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Whose credential it is.")]
KeysArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="The directory that workers are given as --cold-keys; that of credentials will do.",
    ),
]
NamespaceArgument = Annotated[
    str,
    typer.Argument(metavar="NAMESPACE", help='Whose key it is; "*": of all that have none.'),
]


OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write it there, for this user alone, unseen."),
]


class RoleName(StrEnum):
    """What somebody is to a pool; each may do what those before it may."""

    READER = "reader"
    WRITER = "writer"
    WORKER = "worker"
    ADMIN = "admin"


@app.command(
    "reader",
    epilog=examples(
        ("mooncake secret reader pool.secret", "for a file that only its readers can read"),
    ),
)
def reader(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file with the pool's secret.")],
    as_json: JsonOption = False,
) -> None:
    """Print the secret for clients that may only read, whoever they are.

    It is made of the pool's own, which it does not tell; masters and workers accept it as they are.
    """
    from mooncake_store.endpoint import read_secret
    from transfer_engine.wire.keyring import read_only_secret

    made = read_only_secret(read_secret(file)).decode()
    emit({"read_only_secret": made}, as_json=as_json, human=lambda: made)


@app.command(
    epilog=examples(
        (
            "mooncake secret make /etc/mooncake/credentials alice --out alice.secret",
            "may read and write; clients are given the file as --secret-file",
        ),
        (
            "mooncake secret make /etc/mooncake/credentials batch --role reader --namespace team-a"
            " --for 30d",
            "may read one namespace, for 30 days",
        ),
        (
            "mooncake secret make /etc/mooncake/credentials bob --namespace team-b"
            " --limit bytes=10GiB --limit clients=100",
            "no more than so much may lie in what it is for, and so many may be connected",
        ),
        ("mooncake secret make /etc/mooncake/credentials node7 --role worker", "may lend memory"),
    )
)
def make(
    directory: DirectoryArgument,
    name: NameArgument,
    role: Annotated[
        RoleName, typer.Option("--role", help="What it allows: each allows what is before it.")
    ] = RoleName.WRITER,
    namespaces: Annotated[
        list[str] | None,
        typer.Option("--namespace", metavar="NAME", help="One that it is for; none: all of them."),
    ] = None,
    lasts: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="When it ends. Never.")
    ] = None,
    limits: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="NAME=NUMBER",
            help="How much it may take of clients, names, groups, tasks, pins, bytes, segments or "
            "lent. Anything.",
        ),
    ] = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a credential, and print what its principal puts into a file of his.

    Masters and workers let it in within a second; nothing has to be started anew. What is printed
    is kept nowhere else but in the directory.
    """
    from mooncake_store import credentials
    from mooncake_store.limits import split_limit
    from mooncake_store.units import parse_duration
    from transfer_engine.wire.rights import Role

    until = 0.0 if lasts is None else time.time() + parse_duration(lasts)
    given = [split_limit(each) for each in limits or ()]
    text = credentials.make(
        directory,
        name,
        Role[role.value.upper()],
        namespaces=namespaces or (),
        until=until,
        limits=dict(given),
    )
    _tell(text, out, as_json=as_json)


@app.command(
    "list",
    epilog=examples(
        ("mooncake secret list /etc/mooncake/credentials", "whose there are, and until when")
    ),
)
def list_(directory: DirectoryArgument, as_json: JsonOption = False) -> None:
    """List whose credentials there are, what they allow, and which namespaces have keys.

    No secret and no key is shown; a key has an id, by which `mooncake status` calls it as well.
    """
    from mooncake_store import credentials, sealing_keys

    now = time.time()
    found = [
        (name, entry, len(entry.keys(name, now)))
        for name, entry in credentials.entries(directory).items()
    ]
    keys = sealing_keys.keys_in(directory)
    emit(
        {
            "credentials": [
                {
                    "principal": name,
                    "role": entry.role,
                    "namespaces": list(entry.namespaces),
                    "limits": entry.limits,
                    "until": entry.until or None,
                    "secrets": holding,
                }
                for name, entry, holding in found
            ],
            "keys": [{"namespace": name, "ids": ids} for name, ids in keys.items()],
        },
        as_json=as_json,
        human=lambda: _tables(found, keys),
    )


@app.command(
    epilog=examples(
        (
            "mooncake secret rotate /etc/mooncake/credentials alice --keep 1h",
            "the one before holds for an hour yet",
        ),
    )
)
def rotate(
    directory: DirectoryArgument,
    name: NameArgument,
    keep: Annotated[
        str, typer.Option("--keep", metavar="DURATION", help="For how long the old one holds.")
    ] = "1h",
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a principal another secret, and print it; what it allows stays as it is."""
    from mooncake_store import credentials
    from mooncake_store.units import parse_duration

    text = credentials.rotate(directory, name, keep_s=parse_duration(keep))
    _tell(text, out, as_json=as_json)


@app.command(
    epilog=examples(
        (
            "mooncake secret limit /etc/mooncake/credentials bob bytes=20GiB clients=any",
            "as many clients as it likes, and room for 20 GiB",
        ),
    ),
)
def limit(
    directory: DirectoryArgument,
    name: NameArgument,
    limits: Annotated[
        list[str], typer.Argument(metavar="NAME=NUMBER...", help="NAME=any ends a limit.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Change how much a principal may take; its sessions go on, and have it within a second."""
    from mooncake_store import credentials
    from mooncake_store.limits import changed_limit, limits_text

    held = credentials.limit(directory, name, dict(changed_limit(each) for each in limits))
    said = f"is limited to {limits_text(held)}" if held else "has no limits"
    emit({"limits": held}, as_json=as_json, human=lambda: f"{name} {said}")


@app.command(
    epilog=examples(("mooncake secret revoke /etc/mooncake/credentials alice", "her sessions end"))
)
def revoke(directory: DirectoryArgument, name: NameArgument, as_json: JsonOption = False) -> None:
    """Take a credential back: sessions that proved it end within two seconds."""
    from mooncake_store import credentials

    credentials.revoke(directory, name)
    emit({"revoked": name}, as_json=as_json, human=lambda: f"{name} is let in no more")


@app.command(
    epilog=examples(
        (
            "mooncake secret key /etc/mooncake/credentials team-a",
            "a key, or another one: those of before still open what they sealed",
        ),
        ('mooncake secret key /etc/mooncake/credentials "*"', "for all that have none"),
        (
            "mooncake secret key /etc/mooncake/credentials team-a --only",
            "the one before got out: what it sealed is misses from now on",
        ),
    )
)
def key(
    directory: KeysArgument,
    namespace: NamespaceArgument,
    only: Annotated[
        bool, typer.Option("--only", help="Destroy its keys of before, and so what they sealed.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Give a namespace a key, by which workers seal what they write to a store elsewhere.

    Workers that are given the directory as --cold-keys use it within a second. It is kept in the
    directory alone, and printed is what it is called.
    """
    from mooncake_store import sealing_keys

    made = sealing_keys.make(directory, namespace, alone=only)
    emit({"namespace": namespace, "id": made}, as_json=as_json, human=lambda: made)


@app.command(
    epilog=examples(
        (
            "mooncake secret destroy /etc/mooncake/credentials team-a",
            "nothing opens any more what team-a has in a store elsewhere",
        )
    )
)
def destroy(
    directory: KeysArgument, namespace: NamespaceArgument, as_json: JsonOption = False
) -> None:
    """Take all keys of a namespace away: what lies in stores elsewhere is misses within a second.

    Nothing brings it back but a copy of the key: remove those as well. What lies in memory and on
    disks stays as it is.
    """
    from mooncake_store import sealing_keys

    sealing_keys.destroy(directory, namespace)
    emit(
        {"destroyed": namespace},
        as_json=as_json,
        human=lambda: f"nothing opens what was sealed for {namespace}",
    )


def _tables(found: "list[tuple[str, Entry, int]]", keys: dict[str, list[str]]) -> "RenderableType":
    """Draw the principals of a directory, and the keys that it has, if any."""
    from rich.console import Group

    from mooncake_store.limits import limits_text

    principals = table(
        {
            "Principal": "left",
            "Role": "left",
            "Namespaces": "left",
            "Limits": "left",
            "Until": "left",
            "Secrets": "right",
        },
        [
            (
                name,
                entry.role,
                ", ".join(entry.namespaces) or "all",
                limits_text(entry.limits) or "none",
                _day(entry.until),
                str(holding) if holding else "none holds",
            )
            for name, entry, holding in found
        ],
    )
    if not keys:
        return principals
    sealing = table(
        {"Keys of": "left", "Seals": "left", "Opens": "left"},
        [
            (f"{name}, all others" if name == "*" else name, ids[0], ", ".join(ids[1:]))
            for name, ids in keys.items()
        ],
    )
    return Group(principals, sealing) if found else sealing


def _tell(text: str, out: Path | None, *, as_json: bool) -> None:
    """Print a credential, or write it to a file."""
    from mooncake_store import credentials

    if out is None:
        emit({"credential": text}, as_json=as_json, human=lambda: text)
        return
    credentials.write_text(out, text)
    emit({"file": str(out)}, as_json=as_json, human=lambda: f"written to {out}")


def _day(until: float) -> str:
    if not until:
        return "for ever"
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(until))

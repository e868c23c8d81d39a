"""`mooncake tenant`: namespaces, what they have, and what they may have."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import JsonOption, emit, examples, make_app, table
from mooncake_store.cli.shared.client import connected, store_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.admin.pool import Namespace

app = make_app("Show what namespaces have of a pool, and bound it.")

NONE = "none"


@app.command(
    "list",
    epilog=examples(
        ("mooncake tenant list", "all namespaces, those with most first"),
        ("mooncake tenant list --json", "the same for a program"),
    ),
)
@store_options
def list_(as_json: JsonOption = False) -> None:
    """List namespaces, how many objects they have, how many bytes, and of which quota.

    It is for admins. `mooncake secret list` shows who may use which.
    """
    from mooncake_store.admin.pool import list_namespaces

    with connected() as store:
        found = store._run(list_namespaces(store._core))
    found.sort(key=lambda each: -each.bytes)
    value = {
        "namespaces": [
            {"name": e.name, "objects": e.objects, "bytes": e.bytes, "quota": e.quota}
            for e in found
        ]
    }
    emit(value, as_json=as_json, human=lambda: _drawn(found))


@app.command(
    epilog=examples(
        ("mooncake tenant quota team-a 200GB", "it evicts its own objects above that"),
        ("mooncake tenant quota team-a none", "as much as there is room for"),
    )
)
@store_options
def quota(
    namespace: Annotated[str, typer.Argument(metavar="NAMESPACE", help="Whose quota it is.")],
    size: Annotated[
        str, typer.Argument(metavar="SIZE", help=f"The most that it may have; {NONE}: no bound.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Give a namespace a quota, from now on, or take it away. It is for admins.

    What it has too much leaves when it next puts. A quota of the master's settings is that again
    when the master starts.
    """
    from mooncake_store.admin.pool import set_quota
    from mooncake_store.units import format_size, parse_size

    most = None if size == NONE else parse_size(size)
    with connected() as store:
        store._run(set_quota(store._core, namespace, most))
    room = "as much as there is room for" if most is None else format_size(most)
    line = f"{namespace} may have {room}"
    emit({"namespace": namespace, "quota": most}, as_json=as_json, human=lambda: line)


def _drawn(found: "Sequence[Namespace]") -> Any:
    from mooncake_store.units import format_size

    columns = {"namespace": "left", "objects": "right", "bytes": "right", "quota": "right",
               "full": "right"}  # fmt: skip
    rows = [
        (
            each.name,
            f"{each.objects:,}",
            format_size(each.bytes),
            "-" if each.quota is None else format_size(each.quota),
            f"{each.bytes / each.quota:.0%}" if each.quota else "-",
        )
        for each in found
    ]
    return table(columns, rows)

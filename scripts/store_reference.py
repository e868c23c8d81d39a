"""Writes docs/reference/config.md, errors.md, the tables of wire-protocol.md and that of roles.

    python scripts/store_reference.py

A reference written by hand is wrong after the next change. These pages are read off the same
descriptions that the programs obey, and a test compares the files with what this module returns.

Not done here: the page of commands (`cli_reference.py`). O(settings + errors + operations).
"""

from __future__ import annotations

import errno
from pathlib import Path

from mooncake_store.config.loading import environment_name
from mooncake_store.config.setting import Setting, Settings, settings_of
from mooncake_store.config.settings import PROGRAMS
from transfer_engine import errors
from transfer_engine.errors import StoreError

__all__ = ["PAGES", "config_page", "errors_page"]

CONFIG_HEAD = """# Settings

Written by `python scripts/store_reference.py`; edit the fields in
`mooncake_store/config/settings.py`.

A value is looked for in this order, and the first one found wins:

1. the command line: `--port 50060`; for a `Client`, its keywords;
2. the profile named by `--profile NAME` or the keyword `profile`, for clients;
3. the program's own variable, then the general one: `MOONCAKE_WORKER_SECRET_FILE`, then
   `MOONCAKE_SECRET_FILE`. An empty variable counts as absent;
4. the profile named by `MOONCAKE_PROFILE`, for clients;
5. the file named by `--config` or `MOONCAKE_CONFIG`: the program's own table, then the general
   place;
6. the default below.

`mooncake config init` writes a file with all of it, `mooncake config show` says what a program
would run with and where each value comes from.

An unknown table or setting in a file is refused with the nearest known name. An unknown variable
that begins like ours is ignored with one warning, since others name variables too; `strict = true`
refuses it. `MOONCAKE_MASTER_PORT=tcp://10.96.0.1:50051` and its like, which Kubernetes and Docker
set for a service called `mooncake-master`, are recognised by name and value and passed over, and so
are variables that inference engines read. `[serving]` and `MOONCAKE_SERVING_*` belong to the
`serving` package.

A profile is a table `[profile.NAME]` of the same file, with settings of clients, for those who talk
to several stores: `mooncake ls --profile test`, `Client(profile="test")`. One that is named in the
call wins over the environment, so that it is never another store than the one named.

Sizes are bytes or carry a unit in any case: `kB MB GB TB PB` are powers of 1000, `KiB MiB GiB TiB
PiB` powers of 1024, and so are the bare letters `k m g t p`. Durations carry a unit, `ns us ms s m
h d`: a bare number is refused, because it means seconds to one program and milliseconds to the
next. Lists are TOML lists in the file and separated by commas elsewhere.

```toml
secret_file = "/etc/mooncake/secret"   # general: every program of this file
etcd_file = "/etc/mooncake/etcd.toml"  # general as well

[log]                                  # general: every program of this file
level = "info"

[master]
host = "0.0.0.0"
default_lease_ttl = "10s"

[worker]
segments = ["16GiB", "16GiB"]

[profile.test]
url = "mooncake://10.0.0.5:50051/test"
```
"""

ERRORS_HEAD = """# Errors

Written by `python scripts/store_reference.py`; edit `transfer_engine/errors.py`.

Everything raised on purpose is a `mooncake_store.errors.StoreError`. `code` is the number that the
drop-in API returns, *retry* says whether the same call can succeed later, and the advice ends the
message unless the place that raises knows better. An error that is also a built-in one can be
caught as that: a `NotFoundError` is a `KeyError`.

"""


def config_page() -> str:
    """Return docs/reference/config.md."""
    return CONFIG_HEAD + "".join(_program(program) for program in PROGRAMS)


def _program(program: type[Settings]) -> str:
    heading = f"\n## [{program.table}]\n\n{(program.__doc__ or '').strip()}\n"
    return heading + "".join(_setting(setting) for setting in settings_of(program))


def _setting(setting: Setting) -> str:
    lines = [
        f"\n### {setting.table}.{setting.name}\n",
        f"{setting.text}\n",
        f"- default: `{setting.kind.literal(setting.default)}`",
        f"- value: {setting.kind.expected()}",
        f"- option: `{setting.option}`",
        f"- variable: `{environment_name((setting.table, setting.name))}`",
    ]
    if setting.general is not None:
        table, name = setting.general
        place = f"`{name}` in `[{table}]`" if table else f"`{name}` above all tables"
        lines.append(f"- general place: {place}, `{environment_name(setting.general)}`")
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    """Return docs/reference/errors.md."""
    tree = "".join(f"{'    ' * depth}{kind.__name__}\n" for kind, depth in _walk(StoreError, 0))
    rows = "".join(_error(kind) for kind, _ in _walk(StoreError, 0))
    return (
        f"{ERRORS_HEAD}```text\n{tree}```\n\n"
        "| error | code | retry | also a | meaning | advice |\n|---|---|---|---|---|---|\n" + rows
    )


def _walk(kind: type[StoreError], depth: int) -> list[tuple[type[StoreError], int]]:
    """Return `kind` and all public errors below it, depth first, in the order they are defined."""
    found = [(kind, depth)]
    for child in kind.__subclasses__():
        # Modules may have private helpers below a public error; the tree is what is exported.
        if getattr(errors, child.__name__, None) is child:
            found += _walk(child, depth + 1)
    return found


def _error(kind: type[StoreError]) -> str:
    builtin = [base for base in kind.__bases__ if not issubclass(base, StoreError)]
    also = ", ".join(f"`{base.__name__}`" for base in builtin if base is not Exception)
    if OSError in builtin:
        also += f" ({errno.errorcode[errno.ENOSPC]})"
    meaning = (kind.__doc__ or "").strip().splitlines()[0]
    retry = "yes" if kind.retryable else "no"
    return (
        f"| `{kind.__name__}` | {kind.code} | {retry} | {also or '-'} | {meaning} "
        f"| {kind.default_advice or '-'} |\n"
    )


def wire_page() -> str:
    """Return docs/reference/wire-protocol.md with the tables of all services written anew."""
    from mooncake_store.wire.cluster import ADMIN, CLUSTER, LIVENESS
    from mooncake_store.wire.shard import SHARD
    from transfer_engine.rdma.wire import RDMA
    from transfer_engine.rpc import echo
    from transfer_engine.wire.registry import render

    page = (FOLDER / "reference" / "wire-protocol.md").read_text(encoding="utf-8")
    for registry in (SHARD, CLUSTER, LIVENESS, ADMIN, RDMA, echo.REGISTRY):
        page = render(page, registry)
    return page


def security_page() -> str:
    """Return docs/operating/security.md with its table of roles written anew."""
    from mooncake_store.wire.cluster import ADMIN, CLUSTER, LIVENESS
    from mooncake_store.wire.hosts import HOST
    from mooncake_store.wire.shard import SHARD
    from transfer_engine.wire.registry import between
    from transfer_engine.wire.rights import Role

    rows = [
        "| at | " + " | ".join(f"{role.name.lower()}s" for role in Role) + " |",
        "|---" * 5 + "|",
    ]
    for where, registry in (
        ("a shard", SHARD),
        ("a master or standby", CLUSTER),
        ("the port for signs of life", LIVENESS),
        ("a host that leads shards", HOST),
        ("a shard, by its master", ADMIN),
    ):
        cells = [
            ", ".join(f"`{each.name}`" for each in registry if each.needs == role) or "-"
            for role in Role
        ]
        rows.append(f"| {where} | " + " | ".join(cells) + " |")
    page = (FOLDER / "operating" / "security.md").read_text(encoding="utf-8")
    return between(page, "roles", "\n".join(rows) + "\n")


FOLDER = Path(__file__).resolve().parents[1] / "docs"
PAGES = {
    "reference/config.md": config_page,
    "reference/errors.md": errors_page,
    "reference/wire-protocol.md": wire_page,
    "operating/security.md": security_page,
}
"""Each page of docs that this module writes, wholly or in part, and what returns its text."""


def main() -> None:
    """Write the pages into the docs of this source tree."""
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

"""`mount.mooncake`: what mount(8) runs for `mount -t mooncake` and for lines of /etc/fstab.

    mount.mooncake mooncake://host:port/namespace DIR [-sfnv] [-N namespace] [-o options] [-t type]

mount(8) looks for it in /sbin, so that is where a link to it belongs (docs/guide/mount.md). It
mounts in the background as `mooncake mount` does, whose options it takes in `-o` by the same names,
with underscores or hyphens. Options that are for mount(8) itself, for systemd or for the order of
booting are passed over; one that nobody knows is refused, unless `-s` says to be tolerant.

It leaves with mount(8)'s numbers: 0, 1 for a wrong call, 32 for a mount that failed.
"""

from __future__ import annotations

import getopt
import sys
from typing import TYPE_CHECKING, Any

from mooncake_store.config.loading import nearest
from mooncake_store.errors import InvalidArgumentError, StoreError
from mooncake_store.printable import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

WRONG_CALL, MOUNT_FAILED = 1, 32
USAGE = "mount.mooncake mooncake://host:port/namespace DIR [-sfnv] [-o options]"

_SWITCHES = {
    "ro": ("read_only", True),
    "rw": ("read_only", False),
    "allow_other": ("allow_other", True),
}
_VALUES = ("pin", "part_size", "staging", "secret_file", "etcd_file")
_OTHERS = frozenset(
    (
        *("auto", "noauto", "user", "nouser", "users", "owner", "group", "nofail", "_netdev"),
        *("defaults", "async", "nosuid", "nodev", "exec", "silent", "loud"),
        *("atime", "noatime", "relatime", "norelatime", "strictatime", "nostrictatime"),
        *("diratime", "nodiratime", "lazytime", "nolazytime"),
    )
)
"""Meant for mount(8), or true anyway: files keep no time of their last use, for one."""
_OTHERS_BEGIN = ("x-", "X-", "comment=")


def main(argv: Sequence[str] | None = None) -> int:
    """Mount as mount(8) asks, and return what it wants to hear."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        flags, places = getopt.gnu_getopt(arguments, "sfnvhN:o:t:")
        if ("-h", "") in flags:
            sys.stdout.write(f"usage: {USAGE}\n")
            return 0
        if len(places) != 2:
            raise InvalidArgumentError(f"{len(places)} arguments instead of 2", advice=USAGE)
        given = ",".join(value for flag, value in flags if flag == "-o")
        options = read_options(given, tolerant=("-s", "") in flags)
        url, directory = places
    except (getopt.GetoptError, InvalidArgumentError) as error:
        sys.stderr.write(printable(f"mount.mooncake: {error}") + "\n")
        return WRONG_CALL
    return _mount(url, directory, options, fake=("-f", "") in flags, verbose=("-v", "") in flags)


def _mount(url: str, directory: str, options: dict[str, Any], *, fake: bool, verbose: bool) -> int:
    from mooncake_store.fs.mount.program import check_machine, mount

    try:
        if fake:
            check_machine(directory, options.get("staging"))
        else:
            mount(directory, foreground=False, url=url, **options)
    except (StoreError, OSError) as error:
        sys.stderr.write(printable(f"mount.mooncake: {error}") + "\n")
        return MOUNT_FAILED
    if verbose:
        sys.stdout.write(f"{url} {'could be' if fake else 'is'} mounted at {directory}\n")
    return 0


def read_options(text: str, *, tolerant: bool = False) -> dict[str, Any]:
    """Arguments of `mount` from the text after `-o`; raises InvalidArgumentError."""
    out: dict[str, Any] = {}
    for option in filter(None, text.split(",")):
        name, given, value = option.partition("=")
        name = name.replace("-", "_")
        if option in _OTHERS or option.startswith(_OTHERS_BEGIN):
            continue
        if name in _VALUES and given:
            out[name] = None if (name, value) == ("pin", "none") else value
        elif name in _SWITCHES and not given:
            argument, wanted = _SWITCHES[name]
            out[argument] = wanted
        elif not tolerant:
            known = [*_SWITCHES, *(f"{known}=" for known in _VALUES), *_OTHERS]
            raise InvalidArgumentError(f"unknown option {option!r}{nearest(option, known)}")
    return out

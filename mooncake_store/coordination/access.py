"""How an etcd lets somebody in: a user, and TLS; read from one file that all programs share.

    user = "mooncake"                 # a TOML file that its owner alone can read
    password = "..."
    ca = "etcd-ca.crt"                # who has signed the certificate of the etcd
    cert = "mooncake.crt"             # our own, where the etcd asks for one
    key = "mooncake.key"

Each may be left out. Paths begin where the file is. With `ca` or `cert` the etcd is spoken to over
TLS, and must be who it is called; `cert` alone trusts whom this machine trusts. O(file).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.endpoint import read_private
from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    import ssl

__all__ = ["Access", "read_access"]

FILE_BYTES_MAX = 1 << 16
NAMES = ("user", "password", "ca", "cert", "key")
TOGETHER = (("user", "password"), ("cert", "key"))


class Access(NamedTuple):
    """What is shown to an etcd, and asked of it."""

    user: str = ""
    password: str = ""
    tls: ssl.SSLContext | None = None


def read_access(path: str) -> Access:
    """Return what a file says; nothing is shown, and nothing asked, where there is none.

    Raises:
        ConfigError: it cannot be read, is open to others, or says what cannot be.
    """
    import tomllib  # Few programs have such a file.

    if not path:
        return Access()
    path, text = read_private(path, FILE_BYTES_MAX)
    try:
        found = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for name, value in found.items():
        if name not in NAMES:
            raise ConfigError(
                f"{path} says {name!r}, which is nothing that an etcd is shown",
                advice=f"there may be: {', '.join(NAMES)}",
            )
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{name!r} in {path} must be text")
    for one, other in TOGETHER:
        if (one in found) != (other in found):
            raise ConfigError(f"{path} must say {one!r} and {other!r}, or neither of them")
    files = {
        name: os.path.join(os.path.dirname(path), os.path.expanduser(found[name]))
        for name in ("ca", "cert", "key")
        if name in found
    }
    return Access(found.get("user", ""), found.get("password", ""), _context(**files))


def _context(ca: str = "", cert: str = "", key: str = "") -> ssl.SSLContext | None:
    import ssl

    if not (ca or cert):
        return None
    what = f"the authorities in {ca}"
    try:
        context = ssl.create_default_context(cafile=ca or None)
        if cert:
            what = f"the certificate {cert} with the key {key}"
            # No password: else a key that needs one would be asked for on the terminal.
            context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{what} cannot be used for the etcd: {why}") from None
    return context

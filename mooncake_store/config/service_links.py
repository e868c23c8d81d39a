"""Variables that only look like settings: what Kubernetes and Docker set in every container.

A Kubernetes service called `mooncake-master`, or a linked Docker container of that name, puts
MOONCAKE_MASTER_SERVICE_HOST=10.96.0.1, MOONCAKE_MASTER_PORT=tcp://10.96.0.1:50051,
MOONCAKE_MASTER_PORT_50051_TCP_ADDR=10.96.0.1 and the like into the environment of programs that
never asked. The second one has the very name of a setting. Both name and value have a shape that
nobody writes by hand, and each variable is judged by its own, because what injects them leaves
some out.

Not done here: what else may be foreign in an environment (`loading.py`). O(length of a value).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["is_service_link"]

_HOST = r"[0-9]{1,3}(\.[0-9]{1,3}){3}|\[?[0-9A-Fa-f]*:[0-9A-Fa-f:.]+\]?"
_URL = rf"(tcp|udp|sctp)://({_HOST}):[0-9]+"
_EACH_PORT = r".+_PORT_[0-9]+_(TCP|UDP|SCTP)"
_SHAPES = tuple(
    (re.compile(name), re.compile(value))
    for name, value in (
        (r".+_SERVICE_HOST", _HOST),
        (r".+_SERVICE_PORT(_\w+)?", "[0-9]+"),
        (r".+_PORT", _URL),
        (rf"{_EACH_PORT}(_START|_END)?", _URL),
        (rf"{_EACH_PORT}_PROTO", "tcp|udp|sctp"),
        (rf"{_EACH_PORT}_PORT(_START|_END)?", "[0-9]+"),
        (rf"{_EACH_PORT}_ADDR", _HOST),
    )
)
# Docker also copies a linked container's name and variables, whose values can be anything: they
# count only beside its MOONCAKE_MASTER_PORT.
_OF_CONTAINER = re.compile(r"(.+?)_(?:ENV_.+|NAME)")


def is_service_link(name: str, environ: Mapping[str, str]) -> bool:
    """Return whether a variable of `environ` describes a service or container, not a setting."""
    value = environ[name]
    if any(shape.fullmatch(name) and worth.fullmatch(value) for shape, worth in _SHAPES):
        return True
    container = _OF_CONTAINER.fullmatch(name)
    if container is None or (name.endswith("_NAME") and not re.fullmatch("/.+/.+", value)):
        return False
    return re.fullmatch(_URL, environ.get(f"{container[1]}_PORT", "")) is not None

"""Settings that several programs have, with the place that they share in a file.

A name of the kind `SecretFile` is the type of a field; see `setting.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

__all__ = [
    "DataNetworks",
    "EtcdFile",
    "Insecure",
    "LogJson",
    "LogLevel",
    "Overcommit",
    "PortFile",
    "SecretFile",
    "Strict",
]

LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    Meta(
        description="The least important messages of this project that are logged.",
        extra={"general": ("log", "level")},
    ),
]
LogJson = Annotated[
    bool,
    Meta(
        description="Log one JSON object a line instead of text for people.",
        extra={"general": ("log", "json")},
    ),
]
SecretFile = Annotated[
    str,
    Meta(
        description="File with the secret shared by all programs of a pool; readable by its "
        "owner only. Empty: none, which is accepted on loopback only.",
        extra={"general": ("", "secret_file")},
    ),
]
Insecure = Annotated[
    bool,
    Meta(description="Accept connections from other machines and users without any secret."),
]
DataNetworks = Annotated[
    tuple[str, ...],
    Meta(
        description="Networks, such as 10.0.0.0/8, that segments may be reached in over tcp and "
        "rdma. Empty: all but those of one link or a group, and a loopback on its own host.",
        extra={"general": ("", "data_networks")},
    ),
]
Strict = Annotated[
    bool,
    Meta(
        description="Refuse unknown variables in the environment instead of warning of them.",
        extra={"general": ("", "strict")},
    ),
]
Overcommit = Annotated[
    bool,
    Meta(
        description="Lend memory even if there is less than that, by the machine, its control "
        "groups or a tmpfs."
    ),
]
PortFile = Annotated[
    str,
    Meta(description="Write the port in use to this file once ready. Empty: do not."),
]
EtcdFile = Annotated[
    str,
    Meta(
        description="TOML file that says how an etcd lets us in: user and password, ca, cert and "
        "key, as far as it asks for them; readable by its owner only. Empty: it asks for none.",
        extra={"general": ("", "etcd_file")},
    ),
]

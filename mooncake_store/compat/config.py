"""Configuration as the original reads it: a JSON file, or `MOONCAKE_*` variables.

    config = MooncakeConfig.load_from_env()      # the file MOONCAKE_CONFIG_PATH names, or variables

Sizes are numbers, or text with a binary unit ("16MB" is 16 * 2**20). What this store itself can be
told beyond that (deadlines, secret, transports) is in its own settings, by file or variable.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_store.endpoint import split_address

__all__ = ["PROTOCOLS", "MooncakeConfig", "parse_flag", "parse_size", "split_hostname"]

logger = logging.getLogger("mooncake_store.compat")

PROTOCOLS = frozenset(
    {"tcp", "rdma", "efa", "nvmeof", "nvlink", "nvlink_intra", "musa", "hip", "barex", "cxl"}
    | {"ascend", "ub", "ubshmem", "maca", "sunrise_link", "rpc_only"}
)
"""What the original's configuration may name; bytes move over what is built in."""

DEFAULT_GLOBAL_SEGMENT_SIZE = 3_355_443_200
DEFAULT_LOCAL_BUFFER_SIZE = 1 << 30

_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_TRUE = ("true", "1", "yes", "on", "enable")
_FALSE = ("false", "0", "no", "off", "disable", "")


def parse_size(value: Any) -> int:
    """Return the bytes that a number or a text such as "1.5GB" names; raises ValueError."""
    try:
        if isinstance(value, str):
            text = value.strip().lower()
            if text.endswith(("kb", "mb", "gb", "tb")):
                text = text[:-1]
            unit = _UNITS.get(text[-1:])
            return int(float(text[:-1]) * unit) if unit else int(float(text))
        if isinstance(value, int | float) and not isinstance(value, bool):
            return int(value)
    except (ValueError, OverflowError):  # no number, or one without end
        pass
    raise ValueError(f"Invalid segment size: {value!r}")


def parse_flag(value: Any) -> bool:
    """Return the truth that a flag in a file or a variable names; raises ValueError."""
    if isinstance(value, bool | int | float):
        return bool(value)
    text = "" if value is None else str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"Invalid boolean value: {value!r}")


def split_hostname(hostname: str) -> tuple[str, int]:
    """Host and port of a name; port 0 where it has none. Raises ConfigError."""
    if hostname.count(":") != 1 and not hostname.startswith("["):
        return hostname, 0
    return split_address(hostname)


@dataclass
class MooncakeConfig:
    """Settings of one client, under the original's names; raises ValueError for impossible ones."""

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    device_name: str | None
    master_server_address: str
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = 9300

    def __post_init__(self) -> None:
        if not isinstance(self.protocol, str) or not self.protocol.strip():
            raise ValueError(f"Invalid protocol: {self.protocol!r}, use 'tcp' or 'rdma'")
        self.protocol = self.protocol.strip().lower()
        if self.protocol not in PROTOCOLS:
            logger.warning(
                "Unrecognised protocol %r; known are %s",
                self.protocol,
                ", ".join(sorted(PROTOCOLS)),
            )
        for name in ("global_segment_size", "local_buffer_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"Invalid {name}: {getattr(self, name)} is negative")
        for name in ("local_hostname", "metadata_server", "master_server_address"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"Config field {name!r} must be a non-empty string, not {value!r}")

    @staticmethod
    def from_file(file_path: str) -> MooncakeConfig:
        """Read a JSON file. Names it does not know are ignored, as the original does."""
        given = json.loads(Path(file_path).read_text(encoding="utf-8"))
        for name in ("local_hostname", "metadata_server", "master_server_address"):
            if name not in given:
                raise ValueError(f"Missing required config field: {name}")
        return _made(given)

    @staticmethod
    def load_from_env() -> MooncakeConfig:
        """Read the file that MOONCAKE_CONFIG_PATH names, or else the other variables."""
        path = os.getenv("MOONCAKE_CONFIG_PATH")
        if path:
            return MooncakeConfig.from_file(path)
        if not os.getenv("MOONCAKE_MASTER"):
            raise ValueError(
                "Neither the environment variable 'MOONCAKE_CONFIG_PATH' nor 'MOONCAKE_MASTER' is "
                "set."
            )
        named = {name: os.environ[name] for name in _VARIABLES.values() if name in os.environ}
        given = {field: named[name] for field, name in _VARIABLES.items() if name in named}
        return _made({"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE"} | given)


_VARIABLES = {
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "master_server_address": "MOONCAKE_MASTER",
    "enable_ssd_offload": "MOONCAKE_OFFLOAD_ENABLED",
    "ssd_offload_path": "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
    "tenant_id": "MOONCAKE_TENANT_ID",
    "enable_client_http_server": "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER",
    "client_http_port": "MOONCAKE_CLIENT_HTTP_PORT",
}


def _made(given: dict[str, Any]) -> MooncakeConfig:
    tenant, path = given.get("tenant_id"), given.get("ssd_offload_path")
    return MooncakeConfig(
        local_hostname=given["local_hostname"],
        metadata_server=given["metadata_server"],
        global_segment_size=parse_size(
            given.get("global_segment_size", DEFAULT_GLOBAL_SEGMENT_SIZE)
        ),
        local_buffer_size=parse_size(given.get("local_buffer_size", DEFAULT_LOCAL_BUFFER_SIZE)),
        protocol=given.get("protocol", "tcp"),
        device_name=given.get("device_name", ""),
        master_server_address=given["master_server_address"],
        enable_ssd_offload=parse_flag(given.get("enable_ssd_offload", False)),
        ssd_offload_path="" if path is None else str(path),
        tenant_id="default" if tenant is None else str(tenant),
        enable_client_http_server=parse_flag(given.get("enable_client_http_server", False)),
        client_http_port=int(given.get("client_http_port", 9300)),
    )

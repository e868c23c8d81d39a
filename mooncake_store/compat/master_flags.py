"""Flags of the original's master program, as settings of ours.

    mooncake master --rpc_port=50051 --default_kv_lease_ttl=5000 --eviction-high-watermark-ratio 0.9

Underscores and dashes, `--flag=value`, `--flag value`, and `--flag` or `--noflag` for switches are
understood, and `--config_path` of a JSON file with the same names. A flag that means something
here becomes a setting, or opens one of the original's HTTP ports; one whose job is done otherwise,
or not at all, is named in a note so that a start script does not lose it silently; an unknown flag
is an error.

The original opens its control port always and both ports to every network. Here a port is open
when a flag speaks of it, and on loopback unless a flag names another address.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from mooncake_store.errors import ConfigError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Flags", "translate"]


class Flags(NamedTuple):
    """What a command line says: settings by name, what is worth telling, and ports to open."""

    settings: dict[str, str]
    notes: list[str]
    control: tuple[str, int] | None = None
    """Where the control port is to be; see `control.py`."""
    metadata: tuple[str, int] | None = None
    """Where the metadata server is to be; see `metadata.py`."""


def _milliseconds(value: str) -> str:
    return f"{value}ms" if value.isdigit() else value


def _seconds(value: str) -> str:
    return f"{value}s"


def _one_of(**choices: str) -> Callable[[str], str]:
    def choose(value: str) -> str:
        if value not in choices:
            raise ConfigError(f"{value!r} is not one of {', '.join(choices)}")
        return choices[value]

    return choose


_SETTINGS: dict[str, tuple[str, Callable[[str], str]]] = {
    "port": ("port", str),
    "rpc_port": ("port", str),
    "rpc_address": ("host", str),
    "default_kv_lease_ttl": ("default_lease_ttl", _milliseconds),
    "default_kv_soft_pin_ttl": ("soft_pin_ttl", _milliseconds),
    "max_kv_soft_pin_ttl": ("soft_pin_ttl_max", _milliseconds),
    "allow_evict_soft_pinned_objects": ("evict_soft_pinned", str),
    "eviction_ratio": ("eviction_ratio", str),
    "eviction_high_watermark_ratio": ("high_watermark", str),
    "client_ttl": ("client_ttl", _seconds),
    "put_start_discard_timeout_sec": ("put_discard", _seconds),
    "put_start_release_timeout_sec": ("put_release", _seconds),
    "memory_allocator": ("allocator", _one_of(offset="offset", cachelib="slab")),
    "allocation_strategy": (
        "placement", _one_of(random="random", free_ratio_first="free_ratio"),
    ),
}  # fmt: skip

_HOST = "127.0.0.1"
_CONTROL = {"metrics_host": _HOST, "metrics_port": "9003"}
_METADATA = {"http_metadata_server_host": _HOST, "http_metadata_server_port": "8080"}
"""Flags of the two ports, and what they are where only one is given."""
_METADATA_SWITCH = "enable_http_metadata_server"
_TRUE = ("true", "t", "1", "yes", "y")
_TIERS = ("enable_offload", "offload_on_evict", "promotion_on_hit", "promotion_admission_threshold")
"""Flags that mean something together."""

_SWITCHES = [
    "allow_evict_soft_pinned_objects",
    "enable_metric_reporting",
    "rpc_enable_tcp_no_delay",
    "enable_ha",
    "enable_offload",
    "offload_on_evict",
    "offload_force_evict",
    "promotion_on_hit",
    "enable_kv_events",
    "kv_events_emit_legacy_compat",
    "kv_events_emit_object_key",
    "enable_oplog",
    "enable_http_metadata_server",
    "enable_metadata_cleanup_on_timeout",
    "enable_disk_eviction",
    "enable_multi_tenants",
    "enable_snapshot",
    "enable_snapshot_restore",
    "enable_cxl",
    "logtostderr",
    "alsologtostderr",
]

_ELSEWHERE = {
    "there are no threads to choose; see shards": "max_threads rpc_thread_num",
    "metadata stay until they are deleted": "enable_metadata_cleanup_on_timeout",
    "connections are kept as they are": (
        "rpc_conn_timeout_seconds rpc_enable_tcp_no_delay rpc_interface"
    ),
    "tenants need no switch": "enable_multi_tenants",
    "quotas of tenants are given by --quota": (
        "tenant_quota_connector_type tenant_quota_connector_uri"
    ),
    "logs go to standard error": (
        "logtostderr alsologtostderr log_dir minloglevel v stderrthreshold"
    ),
    "nothing is kept in folders that all clients share; lend a disk instead, by a worker "
    "(--segment file:PATH,SIZE) or by stores with enable_ssd_offload": (
        "root_fs_dir global_file_segment_size"
    ),
    "stores and workers say how much of a disk they lend, and full disks always evict": (
        "quota_bytes enable_disk_eviction"
    ),
    "what goes to disks and comes back has bounds of its own": (
        "offload_force_evict offloading_queue_limit offload_cap_ratio promotion_queue_limit "
        "promotion_max_per_heartbeat"
    ),
    "this master does not do it, or is told by settings of its own": (
        "enable_metric_reporting enable_ha ha_backend_type "
        "ha_backend_connstring etcd_endpoints cluster_id enable_oplog oplog_poll_interval_ms "
        "oplog_batch_max_entries batch_oplog_retry_timeout_sec dynamic_replication_mode "
        "dynamic_replication_heat_window_seconds dynamic_replication_admission_qps_threshold "
        "dynamic_replication_max_memory_replicas enable_kv_events kv_events_bind_endpoint "
        "kv_events_model_name kv_events_backend_id kv_events_tenant_id kv_events_additional_salt "
        "kv_events_lora_name kv_events_block_size kv_events_dp_rank kv_events_emit_legacy_compat "
        "kv_events_emit_object_key kv_events_queue_capacity nof_eviction_ratio "
        "nof_eviction_high_watermark_ratio nof_heartbeat_interval_sec "
        "nof_heartbeat_probe_timeout_ms nof_heartbeat_failures_threshold pod_name pod_namespace "
        "snapshot_backup_dir enable_snapshot_restore enable_snapshot snapshot_interval_seconds "
        "snapshot_child_timeout_seconds snapshot_retention_count snapshot_object_store_type "
        "snapshot_payload_store_type snapshot_payload_backend_type snapshot_catalog_store_type "
        "snapshot_catalog_backend_type snapshot_catalog_store_connstring "
        "snapshot_catalog_backend_connstring max_total_finished_tasks max_total_pending_tasks "
        "max_total_processing_tasks pending_task_timeout_sec processing_task_timeout_sec "
        "max_retry_attempts cxl_path cxl_size enable_cxl"
    ),
}
_NOTES = {name: why for why, names in _ELSEWHERE.items() for name in names.split()}


def translate(arguments: Sequence[str]) -> Flags:
    """Read the original's flags; raises InvalidArgumentError for what is none of them.

    Later flags win over earlier ones, and all of them over a file.
    """
    given = dict(_pairs(arguments))
    if path := given.get("config_path"):
        given = dict(_file(path)) | given
    given.pop("config_path", None)  # one that a file names is not followed
    notes: list[str] = []
    settings = _tiers({name: given.pop(name) for name in _TIERS if name in given}, notes)
    control = _place(given, _CONTROL)
    metadata = _place(given, _METADATA)
    if not _is_true(given.pop(_METADATA_SWITCH, "false")):
        if metadata:
            notes.append(f"there is no metadata server without --{_METADATA_SWITCH}")
        metadata = None
    elif metadata is None:
        metadata = _place(dict(_METADATA), _METADATA)
    for name, value in given.items():
        if name in _SETTINGS:
            setting, convert = _SETTINGS[name]
            if name == "rpc_port" and value == "0":
                continue  # the original's way to say: the other flag
            try:
                settings[setting] = convert(value)
            except ConfigError as error:
                raise ConfigError(f"--{name}: {error.what}") from None
        else:
            notes.append(f"--{name} has no effect: {_NOTES[name]}")
    return Flags(settings, notes, control, metadata)


def _is_true(value: str) -> bool:
    return value.lower() in _TRUE


def _tiers(given: dict[str, str], notes: list[str]) -> dict[str, str]:
    """What flags say of moving objects to disks and back; what they leave open stays as it is."""
    settings = {}
    if "enable_offload" in given:
        on_evict = _is_true(given.get("offload_on_evict", "false"))
        enabled = _is_true(given["enable_offload"])
        settings["offload"] = ("evict" if on_evict else "write") if enabled else "none"
    elif "offload_on_evict" in given:
        notes.append("--offload_on_evict has no effect without --enable_offload")
    threshold = given.get("promotion_admission_threshold", "2")
    if not threshold.isdecimal():
        raise ConfigError(
            f"--promotion_admission_threshold: {threshold!r} is not a number", advice="use 1 to 255"
        )
    if "promotion_on_hit" in given:
        promotes = _is_true(given["promotion_on_hit"])
        settings["promotion_hits"] = str(min(255, max(1, int(threshold)))) if promotes else "0"
    elif "promotion_admission_threshold" in given:
        notes.append("--promotion_admission_threshold has no effect without --promotion_on_hit")
    return settings


def _place(given: dict[str, str], names: dict[str, str]) -> tuple[str, int] | None:
    """Take the flags of a port out of those that are given; None if there are none."""
    if not names.keys() & given.keys():
        return None
    (host_name, host), (port_name, port) = names.items()
    host, port = given.pop(host_name, host), given.pop(port_name, port)
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--{port_name}: {port!r} is not a port", advice="use 0 to 65535")
    return host, int(port)


def _pairs(arguments: Sequence[str]) -> Iterable[tuple[str, str]]:
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            raise InvalidArgumentError(f"unexpected argument {word!r}")
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name.startswith("no") and name[2:] in _SWITCHES and not equals:
            name, equals, value = name[2:], "=", "false"
        _known(name)
        if not equals:
            takes = name not in _SWITCHES or (rest and rest[0] in ("true", "false"))
            if takes and not rest:
                raise InvalidArgumentError(f"--{name} needs a value")
            value = rest.pop(0) if takes else "true"
        yield name, value


def _known(name: str) -> None:
    known = {*_SETTINGS, *_NOTES, *_CONTROL, *_METADATA, *_TIERS, _METADATA_SWITCH, "config_path"}
    if name in known:
        return
    import difflib

    close = difflib.get_close_matches(name, sorted(known), n=1)
    advice = f"did you mean --{close[0]}?" if close else "see `mooncake master --help`"
    raise InvalidArgumentError(f"there is no option --{name}", advice=advice)


def _file(path: str) -> Iterable[tuple[str, str]]:
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"--config_path {path}: {error}", advice="write the flags as one JSON object"
        ) from error
    for name, value in found.items():
        _known(name)
        yield name, str(value).lower() if isinstance(value, bool) else str(value)

"""The settings of master, member, worker and client: what they are, and where values come from."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake_store.config.loading import Loaded, Row, rows
    from mooncake_store.config.setting import Setting, Settings, settings_of
    from mooncake_store.config.settings import (
        PROGRAMS,
        ClientConfig,
        MasterConfig,
        MemberConfig,
        WorkerConfig,
        load,
        load_client,
    )
    from mooncake_store.endpoint import read_secret, split_address, split_quota, split_url
else:
    from kernel_cache.lazy import names_of

    __getattr__ = names_of(__name__)

__all__ = [
    "PROGRAMS",
    "ClientConfig",
    "Loaded",
    "MasterConfig",
    "MemberConfig",
    "Row",
    "Setting",
    "Settings",
    "WorkerConfig",
    "load",
    "load_client",
    "read_secret",
    "rows",
    "settings_of",
    "split_address",
    "split_quota",
    "split_url",
]

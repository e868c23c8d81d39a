"""The settings that a member of a pool has beside those of a master."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from mooncake_store.config.checks import check_address
from mooncake_store.config.common import EtcdFile
from mooncake_store.config.setting import Contradiction, Settings
from mooncake_store.endpoint import split_etcd

__all__ = ["MemberConfig"]


class MemberConfig(Settings, frozen=True, kw_only=True):
    """Settings of `mooncake member` beside those of a master: the etcd that elects who leads."""

    table: ClassVar[str] = "member"

    etcd: Annotated[
        str,
        Meta(description="Where the members of the etcd listen, as host:port, with commas."),
    ] = "127.0.0.1:2379"
    name: Annotated[
        str, Meta(description="What the pool is called there; another pool has another name.")
    ] = "default"
    etcd_file: EtcdFile = ""
    standby_grace_s: Annotated[
        float,
        Meta(
            ge=0,
            le=365 * 24 * 3600,
            extra={"unit": "s"},
            description="For how long the standby that changes wait for may be silent, at most 2s "
            "where another one can take its place; then its leader goes on without it, and it may "
            "not lead before it counts again. 0: for ever.",
        ),
    ] = 10.0

    def check(self) -> None:
        """Refuse what is no etcd, or no part of a URL.

        Raises:
            Contradiction: the first such setting.
        """
        check_address(self.table, "etcd", self.etcd, split_etcd)
        if not self.name or any(mark in self.name for mark in "/?#"):
            raise Contradiction(
                f"{self.table}.name {self.name!r} cannot be in a URL as the name of a pool", "name"
            )

"""The settings of whatever listens: who is let in, and under which addresses."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from mooncake_store.config.checks import check_exposure, check_networks
from mooncake_store.config.common import DataNetworks, Insecure, SecretFile
from mooncake_store.config.setting import Contradiction, Settings
from transfer_engine.errors import ConfigError
from transfer_engine.rpc.reached import Reached

__all__ = ["Guarded"]


class Guarded(Settings, frozen=True, kw_only=True):
    """What a master and a worker have in common of that."""

    secret_file: SecretFile = ""
    credentials: Annotated[
        str,
        Meta(
            description="Directory with a file for each principal that is let in beside who knows "
            "the secret, as `mooncake secret make` writes them; looked at once a second.",
            extra={"general": ("", "credentials")},
        ),
    ] = ""
    reached_as: Annotated[
        tuple[str, ...],
        Meta(
            description="Further addresses, by number, that lead here: of a service, a forwarded "
            "port, a tunnel; without a port, all of its ports. With a secret, who dialled another "
            "address than that which he came to is refused, as somebody may stand between; any: "
            "nobody is."
        ),
    ] = ()
    data_networks: DataNetworks = ()
    insecure: Insecure = False

    def check_guard(self, *hosts: str) -> None:
        """Refuse what contradicts itself or lets in more than is said, at any of these hosts.

        Raises:
            Contradiction: the first such setting.
        """
        check_networks(self.table, self.data_networks)
        try:
            Reached(self.reached_as)
        except ConfigError as error:
            raise Contradiction(f"{self.table}.reached_as: {error.what}", "reached_as") from None
        if self.credentials and not self.secret_file:
            raise Contradiction(
                f"{self.table}.credentials say who comes in beside those who know the secret, so "
                "set secret_file as well",
                "credentials",
                "secret_file",
            )
        for host in hosts:
            check_exposure(self.table, host, self.secret_file, self.insecure)

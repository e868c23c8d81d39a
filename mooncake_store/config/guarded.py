"""The settings of whatever connects or listens: who it is, whom it believes, who is let in."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from mooncake_store.config.checks import check_exposure, check_networks
from mooncake_store.config.common import DataNetworks, Insecure, SecretFile
from mooncake_store.config.setting import Contradiction, Settings
from transfer_engine.errors import ConfigError
from transfer_engine.rpc.reached import Reached
from transfer_engine.wire.tls import SYSTEM

__all__ = ["Guarded", "Proving"]


class Proving(Settings, frozen=True, kw_only=True):
    """What clients, masters and workers have in common: all of them connect to others."""

    secret_file: SecretFile = ""
    tls_certificate: Annotated[
        str,
        Meta(
            description="File in PEM with the certificate that is shown to others, and those "
            "between it and its authority. With it a master or a worker speaks TLS alone, and HTTP "
            "ports that others can reach speak https. Looked at once a second, as the files of "
            "the key and the authority are.",
            extra={"general": ("tls", "certificate")},
        ),
    ] = ""
    tls_key: Annotated[
        str,
        Meta(
            description="File with the key of the certificate, readable by its owner only. Empty: "
            "it is in the file of the certificate.",
            extra={"general": ("tls", "key")},
        ),
    ] = ""
    tls_authority: Annotated[
        str,
        Meta(
            description="File with the certificates of whoever signs those of others. A client "
            "with it speaks TLS; a master or a worker asks clients for a certificate as well. "
            "system, for a client: those that its host believes, which masters and workers do "
            "where this is empty.",
            extra={"general": ("tls", "authority")},
        ),
    ] = ""
    tls_name: Annotated[
        str,
        Meta(
            description="The name that certificates of masters and workers have, in place of the "
            "addresses at which they are reached.",
            extra={"general": ("tls", "name")},
        ),
    ] = ""
    data_networks: DataNetworks = ()

    @property
    def sealed(self) -> bool:
        """Whether connections are made over TLS."""
        return bool(self.tls_certificate or self.tls_authority)

    def check_tls(self) -> None:
        """Refuse files without those that they need.

        Raises:
            Contradiction: the first such setting.
        """
        if self.tls_key and not self.tls_certificate:
            raise Contradiction(
                f"{self.table}.tls_key is the key of a certificate, so set tls_certificate as well",
                "tls_key",
                "tls_certificate",
            )
        if self.tls_name and not self.sealed:
            raise Contradiction(
                f"{self.table}.tls_name is expected of certificates, so set tls_authority as well",
                "tls_name",
                "tls_authority",
            )


class Guarded(Proving, frozen=True, kw_only=True):
    """What a master and a worker have in common besides: both of them let others in."""

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
    insecure: Insecure = False

    def check_guard(self, *hosts: str) -> None:
        """Refuse what contradicts itself or lets in more than is said, at any of these hosts.

        Raises:
            Contradiction: the first such setting.
        """
        check_networks(self.table, self.data_networks)
        self.check_tls()
        if self.tls_authority and not self.tls_certificate:
            raise Contradiction(
                f"{self.table}.tls_authority asks others for a certificate, so set "
                "tls_certificate as well",
                "tls_authority",
                "tls_certificate",
            )
        if self.tls_authority == SYSTEM:
            raise Contradiction(
                f"{self.table}.tls_authority would let in whoever has any certificate: name the "
                "file of an authority, or leave it empty",
                "tls_authority",
            )
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

"""Certificates as a pool's operator would make them: an authority, and what it signs."""

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from transfer_engine.wire.tls import Tls

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


def _name(text):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(key):
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


class Authority:
    """Signs certificates, and writes them and itself into a folder."""

    def __init__(self, folder, name="authority"):
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        made = self._made(self._name, self._key, NOW + DAY)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self._signed(made).public_bytes(serialization.Encoding.PEM))

    def _made(self, subject, key, end):
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - 10 * DAY)
            .not_valid_after(end)
        )

    def _signed(self, made):
        return made.sign(self._key, hashes.SHA256())

    def signs(self, name, *others, ends=NOW + DAY):
        """Make a certificate for these names and addresses; returns its file, which has its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([_alternative(each) for each in (name, *others)])
        made = self._made(_name(name), key, ends).add_extension(names, critical=False)
        file = self._folder / f"{name}.pem"
        made = self._signed(made).public_bytes(serialization.Encoding.PEM)
        file.write_bytes(made + _pem(key))
        file.chmod(0o600)
        return file


def _alternative(text):
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def tls(certificate=None, authority=None, name=""):
    """What an end has that shows this file, and believes what this authority has signed."""
    return Tls(
        certificate=str(certificate or ""),
        authority=str(authority.file if authority else ""),
        name=name,
    )

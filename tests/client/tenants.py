"""A pool of real processes with credentials, and two tenants of it."""

import contextlib
import secrets

import numpy as np

from mooncake_store import LocalCluster, credentials
from mooncake_store.errors import NoSpaceError, TransferTimeoutError
from tests.certificates import Authority
from tests.waiting import PATIENCE_S
from transfer_engine.wire.rights import Role

SECRET = secrets.token_hex(32).encode()
NO_ROOM = (NoSpaceError, TransferTimeoutError)
"""What a put without room ends with, sooner or later."""
TENANTS = {"alice": "team-a", "bob": "team-b"}


def value_of(key, nbytes):
    return np.random.default_rng(abs(hash(key)) % (1 << 32)).bytes(nbytes)


class Pool:
    """A pool with credentials: what its programs are told, and its tenants' files."""

    def __init__(self, folder, tls=False, **settings):
        self.folder = folder
        where = str(folder / "credentials")
        texts = {
            name: credentials.make(where, name, Role.WRITER, namespaces=[namespace])
            for name, namespace in TENANTS.items()
        }
        self.files = {name: self._file(name, text.encode()) for name, text in texts.items()}
        self.files["pool"] = self._file("pool", SECRET)
        self.tls = {}
        if tls:
            authority = Authority(folder)
            self.tls = {
                "tls_certificate": str(authority.signs("127.0.0.1")),
                "tls_authority": str(authority.file),
            }
        told = {"secret_file": self.files["pool"], "credentials": where, **self.tls}
        master = told | settings.pop("master", {})
        worker = told | settings.pop("worker", {})
        self.cluster = LocalCluster(secret=SECRET, master=master, worker=worker, **settings)

    def _file(self, name, content):
        file = self.folder / f"{name}.secret"
        file.write_bytes(content)
        file.chmod(0o600)
        return str(file)

    def url(self, name):
        return f"mooncake://{self.cluster.address}/{TENANTS.get(name, 'team-a')}"

    def settings(self, name, **more):
        told = {"secret_file": self.files[name], "deadline": f"{PATIENCE_S}s", **self.tls}
        return {"url": self.url(name)} | told | more


@contextlib.contextmanager
def running(pool):
    with pool.cluster:
        yield pool

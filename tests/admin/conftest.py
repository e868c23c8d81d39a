"""A pool with an admin API, in this process; and how it is asked."""

import http.client
import json
import time
import urllib.parse

import pytest

from mooncake_store import Client, LocalCluster, credentials
from mooncake_store.compat.control import Control
from mooncake_store.config import MasterConfig, load
from transfer_engine.wire.rights import Role


class Api:
    """One port, and who asks there."""

    def __init__(self, control):
        self.control = control
        self.port = int(control.address.rpartition(":")[2])

    def ask(self, path, wish=None, method=None, **headers):
        """The status of an answer, and what it says; a wish is sent by POST."""
        body = None if wish is None else wish if isinstance(wish, bytes) else json.dumps(wish)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, body, sent)
            answer = connection.getresponse()
            said = answer.read()
            return answer.status, json.loads(said) if "json" in answer.headers[
                "Content-Type"
            ] else said
        finally:
            connection.close()

    def get(self, name, **query):
        """What a path of the API says, which has to be well."""
        text = f"?{urllib.parse.urlencode(query)}" if query else ""
        status, said = self.ask(f"/v1/{name}{text}")
        assert status == 200, said
        return said

    def done(self, name, wish):
        """What became of a change, which has to be well."""
        status, said = self.ask(f"/v1/{name}", wish)
        assert status == 200, said
        return said

    def ended(self, job):
        """A job once it has ended."""
        until = time.monotonic() + 60
        while job["state"] in ("waiting", "running"):
            assert time.monotonic() < until, job
            job = self.get("job", id=job["id"])
        return job


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The directory of credentials and, by role, the line of a principal of it."""
    folder = str(tmp_path_factory.mktemp("admin") / "credentials")
    made = {role: credentials.make(folder, role.name.lower(), role) for role in Role}
    made["tenant"] = credentials.make(folder, "tenant", Role.ADMIN, namespaces=["team-a"])
    return folder, made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, texts):
    secret = tmp_path_factory.mktemp("pool") / "secret"
    secret.touch(0o600)
    secret.write_text("a secret of the pool, long enough")
    settings = {"secret_file": str(secret), "credentials": texts[0]}
    with LocalCluster(
        in_process=True, workers=2, segment="16MB", secret=secret.read_bytes(), master=settings
    ) as running:
        running.settings = settings
        yield running


@pytest.fixture(scope="module")
def serve(cluster):
    """Open a port with the API at an address."""
    opened = []

    def at(host="127.0.0.1", **more):
        settings = load(MasterConfig, overrides=cluster.settings).value
        control = Control(host, 0, secret_file=settings.secret_file, settings=settings, **more)
        opened.append(control)
        control.serve(cluster.address)
        return Api(control)

    yield at
    for control in opened:
        control.close()


@pytest.fixture(scope="module")
def api(serve):
    return serve()


@pytest.fixture
def store(cluster):
    with Client(cluster.url, secret_file=cluster.settings["secret_file"]) as client:
        yield client
        client.clear(force=True)

"""What these tests need is not in the default environment: `make test-interop` makes another."""

import itertools

import pytest

from mooncake_store import LocalCluster
from mooncake_store.fs import MooncakeFileSystem

_numbers = itertools.count()
S3_KEYS = {
    "AWS_ACCESS_KEY_ID": "mine",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
}


@pytest.fixture(scope="session")
def cluster():
    with LocalCluster(workers=2, segment="512MB") as running:
        yield running


@pytest.fixture
def url(cluster):
    """A store nobody else uses."""
    return f"mooncake://{cluster.address}/interop-{next(_numbers)}"


@pytest.fixture
def fs(url):
    made = MooncakeFileSystem(url)
    yield made
    made.close()


@pytest.fixture
def s3(monkeypatch):
    """A local server that speaks S3, with a bucket; the environment names it, as fsspec has it."""
    moto = pytest.importorskip("moto.server", reason="make test-interop has it")
    s3fs = pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    s3fs.S3FileSystem.clear_instance_cache()
    fs = s3fs.S3FileSystem()
    fs.makedirs("bucket", exist_ok=True)  # servers of one process share their buckets
    fs.server = server
    yield fs
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()

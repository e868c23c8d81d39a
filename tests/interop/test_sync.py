"""fsspec.generic.rsync brings trees into the pool and keeps them up to date."""

import os
import socket

import pytest
from fsspec.generic import GenericFileSystem, rsync


def test_rsync_from_the_local_disk(fs, url, tmp_path):
    for number in range(20):
        (tmp_path / "tree" / str(number % 3)).mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / str(number % 3) / f"{number}.bin").write_bytes(os.urandom(5000))
    generic = GenericFileSystem(default_method="current")
    rsync(f"file://{tmp_path}/tree", f"{url}/copy", fs=generic)
    assert len(fs.find("copy")) == 20
    for name in fs.find("copy"):
        local = tmp_path / "tree" / name.removeprefix("copy/")
        assert fs.cat_file(name) == local.read_bytes()
    (tmp_path / "tree" / "0" / "0.bin").unlink()
    rsync(f"file://{tmp_path}/tree", f"{url}/copy", fs=generic, delete_missing=True)
    assert len(fs.find("copy")) == 19


@pytest.fixture
def s3():
    """A local server that speaks S3, with one bucket."""
    server = pytest.importorskip("moto.server", reason="make test-interop has it")
    s3fs = pytest.importorskip("s3fs")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=port)
    running.start()
    made = s3fs.S3FileSystem(
        key="test", secret="test", endpoint_url=f"http://127.0.0.1:{port}", skip_instance_cache=True
    )
    made.mkdir("bucket")
    yield made
    running.stop()


def test_rsync_from_s3(fs, url, s3):
    s3.pipe({f"bucket/data/{number}": os.urandom(3000) for number in range(10)})
    storage = dict(s3.storage_options)
    storage.pop("skip_instance_cache", None)
    rsync(
        "s3://bucket/data",
        f"{url}/from-s3",
        fs=GenericFileSystem(default_method="options", storage_options={"s3": storage}),
    )
    for number in range(10):
        assert fs.cat_file(f"from-s3/{number}") == s3.cat_file(f"bucket/data/{number}")

"""fsspec.generic.rsync brings trees into the pool and keeps them up to date."""

import os

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


def test_rsync_from_s3(fs, url, s3):
    s3.pipe({f"bucket/data/{number}": os.urandom(3000) for number in range(10)})
    generic = GenericFileSystem(default_method="options", storage_options={"s3": {}})
    rsync("s3://bucket/data", f"{url}/from-s3", fs=generic)
    for number in range(10):
        assert fs.cat_file(f"from-s3/{number}") == s3.cat_file(f"bucket/data/{number}")

"""Folders to prefixes and back: `put -r`, `get -r`, `sync`."""

import json
import os

import numpy as np
import pytest

from mooncake_store.cli.shared import bulk

FILES = {
    "a": b"one",
    "deep/er/b": b"two" * 1000,
    "deep/empty": b"",
    "large": np.random.default_rng(0).bytes((8 << 20) + 12345),
}
ODD = os.fsdecode(b"b\xffd")


def write(folder, files):
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def read(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "folder"
    write(made, FILES)
    return made


def test_a_folder_goes_up_and_comes_back(mooncake, folder, tmp_path):
    write(folder, {ODD: b"no text"})
    (folder / "link").symlink_to("/etc/hostname")
    code, out, err = mooncake("put", "-r", str(folder), "run/1")
    assert code == 0
    assert out.startswith("stored 5 files: ")
    assert "link" in err
    assert mooncake("get", "run/1/a")[1] == "one"
    code, out, _ = mooncake("get", "-r", "run/1", str(tmp_path / "copy"), "--json")
    assert code == 0
    assert json.loads(out)["written"] == 5
    assert read(tmp_path / "copy") == FILES | {ODD: b"no text"}


def test_what_exists_is_left_alone_unless_it_is_to_be_replaced(mooncake, folder):
    mooncake("put", "run/a", "-", stdin=b"older")
    assert "1 exist already" in mooncake("put", "-r", str(folder), "run")[1]
    assert mooncake("get", "run/a")[1] == "older"
    assert mooncake("put", "-r", str(folder), "run", "--replace")[0] == 0
    assert mooncake("get", "run/a")[1] == "one"


def test_copies_and_pins_hold_for_every_part(mooncake, folder, store):
    assert mooncake("put", "-r", str(folder), "run", "--replicas", "2", "--hard-pin")[0] == 0
    for item in store.list():
        found = store.stat(item.key)
        assert (len(found.replicas), found.hard_pin) == (2, True), item.key
    store.clear()


def test_a_thousand_files_take_some_requests_and_not_one_each(mooncake, tmp_path, store):
    def requests():
        return sum(shard.requests for shard in store.store_stats())

    write(tmp_path / "many", {f"{n % 7}/{n:04d}": b"%d" % n for n in range(1000)})
    for words in (
        ["put", "-r", str(tmp_path / "many"), "many"],
        ["get", "-r", "many", str(tmp_path / "back")],
        ["sync", str(tmp_path / "many"), "pool:many"],
    ):
        before = requests()
        assert mooncake(*words)[0] == 0
        assert requests() - before < 100
    assert read(tmp_path / "back") == read(tmp_path / "many")


def test_more_than_a_batch(mooncake, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(bulk, "BATCH_FILES", 2)
    monkeypatch.setattr(bulk, "BATCH_BYTES", 3000)
    monkeypatch.setattr(bulk, "PIECE_BYTES", 1 << 20)
    assert mooncake("put", "-r", str(folder), "run")[0] == 0
    assert mooncake("get", "-r", "run", str(tmp_path / "copy"))[0] == 0
    assert read(tmp_path / "copy") == FILES
    assert "copied 0 files" in mooncake("sync", str(folder), "pool:run")[1]


@pytest.mark.parametrize(
    "name", ["../out", "x/../../out", "/tmp/out", "x//y", "./x", "nul\0", ".."]
)
def test_a_name_of_the_pool_does_not_lead_out_of_the_folder(mooncake, store, tmp_path, name):
    store.put(f"run/{name}", b"from the pool")
    store.put("run/good", b"good")
    target = tmp_path / "in" / "folder"
    code, out, _ = mooncake("get", "-r", "run", str(target))
    assert code == 1
    assert "not written: " in out
    assert "\0" not in out
    assert read(tmp_path) == {"in/folder/good": b"good"}
    code, out, _ = mooncake("sync", "pool:run", str(target), "--delete", "--json")
    assert code == 1
    assert list(json.loads(out)["failed"]) == [name]
    assert read(tmp_path) == {"in/folder/good": b"good"}


def test_a_symbolic_link_does_not_lead_out_of_the_folder(mooncake, store, tmp_path):
    outside = tmp_path / "outside"
    write(outside, {"victim": b"old"})
    target = tmp_path / "target"
    target.mkdir()
    (target / "folder").symlink_to(outside)
    (target / "file").symlink_to(outside / "victim")
    store.put_many(["run/folder/victim", "run/file"], [b"new", b"new"])
    code, out, _ = mooncake("get", "-r", "run", str(target))
    assert code == 1
    assert "not written: folder/victim: " in out
    assert read(outside) == {"victim": b"old"}
    # The link is replaced, as whatever else had the name.
    assert not (target / "file").is_symlink()
    assert (target / "file").read_bytes() == b"new"
    assert [path.name for path in target.iterdir() if path.name.endswith(".part")] == []


def test_a_file_that_is_in_the_way_of_a_folder_costs_that_one_only(mooncake, store, tmp_path):
    store.put_many(["run/a", "run/a/b", "run/c"], [b"1", b"2", b"3"])
    code, out, _ = mooncake("get", "-r", "run", str(tmp_path))
    assert code == 1
    assert "not written: a/b: " in out
    assert read(tmp_path) == {"a": b"1", "c": b"3"}


def test_sync_copies_what_differs(mooncake, folder, store, tmp_path):
    def sync(*words):
        code, out, _ = mooncake("sync", *words, "--json")
        assert code == 0
        found = json.loads(out)
        return sorted(found["copied"]), found["deleted"], found["unchanged"]

    up = (str(folder), "pool:run")
    assert sync(*up, "--dry-run") == (sorted(FILES), [], 0)
    assert store.list() == []
    assert sync(*up) == (sorted(FILES), [], 0)
    assert sync(*up) == ([], [], 4)
    changed = bytearray(FILES["large"])
    changed[-1] ^= 1  # the same size, in the last part
    write(folder, {"a": b"ONE", "large": changed})
    (folder / "deep" / "empty").unlink()
    assert sync(*up, "--delete", "-n") == (["a", "large"], ["deep/empty"], 1)
    assert sync(*up) == (["a", "large"], [], 1)
    assert sync(*up, "--delete") == ([], ["deep/empty"], 3)
    down = ("pool:run", str(tmp_path / "copy"))
    assert sync(*down) == (["a", "deep/er/b", "large"], [], 0)
    assert read(tmp_path / "copy") == read(folder)
    write(tmp_path / "copy", {"gone/far/away": b"x", "a": b"123"})
    (tmp_path / "copy" / "kept").mkdir()
    assert sync(*down, "--delete") == (["a"], ["gone/far/away"], 2)
    assert read(tmp_path / "copy") == read(folder)
    assert not (tmp_path / "copy" / "gone").exists()
    assert (tmp_path / "copy" / "kept").exists()
    # Parts of what was replaced or deleted are gone too.
    assert len(store.list()) == 3 + 2


def test_an_emptied_source_empties_no_target(mooncake, folder, store, tmp_path):
    code, _, err = mooncake("sync", "pool:run", str(folder), "--delete")
    assert code == 5
    assert "run" in err
    assert read(folder) == FILES
    store.put("run/a", b"x")
    (tmp_path / "empty").mkdir()
    assert mooncake("sync", str(tmp_path / "empty"), "pool:run", "--delete")[0] == 2
    assert store.exists("run/a")


def test_what_is_meant_has_to_be_clear(mooncake, folder, store):
    for words in (
        ["sync", str(folder), "run"],
        ["sync", "pool:a", "pool:b"],
        ["put", "-r", str(folder), "../run"],
        ["get", "-r", "run"],
    ):
        assert mooncake(*words)[0] == 2
    assert mooncake("get", "-r", "nothing", "x")[0] == 5
    store.put("one", b"x")
    code, _, err = mooncake("get", "-r", "one", "x")
    assert code == 2
    assert "-r" in err

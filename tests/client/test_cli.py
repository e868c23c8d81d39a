"""The commands that talk to a store."""

import contextlib
import json
import os
import re

import numpy as np

from mooncake_store import Client
from mooncake_store.cli import put
from mooncake_store.cli.shared.tree import run
from mooncake_store.core.records import SegmentState
from tests.waiting import until


def test_put_get_and_rm(mooncake, tmp_path):
    source = tmp_path / "source"
    source.write_bytes(b"\0\xff" * 1000)
    code, out, _ = mooncake("put", "file", str(source), "--replicas", "2")
    assert code == 0
    assert re.fullmatch(r"stored file: 1\.95KiB, 2 copies, \S+B/s\n", out)
    code, out, _ = mooncake("put", "wide", str(source), "--replicas", "9")
    assert code == 0
    assert "2 of 9 copies" in out
    assert mooncake("put", "piped", "-", stdin=b"hello\n")[0] == 0
    code, out, _ = mooncake("put", "piped", "-", stdin=b"other\n")
    assert code == 0
    assert "left alone" in out
    assert mooncake("get", "piped")[1] == "hello\n"
    assert mooncake("put", "piped", "-", "--replace", stdin=b"other\n")[0] == 0
    assert mooncake("get", "piped")[1] == "other\n"
    target = tmp_path / "target"
    code, out, _ = mooncake("get", "file", str(target))
    assert code == 0
    assert re.fullmatch(rf"wrote 1\.95KiB to {re.escape(str(target))}, read at \S+B/s\n", out)
    code, out, _ = mooncake("get", "file", str(target), "--json")
    found = json.loads(out)
    assert found.pop("seconds") > 0
    assert found == {"key": "file", "size": 2000, "file": str(target)}
    assert target.read_bytes() == source.read_bytes()
    assert mooncake("rm", "file", "missing")[0] == 1
    code, _, err = mooncake("rm", "missing")
    assert code == 5
    assert "'missing'" in err
    assert mooncake("rm", "--prefix", "pip")[1] == "removed 1 object\n"
    assert mooncake("get", "piped")[0] == 5


def test_a_large_file_is_stored_piece_by_piece_and_one_sees_it_go(mooncake, tmp_path, monkeypatch):
    said = []

    @contextlib.contextmanager
    def progress(text):
        said.append(text)
        yield said.append

    monkeypatch.setattr(put, "progress", progress)
    monkeypatch.setattr(put, "PIECE_BYTES", 1 << 20)
    source = tmp_path / "large"
    source.write_bytes(np.random.default_rng(0).bytes(2_500_000))
    code, out, _ = mooncake("put", "large", str(source), "--replicas", "2", "--json")
    stored = json.loads(out)
    assert (code, stored["outcome"], stored["size"], stored["replicas"]) == (
        0, "stored", 2_500_000, 2,
    )  # fmt: skip
    assert stored["seconds"] > 0
    assert [text.partition(", ")[0] for text in said] == [
        "storing large",
        "storing large: 1MiB of 2.38MiB",
        "storing large: 2MiB of 2.38MiB",
        "storing large: 2.38MiB of 2.38MiB",
    ]
    target = tmp_path / "back"
    assert mooncake("get", "large", str(target))[0] == 0
    assert target.read_bytes() == source.read_bytes()
    source.write_bytes(bytes(2_000_000))
    assert "left alone" in mooncake("put", "large", str(source))[1]
    assert mooncake("put", "large", str(source), "--replace")[0] == 0
    assert mooncake("get", "large", str(target))[0] == 0
    assert target.read_bytes() == bytes(2_000_000)


def test_keys_that_are_no_text(mooncake, tmp_path):
    key = os.fsdecode(b"\xff\x01key")  # as a shell passes it
    shown = "\\xff\x01key"
    assert "stored \\xff\\x01key:" in mooncake("put", key, "-", stdin=b"value")[1]
    assert json.loads(mooncake("ls", "--json")[1])["objects"][0]["key"] == shown
    below = mooncake("ls", os.fsdecode(b"\xff"), "--json")[1]
    assert json.loads(below)["objects"][0]["key"] == shown
    assert mooncake("get", key)[1] == "value"
    assert json.loads(mooncake("exists", key, "--json")[1]) == {"exists": {shown: True}}
    assert json.loads(mooncake("stat", key, "--json")[1])["key"] == shown
    assert mooncake("rm", key)[0] == 0
    code, _, err = mooncake("get", key)
    assert code == 5
    assert "xff" in err
    assert json.loads(mooncake("rm", key, "other", "--json")[1])["failed"].keys() == {
        shown, "other",
    }  # fmt: skip


def test_rm_wants_to_know_exactly(mooncake):
    mooncake("put", "key", "-", stdin=b"x")
    for words in (["rm"], ["rm", "key", "--all"], ["rm", "--prefix", ""]):
        assert mooncake(*words)[0] == 2
    code, _, err = mooncake("rm", "--all")  # no terminal to ask at
    assert code == 2
    assert "--yes" in err
    assert mooncake("exists", "key")[0] == 0
    code, out, _ = mooncake("rm", "--all", "--yes", "--json")
    assert (code, json.loads(out)) == (0, {"removed": 1, "failed": {}})


def test_listing(mooncake):
    for key in ("b", "a/2", "a/1"):
        mooncake("put", key, "-", stdin=b"x" * 2048)
    assert mooncake("ls")[1] == "a/1\na/2\nb\n"
    assert mooncake("ls", "a/")[1] == "a/1\na/2\n"
    long = mooncake("ls", "-l")[1]
    assert "2KiB" in long
    assert "3 objects, 6KiB" in long
    objects = json.loads(mooncake("ls", "b", "--json")[1])["objects"]
    assert [(item["key"], item["size"], item["replicas"]) for item in objects] == [("b", 2048, 1)]
    assert mooncake("ls", "zzz")[1] == "no objects\n"


def test_stat_and_exists(mooncake):
    mooncake("put", "key", "-", "--hard-pin", stdin=b"hello")
    out = mooncake("stat", "key")[1]
    assert "5B (5 bytes)" in out
    assert "readable" in out
    found = json.loads(mooncake("stat", "key", "--json")[1])
    assert (found["key"], found["size"], found["hard_pin"]) == ("key", 5, True)
    assert mooncake("stat", "missing")[0] == 5
    assert mooncake("exists", "key")[:2] == (0, "key: yes\n")
    code, out, _ = mooncake("exists", "key", "missing", "--json")
    assert (code, json.loads(out)) == (5, {"exists": {"key": True, "missing": False}})


def test_status_and_top(mooncake, url):
    out = mooncake("status")[1]
    assert out.startswith("ready; version")
    master = url.split("/")[2]
    assert out.splitlines()[0].endswith(f", master at {master}")
    assert "worker-0" in out
    found = json.loads(mooncake("status", "--json")[1])
    assert found["ready"]
    assert {segment["state"] for segment in found["segments"]} == {"ok"}
    assert mooncake("put", "key", "-", stdin=b"hello")[0] == 0
    out = mooncake("top", "--once", "--interval", "0.1")[1]
    assert "keys/s" in out
    assert re.search(r"^namespace test-\d+: 1 objects, 5B$", out, re.MULTILINE)
    found = json.loads(mooncake("top", "--json", "--interval", "0.1")[1])
    assert found["master"] == master
    assert len(found["shards"]) == 1
    assert found["shards"][0]["requests_per_s"] >= 0
    assert found["shards"][0]["hit_rate"] is None  # nobody asked for anything meanwhile
    assert (found["namespace"]["bytes_used"], found["namespace"]["quota"]) == (5, 0)


def test_top_tells_of_missing_replicas(mooncake):
    def missing():
        found = json.loads(mooncake("top", "--json", "--interval", "0.1")[1])
        return found["shards"][0]["replicas_missing"]

    before = missing()
    assert mooncake("put", "key", "-", "--replicas", "3", stdin=b"value")[0] == 0
    assert missing() == before + 1  # there are two workers
    assert f"missing replicas: {before + 1}" in mooncake("top", "--once", "--interval", "0.1")[1]
    assert mooncake("rm", "key")[0] == 0


def test_a_store_that_is_not_there(monkeypatch, capsys, free_port):
    monkeypatch.setenv("MOONCAKE_CLIENT_URL", f"mooncake://127.0.0.1:{free_port}")
    for words in (["ls"], ["get", "key"], ["status"], ["top", "--once"]):
        assert run(words) == 4
        assert str(free_port) in capsys.readouterr().err
    assert run(["ls", "--url", "http://127.0.0.1"]) == 3


def test_what_an_absent_worker_holds_is_told_of(own_cluster, monkeypatch, capfd):
    quick = {"ping_interval": "100ms", "client_ttl": "1s", "suspect_after_pings": 3}
    cluster = own_cluster(workers=1, in_process=True, master=quick)
    monkeypatch.setenv("MOONCAKE_CLIENT_URL", cluster.url)
    (worker,) = cluster._workers
    with Client(cluster.url) as store:
        store.put("key", b"value")
        with monkeypatch.context() as silenced:
            silenced.setattr(worker, "_say_alive", lambda: None)
            until(lambda: store.status().segments[0].state == SegmentState.ABSENT)
            capfd.readouterr()
            assert run(["status"]) == 4
            said = " ".join(capfd.readouterr().out.split())
            assert "absent" in said
            assert "worker absent" not in said
            assert run(["stat", "key"]) == 0
            assert re.search(r"state\s+absent", capfd.readouterr().out)
            assert run(["get", "key"]) == run(["exists", "key"]) == 5
            assert "the workers that hold the object are absent" in capfd.readouterr().err
        until(lambda: store.exists("key"))
    assert run(["get", "key"]) == 0
    assert capfd.readouterr().out == "value"

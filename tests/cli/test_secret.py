"""`mooncake secret`, as an operator types it: made, used, listed, exchanged, taken back."""

import contextlib
import json
import secrets

import pytest

from mooncake_store import LocalCluster
from mooncake_store.cli.main import main
from mooncake_store.client import Client
from mooncake_store.errors import AuthError, NoSpaceError, StoreError
from tests.waiting import until


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "credentials")


def told(capsys, *words):
    assert main(["secret", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def pool(tmp_path, folder, capsys):
    secret = secrets.token_hex(32)
    file = tmp_path / "pool.secret"
    file.write_text(secret)
    file.chmod(0o600)
    told(capsys, "make", folder, "first", "--role", "admin")
    guarded = {"secret_file": str(file), "credentials": folder}
    with LocalCluster(
        1, "16MiB", in_process=True, secret=secret.encode(), master=guarded, worker=guarded
    ) as cluster:
        yield cluster


def put_for_ever(client):
    until(lambda: client.put(secrets.token_hex(8), b"value") is client, what="it is refused")


def until_let_in(pool, file):
    """A client, once servers have looked at the directory again."""

    def let_in():
        with contextlib.suppress(AuthError):
            client = Client(pool.url, secret_file=file)
            assert not client.exists("x")
            return client

    return until(let_in, what="it is let in")


def test_what_was_made_is_let_in_and_what_was_taken_back_is_not(pool, folder, tmp_path, capsys):
    file = str(tmp_path / "alice.secret")
    assert told(capsys, "make", folder, "alice", "--out", file) == {"file": file}
    with until_let_in(pool, file) as client:
        client.put("k", b"value")
        told(capsys, "revoke", folder, "alice")
        with pytest.raises(StoreError) as ended:
            put_for_ever(client)
        assert isinstance(ended.value, AuthError), ended.value
    with pytest.raises(AuthError, match="did not prove that it is alice"):
        Client(pool.url, secret_file=file).exists("k")


def test_the_one_before_holds_for_as_long_as_is_said(pool, folder, tmp_path, capsys):
    before, after = (str(tmp_path / name) for name in ("before", "after"))
    told(capsys, "make", folder, "alice", "--out", before)
    told(capsys, "rotate", folder, "alice", "--keep", "1h", "--out", after)
    for file in (before, after):
        until_let_in(pool, file).close()


def test_the_list_says_what_there_is_and_tells_no_secret(folder, capsys):
    said = ("--role", "reader", "--namespace", "a", "--for", "1h")
    made = told(capsys, "make", folder, "batch", *said)
    assert made["credential"].startswith("mooncake:batch:")
    told(capsys, "make", folder, "node", "--role", "worker")
    assert main(["secret", "list", folder]) == 0
    shown = capsys.readouterr().out
    assert "batch" in shown
    assert made["credential"].rpartition(":")[2] not in shown
    [batch, node] = told(capsys, "list", folder)["credentials"]
    assert (batch["role"], batch["namespaces"], batch["secrets"]) == ("reader", ["a"], 1)
    assert batch["until"] > 0
    assert node == {
        "principal": "node", "role": "worker", "namespaces": [], "limits": {}, "until": None,
        "secrets": 1,
    }  # fmt: skip


def test_limits_are_made_listed_and_changed(folder, capsys):
    limits = ("--limit", "bytes=10GiB", "--limit", "clients=100")
    told(capsys, "make", folder, "alice", "--namespace", "a", *limits)
    [alice] = told(capsys, "list", folder)["credentials"]
    assert alice["limits"] == {"bytes": 10 << 30, "clients": 100}
    assert main(["secret", "list", folder]) == 0
    shown = capsys.readouterr().out  # in lines as long as the terminal allows
    assert all(limit in shown for limit in ("bytes=10GiB", "clients=100"))
    changed = told(capsys, "limit", folder, "alice", "clients=any", "groups=5")["limits"]
    assert changed == {"bytes": 10 << 30, "groups": 5}
    assert told(capsys, "list", folder)["credentials"][0]["limits"] == changed


def test_what_is_no_limit_is_refused_with_what_there_are(folder, capsys):
    for words, said in (
        (("--limit", "byte=10"), "clients, names"),
        (("--limit", "clients=10GiB"), "without a unit"),
        (("--limit", "bytes=10GiB"), "--namespace"),
        (("--limit", "lent=10GiB"), "make a worker"),
        (("--role", "reader", "--namespace", "a", "--limit", "tasks=1"), "make a writer"),
    ):
        assert main(["secret", "make", folder, "alice", *words]) != 0
        assert said in capsys.readouterr().err
    told(capsys, "make", folder, "bob")
    assert main(["secret", "limit", folder, "alice", "clients=1"]) != 0
    assert "no credential of alice" in capsys.readouterr().err
    assert main(["secret", "limit", folder, "bob", "bytes=1GiB"]) != 0
    assert "--namespace" in capsys.readouterr().err


def test_a_limit_that_is_raised_ends_no_session(pool, folder, tmp_path, capsys):
    file = str(tmp_path / "alice.secret")
    named = ("--namespace", "default", "--limit", "bytes=1MiB")
    told(capsys, "make", folder, "alice", *named, "--out", file)
    with until_let_in(pool, file) as client:
        client.put("pinned", bytes(1 << 19), hard_pin=True)
        with pytest.raises(NoSpaceError, match="of alice has a limit of 1MiB for objects"):
            client.put("more", bytes(1 << 20))
        told(capsys, "limit", folder, "alice", "bytes=4MiB")

        def put():
            with contextlib.suppress(NoSpaceError):
                client.put("more", bytes(1 << 20))
                return True

        until(put, what="it has room")


def test_a_limit_that_was_added_holds_who_is_there(pool, folder, tmp_path, capsys):
    file = str(tmp_path / "alice.secret")
    told(capsys, "make", folder, "alice", "--namespace", "default", "--out", file)
    with until_let_in(pool, file) as client:
        client.put("before", b"value", hard_pin=True)
        told(capsys, "limit", folder, "alice", "bytes=0")
        with pytest.raises(NoSpaceError, match="of alice has a limit of 0B"):
            put_for_ever(client)
        assert client.get("before") == b"value"


def test_the_list_says_which_namespaces_have_keys_and_shows_none(folder, capsys):
    first = told(capsys, "key", folder, "team-a")
    assert first["namespace"] == "team-a"
    second, others = told(capsys, "key", folder, "team-a"), told(capsys, "key", folder, "*")
    assert told(capsys, "list", folder) == {
        "credentials": [],
        "keys": [
            {"namespace": "*", "ids": [others["id"]]},
            {"namespace": "team-a", "ids": [second["id"], first["id"]]},
        ],
    }
    assert main(["secret", "list", folder]) == 0
    shown = capsys.readouterr().out
    assert all(each in shown for each in ("team-a", second["id"], first["id"], "all others"))
    third = told(capsys, "key", folder, "team-a", "--only")
    assert told(capsys, "destroy", folder, "*") == {"destroyed": "*"}
    told(capsys, "make", folder, "alice")
    found = told(capsys, "list", folder)
    assert found["keys"] == [{"namespace": "team-a", "ids": [third["id"]]}]
    assert [each["principal"] for each in found["credentials"]] == ["alice"]
    assert main(["secret", "list", folder]) == 0
    shown = capsys.readouterr().out
    assert "alice" in shown
    assert third["id"] in shown


def test_a_file_of_a_credential_is_for_its_user_alone(folder, tmp_path, capsys):
    file = tmp_path / "alice.secret"
    told(capsys, "make", folder, "alice", "--out", str(file))
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["make", "{folder}", "a/b"], 3, "cannot name a principal"),
        (["make", "{folder}", "alice", "--role", "owner"], 2, "reader"),
        (["make", "{folder}", "alice", "--for", "soon"], 2, "soon"),
        (["revoke", "{folder}", "alice"], 3, "cannot be read"),
        (["list", "{folder}"], 3, "secret make"),
        (["make", "/proc/no", "alice"], 3, "/proc/no"),
        (["key", "/proc/no", "team-a"], 3, "/proc/no"),
        (["key", "{folder}", "team?a"], 3, "cannot be the namespace"),
        (["destroy", "{folder}", "team-a"], 3, "cannot be read"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(folder, capsys, words, code, said):
    assert main(["secret", *(word.format(folder=folder) for word in words)]) == code
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown

"""Credentials in files: what is believed, what is refused and said, and what follows a change."""

import json
import logging
import os
import secrets

import pytest

from mooncake_store import credentials
from mooncake_store.credentials import (
    NamedKeyring,
    credential_of,
    entries,
    pool_secret_in,
    secret_in,
)
from mooncake_store.errors import AlreadyExistsError, AuthError, ConfigError, NotFoundError
from transfer_engine.wire.keyring import Alone, guarding, read_only_secret
from transfer_engine.wire.rights import EVERYTHING, LOOKING, Role

SECRET = b"the secret of the pool"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "credentials"


@pytest.fixture
def clock(monkeypatch):
    """What time it is, for both clocks; looked at anew each time."""

    class Clock:
        now = 1_000_000.0

    monkeypatch.setattr(credentials.time, "time", lambda: Clock.now)
    monkeypatch.setattr(credentials.time, "monotonic", lambda: Clock.now)
    return Clock


@pytest.fixture
def keyring(folder, clock):
    credentials.make(str(folder), "alice", Role.WRITER, namespaces=["team-a"])
    return NamedKeyring(SECRET, str(folder))


def proof_of(text):
    return credential_of(text.encode()).secret


def believed(keyring, name):
    return [key.secret for key in keyring.accepted(name)]


def test_what_is_made_is_believed_and_says_what_it_allows(keyring, folder):
    text = credentials.make(str(folder), "batch", Role.READER, until=2_000_000)
    made = credential_of(text.encode())
    assert made.principal == "batch"
    keyring = NamedKeyring(SECRET, str(folder))
    (key,) = keyring.accepted("batch")
    assert key.secret == made.secret
    assert (key.rights.principal, key.rights.role) == ("batch", Role.READER)
    assert (key.rights.namespaces, key.rights.until) == ((), 2_000_000)
    (key,) = keyring.accepted("alice")
    assert (key.rights.role, key.rights.namespaces) == (Role.WRITER, ("team-a",))


def test_who_comes_is_believed_by_what_his_file_says_then(keyring, folder):
    """The clock stands still: what others may do is as it was when that was looked at."""
    first = proof_of(credentials.make(str(folder), "bob", Role.READER))
    assert believed(keyring, "bob") == [first]
    second = proof_of(credentials.rotate(str(folder), "bob", keep_s=0))
    assert believed(keyring, "bob") == [second]
    credentials.revoke(str(folder), "bob")
    assert believed(keyring, "bob") == []
    text = (folder / "alice.json").read_bytes()
    (folder.parent / "elsewhere.json").write_bytes(text)
    assert believed(keyring, "../elsewhere") == believed(keyring, "alice\0") == []


def test_the_secret_of_the_pool_is_believed_from_who_has_no_name_only(keyring):
    keys = [(key.secret, key.rights) for key in keyring.accepted("")]
    assert keys == [(SECRET, EVERYTHING), (read_only_secret(SECRET), LOOKING)]
    assert SECRET not in believed(keyring, "alice")
    assert keyring.accepted("nobody") == ()


def test_a_file_that_is_removed_while_others_are_looked_at_costs_nobody_his_way_in(keyring, folder):
    (folder / "gone.json").symlink_to(folder / "nowhere")  # listed, and not there
    assert list(entries(str(folder))) == ["alice"]


def test_files_and_their_directory_are_for_their_user_alone(keyring, folder):
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "alice.json").stat().st_mode & 0o777 == 0o600


def test_changes_are_seen_within_a_second(keyring, folder, clock):
    (key,) = keyring.accepted("alice")
    text = credentials.make(str(folder), "carol", Role.ADMIN)
    clock.now += 1.0
    assert believed(keyring, "carol") == [proof_of(text)]
    assert keyring.holds(key.rights)
    credentials.revoke(str(folder), "alice")
    clock.now += 1.0
    assert keyring.accepted("alice") == ()
    assert not keyring.holds(key.rights)
    assert keyring.holds(EVERYTHING), "who knows the pool's secret has no name"


def test_a_secret_that_is_exchanged_holds_for_as_long_as_was_said(keyring, folder, clock):
    (before,) = keyring.accepted("alice")
    text = credentials.rotate(str(folder), "alice", keep_s=60)
    clock.now += 1.0
    new, old = keyring.accepted("alice")
    assert (new.secret, old.secret) == (proof_of(text), before.secret)
    assert new.rights.namespaces == ("team-a",)
    assert keyring.holds(old.rights)
    assert keyring.holds(before.rights), "a session that began before it was exchanged"
    clock.now += 60
    assert believed(keyring, "alice") == [new.secret]
    assert not keyring.holds(old.rights)
    assert not keyring.holds(before.rights)
    assert keyring.holds(new.rights)


def test_exchanging_with_nothing_kept_ends_the_one_before(keyring, folder, clock):
    text = credentials.rotate(str(folder), "alice", keep_s=0)
    clock.now += 1.0
    assert believed(keyring, "alice") == [proof_of(text)]


def test_secrets_that_were_exchanged_often_are_few(keyring, folder):
    for _ in range(20):
        credentials.rotate(str(folder), "alice", keep_s=3600)
    assert len(entries(str(folder))["alice"].secrets) == 8


def test_what_a_principal_may_is_changed_by_its_file(keyring, folder, clock):
    (key,) = keyring.accepted("alice")
    file = folder / "alice.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"role": "reader"}))
    os.utime(file, ns=(1, 1))
    clock.now += 1.0
    assert not keyring.holds(key.rights), "a session with more rights ends"
    assert keyring.accepted("alice")[0].rights.role == Role.READER


def test_one_that_has_run_out_is_believed_no_more(folder, clock):
    credentials.make(str(folder), "batch", Role.READER, until=clock.now + 10)
    keyring = NamedKeyring(SECRET, str(folder))
    (key,) = keyring.accepted("batch")
    clock.now += 10
    assert keyring.accepted("batch") == []
    assert not keyring.holds(key.rights)


def wrong_mode(file):
    file.chmod(0o604)


def no_json(file):
    file.write_text("{")


def deep(file):
    file.write_text("[" * 30_000)


def unknown_role(file):
    file.write_text(file.read_text().replace("writer", "owner"))


def unknown_field(file):
    file.write_text(file.read_text().replace('"role"', '"rule": "x", "role"'))


def no_secret(file):
    file.write_text('{"role": "reader", "secrets": []}')


def short_secret(file):
    file.write_text('{"role": "reader", "secrets": [{"secret": "00"}]}')


def too_long(file):
    file.write_text(file.read_text() + " " * (1 << 17) + "x")


WRONGS = [
    wrong_mode, no_json, deep, unknown_role, unknown_field, no_secret, short_secret, too_long,
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONGS)
def test_a_file_that_is_wrong_is_refused_at_the_start_by_its_name(keyring, folder, wrong):
    wrong(folder / "alice.json")
    with pytest.raises(ConfigError, match=r"alice\.json"):
        NamedKeyring(SECRET, str(folder))


@pytest.mark.parametrize("wrong", WRONGS)
def test_a_file_that_becomes_wrong_costs_its_principal_only(keyring, folder, clock, wrong, caplog):
    text = credentials.make(str(folder), "carol", Role.ADMIN)
    wrong(folder / "alice.json")
    with caplog.at_level(logging.ERROR):
        clock.now += 1.0
        assert keyring.accepted("alice") == ()
        clock.now += 1.0
        assert keyring.accepted("alice") == ()
    assert believed(keyring, "carol") == [proof_of(text)]
    assert [each.getMessage()[:5] for each in caplog.records] == ["alice"], "said once"


def test_others_cannot_add_to_the_directory(keyring, folder, clock, caplog):
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="0777"):
        NamedKeyring(SECRET, str(folder))
    clock.now += 1.0
    assert keyring.accepted("alice") == ()
    folder.chmod(0o700)
    clock.now += 1.0
    assert believed(keyring, "alice")


def test_a_directory_that_goes_takes_everybody_with_it(keyring, folder, clock, caplog):
    folder.rename(folder.with_name("away"))
    clock.now += 1.0
    assert keyring.accepted("alice") == ()
    assert believed(keyring, "")
    assert "nobody with a name" in caplog.text


def test_other_files_of_the_directory_say_nothing(keyring, folder):
    for name in ("notes.txt", ".hidden.json", "alice.json.new", "-x.json"):
        (folder / name).write_text("nothing")
    assert list(entries(str(folder))) == ["alice"]


@pytest.mark.parametrize("name", ["", ".", "../alice", "a/b", "-x", "x" * 65, "a b", "ä"])
def test_what_cannot_name_a_principal_is_refused(folder, name):
    with pytest.raises(ConfigError, match="cannot name"):
        credentials.make(str(folder), name, Role.READER)
    assert not folder.exists() or not list(folder.iterdir())


def test_names_are_there_once_or_not_at_all(keyring, folder):
    with pytest.raises(AlreadyExistsError, match="alice"):
        credentials.make(str(folder), "alice", Role.READER)
    for change in (
        lambda: credentials.revoke(str(folder), "bob"),
        lambda: credentials.rotate(str(folder), "bob", keep_s=1),
    ):
        with pytest.raises(NotFoundError, match="bob"):
            change()


@pytest.fixture
def file_with(tmp_path):
    def write(text):
        path = tmp_path / secrets.token_hex(4)
        path.write_text(text)
        path.chmod(0o600)
        return str(path)

    return write


def test_a_file_of_a_client_has_the_one_or_the_other(keyring, folder, file_with):
    text = credentials.rotate(str(folder), "alice", keep_s=0)
    found = secret_in(file_with(text + "\n"))
    assert found.own == credential_of(text.encode())
    assert secret_in(file_with(SECRET.decode())) == SECRET
    assert secret_in("") is None


@pytest.mark.parametrize("text", [f"a:{'x' * 64}", f"alice:{'0' * 63}", f":{'0' * 64}", ""])
def test_a_damaged_credential_is_told_from_a_secret(file_with, text):
    with pytest.raises(ConfigError, match="damaged"):
        secret_in(file_with(f"mooncake:{text}".ljust(20)))


def test_a_master_needs_the_secret_of_the_pool(keyring, folder, file_with):
    assert pool_secret_in(file_with(SECRET.decode())) == SECRET
    assert pool_secret_in("") is None
    text = credentials.rotate(str(folder), "alice", keep_s=0)
    with pytest.raises(ConfigError, match=r"alice.*masters need the pool's secret"):
        pool_secret_in(file_with(text))


def test_one_credential_guards_no_port(keyring, folder):
    alone = Alone(credential_of(credentials.rotate(str(folder), "alice", keep_s=0).encode()))
    with pytest.raises(ConfigError, match="alice alone can guard no port"):
        guarding(alone)
    assert guarding(NamedKeyring(alone, str(folder))).accepted("alice")
    with pytest.raises(AuthError, match="empty"):
        guarding(b"")


def test_what_is_soon_guessed_guards_no_port():
    with pytest.raises(ConfigError, match="15 bytes is soon guessed, at least 16"):
        guarding(SECRET[:15])
    assert guarding(SECRET[:16]).own.secret == SECRET[:16]


def test_nothing_shows_a_secret(keyring, folder):
    text = credentials.rotate(str(folder), "alice", keep_s=0)
    own = credential_of(text.encode())
    (key,) = NamedKeyring(SECRET, str(folder)).accepted("alice")
    for shown in (repr(own), repr(key), str(key.rights)):
        assert own.secret.decode() not in shown

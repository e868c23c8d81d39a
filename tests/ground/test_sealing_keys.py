"""Keys of namespaces in files: what seals, what still opens, and what follows a change."""

import json
import logging

import pytest

from mooncake_store import credentials, sealing_keys
from mooncake_store.errors import ConfigError, NotFoundError
from mooncake_store.sealing_keys import KeyFolder, destroy, keys_in, make, ring_at
from transfer_engine.wire.rights import Role

A, B = "a1" * 32, "b2" * 32


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "credentials"


@pytest.fixture
def clock(monkeypatch):
    """What time it is; looked at anew each time."""

    class Clock:
        now = 1_000_000.0

    monkeypatch.setattr(sealing_keys.time, "monotonic", lambda: Clock.now)
    return Clock


def test_each_namespace_is_sealed_by_its_own_key_or_that_of_all_others(folder):
    own = make(str(folder), "team-a")
    ring = KeyFolder(str(folder))
    assert ring.of("team-a").id == own
    assert ring.of("team-b") is None
    others = make(str(folder), "*")
    ring = ring_at(str(folder))
    assert (ring.of("team-a").id, ring.of("team-b").id) == (own, others)
    assert keys_in(str(folder)) == {"*": [others], "team-a": [own]}


def test_files_and_their_directory_are_for_their_user_alone(folder):
    make(str(folder), "team/a")
    assert folder.stat().st_mode & 0o777 == 0o700
    (file,) = folder.iterdir()
    assert (file.name, file.stat().st_mode & 0o777) == ("team%2Fa.key", 0o600)


def test_another_key_seals_and_those_of_before_open(folder):
    first = make(str(folder), "a")
    sealed = KeyFolder(str(folder)).of("a").seal(b"here", b"since long")
    second = make(str(folder), "a")
    ring = KeyFolder(str(folder))
    assert ring.of("a").id == second
    assert ring.by_id(first).open(b"here", sealed) == b"since long"
    third = make(str(folder), "a", alone=True)
    assert KeyFolder(str(folder)).ids == {third}


def test_what_was_made_or_destroyed_is_seen_within_a_second(folder, clock):
    other, first = make(str(folder), "b"), make(str(folder), "a")
    ring = KeyFolder(str(folder))
    second = make(str(folder), "a")
    destroy(str(folder), "b")
    assert (ring.of("a").id, ring.ids) == (first, {first, other})
    clock.now += sealing_keys.LOOK_S
    assert (ring.of("a").id, ring.ids) == (second, {first, second})
    assert ring.of("b") is None
    destroy(str(folder), "a")
    clock.now += sealing_keys.LOOK_S
    assert ring.lacking([first]) == [first]


def test_a_file_that_is_wrong_costs_its_namespace_its_keys_and_gives_it_no_others(
    folder, clock, caplog
):
    make(str(folder), "*")
    kept = make(str(folder), "b")
    made = make(str(folder), "a")
    ring = KeyFolder(str(folder))
    (folder / "a.key").chmod(0o644)
    clock.now += sealing_keys.LOOK_S
    with caplog.at_level(logging.ERROR):
        assert ring.of("a") is None
        assert ring.by_id(made) is None
    assert "the keys of namespace 'a' are not used" in caplog.text
    assert ring.of("b").id == kept
    (folder / "a.key").chmod(0o600)
    clock.now += sealing_keys.LOOK_S
    assert ring.of("a").id == made


def test_a_directory_that_others_can_write_to_has_no_keys_while_it_is_so(folder, clock, caplog):
    made = make(str(folder), "a")
    ring = KeyFolder(str(folder))
    folder.chmod(0o722)
    clock.now += sealing_keys.LOOK_S
    assert ring.of("a") is None
    assert "others can add credentials" in caplog.text
    folder.chmod(0o700)
    clock.now += sealing_keys.LOOK_S
    assert ring.of("a").id == made


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"keys": []}',
        f'{{"keys": ["{A[1:]}"]}}',
        f'{{"keys": ["{A}"], "x": 1}}',
        "[" * 999,
    ],
)
def test_what_is_no_key_is_refused_with_its_file_and_not_shown(folder, text):
    make(str(folder), "b")
    file = folder / "a.key"
    file.touch(0o600)
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        KeyFolder(str(folder))
    assert str(file) in caught.value.what
    assert "64 hex digits" in caught.value.advice
    assert A[1:] not in str(caught.value)
    with pytest.raises(ConfigError):
        make(str(folder), "a")
    assert make(str(folder), "a", alone=True) in KeyFolder(str(folder)).ids


def test_a_key_may_be_written_by_hand(folder):
    folder.mkdir(mode=0o700)
    file = folder / "a.key"
    file.touch(0o600)
    file.write_text(json.dumps({"keys": [B, A]}))
    assert len(KeyFolder(str(folder)).ids) == 2


def test_a_directory_without_keys_and_a_namespace_that_none_is_are_refused(folder):
    credentials.make(str(folder), "alice", Role.READER)
    with pytest.raises(ConfigError, match="no key of a namespace") as caught:
        ring_at(str(folder))
    assert "mooncake secret key" in caught.value.advice
    for name in ("", "a,b", "a?b", "/a"):
        with pytest.raises(ConfigError, match="cannot be the namespace"):
            make(str(folder), name)
    with pytest.raises(NotFoundError, match="no key of namespace 'a'"):
        destroy(str(folder), "a")


def test_keys_are_no_principals_and_principals_no_keys(folder):
    made = make(str(folder), "alice")
    credentials.make(str(folder), "bob", Role.READER)
    assert list(credentials.entries(str(folder))) == ["bob"]
    assert credentials.look(str(folder))[1] == {}
    assert keys_in(str(folder)) == {"alice": [made]}


def test_no_file_grows_without_end(folder):
    for _ in range(sealing_keys._KEYS_MAX):
        make(str(folder), "a")
    with pytest.raises(ConfigError, match="64 keys") as caught:
        make(str(folder), "a")
    assert "--only" in caught.value.advice
    make(str(folder), "a", alone=True)
    assert len(keys_in(str(folder))["a"]) == 1

"""What the doctor says of pools in which one thing is wrong, and what it says first."""

import json
import secrets
import socket

import pytest

from mooncake_store import doctor_pool
from mooncake_store.cli.main import main
from mooncake_store.doctor import Severity
from mooncake_store.doctor_pool import Answer, Member, Met, ask_pool, judge, judge_rates
from mooncake_store.local_cluster import LocalCluster
from mooncake_store.wire.about import ABOUT
from mooncake_store.wire.shard import SHARD
from transfer_engine.errors import PeerLostError
from transfer_engine.surroundings import UNLIMITED, Surroundings, surroundings
from transfer_engine.wire.registry import Registry

VERSION = "1.2.3"
NOW = Surroundings(1_700_000_000_000, 20_000, UNLIMITED, 1 << 30, 1 << 29)
NAMES = ("worker a", "worker b", "worker c", "worker d")


def answer(took_s=0.001, version=VERSION, around=NOW, ahead_s=0.0):
    return Answer(took_s, version, around, ahead_s)


def met(name, *answers, said="", error=None, address="10.0.0.7:1"):
    return Met(Member(name, address, None, said), answers or (answer(),) * 5, error)


def judged(*others):
    """What is said of these beside some that are as usual."""
    return judge([*map(met, NAMES), *others], VERSION)


def first(*others):
    found = judged(*others)
    assert all(item.advice for item in found if item.severity > Severity.OK)
    return found[0]


def test_of_a_pool_in_which_all_is_well_nothing_is_said():
    assert {item.severity for item in judged()} == {Severity.OK}


def test_a_link_that_takes_long_is_named():
    item = first(met("worker z", *[answer(0.05)] * 5))
    assert (item.name, item.severity) == ("worker z at 10.0.0.7:1", Severity.WARNING)
    assert item.found == "answers in 50.0 ms, where 1.0 ms are usual"


def test_a_link_of_which_an_answer_was_late_loses_packets():
    item = first(met("worker z", answer(0.002), answer(0.215), answer(0.003)))
    assert (item.name, item.severity) == ("worker z at 10.0.0.7:1", Severity.WARNING)
    assert item.found.startswith("answers in 2.0 ms, but one of 3 answers took 215 ms")


def test_of_several_the_worst_is_named_first():
    lost = PeerLostError("nobody is there", advice="start it")
    found = judged(
        met("worker far", answer(0.05)),
        met("worker farther", answer(0.2)),
        met("worker gone", answer(), error=lost, said="absent, silent for 3s"),
    )
    assert [item.name.split()[1] for item in found[:3]] == ["gone", "farther", "far"]
    assert found[0].severity is Severity.PROBLEM
    assert found[0].found == (
        "nobody is there; it answered 1 times before; the master says: absent, silent for 3s"
    )
    assert found[0].advice == "start it"


def test_one_that_answers_here_but_not_the_master_is_told_as_that():
    item = first(met("worker z", said="suspect, silent for 2s"))
    assert item.severity is Severity.WARNING
    assert "answers in 1.0 ms, but the master says: suspect, silent for 2s" in item.found


def test_one_without_an_address_is_told_as_the_master_does():
    item = first(Met(Member("worker z", "", None, "absent, silent for 2s")))
    assert (item.name, item.severity) == ("worker z", Severity.PROBLEM)
    assert item.found == "the master says: absent, silent for 2s"


@pytest.mark.parametrize(("ahead_s", "said"), [(90.0, "90.0 s ahead of"), (-5.0, "5.0 s behind")])
def test_a_clock_that_is_not_as_the_others_is_named(ahead_s, said):
    item = first(met("worker z", answer(ahead_s=ahead_s)))
    assert (item.name, item.severity) == ("clock of worker z", Severity.WARNING)
    assert item.found.startswith(said)


def test_where_all_others_agree_it_is_the_clock_of_this_host():
    found = judge([met(name, answer(ahead_s=-60.0)) for name in NAMES], VERSION)
    assert [item.name for item in found if item.severity] == ["clock of this host"]
    assert "60.0 s ahead of" in found[0].found


def test_a_clock_that_may_only_seem_off_because_its_answer_took_long_is_not_named():
    names = [item.name for item in judged(met("worker z", answer(4.0, ahead_s=2.5)))]
    assert "clocks" in names


def test_another_version_is_named_and_one_that_is_not_told():
    found = judged(
        met("worker old", answer(version="")), met("worker other", answer(version="1.2.2"))
    )
    told = {item.name: item for item in found if item.severity}
    assert told.keys() == {"version of worker old", "version of worker other"}
    assert told["version of worker other"].found == "1.2.2, where the master has 1.2.3"
    assert told["version of worker old"].severity is Severity.NOTE
    assert all(item.advice for item in told.values())


@pytest.mark.parametrize(
    ("files", "severity"), [(1024, "WARNING"), (4096, "OK"), (UNLIMITED, "OK")]
)
def test_a_low_limit_is_named(files, severity):
    around = Surroundings(NOW.clock_ms, files, 8 << 20, 1 << 30, 1 << 29)
    told = {item.name: item for item in judged(met("worker z", answer(around=around)))}
    item = told["limits of worker z"]
    assert item.severity is Severity[severity]
    assert "locked memory 8MiB, /dev/shm 512MiB free of 1GiB" in item.found


def test_the_worker_that_is_read_slowly_is_named_first_and_one_that_refuses_as_well():
    rates = {"a": 3e9, "b": 1e8, "c": 2e9, "d": PeerLostError("gone")}
    found = judge_rates(iter(rates.items()))
    assert [item.name for item in found if item.severity] == [
        "transfer from worker b", "transfer from worker d",
    ]  # fmt: skip
    assert found[0].found == "100MB/s over TCP from here; usual are 2GB/s"


# -- of pools that run


def asked(cluster, secret=None, **how):
    """What is said of a pool, and the first of it."""
    found = ask_pool(str(cluster.address), secret, **how)
    return {item.name: item for item in found}, found[0]


def test_everybody_in_a_pool_is_spoken_to():
    with LocalCluster(workers=2, shards=2, segment="16MiB", in_process=True) as cluster:
        told, _ = asked(cluster, transfer=True)
        members = {name.partition(" at ")[0] for name in told if " at " in name}
        assert members == {
            "master", "signs of life to the master", "shard 0", "shard 1",
            "worker worker-0", "worker worker-1",
        }  # fmt: skip
        assert told["versions"].severity is Severity.OK
        assert told["clocks"].found == "all 5 agree to 1 s"
        for name in ("shard 1", "worker worker-0", "master"):
            assert told[f"limits of {name}"].found.startswith("open files ")
        for name in ("worker-0", "worker-1"):
            assert "over TCP" in told[f"transfer from worker {name}"].found


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(doctor_pool, "CALL_S", 0.5)


def test_a_worker_that_stands_still_is_named_first(hurried, capsys):
    with LocalCluster(workers=2, segment="16MiB") as cluster:
        cluster.stop_worker(1)
        code = main(["doctor", "--json", "--pool", str(cluster.address)])
        told = json.loads(capsys.readouterr().out)["findings"]
        cluster.resume_worker(1)
    assert code == 11
    assert told[0]["severity"] == "problem"
    assert told[0]["name"].startswith("worker worker-1 at ")
    assert told[0]["advice"]
    ranks = [("ok", "note", "warning", "problem").index(each["severity"]) for each in told]
    assert ranks == sorted(ranks, reverse=True)


def test_a_port_that_is_closed_is_named_first(monkeypatch):
    with LocalCluster(workers=2, segment="16MiB", in_process=True) as cluster:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            closed = f"127.0.0.1:{taken.getsockname()[1]}"
        ask_at = doctor_pool.ask_at
        blocked = []

        def ask(address, *rest):
            # As a firewall: whatever the pool says of it, nobody is there.
            blocked.append(address)
            return ask_at(closed if address == blocked[0] else address, *rest)

        monkeypatch.setattr(doctor_pool, "ask_at", ask)
        _, item = asked(cluster)
        assert item.severity is Severity.PROBLEM
        assert item.name.endswith(f" at {blocked[0]}")
        assert item.name.startswith("worker worker-")


def test_the_clock_of_a_worker_that_is_ahead_is_named(monkeypatch):
    def ahead():
        now = surroundings()
        return Surroundings(now.clock_ms + 90_000, now.open_files)

    monkeypatch.setattr("transfer_engine.notify.surroundings", ahead)
    with LocalCluster(workers=1, segment="16MiB", in_process=True) as cluster:
        told, _ = asked(cluster)
        assert told["clock of worker worker-0"].severity is Severity.WARNING
        assert "90.0 s ahead of" in told["clock of worker worker-0"].found


def test_a_worker_of_another_version_is_named(monkeypatch):
    monkeypatch.setattr("mooncake_store.worker.worker.__version__", "0.0.9")
    with LocalCluster(workers=1, segment="16MiB", in_process=True) as cluster:
        told, _ = asked(cluster)
        assert told["version of worker worker-0"].found.startswith("0.0.9, where the master has ")


def test_a_shard_from_before_that_question_is_there_all_the_same(monkeypatch):
    older = [each for each in SHARD if each is not ABOUT]
    monkeypatch.setattr("mooncake_store.master.building.SHARD", Registry(SHARD.service, older))
    with LocalCluster(workers=1, segment="16MiB", in_process=True) as cluster:
        told, _ = asked(cluster)
        assert told["version of shard 0"].severity is Severity.NOTE
        (link,) = (item for name, item in told.items() if name.startswith("shard 0 at "))
        assert link.severity < Severity.PROBLEM


def test_a_pool_without_workers_takes_no_puts():
    with LocalCluster(workers=0, in_process=True) as cluster:
        _, item = asked(cluster)
        assert (item.name, item.severity) == ("pool", Severity.PROBLEM)
        assert item.found == "takes no puts: no worker lends memory"


def test_a_wrong_secret_is_the_first_thing_that_is_said():
    secret = secrets.token_bytes(32)
    with LocalCluster(workers=1, segment="16MiB", in_process=True, secret=secret) as cluster:
        told, item = asked(cluster, secrets.token_bytes(32))
        assert told.keys() == {f"pool {cluster.address}"}
        assert item.severity is Severity.PROBLEM
        told, _ = asked(cluster, secret)
        assert f"master {cluster.address}" in told


def test_nobody_there_is_a_problem_and_a_transfer_is_of_a_pool(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
    assert main(["doctor", "--json", "--pool", nobody]) == 11
    told = json.loads(capsys.readouterr().out)["findings"]
    assert told[0]["name"] == f"pool {nobody}"
    assert main(["doctor", "--transfer"]) == 2
    assert "--pool" in capsys.readouterr().err

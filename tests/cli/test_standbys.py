"""What is told of standbys: to people, to programs, and to what gathers metrics."""

import io
import json

import pytest
from rich.console import Console

from mooncake_store.admin.told import standbys_value
from mooncake_store.cli import standbys, status
from mooncake_store.cli.shared.standbys import promotion_of
from mooncake_store.cli.shared.tree import run
from mooncake_store.compat.metrics import metrics
from mooncake_store.wire.cluster import ClusterStatus
from mooncake_store.wire.standby import CopiedShard, Dropped, StandbyEntry, StandbyStatus

COUNTS = StandbyEntry(0xA, "10.0.0.6:50051", True, True, True, 0, 0, 1200)
COPY = StandbyEntry(0xB, "", False, True, False, 37, 1500, 1200)
AWAY = StandbyEntry(0xC, "10.0.0.8:50051", True, False, False, -1, 61_000, 1200)


def found(*entries, refusing="", waiting=0):
    return ClusterStatus(
        not refusing, "1.0", 1, 0, ("10.0.0.5:1",), (), (), entries, refusing, waiting
    )


def drawn(content):
    out = io.StringIO()
    Console(file=out, width=200).print(content)
    return out.getvalue()


@pytest.mark.parametrize(
    "draw", [standbys._drawn, lambda each: status._drawn("10.0.0.5:50051", each)]
)
def test_people_are_shown_who_counts_and_what_a_promotion_comes_to(draw):
    text = drawn(draw(found(COUNTS, COPY, AWAY, refusing="the standby is away", waiting=3)))
    rows = [line.split() for line in text.splitlines()]
    assert ["000000000000000a", "10.0.0.6:50051", "counts", "0", "0.0", "s"] in rows
    assert ["000000000000000b", "-", "a", "copy", "37", "1.5", "s"] in rows
    for line in (
        "000000000000000a: a promotion restores 1,200 objects: nothing that was answered is lost",
        "000000000000000b: a promotion restores 1,200 objects: 37 words lacking, what was answered"
        " last may be lost",
        "000000000000000c: what a promotion would restore is not known here",
    ):
        assert line in text
    assert "the standby is away" in text
    assert "3 changes wait" in text


def test_a_standby_and_its_leader_say_the_same():
    shards = tuple(CopiedShard("following", 63, 100, 5, "", 600, exact) for exact in (True, False))
    copy = StandbyEntry(0xB, "", False, True, False, 74, 0, 1200)
    own = promotion_of(StandbyStatus("10.0.0.5:50051", "name", shards, ""))
    assert own == standbys_value([copy])[0]["promotion"]
    assert own == {"objects": 1200, "lacking_words": 74, "loses": "the last changes"}


@pytest.mark.parametrize(
    ("dropped", "words"),
    [
        (Dropped(0xB, False), ("000000000000000b does", "never promote it, unless it counts")),
        (Dropped(0, False), ("changes are refused until", "never promote it")),
        (Dropped(0, True), ("changes wait for nobody", "does not lead before it counts")),
    ],
)
def test_who_drops_a_standby_is_told_what_that_means(dropped, words):
    text = standbys._meaning(0xA, dropped)
    assert text.startswith("000000000000000a counts no more")
    assert all(each in text for each in words)


def test_what_is_no_number_is_refused(capsys):
    assert run(["standbys", "10.0.0.5:50051", "--drop", "it", "--json"]) == 2
    assert "no number of a standby" in json.loads(capsys.readouterr().err)["error"]["message"]


def test_metrics_tell_of_standbys():
    lines = metrics([], found(COUNTS, COPY, refusing="it is away", waiting=3)).splitlines()
    for line in (
        "changes_refused 1",
        "changes_waiting 3",
        'standby_counts{standby="000000000000000a"} 1',
        'standby_counts{standby="000000000000000b"} 0',
        'standby_behind_words{standby="000000000000000b"} 37',
        'standby_silent_ms{standby="000000000000000b"} 1500',
        'standby_follows{standby="000000000000000a"} 1',
    ):
        assert line in lines

"""What everybody may read of a pool by HTTP."""

import pytest

from mooncake_store.admin.told import problems, status_value
from mooncake_store.compat.control import Control
from mooncake_store.wire.cluster import ClusterStatus, SegmentEntry, WorkerEntry
from mooncake_store.wire.standby import StandbyEntry
from tests.admin.conftest import Api


def test_a_pool_tells_how_it_is(api, store):
    store.put("one", bytes(5000))
    assert api.get("health")["serving"] is True
    ready = api.get("ready")
    assert (ready["ready"], ready["problems"], ready["standbys"]) == (True, [], [])
    status = api.get("status")
    assert status["segments"] == api.get("segments")["segments"]
    assert [each["name"] for each in api.get("workers")["workers"]] == [
        each["name"] for each in status["workers"]
    ]
    assert sum(each["used"] for each in status["segments"]) >= 5000


def test_objects_are_listed_in_pages(api, store):
    keys = [f"listed/{at}" for at in range(25)]
    store.put_many([*keys, "other"], [b"x"] * 26).check()
    found, after = [], ""
    while True:
        page = api.get("objects", prefix="listed/", limit=10, after=after)
        assert len(page["objects"]) <= 10
        found += [each["key"] for each in page["objects"]]
        after = page["after"]
        if not after:
            break
    assert sorted(found) == sorted(keys)
    assert api.get("object", key="other")["replicas"][0]["tier"] == "memory"
    status, said = api.ask("/v1/object?key=none")
    assert (status, said["error"]["code"]) == (404, -704)
    assert said["error"]["advice"]


def test_events_go_on_from_a_place(api, store):
    after = api.get("events")["after"]
    store.put("seen", b"value")
    told = api.get("events", after=after)
    assert [each["kind"] for each in told["events"]] == ["stored"]
    store.remove("seen")
    further = api.get("events", after=told["after"])
    assert [each["kind"] for each in further["events"]] == ["removed"]
    assert further["events"][0]["digest"] == told["events"][0]["digest"]
    assert api.get("events", after=further["after"])["events"] == []
    # Whoever followed when there were more shards has missed something.
    others = api.get("events", after=f"{after}_{after}")
    assert (others["gap"], others["events"], others["after"]) == (True, [], further["after"])


@pytest.mark.parametrize(
    "path",
    [
        "objects?limit=0", "objects?limit=1001", "objects?limit=x", "objects?after=x", "object",
        "events?after=x", "events?after=99999999999999999999.1",
        "object?" + "a=1&" * 20,
    ],
)  # fmt: skip
def test_bad_questions_are_refused(api, path):
    status, said = api.ask(f"/v1/{path}")
    assert status == 400
    assert said["error"]["message"]


def test_an_unknown_path_leads_to_the_description(api):
    status, said = api.ask("/v1/nothing")
    assert status == 404
    assert "/v1/openapi.json" in said["error"]["advice"]
    assert api.ask("/v1/status", {})[0] == 404
    assert "/v1/drain" in api.get("openapi.json")["paths"]


def test_a_master_that_has_yet_to_start_is_not_ready():
    with Control("127.0.0.1", 0) as control:
        starting = Api(control)
        assert starting.get("health")["serving"] is False
        status, said = starting.ask("/v1/ready")
        assert (status, said["ready"]) == (503, False)
        assert "begun to start" in said["problems"][0]
        assert starting.ask("/v1/status")[0] == 503


def test_what_is_wrong_is_named_worst_first():
    worker = WorkerEntry("w-1", "10.0.0.6", "absent", 90_000, (0,))
    segment = SegmentEntry(
        0, b"", "w-1/disk", "10.0.0.6", 1 << 20, 1, b"", worker="w-1", tier=1, fault="EIO"
    )
    standby = StandbyEntry(7, "10.0.0.7:1", False, False, False, -1, 0, 0)
    found = ClusterStatus(False, "1", 1, 0, ("a",), (worker,), (segment,), (standby,), "no standby")
    assert [each.what for each in problems(found)] == [
        "not ready: no standby",
        "worker w-1 on 10.0.0.6 is absent: silent for 90s",
        "disk of w-1/disk, worker w-1: EIO",
        "standby 0000000000000007 at 10.0.0.7:1 does not follow",
    ]
    assert status_value(found)["problems"] == problems(found)

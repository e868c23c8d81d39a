"""Work that takes a while: begun, seen to go on, listed, stopped; and quotas."""

import pytest

from mooncake_store import Client
from mooncake_store.admin.jobs import begin_copy, find_job, list_jobs


@pytest.fixture
def segments(api):
    return [each["name"] for each in api.get("segments")["segments"]]


def lies_at(api, key):
    return sorted(each["segment"] for each in api.get("object", key=key)["replicas"])


def test_a_copy_and_a_move_are_jobs(api, store, segments):
    store.put("object", bytes(100_000))
    (here,) = lies_at(api, "object")
    (there,) = set(segments) - {here}
    job = api.done("copy", {"key": "object", "to": [there]})
    assert (job["kind"], job["about"], job["to"]) == ("copy", "object", [there])
    assert api.ended(job)["state"] == "done"
    assert lies_at(api, "object") == sorted([here, there])
    assert job["id"] in [each["id"] for each in api.get("jobs")["jobs"]]
    store.put("other", bytes(1000))
    (here,) = lies_at(api, "other")
    (there,) = set(segments) - {here}
    job = api.done("move", {"key": "other", "from": here, "to": there})
    assert api.ended(job)["state"] == "done"
    assert lies_at(api, "other") == [there]


@pytest.mark.parametrize(
    "number", ["", "x", "drain-99", "task-0-99", "task-99-1", "task-1", "shard-0"]
)
def test_jobs_that_are_none(api, number):
    status, said = api.ask(f"/v1/job?id={number}")
    assert status in (400, 404)
    assert said["error"]["message"]
    assert api.ask("/v1/cancel", {"id": number or "-"})[0] in (400, 404)


@pytest.mark.parametrize(
    ("name", "wish", "status"),
    [
        ("drain", {"segment": "none"}, 404),
        ("copy", {"key": "none", "to": ["SEGMENT"]}, 404),
        ("copy", {"key": "object", "to": ["none"]}, 404),
        ("move", {"key": "object", "from": "SEGMENT", "to": "SEGMENT"}, 400),
    ],
)
def test_what_cannot_be_is_said(api, store, segments, name, wish, status):
    store.put("object", b"x")
    (here,) = lies_at(api, "object")
    text = {"SEGMENT": here}
    wish = {
        field: [text.get(e, e) for e in value]
        if isinstance(value, list)
        else text.get(value, value)
        for field, value in wish.items()
    }
    found, said = api.ask(f"/v1/{name}", wish)
    assert found == status, said


def test_a_key_of_another_namespace_is_not_told_to_everybody(api, cluster, segments):
    url = f"mooncake://{cluster.address}/elsewhere"
    with Client(url, secret_file=cluster.settings["secret_file"]) as theirs:
        theirs.put("their secret plan", b"x")
        (here,) = {each.segment for each in theirs.query("their secret plan").replicas}
        (there,) = set(segments) - {here}
        begun = theirs._run(begin_copy(theirs._core, "their secret plan", [there]))
        own = [job for job in theirs._run(list_jobs(theirs._core)) if job.id == begun.id]
        assert own[0].about == "their secret plan"
        assert theirs._run(find_job(theirs._core, begun.id)).kind == "copy"
        told = next(job for job in api.get("jobs")["jobs"] if job["id"] == begun.id)
        assert told["about"] == "an object of elsewhere"
        theirs.clear(force=True)


def test_a_split_that_cannot_be_says_why(api):
    job = api.ended(api.done("split", {"factor": 2}))
    assert job["state"] == "failed"
    assert "can be split" in job["message"]
    assert api.get("jobs")["jobs"][-1]["id"] == "split" or api.get("job", id="split") == job


def test_a_quota_is_given_and_taken_away(api, cluster):
    def quota():
        found = api.get("namespaces")["namespaces"]
        return next((each["quota"] for each in found if each["name"] == "bounded"), 0)

    assert quota() == 0
    api.done("quota", {"namespace": "bounded", "bytes": 1 << 20})
    assert quota() == 1 << 20
    url = f"mooncake://{cluster.address}/bounded"
    with Client(url, secret_file=cluster.settings["secret_file"]) as theirs:
        for at in range(30):
            theirs.put(f"b{at}", bytes(100_000))
        assert sum(each.tenant_bytes for each in theirs.store_stats()) <= 1 << 20
        api.done("quota", {"namespace": "bounded", "bytes": None})
        assert quota() is None
        for at in range(30, 60):
            theirs.put(f"b{at}", bytes(100_000))
        assert sum(each.tenant_bytes for each in theirs.store_stats()) > 2 << 20
        theirs.clear(force=True)


def test_namespaces_come_in_pages(api):
    for at in range(5):
        api.done("quota", {"namespace": f"page-{at}", "bytes": 1 << 20})
    names, after = [], ""
    while True:
        page = api.get("namespaces", limit=2, after=after)
        names += [each["name"] for each in page["namespaces"]]
        after = page["after"]
        if not after:
            break
    assert names == sorted(names)
    assert {f"page-{at}" for at in range(5)} <= set(names)


# Last: a segment that was drained takes nothing more.
def test_a_drain_is_a_job_that_can_be_stopped(api, store, segments):
    store.put_many([f"d{at}" for at in range(50)], [bytes(10_000)] * 50).check()
    number = next(e["number"] for e in api.get("segments")["segments"] if e["name"] == segments[0])
    job = api.done("drain", {"segment": segments[0]})
    assert (job["id"], job["about"]) == (f"drain-{number}", segments[0])
    ended = api.ended(job)
    assert (ended["state"], ended["left_bytes"]) == ("done", 0)
    assert all(lies_at(api, f"d{at}") == [segments[1]] for at in range(50))
    assert job["id"] in [each["id"] for each in api.get("jobs")["jobs"]]
    status, said = api.ask("/v1/cancel", {"id": job["id"]})
    assert (status, "has ended" in said["error"]["message"]) == (400, True)
    # With nowhere to go the other one's does not end.
    job = api.done("drain", {"segment": segments[1]})
    if job["state"] == "running":
        status, said = api.ask("/v1/cancel", {"id": job["id"]})
        assert status == 200 or "has ended" in said["error"]["message"]
    assert api.ended(job)["state"] in ("cancelled", "failed")

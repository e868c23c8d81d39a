"""Who may change something by HTTP, and who may not; what is refused has no effect."""

import logging
from collections import OrderedDict

import pytest

from mooncake_store.admin import admission
from mooncake_store.admin import api as described
from mooncake_store.errors import AuthError
from transfer_engine import audit
from transfer_engine.wire.rights import Role

WISHES = {
    "drain": {"segment": "SEGMENT"},
    "copy": {"key": "kept", "to": ["OTHER"]},
    "move": {"key": "kept", "from": "SEGMENT", "to": "OTHER"},
    "split": {"factor": 2},
    "cancel": {"id": "drain-0"},
    "remove": {"prefix": "kept", "force": True},
    "quota": {"namespace": "default", "bytes": 1 << 20},
}
GUARDED = ("credentials", "config")


def bearer(text):
    return {"Authorization": f"Bearer {text}"}


@pytest.fixture(scope="module")
def remote(serve):
    """A port that other hosts reach, where nobody is believed for where they are."""
    return serve("0.0.0.0")


@pytest.fixture
def kept(store, api):
    """An object, and what of the pool has to stay as it is."""
    store.put("kept", b"value")

    def seen():
        object_ = api.get("object", key="kept")
        return (
            [each["state"] for each in api.get("segments")["segments"]],
            [each["segment"] for each in object_["replicas"]],
            api.get("namespaces")["namespaces"],
            [job for job in api.get("jobs")["jobs"] if not job["id"].startswith("task")],
        )

    before = seen()
    yield [each["name"] for each in api.get("segments")["segments"]]
    assert seen() == before
    assert store.get("kept") == b"value"


def wish_of(name, names):
    text = dict(zip(("SEGMENT", "OTHER"), names, strict=True))
    wish = {}
    for field, value in WISHES[name].items():
        wish[field] = [text.get(e, e) for e in value] if isinstance(value, list) else value
        if isinstance(value, str):
            wish[field] = text.get(value, value)
    return wish


def test_every_change_is_tried_here():
    assert {each.name for each in described.CHANGES} == {f"begin_{name}" for name in WISHES}
    assert {each.name for each in described.ADMINS} == set(GUARDED)


@pytest.mark.parametrize("name", WISHES)
def test_a_change_is_refused_to_who_is_no_admin(remote, kept, texts, name):
    _, lines = texts
    wish = wish_of(name, kept)
    asked = [
        (401, {}),
        *((403, bearer(lines[role])) for role in (Role.READER, Role.WRITER, Role.WORKER)),
    ]
    for status, headers in asked:
        found, said = remote.ask(f"/v1/{name}", wish, **headers)
        assert (found, said["error"]["code"]) == (status, AuthError.code), headers
        assert said["error"]["advice"]


@pytest.mark.parametrize("name", WISHES)
def test_a_page_of_a_browser_is_refused(api, remote, kept, texts, name):
    admin, wish = bearer(texts[1][Role.ADMIN]), wish_of(name, kept)
    evil = {"Origin": "http://evil.example"}
    # Without a credential it is refused where the user that runs the master asks, too.
    assert api.ask(f"/v1/{name}", wish, **evil)[0] == 403
    assert api.ask(f"/v1/{name}", wish, Origin=f"http://127.0.0.1:{api.port}")[0] == 401
    assert remote.ask(f"/v1/{name}", wish, **evil, **admin)[0] == 403


@pytest.mark.parametrize("name", GUARDED)
def test_what_only_admins_may_see(api, remote, texts, name):
    _, lines = texts
    assert remote.ask(f"/v1/{name}")[0] == 401
    assert remote.ask(f"/v1/{name}", **bearer(lines[Role.READER]))[0] == 403
    assert remote.ask(f"/v1/{name}", **bearer(lines[Role.ADMIN]))[0] == 200
    assert api.ask(f"/v1/{name}")[0] == 200
    told = str(api.get(name))
    assert not any(str(line).rpartition(":")[2] in told for line in lines.values())


def test_an_admin_changes_something_from_anywhere(remote, store, texts):
    admin = bearer(texts[1][Role.ADMIN])
    store.put_many(["a/1", "a/2"], [b"x", b"y"]).check()
    own = {"Origin": f"http://127.0.0.1:{remote.port}"}
    status, said = remote.ask("/v1/remove", {"keys": ["a/1", "none"]}, **admin, **own)
    assert (status, said["removed"]) == (200, 1)
    assert [each["key"] for each in said["stay"]] == ["none"]
    assert remote.ask("/v1/remove", {"prefix": "a/"}, **admin)[1]["removed"] == 1
    assert not store.exists("a/2")


def test_an_admin_of_a_namespace_keeps_to_it(remote, kept, texts):
    tenant = bearer(texts[1]["tenant"])
    for name in ("remove", "copy", "move", "quota"):
        assert remote.ask(f"/v1/{name}", wish_of(name, kept), **tenant)[0] == 403


def test_another_user_of_the_host_changes_nothing(api, kept, monkeypatch):
    other = AuthError("this is for user 1 of the host")
    monkeypatch.setattr(admission, "stranger", lambda sock: other)
    for name in WISHES:
        assert api.ask(f"/v1/{name}", wish_of(name, kept))[0] == 403
    assert api.ask("/v1/config")[0] == 403


def test_a_credential_is_not_taken_in_the_clear_from_another_host(serve, texts, monkeypatch):
    port = serve("0.0.0.0")
    monkeypatch.setattr(admission, "is_loopback", lambda host: False)
    status, said = port.ask("/v1/config", **bearer(texts[1][Role.ADMIN]))
    assert status == 403
    assert "in the clear" in said["error"]["message"]


def test_wrong_credentials_are_counted_and_no_other_is_looked_at(serve, texts, monkeypatch, caplog):
    port, (_, lines) = serve("0.0.0.0"), texts
    right = bearer(lines[Role.ADMIN])
    wrong = [
        bearer(lines[Role.ADMIN][:-4] + "0000"),
        bearer(f"mooncake:nobody:{'0' * 64}"),
        bearer("a secret of the pool, long enough"),
        bearer("mooncake:admin:short"),
        bearer("é".encode().decode("latin-1")),
        {"Authorization": "Basic YTpi"},
        bearer(""),
    ]
    caplog.set_level(logging.WARNING)
    for at in range(admission.FAILED_MAX):
        status, said = port.ask("/v1/config", **wrong[at % len(wrong)])
        assert (status, said["error"]["message"].split(" (")[0]) == (
            401, "the credential is none that this pool believes",
        )  # fmt: skip
    status, said = port.ask("/v1/config", **right)
    assert status == 429
    assert "wait" in said["error"]["advice"]
    assert "none that this pool believes" in caplog.text
    assert lines[Role.ADMIN].rpartition(":")[2] not in caplog.text
    later = admission.time.monotonic() + admission.FAILED_S
    monkeypatch.setattr(admission.time, "monotonic", lambda: later)
    assert port.ask("/v1/config", **right)[0] == 200


def test_the_addresses_of_who_failed_are_bounded(monkeypatch):
    decides = admission.Admission("0.0.0.0", None, insecure=True, sealed=False)
    monkeypatch.setattr(admission, "ADDRESSES_MAX", 4)
    for at in range(10):
        with pytest.raises(admission.Refused):
            decides._shown("Bearer x", admission.Address(f"10.0.0.{at}", 1), "drain")
    assert len(decides._failed) == 4


def test_an_insecure_master_believes_everybody(serve, store):
    port = serve("0.0.0.0", insecure=True)
    store.put("theirs", b"x")
    assert port.done("remove", {"keys": ["theirs"]})["removed"] == 1


def test_who_did_what_is_written_down(remote, store, texts, caplog, monkeypatch):
    monkeypatch.setattr(audit, "_seldom", OrderedDict())
    caplog.set_level(logging.INFO, logger="transfer_engine.audit")
    remote.ask("/v1/remove", {"keys": ["none"]}, **bearer(texts[1][Role.ADMIN]))
    remote.ask("/v1/remove", {"keys": ["none"]}, **bearer(texts[1][Role.WRITER]))
    done, refused = [
        each.getMessage() for each in caplog.records if "127.0.0.1" in each.getMessage()
    ]
    assert done.startswith("admin from 127.0.0.1:")
    assert "remove(" in done
    assert refused.startswith("writer from 127.0.0.1:")
    assert "remove refused" in refused


@pytest.mark.parametrize(
    ("name", "wish"),
    [
        ("drain", b"{"), ("drain", b"[]"), ("drain", {}), ("drain", {"segment": ""}),
        ("drain", {"segment": "x", "more": 1}), ("drain", b'{"segment": "\xff"}'),
        ("drain", b"[" * 100_000), ("copy", {"key": "k", "to": []}),
        ("copy", {"key": "k", "to": ["s"] * 65}),
        ("move", {"key": "k" * 4097, "from": "a", "to": "b"}),
        ("remove", {}), ("remove", {"keys": [], "prefix": "a"}), ("remove", {"prefix": ""}),
        ("remove", {"keys": ["k"] * 1025}), ("split", {"factor": 1}),
        ("split", {"factor": 1 << 70}),
        ("quota", {"namespace": "n", "bytes": 0}), ("quota", {"namespace": "n" * 256, "bytes": 1}),
        ("quota", {"namespace": "", "bytes": 1 << 20}),
    ],
)  # fmt: skip
def test_wishes_that_are_none_are_refused(api, kept, name, wish):
    status, said = api.ask(f"/v1/{name}", wish)
    assert status == 400
    assert said["error"]["message"]


def test_a_body_is_bounded(api):
    assert api.ask("/v1/drain", b" " * (1 << 20) + b"{}")[0] == 400

"""What other versions rely on: the page fits the code, and what would break it is refused."""

from __future__ import annotations

import copy

import msgspec
import pytest

from scripts.wire_promises import FILE, broken, code, parse, text
from transfer_engine.wire.cold import Cold


@pytest.fixture(scope="module")
def now():
    return code()


def test_no_promise_is_broken_and_the_page_is_up_to_date(now):
    page = FILE.read_text(encoding="utf-8")
    assert not broken(parse(page), now)
    assert page == text(now), "run: python scripts/wire_promises.py"


@pytest.mark.parametrize(
    ("what", "change", "said"),
    [
        ("struct MapRequest", lambda lines: lines.insert(0, "first: int ="), "may grow at its end"),
        ("struct MapRequest", lambda lines: lines.pop(), "may grow at its end"),
        ("struct MapRequest", lambda lines: lines.append("last: int"), "give it a default"),
        ("struct SegmentEntry", lambda lines: lines.reverse(), "may grow at its end"),
        ("struct Hello", lambda lines: lines.pop(), "may grow at its end"),
        ("operation mooncake-shard get", lambda lines: lines.append("reply x: u1"), "an opcode"),
        (
            "operation mooncake map",
            lambda lines: lines.__setitem__(0, "opcode 0x00ff"),
            "an opcode",
        ),
        ("record GET_ROW", lambda lines: lines.pop(), "another layout"),
        ("names Status", lambda lines: lines.pop(), "lacks"),
        ("names errors", lambda lines: lines.pop(), "lacks"),
    ],
)
def test_what_would_break_another_version_is_refused(now, what, change, said):
    changed = copy.deepcopy(now)
    change(changed[what])
    (complaint,) = broken(now, changed)
    assert what in complaint
    assert said in complaint


def test_what_another_version_can_live_with_is_not(now):
    changed = copy.deepcopy(now)
    changed["struct MapRequest"].append("last: int =")
    changed["names Status"].append("LATEST = 99")
    changed["operation mooncake latest"] = ["opcode 0x00ff", "request cold latest?"]
    assert not broken(now, changed)
    (complaint,) = broken(changed, now)[-1:]
    assert "is gone" in complaint


class Earlier(msgspec.Struct, frozen=True, array_like=True, tag="note"):
    text: str


class Later(msgspec.Struct, frozen=True, array_like=True, tag="note"):
    text: str
    count: int = 7


def test_a_field_at_the_end_is_no_matter_to_another_version():
    assert Cold(Earlier).unpack(Cold(Later).pack(Later("a", 1))) == Earlier("a")
    assert Cold(Later).unpack(Cold(Earlier).pack(Earlier("a"))) == Later("a")

"""Segments that come, fall silent and go, on a shard and its model; part of `Checked`."""

from __future__ import annotations

from typing import Any

from mooncake_store.core.records import SegmentState, Status
from tests.core.checked_tasks import TaskCalls
from tests.core.model import OK, UNREADABLE
from tests.core.nouns import Segment
from tests.core.space import Space, expect


class SegmentCalls(TaskCalls):
    """What `Checked` does about segments."""

    follow_upserts: Any
    _may_be_there: Any

    def mount(self, client: int, number: int, nbytes: int, host: str) -> None:
        self.note("mount", client, number, nbytes, host)
        uuid = number.to_bytes(16, "big")
        status, index = self.shard.mount(self.now, client, uuid, f"s{number}", nbytes, host)
        present = [
            at
            for at, segment in self.model.segments.items()
            if segment.uuid == uuid and segment.state != SegmentState.GONE
        ]
        if present:
            expect(index == present[0], f"mounting again gave {index}, not {present[0]}")
            known = self.model.segments[index]
            if known.owner != client and known.owner in self.model.clients:
                expect(status == Status.ILLEGAL_CLIENT, f"mount by a stranger: {status!r}")
                return
            expect(status == OK, f"mounting again answered {status!r}")
            known.owner = client
            known.state = SegmentState.OK
            return
        expect(status == OK, f"mount answered {status!r}")
        self.model.mount(index, Segment(uuid, f"s{number}", host, client, Space(nbytes)))

    def unmount(self, client: int, index: int, force: bool) -> None:
        self.note("unmount", client, index, force)
        segment = self.model.segments[index]
        status = self.shard.unmount(self.now, client, segment.uuid, force)
        if segment.state == SegmentState.GONE:
            expect(status == Status.SEGMENT_NOT_FOUND, f"unmount of a gone segment: {status}")
        elif client != segment.owner and not force:
            expect(status == Status.ILLEGAL_CLIENT, f"unmount by a stranger: {status}")
        else:
            expect(status == OK, f"unmount: {status}")
            self.model.segments[index].state = SegmentState.GONE
            self.follow_tasks()
            self.model.lose_dead()
            self.follow_upserts()
            self.model.follow_reclaimed(self._may_be_there(set()))

    def suspect(self, index: int, suspect: bool) -> None:
        self.note("set_suspect", index, suspect)
        self.shard.set_suspect(self.now, index, suspect)
        segment = self.model.segments[index]
        if segment.state in (SegmentState.OK, SegmentState.SUSPECT):
            segment.state = SegmentState.SUSPECT if suspect else SegmentState.OK

    def absent(self, index: int, absent: bool) -> None:
        """Nothing is lost by it, and nothing told: readers only find other answers."""
        self.note("set_absent", index, absent)
        number = self.shard.events.next_number
        self.shard.set_absent(self.now, index, absent)
        expect(self.shard.events.next_number == number, "an absence made an event")
        segment = self.model.segments[index]
        if absent and segment.state not in UNREADABLE:
            segment.state = SegmentState.ABSENT
        elif not absent and segment.state == SegmentState.ABSENT:
            segment.state = SegmentState.OK

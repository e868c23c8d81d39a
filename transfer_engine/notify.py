"""What peers ask of each other besides bytes: where is this segment, are you there, take this note.

    find     a segment by its name, for its descriptor: how engines meet
    survey   what is published under names that begin so, as descriptors
    post     a notification: a name and a few bytes, for the application at the other end
    probe    nothing; who answers, with how many segments
    sync     have what was written to a file segment on its medium before you answer

These travel on data connections, between batches, so they have the handshake, the secret and the
bounds of those. A notification posted after a batch over the same engine is seen after the bytes
of the batch: the owner's memory holds them before the batch completes.

Notifications wait in a bounded `Inbox` until the application takes them; when it does not, the
sender is refused (BusyError) rather than the owner's memory filled.
Cost: one round trip a question; nothing while nobody asks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol, TypeAlias

import msgspec

from transfer_engine.errors import (
    BusyError,
    InvalidArgumentError,
    NotFoundError,
    RemoteProtocolError,
)
from transfer_engine.segments.file import FileSegment
from transfer_engine.surroundings import Surroundings, surroundings
from transfer_engine.wire.cold import MALFORMED
from transfer_engine.wire.rights import EVERYTHING, Rights, Role

if TYPE_CHECKING:
    from transfer_engine.base import SegmentDescriptor

__all__ = [
    "QUESTION_BYTES_MAX",
    "SYNC_S",
    "Alive",
    "Find",
    "Found",
    "Inbox",
    "Notification",
    "PeerService",
    "Post",
    "Posted",
    "Probe",
    "Survey",
    "Surveyed",
    "Sync",
    "Synced",
    "decode_answer",
    "encode",
    "note",
]

QUESTION_BYTES_MAX = 80 << 10
ANSWER_BYTES_MAX = 4 << 20
SYNC_S = 20.0
"""How long the owner of a file waits for its device before it answers that it does not know."""
_DATA_BYTES_MAX = 64 << 10
_NAME_CHARS_MAX = 256
# More than MessagePack puts before bytes, and before a list of them.
_HEAD_BYTES = 16

_Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=_NAME_CHARS_MAX)]


class Find(msgspec.Struct, frozen=True, array_like=True, tag="find"):
    """Which segment has this name?"""

    name: _Name


class Survey(msgspec.Struct, frozen=True, array_like=True, tag="survey"):
    """What is published under names that start so?"""

    prefix: _Name


class Post(msgspec.Struct, frozen=True, array_like=True, tag="post"):
    """Take this note."""

    name: _Name
    data: Annotated[bytes, msgspec.Meta(max_length=_DATA_BYTES_MAX)]


class Probe(msgspec.Struct, frozen=True, array_like=True, tag="probe"):
    """Are you there?"""


class Sync(msgspec.Struct, frozen=True, array_like=True, tag="sync"):
    """Is all that was written to this segment on its medium? It is when that is answered."""

    uuid: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Synced(msgspec.Struct, frozen=True, array_like=True, tag="synced"):
    """It is."""


class Found(msgspec.Struct, frozen=True, array_like=True, tag="found"):
    """The descriptor of a segment, encoded."""

    value: bytes


class Surveyed(msgspec.Struct, frozen=True, array_like=True, tag="surveyed"):
    """Encoded descriptors in the order of publishing, as many as an answer holds."""

    descriptors: list[bytes]


class Posted(msgspec.Struct, frozen=True, array_like=True, tag="posted"):
    """How many notifications wait, this one included."""

    waiting: int


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """Who answered: its process, its host (a boot id) and how many segments it serves."""

    pid: int
    host: str
    segments: int
    version: str = ""
    """Of the program, where it says."""
    around: Surroundings = Surroundings()


Question: TypeAlias = Find | Survey | Post | Probe | Sync
Answer: TypeAlias = Found | Surveyed | Posted | Alive | Synced

encode = msgspec.msgpack.Encoder().encode
_QUESTIONS: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def note(name: str, data: bytes) -> Post:
    """Return the question that leaves a note; raises InvalidArgumentError for one too long."""
    if len(name) > _NAME_CHARS_MAX or len(data) > _DATA_BYTES_MAX:
        raise InvalidArgumentError(
            f"a notification has a name of at most {_NAME_CHARS_MAX} characters and "
            f"{_DATA_BYTES_MAX} bytes of data, not {len(name)} and {len(data)}",
            operation="notify",
            advice="put the data into a segment, and its place into the notification",
        )
    return Post(name, data)


def decode_answer(data: bytes, peer: str) -> Answer:
    """Return what a peer answered; raises RemoteProtocolError when that is malformed."""
    try:
        return _ANSWERS.decode(data)
    except MALFORMED as error:
        raise RemoteProtocolError(f"a malformed answer: {error}", peer=peer) from error


class Notification(NamedTuple):
    """A note of a peer: `peer` is its address, name and data are the application's."""

    peer: str
    name: str
    data: bytes


class Inbox:
    """Notifications that wait for the application; bounded, thread-safe."""

    def __init__(self, waiting_max: int = 1024) -> None:
        self._waiting: deque[Notification] = deque()
        self._waiting_max = waiting_max
        self._changed = threading.Condition()

    def put(self, note: Notification) -> int:
        """Add one and return how many wait; raises BusyError when that are too many."""
        with self._changed:
            if len(self._waiting) >= self._waiting_max:
                raise BusyError(
                    f"{self._waiting_max} notifications wait at the owner, which takes none",
                    operation="notify",
                    advice="the owner's application must call take_notifications",
                )
            self._waiting.append(note)
            self._changed.notify()
            return len(self._waiting)

    def take(self, timeout_s: float = 0.0) -> list[Notification]:
        """Return what waits, oldest first; wait up to `timeout_s` for the first one."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._waiting:
                left = deadline - time.monotonic()
                if left <= 0:
                    return []
                self._changed.wait(left)
            taken = list(self._waiting)
            self._waiting.clear()
            return taken


class Publisher(Protocol):
    """What answers need to know of the server they are given for."""

    def described(self) -> list[SegmentDescriptor]:
        """Return the descriptors of everything that is published, in the order of publishing."""

    def find(self, uuid: bytes) -> object:
        """Return a published segment, None where there is none."""


class PeerService:
    """Answers the questions of peers for one server."""

    def __init__(self, publisher: Publisher, pid: int, host: str) -> None:
        self.inbox = Inbox()
        self.version = ""
        """What is told as that of the program."""
        self._publisher = publisher
        self._identity = (pid, host)

    def answer(self, question: bytes, peer: str, rights: Rights = EVERYTHING) -> bytes:
        """Return the answer; raises a StoreError for the peer, RemoteProtocolError for nonsense."""
        try:
            asked = _QUESTIONS.decode(question)
        except MALFORMED as error:
            raise RemoteProtocolError(f"a malformed question: {error}", peer=peer) from error
        if isinstance(asked, Post | Sync) and rights.role < Role.WRITER:
            kind = "notify" if isinstance(asked, Post) else "sync"
            raise rights.refusal(Role.WRITER, kind, peer)
        return encode(self._answer(asked, peer))

    def _answer(self, asked: Question, peer: str) -> Answer:
        if isinstance(asked, Find):
            return Found(self._find(asked.name))
        if isinstance(asked, Survey):
            return Surveyed(self._survey(asked.prefix))
        if isinstance(asked, Post):
            return Posted(self.inbox.put(Notification(peer, asked.name, asked.data)))
        if isinstance(asked, Sync):
            return self._sync(asked.uuid)
        count = len(self._publisher.described())
        return Alive(*self._identity, count, self.version, surroundings())

    def _sync(self, uuid: bytes) -> Synced:
        segment = self._publisher.find(uuid)
        if not isinstance(segment, FileSegment):
            what = "has no medium" if segment else "is not published"
            raise NotFoundError(f"segment {uuid.hex()} {what}", operation="sync", advice="")
        segment.file.sync(time.monotonic() + SYNC_S)
        return Synced()

    def _survey(self, prefix: str) -> list[bytes]:
        told: list[bytes] = []
        room = ANSWER_BYTES_MAX - _HEAD_BYTES
        for segment in self._publisher.described():
            if segment.name.startswith(prefix):
                descriptor = segment.encode()
                room -= _HEAD_BYTES + len(descriptor)
                if room < 0:
                    break
                told.append(descriptor)
        return told

    def _find(self, name: str) -> bytes:
        found = [segment for segment in self._publisher.described() if segment.name == name]
        if len(found) == 1:
            return found[0].encode()
        what = f"{len(found)} segments are" if found else "no segment is"
        raise NotFoundError(
            f"{what} published under this name", key=name, operation="find",
            advice="give every segment a name of its own",
        )  # fmt: skip

"""What the REST service can be asked: its operations, what they read and answer. No I/O."""

from __future__ import annotations

from typing import Annotated

import msgspec

from mooncake_store.program.openapi import Answer, Api, Operation, Shape

__all__ = ["API", "KEYS", "Grace", "Mode", "Mount", "MountFile", "Put", "Unmount"]

GRACE_S_MAX = 3600
KEYS = ("/api/get/", "/api/exist/", "/api/remove/")
"""What follows these in a path is a key."""
_KEY = r"{key:[\s\S]+}"
"""Whatever is in it, lines as well."""


class Put(msgspec.Struct, frozen=True):
    """A text to be stored."""

    key: Annotated[str, msgspec.Meta(min_length=1)]
    value: str


class Mount(msgspec.Struct, frozen=True):
    """Memory to be lent."""

    size: Annotated[int, msgspec.Meta(ge=1)]
    protocol: str | None = None
    location: str = ""


class MountFile(Mount, frozen=True):
    """A file of shared memory to be lent, by name or by path."""

    name: str = ""
    path: str = ""
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0


class Grace(msgspec.Struct, frozen=True):
    """How long objects may be moved away from what is taken back."""

    grace_period_seconds: Annotated[int, msgspec.Meta(ge=0, le=GRACE_S_MAX)] = 0


class Unmount(Grace, frozen=True, kw_only=True):
    """Memory to be taken back: one segment, or several."""

    segment_ids: (
        Annotated[list[str], msgspec.Meta(min_length=1)]
        | Annotated[str, msgspec.Meta(min_length=1)]
    )

    @property
    def names(self) -> list[str]:
        """The segments."""
        return [self.segment_ids] if isinstance(self.segment_ids, str) else self.segment_ids


class Mode(msgspec.Struct, frozen=True):
    """What a store is to be from now on."""

    mode: str = ""


class Reconfigure(Mode, frozen=True):
    """The same, and for "decode" the file that it lends then."""

    path: str = ""
    size: Annotated[int, msgspec.Meta(ge=1)] | msgspec.UnsetType = msgspec.UNSET
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    protocol: str | None = None
    location: str = ""


class Error(Shape, frozen=True):
    """Why something was not done."""

    error: str


class Done(Shape, frozen=True):
    """It was done."""

    status: str


class Exists(Shape, frozen=True):
    """Whether there is an object."""

    exists: bool


class Lent(Done, frozen=True):
    """The segments that memory became."""

    segment_ids: list[str]


class Mounted(Lent, frozen=True):
    """The same, and how much memory they have."""

    allocated_size: int


class Left(Error, frozen=True):
    """Why, and which segments could not be taken back."""

    failed_segment_ids: list[str]


class InMode(Done, frozen=True):
    """The mode that holds now, and in "decode" the segments that are lent."""

    mode: str
    segment_ids: list[str] | msgspec.UnsetType = msgspec.UNSET


class StillInMode(Error, frozen=True):
    """Why, and the mode that holds still."""

    mode: str


_DONE = Answer(200, "it was done", Done)
_NO_BODY = Answer(400, "the body is none that is meant", Error)
_FAILED = Answer(500, "the store could not do it", Error)

API = Api(
    "The REST service of a store",
    "Objects, and memory lent or taken back. Where all connections are in use an answer is 503, "
    "without a body.",
    Error,
    (
        Operation(
            "put", "PUT", "/api/put", "Store a text",
            (
                _DONE,
                _NO_BODY,
                Answer(400, "the key is too long, or the text empty", Error),
                _FAILED,
            ),
            Put,
            examples=({"key": "a", "value": "text"},),
        ),
        Operation(
            "get", "GET", f"/api/get/{_KEY}", "Answer an object's bytes",
            (
                Answer(200, "the bytes", kind="application/octet-stream"),
                Answer(404, "there is none", Error),
                _FAILED,
            ),
        ),
        Operation(
            "exist", "GET", f"/api/exist/{_KEY}", "Say whether there is an object",
            (Answer(200, "whether there is one", Exists), _FAILED),
        ),
        Operation(
            "remove", "DELETE", f"/api/remove/{_KEY}", "Remove an object",
            (
                _DONE,
                Answer(400, "that is no key", Error),
                Answer(404, "there is none", Error),
                Answer(409, "somebody reads it", Error),
                _FAILED,
            ),
        ),
        Operation(
            "remove_all", "DELETE", "/api/remove_all", "Remove what nobody reads",
            (Answer(200, "how many went", Done), _FAILED),
        ),
        Operation(
            "mount", "POST", "/api/mount", "Lend more memory",
            (Answer(200, "what is lent", Mounted), _NO_BODY, _FAILED), Mount,
            examples=({"size": 1 << 21},),
        ),
        Operation(
            "unmount", "POST", "/api/unmount", "Take memory back",
            (_DONE, _NO_BODY, _FAILED), Unmount,
            examples=({"segment_ids": ["1-2"], "grace_period_seconds": 10},),
        ),
        Operation(
            "mount_shm", "POST", "/api/mount_shm", "Lend a file of shared memory, by its name",
            (Answer(200, "what is lent", Lent), _NO_BODY, _FAILED), MountFile,
        ),
        Operation(
            "unmount_shm", "POST", "/api/unmount_shm", "Take such files back",
            (_DONE, _NO_BODY, _FAILED, Answer(500, "some could not be taken back", Left)), Unmount,
        ),
        Operation(
            "unmount_local_disk", "POST", "/api/unmount_local_disk",
            "Take the disk of this store back, if it lends one",
            (_DONE, _NO_BODY, _FAILED), Grace,
        ),
        Operation(
            "reconfigure", "POST", "/api/reconfigure",
            'Lend a file of shared memory, by its path ("decode"), or nothing beside the own '
            '("prefill")',
            (
                Answer(200, "what holds now", InMode),
                _NO_BODY,
                _FAILED,
                Answer(500, "it is not lent", StillInMode),
            ),
            Reconfigure, examples=({"mode": "prefill"},),
        ),
    ),
)  # fmt: skip

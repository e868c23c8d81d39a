"""What the reference model knows: segments, objects and their generations, tasks, tenants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mooncake_store.core.records import SegmentState
from tests.core.holds import Holds

if TYPE_CHECKING:
    from mooncake_store.core.options import StartOptions
    from tests.core.space import Extent, Space


@dataclass(slots=True)
class Segment:
    uuid: bytes
    name: str
    host: str
    owner: int
    space: Space
    state: SegmentState = SegmentState.OK
    deadline: int | None = None
    idle_until: int = 0
    """A segment that came back may take nothing until whoever used it before is done."""


@dataclass(slots=True)
class Version:
    """One generation of an object: being written, or readable."""

    generation: int
    size: int
    owner: int
    started: int
    options: StartOptions
    extents: list[Extent]
    checksum: int = 0
    name: str = ""
    group: str = ""
    """That which its put named; without one it takes that of the generation it replaces."""


@dataclass(slots=True)
class Object:
    key: int
    tenant: int
    name: str
    current: Version | None = None
    writing: Version | None = None
    holds: Holds = field(default_factory=Holds)
    soft_pin_end: int = 0
    priority: int = 1
    """Of its soft pin, while it has one."""
    hard_pin: bool = False
    group: str = ""
    stamp: int = 0
    task: int | None = None

    @property
    def lease_end(self) -> int:
        return self.holds.end


@dataclass(slots=True)
class Task:
    key: int
    client: int
    move: bool
    source: int | None
    targets: list[Extent]
    started: int


@dataclass(slots=True)
class Quarantined:
    space: Space
    offset: int
    size: int
    until: int
    writer: tuple[int, int, int] | None = None
    """(client, generation, key) of an unfinished put that may still write there."""


@dataclass(slots=True)
class Tenant:
    quota: int | None = None

"""What clients did to some keys and were told, and whether one store could have told all of it.

    unexplained(operations)     # "" if so, else a text that says for which key it cannot be

A key has a value or none, and each operation takes effect at one moment between its begin and its
end (it is linearizable). Since objects do not change, a put succeeds where there is none. Keys do
not touch each other, so each has a search of its own: which operation may have been first, then
which next, with all that was tried before remembered (after Wing and Gong, and Lowe).

What is promised of operations makes some of them weaker:

- one that failed, without an answer of the store to it, took effect at any later time or never,
  or did and was undone: who leads shows a change before a standby has it, and the next leader may
  not know it; a read that failed says nothing;
- a put is refused as present also while another put of the key is under way, or may be;
- a remove whose answer was lost is sent again and may find nothing, or what was put meanwhile: it
  counts as one that takes effect once or twice, whatever was there.

It does not know of evictions, expiry and leases: there must be none. Cost: a step for each
operation, where few are under way at once and all are answered; an exponential of the unanswered
puts and removes of one key at worst, so use a key for a second or two.
"""

import math
from collections import defaultdict
from typing import NamedTuple

OK, PRESENT, ABSENT, UNKNOWN = "ok", "present", "absent", "unknown"
REASONS_MAX = 40


class Operation(NamedTuple):
    """One call of a client; times are of the same monotonic clock."""

    client: str
    kind: str
    """put, get, exists or remove."""
    key: str
    begin: float
    end: float
    outcome: str
    """OK, PRESENT (of a put and of exists), ABSENT or UNKNOWN."""
    value: int | None = None
    """What was put or read; each put of a history has another one."""
    error: str = ""
    """Why there is no better outcome."""

    def __str__(self):
        value = "" if self.value is None else f" {self.value}"
        times = f"{self.begin:9.3f} to {self.end:9.3f}"
        return f"{times}  {self.client:8} {self.kind}{value}: {self.outcome} {self.error}".rstrip()


ANY, THERE, NOTHING, SAME = "any", "there", "nothing", "same"
"""What a step may need of a key, beside a certain value, and make of it."""
HIDDEN, SHOWN = "hidden", "shown"
"""The same: a value that is gone until that is undone, and the value that was hidden."""


class Step(NamedTuple):
    """What happens to a key at one moment."""

    begin: float
    end: float
    needs: object
    becomes: object
    must: bool
    """Whether it did happen, or only may have."""


def unexplained(operations):
    """Say which key's operations no order of them explains; empty where there is one for each."""
    keys = defaultdict(list)
    for operation in operations:
        keys[operation.key].append(operation)
    return "\n".join(filter(None, (_unexplained_of(key, some) for key, some in keys.items())))


def _unexplained_of(key, operations):
    operations = sorted(operations, key=lambda each: each.begin)
    if _explained(_steps(operations)):
        return ""
    # The shortest history that cannot be is the one to look at.
    for end in sorted(each.end for each in operations):
        some = [_as_of(each, end) for each in operations if each.begin <= end]
        if not _explained(_steps(some)):
            break
    told = "\n".join(f"  {each}" for each in some[-REASONS_MAX:])
    return f"no order explains what was told of {key} by {end:.3f}:\n{told}"


def _as_of(operation, moment):
    """What was known of it then."""
    return operation if operation.end <= moment else operation._replace(outcome=UNKNOWN)


def _steps(operations):
    """What happened, and what may have, by when it began."""
    seen = {each.value for each in operations if each.kind == "get"}
    steps = []
    for each in operations:
        begin, end = each.begin, each.end
        if each.kind == "put":
            steps += _steps_of_put(each, operations, seen)
        elif each.kind == "remove" and each.outcome != UNKNOWN:
            steps.append(Step(begin, end, ANY, NOTHING, True))
            steps.append(Step(begin, end, THERE, NOTHING, False))
        elif each.kind == "remove":
            steps.append(Step(begin, math.inf, THERE, HIDDEN, False))
            steps.append(Step(begin, math.inf, THERE, HIDDEN, False))
            steps.append(Step(begin, math.inf, HIDDEN, SHOWN, False))
        elif each.outcome == ABSENT:
            steps.append(Step(begin, end, NOTHING, SAME, True))
        elif each.outcome != UNKNOWN:
            wanted = THERE if each.value is None else each.value
            steps.append(Step(begin, end, wanted, SAME, True))
    return steps


def _steps_of_put(put, operations, seen):
    if put.outcome == OK:
        return [Step(put.begin, put.end, NOTHING, put.value, True)]
    if put.outcome == UNKNOWN:
        # One that nobody saw explains nothing that could not be without it, but that somebody
        # found something there.
        needed = put.value in seen or any(
            each.kind == "exists" and each.outcome == PRESENT for each in operations
        )
        done = Step(put.begin, math.inf, NOTHING, put.value, False)
        undone = Step(put.begin, math.inf, put.value, NOTHING, False)
        return [done, undone] if needed else []
    under_way = any(
        each.kind == "put"
        and each is not put
        and each.begin < put.end
        and (each.end > put.begin or each.outcome == UNKNOWN)
        for each in operations
    )
    return [] if under_way else [Step(put.begin, put.end, THERE, SAME, True)]


def _explained(steps):
    """Whether there is an order of these steps."""
    everything = sum(1 << at for at, step in enumerate(steps) if step.must)
    waiting = [(0, NOTHING)]
    tried = set(waiting)
    while waiting:
        done, state = waiting.pop()
        if done & everything == everything:
            return True
        new = set(_next(steps, done, state)) - tried
        tried |= new
        waiting += new
    return False


def _next(steps, done, state):
    """Where one step more may lead; one that changes nothing is as well taken at once."""
    latest = steps[done.bit_length() - 1].begin if done else -math.inf
    first_end = math.inf
    open_ = []
    for at in range((~done & (done + 1)).bit_length() - 1, len(steps)):
        step = steps[at]
        if step.begin > first_end:
            break  # so do all that follow
        if done >> at & 1:
            continue
        if step.end < latest:
            # It did not happen and can no more: counts as done, so that ways to get here are one.
            done |= 1 << at
            continue
        open_.append(at)
        if step.must:
            first_end = min(first_end, step.end)
    found = []
    for at in open_:
        step = steps[at]
        if step.begin <= first_end and _fits(step.needs, state):
            if step.becomes == SAME:
                return [(done | 1 << at, state)]
            found.append((done | 1 << at, _after(step.becomes, state)))
    return found


def _fits(needs, state):
    hidden = isinstance(state, tuple)
    if needs == NOTHING:
        return hidden or state == NOTHING
    if needs == THERE:
        return not hidden and state != NOTHING
    return needs in (ANY, state) or (needs == HIDDEN and hidden)


def _after(becomes, state):
    if becomes == HIDDEN:
        return HIDDEN, state
    return state[1] if becomes == SHOWN else becomes

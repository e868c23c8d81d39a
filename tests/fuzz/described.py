"""Fuzz HTTP ports by what they say of themselves: `python -m tests.fuzz.described --seconds 300`.

Every port serves its description (`mooncake_store.program.openapi`). Schemathesis makes requests of
it, such as it allows and such as it does not. The rules: status, media type and body of what comes
back are among those that the description names, so a server error is a finding unless it names one;
what wants a token is not done without it, or with another one; every process lives, and none logs a
traceback. Then strangers ask the same: nothing but 401 for what wants a token, 400 for a path that
is none, or 405 for a method that is none.

Whoever has a token may lend memory as often as they like, and each time takes descriptors: there
are enough for that here, `FILES`.

Time is kept to by the second: what is asked then is not waited for longer than `ANSWER_S`. Without
seconds a fixed number of requests is made, the same each time; strangers, who are let no further
than to a 401, then do without those at the bounds of each parameter. Beside `ports`, which says
what no client of HTTP would say.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
import urllib.request
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events, from_schema

from mooncake_store.admin import api as admin_api
from mooncake_store.program.openapi import PATH
from tests.fuzz.ports import Watch
from tests.soak.pool_of_processes import PoolOfProcesses

if TYPE_CHECKING:
    from collections.abc import Iterator

    from schemathesis.engine.recorder import ScenarioRecorder

    from tests.soak.pool_of_processes import Place

__all__ = ["FILES", "NAMES", "Port", "places_of"]

NAMES = ("control", "admin", "rest", "front", "workers", "engines")
CHECKS = (
    "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "ignored_auth",
)  # fmt: skip
FILES = 4096
ANSWER_S = 30.0
STRANGERS = 4
"""One of so many seconds is theirs."""
SHOWN = 600


class Finding(NamedTuple):
    """A rule that was broken, once for each operation."""

    operation: str
    rule: str
    told: str

    def __str__(self) -> str:
        return f"FOUND: {self.operation}: {self.rule}: {self.told}"


LENDING = ["/api/mount"]
"""Paths at which who has the token may have all memory of a host lent, and so end what runs there;
only who has none asks for it."""
SPLITTING = ["/v1/split"]
"""Where the user of a host may have a master started anew; it is asked for that nowhere here."""
AT = {"admin": ("control", admin_api.PATH)}
"""Ports that are described in two places: which one it is, and where."""


class Port:
    """A port, and what was seen there."""

    def __init__(self, place: Place, pool: PoolOfProcesses) -> None:
        self.name = place.name
        self._url = "http://{}:{}".format(*place.where)
        self._path = AT.get(place.name, ("", PATH))[1]
        self._tokens = {"token": pool.token, "administrators": pool.admin_token}
        self.described: set[str] = set()
        self.operations: set[str] = set()
        self._secured: set[str] = set()
        self.requests = 0
        self.statuses: Counter[int] = Counter()
        self._found: dict[tuple[str, str], Finding] = {}

    @property
    def found(self) -> list[Finding]:
        """What broke a rule."""
        return list(self._found.values())

    def fuzz(self, seed: int, seconds: int | None = None, examples: int = 20) -> list[Finding]:
        """Ask with tokens, then without; returns what was found."""
        strange = None if seconds is None else max(1, seconds // STRANGERS)
        own = None if seconds is None or strange is None else max(1, seconds - strange)
        for recorder in self._run(seed, own, examples, with_tokens=True):
            self._look(recorder)
        for recorder in self._run(seed, strange, examples, with_tokens=False):
            self._look_at_strangers(recorder)
        return self.found

    def _run(
        self, seed: int, seconds: int | None, examples: int, *, with_tokens: bool
    ) -> Iterator[ScenarioRecorder]:
        # Whether there is a description is asked with the token in any case.
        headers = {"Authorization": f"Bearer {self._tokens['token']}"}
        asked = urllib.request.Request(self._url + self._path, headers=headers)
        with urllib.request.urlopen(asked, timeout=ANSWER_S) as answer:
            description = json.load(answer)
        config = self._config(seed, seconds, examples)
        config["phases"]["coverage"] = {"enabled": with_tokens or seconds is not None}
        used = description["components"].get("securitySchemes", {})
        if with_tokens and used:
            config["auth"] = {"openapi": {name: {"bearer": self._tokens[name]} for name in used}}
        described = schemathesis.openapi.from_dict(
            description, config=SchemathesisConfig.from_dict(config)
        )
        described = described.exclude(path=SPLITTING + (LENDING if with_tokens else []))
        secured = {
            f"{method.upper()} {path}": "security" in operation
            for path, operations in description["paths"].items()
            for method, operation in operations.items()
        }
        self.described = {each for each in secured if each.split()[1] not in SPLITTING}
        self._secured = {each for each, asked in secured.items() if asked}
        for event in from_schema(described).execute():
            if isinstance(event, events.FatalError):
                raise event.exception
            if isinstance(event, events.NonFatalError):  # it hung up, or did not answer
                told = f"{event.value}\n{event.info.code_sample or ''}"
                self._found[event.label, "no answer"] = Finding(event.label, "no answer", told)
            if isinstance(event, events.ScenarioFinished):
                self.operations.add(event.recorder.label)
                yield event.recorder

    def _config(self, seed: int, seconds: int | None, examples: int) -> dict[str, Any]:
        timed = {} if seconds is None else {"max-time": seconds}
        return timed | {
            "seed": seed,
            "base-url": self._url,
            "request-timeout": ANSWER_S,
            "continue-on-failure": True,
            "checks": {"enabled": False, **{each: {"enabled": True} for each in CHECKS}},
            "generation": {
                "max-examples": examples, "no-shrink": True, "database": "none",
                "deterministic": seconds is None,
            },
            "phases": {"stateful": {"enabled": False}},
        }  # fmt: skip

    def _look(self, recorder: ScenarioRecorder) -> None:
        self._count(recorder)
        for case, checks in recorder.checks.items():
            for check in checks:
                if check.failure_info is not None:
                    told = check.failure_info.failure
                    why = f"{told.title}: {told.message}"
                    self._note(recorder, case, check.name, why)

    def _look_at_strangers(self, recorder: ScenarioRecorder) -> None:
        self._count(recorder)
        for case, each in recorder.interactions.items():
            status = None if each.response is None else each.response.status_code
            if recorder.label in self._secured and status not in (400, 401, 405):
                self._note(recorder, case, "without a token", f"the answer is {status}")

    def _count(self, recorder: ScenarioRecorder) -> None:
        self.requests += len(recorder.interactions)
        for each in recorder.interactions.values():
            if each.response is not None:
                self.statuses[each.response.status_code] += 1

    def _note(self, recorder: ScenarioRecorder, case: str, rule: str, why: str) -> None:
        each = recorder.interactions.get(case)
        told = why
        if each is not None and each.request is not None:
            answer = each.response and (each.response.status_code, each.response.content[:SHOWN])
            request = each.request
            told += f"\n{request.method} {request.uri} {request.body!r:.{SHOWN}}\n{answer}"
        self._found.setdefault((recorder.label, rule), Finding(recorder.label, rule, told))

    def __str__(self) -> str:
        told = ", ".join(f"{count} {status}" for status, count in self.statuses.most_common(6))
        return (
            f"{self.name:14}{len(self.operations):12}{self.requests:10}{len(self.found):10}  {told}"
        )


def places_of(pool: PoolOfProcesses) -> list[Place]:
    """Where the ports are that describe themselves."""
    found = {place.name: place for place in (*pool.places(), *pool.fronts())}
    return [found[AT[name][0] if name in AT else name]._replace(name=name) for name in NAMES]


def main() -> int:
    """Read the arguments, fuzz, and say what was done; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="ports whose name begins so")
    options = parser.parse_args()
    began = time.monotonic()
    with PoolOfProcesses(FILES) as pool:
        places = [each for each in places_of(pool) if each.name.startswith(options.only)]
        watch, ports = Watch(pool, places), [Port(place, pool) for place in places]
        print(f"{'port':14}{'operations':>12}{'requests':>10}{'findings':>10}  answers")
        for number, port in enumerate(ports):
            left_s = options.seconds - (time.monotonic() - began)
            port.fuzz(options.seed, max(2, int(left_s / (len(ports) - number))))
            print(port, flush=True)
        found = [*map(str, itertools.chain(*(port.found for port in ports))), *watch.complaints()]
    for each in found:
        print(each)
    rule = "a rule was broken" if found else "nothing found"
    print(f"described: seed {options.seed}: {rule}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

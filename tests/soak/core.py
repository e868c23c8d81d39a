"""Soak of the shard core: `python -m tests.soak.core --seed N [--steps 100000] [--foreign]`.

Runs the rules of `tests/core/rules.py` from one seed and stops at the first disagreement with the
reference model, printing the step, the last calls and the command that replays it. The same seed
gives the same run. Every reply is compared and one rule compares the whole state; the core's own
integrity check, which costs far more than a step, runs at every tenth. The printed replay checks
after each, so that it stops where the state broke. `--foreign` has a writer among the clients who
is confined to a namespace of his own, and knows the digests of others (`tests/core/foreign.py`);
`--asked` one who shows rights (`tests/core/asked.py`).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback

from tests.core.asked import AskedRules
from tests.core.foreign import ForeignRules
from tests.core.rules import Rules

CHUNK = 2_000
"""Steps after which a fresh shard begins, so that start-up and full tables both get their share."""
KINDS = {"": Rules, "foreign": ForeignRules, "asked": AskedRules}


def soak(seed: int, steps: int, only: int | None, check_every: int, *, among: str = "") -> bool:
    """Run; False at the first failure, which is printed with its replay command."""
    started = time.perf_counter()
    chunks = range(0, steps, CHUNK) if only is None else [only]
    for first in chunks:
        rules = None
        try:
            rules = KINDS[among](random.Random(seed * 1_000_003 + first), check_every)
            for _ in range(min(CHUNK, steps - first) if only is None else CHUNK):
                rules.step()
            rules.audit()
        except Exception as error:
            traceback.print_exc()
            done = rules.steps if rules is not None else 0
            print(f"FAILED: seed {seed}, step {first + done}: {type(error).__name__}: {error}")
            print(
                f"replay: .venv/bin/python -m tests.soak.core --seed {seed} "
                f"--from-step {first} --check-every 1{f' --{among}' if among else ''}"
            )
            return False
        if first % (CHUNK * 5) == 0:
            rate = (first + CHUNK) / (time.perf_counter() - started)
            print(
                f"seed {seed}: step {first + CHUNK}, {rate:.0f} steps/s, "
                f"{rules.model.evicted} evicted in the last {CHUNK}",
                flush=True,
            )
    print(f"seed {seed}: {steps} steps agree, {time.perf_counter() - started:.0f} s")
    return True


def main() -> int:
    """Parse the command line and run; the exit status tells success."""
    parser = argparse.ArgumentParser(description="the shard core against its reference model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument(
        "--from-step", type=int, default=None, help="replay only the chunk that starts there"
    )
    parser.add_argument("--check-every", type=int, default=10, help="steps per integrity check")
    for kind, help_text in (
        ("foreign", "with a confined foreign writer"),
        ("asked", "with a writer who shows rights"),
    ):
        parser.add_argument(
            f"--{kind}", dest="among", action="store_const", const=kind, default="", help=help_text
        )
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.steps} steps")
    agreed = soak(
        options.seed, options.steps, options.from_step, options.check_every, among=options.among
    )
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())

"""The serving half of `make demo`: a conversation whose second question is visibly faster.

Store, one prefill and one decode worker start on this machine with a tiny random model; a client
asks two questions about the same long text, over HTTP, streaming. The second one finds the blocks
of the first in the pool. The model is random, so answers are nonsense; times and tokens are real,
and those of one run on this machine.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from mooncake_store.cli.shared.app import console, table
from serving.cli.chat import Talk
from serving.system import ServingSystem, SystemSettings

TEXT = "The pool keeps what a prompt has cost, so that nobody has to pay for it twice. " * 52
"""Some 4,100 tokens of the model, which takes each byte for one."""
QUESTIONS = ("What does it keep?", "Who pays for it, and how often?")
ANSWER_TOKENS = 12
ANSWER_S = 60.0
STORED_S, POLL_S = 20.0, 0.05


async def ask(url: str, prompt: str) -> dict[str, Any]:
    """Send a prompt, read its answer as it comes; tokens and times by name."""
    talk = Talk(url, "", ANSWER_S)
    talk.settings = {"max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    return await asyncio.to_thread(talk.ask, prompt, None)


async def story() -> tuple[list[dict[str, Any]], float]:
    """Ask the questions; returns the turns and how long the start took."""
    began = time.monotonic()
    async with ServingSystem(SystemSettings(port=0, segment="256MB")) as system:
        started_s = time.monotonic() - began
        # Code that is loaded by the first request is not what a hit saves.
        await ask(system.url, "Something else. " * 20)
        turns = []
        for question in QUESTIONS:
            turns.append(await ask(system.url, TEXT + question))
            await stored(system)
    return turns, started_s


async def stored(system: ServingSystem) -> None:
    """Wait until the blocks of a prompt are in the pool; they are stored behind the answer."""
    for _ in range(int(STORED_S / POLL_S)):
        members = list(system.conductor.fleet.members.values())
        loads = [await member.client.load() for member in members]
        if not any(load.pending_puts for load in loads):
            return
        await asyncio.sleep(POLL_S)
    raise SystemExit("the blocks of a prompt did not reach the pool")


def main() -> int:
    """Play the story, print the table, and fail unless the second question was faster."""
    began = time.monotonic()
    turns, started_s = asyncio.run(story())
    console().print(
        f"\nA prefill and a decode worker over the same kind of pool, ready after "
        f"{started_s:.1f} s; two questions about one text:"
    )
    rows = [
        (
            f"question {number}",
            f"{turn['prompt']:,}",
            f"{turn['cached']:,}",
            f"{turn['ttft_s'] * 1000:,.0f} ms",
            f"{turn['total_s'] * 1000:,.0f} ms",
        )
        for number, turn in enumerate(turns, 1)
    ]
    columns = {
        "request": "left",
        "prompt tokens": "right",
        "from the pool": "right",
        "first token": "right",
        "answer": "right",
    }
    console().print(table(columns, rows))
    first, second = turns
    if second["ttft_s"] >= first["ttft_s"] or second["cached"] == 0:
        console().print("The second question was no faster: this is a bug, or a very busy machine.")
        return 1
    console().print(
        f"The second first token came {first['ttft_s'] / second['ttft_s']:.1f} times as soon. "
        f"All processes have ended; it took {time.monotonic() - began:.1f} s."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

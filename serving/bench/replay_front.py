"""Plays a trace against a server with OpenAI's API: first tokens, and those after them.

Every request of the trace is a streamed completion of its lengths, sent when the trace has it come.
Its prompt is tokens that are made from the names of its blocks, so that prompts which share blocks
share tokens, and no others. They are small numbers, which every vocabulary has. `ignore_eos` asks
for answers that are as long as they were.

With `--block-tokens N` a block is N tokens instead of 512, and prompts and answers shrink alike:
for models whose context is short. What does not fit in the context that the server names is left
out, and counted.

`first token` counts from when a request was sent; `between tokens` is the mean of an answer, since
a server may tell several tokens at once. What was refused (429 and 503) and what failed has no
times. Requests wait for no other; a client that is itself too slow shows in `late`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np

from eviction.trace import BLOCK_TOKENS
from mooncake_store import config
from mooncake_store.cli.shared.client import judge_of
from mooncake_store.errors import StoreError, UnavailableError
from serving.bench.times import percentiles

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from eviction import Trace
    from mooncake_store.bench.harness import Report

__all__ = ["play", "prompt_of"]

LEAST_TOKEN, TOKENS = 32, 192
"""Prompts are of these tokens: no vocabulary is smaller, and the first ones are often special."""
REFUSED = (429, 503)
CONNECTIONS = 1024
ANSWER_S = 600.0


def play(
    report: Report,
    trace: Trace,
    url: str,
    token_file: str,
    speed: float,
    block_tokens: int | None,
) -> None:
    """Play a trace and add all rows. Raises StoreError if nothing is answered."""
    token = config.read_secret(token_file).decode() if token_file else ""
    player = _Player(trace, url.rstrip("/"), block_tokens or BLOCK_TOKENS)
    seconds = asyncio.run(player.play(token, speed))
    answered = len(player.first)
    if not answered:
        why = player.why or "no request of the trace fits into its context"
        raise StoreError(f"{url} answered nothing: {why}", advice="see what the server logs")
    report.row("answered", "requests", [answered])
    report.row("refused", "requests", [player.ended["refused"]], higher_is_better=False)
    report.row("failed", "requests", [player.ended["failed"]], higher_is_better=False)
    report.row("too long", "requests", [player.ended["too long"]], higher_is_better=False)
    report.row("hit_ratio", "ratio", [player.cached / player.prompted])
    report.row("read", "tokens/s", [player.prompted / seconds])
    report.row("written", "tokens/s", [player.written / seconds])
    percentiles(report, "first token", player.first, "")
    percentiles(report, "between tokens", player.between, "no answer has two tokens")
    percentiles(report, "late", player.late, "")


def prompt_of(names: NDArray[np.int64], tokens: int, block_tokens: int) -> list[int]:
    """Make a prompt of that many tokens, of the names of its blocks."""
    rows = [np.random.default_rng(name).integers(0, TOKENS, block_tokens) for name in names]
    made = np.concatenate(rows) if rows else np.zeros(1, np.int64)
    prompt: list[int] = (LEAST_TOKEN + made[:tokens]).tolist()
    return prompt


@dataclass(slots=True)
class _Player:
    """What is played, and what came of it."""

    trace: Trace
    url: str
    block_tokens: int
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    prompted: int = 0
    cached: int = 0
    written: int = 0
    why: str = ""
    """Of the last one that was not answered."""

    def _scaled(self, tokens: int) -> int:
        return max(1, -(-tokens * self.block_tokens // BLOCK_TOKENS))

    async def play(self, token: str, speed: float) -> float:
        """Send every request when it is due; return the seconds until the last one ended."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=CONNECTIONS, ssl=judge_of(self.url) or True),
            timeout=aiohttp.ClientTimeout(ANSWER_S),
        ) as http:
            model, context = await self._model(http)
            times = (self.trace.timestamps_ms - self.trace.timestamps_ms[0]) / 1e3 / speed
            began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for number, due in enumerate(times.tolist()):
                    body = self._body(number, model, context)
                    if body is None:
                        self.ended["too long"] += 1
                        continue
                    await asyncio.sleep(began + due - time.perf_counter())
                    self.late.append(max(0.0, time.perf_counter() - began - due))
                    group.create_task(self._request(http, body))
            return time.perf_counter() - began

    async def _model(self, http: aiohttp.ClientSession) -> tuple[str, int]:
        """The name of the model that is served, and its context, if the server tells."""
        try:
            async with http.get(f"{self.url}/v1/models") as answer:
                told = await answer.json()
                answer.raise_for_status()
                model = told["data"][0]
                return str(model["id"]), int(model.get("max_model_len") or 1 << 62)
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            raise UnavailableError(
                f"{self.url}/v1/models names no model: {error}",
                advice="name a server with OpenAI's API with --front, and its key's --token-file",
            ) from error

    def _body(self, number: int, model: str, context: int) -> bytes | None:
        """What a request sends, unless it does not fit."""
        trace = self.trace
        tokens = self._scaled(int(trace.input_tokens[number]))
        wanted = self._scaled(int(trace.output_tokens[number]))
        if tokens + wanted > context:
            return None
        names = trace.ids[trace.offsets[number] : trace.offsets[number + 1]]
        return json.dumps(
            {
                "model": model,
                "prompt": prompt_of(names, tokens, self.block_tokens),
                "max_tokens": wanted,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()

    async def _request(self, http: aiohttp.ClientSession, body: bytes) -> None:
        """Send one request and read its answer; what fails is counted."""
        sent = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        try:
            async with http.post(
                f"{self.url}/v1/completions", data=body, headers=headers
            ) as answer:
                if answer.status != 200:
                    self.why = (await answer.text())[:200]
                    self.ended["refused" if answer.status in REFUSED else "failed"] += 1
                    return
                await self._read(answer, sent)
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            self.why = f"{type(error).__name__}: {error}"
            self.ended["failed"] += 1

    async def _read(self, answer: aiohttp.ClientResponse, sent: float) -> None:
        first = last = 0.0
        usage: dict[str, Any] = {}
        async for line in answer.content:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(event["error"]["message"])
            last = time.perf_counter()
            first = first or last
            usage = event.get("usage") or usage
        written = int(usage["completion_tokens"])
        details = usage.get("prompt_tokens_details") or {}
        self.first.append(first - sent)
        if written > 1:
            self.between.append((last - first) / (written - 1))
        self.prompted += int(usage["prompt_tokens"])
        self.cached += int(details.get("cached_tokens") or 0)
        self.written += written

"""The OpenAI API over HTTP: completions and chats, whole or streamed, from a backend.

    runner = web.AppRunner(front_application(front, shell), handler_cancellation=True)

A request is read and checked (`openai`), its tokens go to the backend, its text comes back through
`AnswerText`. Headers are sent with the first token, so whatever fails before has its own HTTP
status; what fails later is an `error` event in the stream. A client that goes away cancels its
request wherever it is, which needs `handler_cancellation` of the runner. No answer outlasts the
deadline of its request by more than `GRACE_S`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import time
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from mooncake_store.errors import InvalidArgumentError, StoreError
from mooncake_store.program.logs import request_id
from mooncake_store.program.shell import Shell, shelled
from serving.conductor.hints import HintsFullError
from serving.engine.tokenizer import load_tokenizer
from serving.front.answers import Choice, Ended, Shape, error_body, usage_of
from serving.front.api import API
from serving.front.choices import merged
from serving.front.hints import hint_answer, read_hint
from serving.front.openai import (
    Asked,
    BadRequestError,
    Limits,
    check_model,
    read_chat,
    read_completion,
)
from serving.front.pages import page_handlers
from serving.front.text import AnswerText
from serving.front.tools import CallsInText
from serving.scheduling.requests import Failure, Finish, Piece, Request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from mooncake_store.program.openapi import Api
    from serving.conductor.conductor import Conductor
    from serving.engine.tokenizer import Tokenizer
    from serving.engine.tool_styles import Call
    from serving.front.board import ConductorBoard
    from serving.scheduling.requests import Outcome
    from serving.traces.recording import Recorder

__all__ = ["Front", "error_response", "front_application", "openai_application"]

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 16 << 20
GRACE_S = 5.0
PIPED_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(slots=True)
class Front:
    """What the handlers need: who answers, what to show, the model's name to the outside."""

    conductor: Conductor
    board: ConductorBoard
    model: str = ""
    deadline_s: float = 120.0
    tokenizer: Tokenizer | None = None
    recorder: Recorder | None = None

    def submit(self, request: Request) -> AsyncGenerator[Outcome, None]:
        """Go through what happens to a request, which is recorded if anything is."""
        outcomes = self.conductor.submit(request)
        return self.recorder.recorded(request, outcomes) if self.recorder else outcomes

    def limits(self) -> tuple[Limits, Tokenizer]:
        """What holds for a request now; raises while no worker has said what it serves."""
        card = self.conductor.card
        if card is None:
            raise BadRequestError("no worker is there yet", status=503, code="no_workers")
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(card.directory, card.eos)
        limits = Limits(
            self.model or card.name, card.context_max, card.vocabulary, self.deadline_s,
            card.eos or self.tokenizer.eos,
        )  # fmt: skip
        return limits, self.tokenizer


def error_response(
    message: str,
    status: int,
    *,
    param: str | None = None,
    code: str | None = None,
    retry_after_s: float = 0.0,
) -> web.Response:
    """An error as a response; Retry-After in whole seconds, as HTTP wants it."""
    headers = {"Retry-After": str(max(1, math.ceil(retry_after_s)))} if retry_after_s else {}
    return web.json_response(
        error_body(message, status, param=param, code=code),
        status=status if status != 499 else 400,
        headers=headers,
    )


@web.middleware
async def _told(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every error in OpenAI's shape."""
    try:
        return await handler(request)
    except BadRequestError as error:
        return error_response(error.message, error.status, param=error.param, code=error.code)
    except (asyncio.CancelledError, ConnectionResetError, web.HTTPException):
        raise
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return error_response("internal error; the server's log has it", 500)


def openai_application(
    shell: Shell,
    api: Api,
    handlers: Mapping[str, Callable[[web.Request], Awaitable[web.StreamResponse]]],
) -> web.Application:
    """An API behind a shell that says no as OpenAI does."""
    return shelled(
        shell,
        api,
        handlers,
        refusal=lambda status, message, code: error_response(message, status, code=code),
        bytes_max=BODY_BYTES_MAX,
        inner=[_told],
    )


def front_application(front: Front, shell: Shell) -> web.Application:
    """All that can be asked."""
    handlers = _Handlers(front)
    pages = page_handlers()
    own = [each.name for each in API.operations if each.name not in pages]
    return openai_application(shell, API, pages | {name: getattr(handlers, name) for name in own})


class _Handlers:
    """What the routes lead to."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._started = int(time.time())

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answer a prompt."""
        return await self._serve(request, read_completion)

    async def chats(self, request: web.Request) -> web.StreamResponse:
        """Answer a conversation."""
        return await self._serve(request, read_chat)

    async def _serve(
        self, request: web.Request, read: Callable[[bytes, Limits, Tokenizer], Asked]
    ) -> web.StreamResponse:
        raw = await request.read()
        limits, tokenizer = self._front.limits()
        asked = read(raw, limits, tokenizer)
        name = f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(12)}"
        # Who asks may ask under the same id twice; workers are told of both.
        within = f"{request_id()}/{name}"
        texts = [AnswerText(tokenizer, asked.stopping) for _ in range(asked.choices)]
        sources = [
            partial(self._front.submit, _wanted(asked, within, number, text))
            for number, text in enumerate(texts)
        ]
        answer = _Answer(asked, texts, Shape(asked, name, int(time.time()), tokenizer))
        async with (
            asyncio.timeout(asked.deadline_s + GRACE_S),
            aclosing(merged(sources)) as outcomes,
        ):
            if asked.stream:
                return await answer.stream(request, outcomes)
            return await answer.whole(outcomes)

    async def hints(self, request: web.Request) -> web.Response:
        """Tell the pool what to expect of a prompt."""
        raw = await request.read()
        limits, tokenizer = self._front.limits()
        asked = read_hint(raw, limits, tokenizer)
        if self._front.conductor.pool is None:
            raise BadRequestError("this server has no pool", status=501, code="no_pool")
        try:
            hinted = await self._front.conductor.hint(
                asked.tokens, asked.action, ttl=asked.ttl, priority=asked.priority
            )
        except InvalidArgumentError as error:
            raise BadRequestError(str(error), code="invalid_hint") from error
        except HintsFullError as error:
            return error_response(str(error), 429, code="queue_full", retry_after_s=1.0)
        except StoreError as error:
            return error_response(str(error), 503, code="pool_unavailable", retry_after_s=1.0)
        return web.json_response(hint_answer(asked, hinted, limits))

    async def models(self, request: web.Request) -> web.Response:
        """The one model there is."""
        limits, _ = self._front.limits()
        return web.json_response({"object": "list", "data": [self._described(limits)]})

    async def model(self, request: web.Request) -> web.Response:
        """One model by its name."""
        limits, _ = self._front.limits()
        check_model(request.match_info["model"], limits)
        return web.json_response(self._described(limits))

    def _described(self, limits: Limits) -> dict[str, Any]:
        return {
            "id": limits.model,
            "object": "model",
            "created": self._started,
            "owned_by": "mooncake",
            "max_model_len": limits.context_max,
        }

    async def health(self, request: web.Request) -> web.Response:
        """200 while requests can be served, 503 else; says what is missing."""
        health = self._front.board.health()
        return web.json_response(health, status=200 if health["serving"] else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """The counters as Prometheus reads them."""
        text = self._front.board.metrics()
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def stats(self, request: web.Request) -> web.Response:
        """What the page shows; it asks every second, and a tenth of the bytes is enough."""
        response = web.json_response(self._front.board.stats())
        response.enable_compression()
        return response


def _wanted(asked: Asked, name: str, number: int, text: AnswerText) -> Request:
    """One choice of an answer as a request."""
    return Request(
        request_id=f"{name}-{number}" if number else name,
        tokens=asked.tokens,
        sampling=asked.sampling_of(number),
        max_new_tokens=asked.max_new_tokens,
        stop_tokens=asked.stop_tokens,
        deadline_s=asked.deadline_s,
        priority=asked.priority,
        enough=lambda: text.stop is not None,
    )


class _Answer:
    """Turns outcomes into one response, which has a choice for each text."""

    def __init__(self, asked: Asked, texts: Sequence[AnswerText], shape: Shape) -> None:
        self._asked = asked
        self._texts = texts
        self._parted = [CallsInText(asked.tools) for _ in texts]
        self._calls: dict[int, list[Call]] = {}
        self._shape = shape
        self._finishes: dict[int, Finish] = {}

    @property
    def _usage(self) -> dict[str, Any]:
        finishes = [self._finishes[number] for number in range(len(self._texts))]
        return usage_of(finishes, sum(text.tokens for text in self._texts))

    def _add(self, number: int, piece: Piece) -> str:
        """The text that may be told when further tokens have come."""
        text = self._texts[number].add(piece.tokens, piece.likelihoods)
        return self._parted[number].add(text)

    def _rest(self, number: int, finish: Finish) -> str:
        """The text that is left when a choice has ended."""
        self._finishes[number] = finish
        text, last, rest = self._texts[number], finish.last, ""
        named = last is not None and last.token in self._asked.named_stop_tokens
        if last is not None and named and self._asked.stopping.shown:
            rest = text.add((last.token,), () if last.likelihood is None else (last.likelihood,))
        rest = self._parted[number].add(rest + text.finish())
        left, self._calls[number] = self._parted[number].finish()
        return rest + left

    def _ended(self, number: int) -> Ended:
        stop, finish = self._texts[number].stop, self._finishes[number]
        if self._calls[number] and finish.reason == "stop":
            return Ended(self._asked.tools.reason)
        if stop is not None:
            return Ended("stop", stop)
        token = None if finish.last is None else finish.last.token
        return Ended(finish.reason, token if token in self._asked.named_stop_tokens else None)

    async def whole(self, outcomes: AsyncGenerator[tuple[int, Outcome], None]) -> web.Response:
        """The answer as one object; what one choice fails with, all do."""
        told: list[list[str]] = [[] for _ in self._texts]
        async for number, outcome in outcomes:
            if isinstance(outcome, Piece):
                told[number].append(self._add(number, outcome))
            elif isinstance(outcome, Failure):
                return _failed(outcome)
            else:
                told[number].append(self._rest(number, outcome))
        choices = []
        for number, pieces in enumerate(told):
            listed, calls = self._texts[number].listed(), self._calls[number]
            choices.append(Choice("".join(pieces), listed, calls, self._ended(number)))
        return web.json_response(self._shape.answer(choices, self._usage))

    async def stream(
        self, request: web.Request, outcomes: AsyncGenerator[tuple[int, Outcome], None]
    ) -> web.StreamResponse:
        """The answer as events; a failure before the first token is a response of its own."""
        response: web.StreamResponse | None = None
        opened: set[int] = set()
        async for number, outcome in outcomes:
            if response is None:
                if isinstance(outcome, Failure):
                    return _failed(outcome)
                response = await self._begin(request)
            if isinstance(outcome, Failure):
                error = error_body(outcome.message, outcome.status, code=outcome.code)
                await _send(response, error)
                break
            if number not in opened:
                opened.add(number)
                await _send(response, self._shape.opening(number))
            if isinstance(outcome, Piece):
                await self._tell(response, number, self._add(number, outcome))
            else:
                await self._end(response, number, outcome)
        assert response is not None, "a backend ends with Finish or Failure"
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _begin(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=PIPED_HEADERS)
        response.content_type = "text/event-stream"
        await response.prepare(request)
        return response

    async def _tell(self, response: web.StreamResponse, number: int, text: str) -> None:
        listed = self._texts[number].listed()
        if text or listed:
            await _send(response, self._shape.piece(number, text, listed))

    async def _end(self, response: web.StreamResponse, number: int, finish: Finish) -> None:
        await self._tell(response, number, self._rest(number, finish))
        if self._calls[number]:
            await _send(response, self._shape.calls(number, self._calls[number]))
        await _send(response, self._shape.piece(number, "", ended=self._ended(number)))
        if len(self._finishes) == len(self._texts):
            await _send(response, self._shape.closing(self._usage))


async def _send(response: web.StreamResponse, event: dict[str, Any] | None) -> None:
    if event is not None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def _failed(failure: Failure) -> web.Response:
    return error_response(
        failure.message, failure.status, code=failure.code, retry_after_s=failure.retry_after_s
    )

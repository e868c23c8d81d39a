"""`mooncake chat`: talk to a server with OpenAI's API."""

import json
import sys
from typing import Annotated, Any

import typer

from mooncake_store.cli.shared.app import JsonOption, command, emit, note
from mooncake_store.cli.shared.client import judge_of
from mooncake_store.errors import StoreError, UnavailableError
from mooncake_store.printable import TEXT, printable


@command(
    ("mooncake chat", "a conversation with `mooncake serve` on this machine"),
    ('mooncake chat --message "Hello" --json', "one answer, for a program"),
)
def chat(
    url: Annotated[str, typer.Option(help="Where the server is.")] = "http://127.0.0.1:8000",
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Ask this and end.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="How the model should behave.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Length of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes answers repeatable.")] = None,
    timeout: Annotated[str, typer.Option(help="How long an answer may take.")] = "120s",
    token_file: Annotated[str | None, typer.Option(help="File with the API key.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Talk to a model; an empty line or Ctrl-D ends the conversation, Ctrl-C an answer.

    Each answer is followed by its times, and by how much of the conversation the server had kept.
    """
    from mooncake_store import config
    from mooncake_store.units import parse_duration

    token = config.read_secret(token_file).decode() if token_file else ""
    talk = Talk(url.rstrip("/"), token, parse_duration(timeout), judge_of(url))
    talk.settings = {"max_tokens": max_tokens, "temperature": temperature}
    if seed is not None:
        talk.settings["seed"] = seed
    if system:
        talk.messages.append({"role": "system", "content": system})
    if message is not None:
        answer = talk.ask(message, tell=None if as_json else sys.stdout)
        emit(answer, as_json=as_json, human=lambda: _figures(answer))
        return
    while (asked := _line()) is not None:
        try:
            answer = talk.ask(asked, tell=sys.stdout)
        except KeyboardInterrupt:
            note("stopped; Ctrl-C at the prompt, an empty line or Ctrl-D ends the conversation")
            continue
        note(_figures(answer))


def _line() -> str | None:
    """The next line of the user; None at the end."""
    if sys.stdin.isatty():
        sys.stdout.write("> ")
        sys.stdout.flush()
    line = sys.stdin.readline().strip()
    return line or None


def _figures(answer: dict[str, Any]) -> str:
    return (
        f"first token after {answer['ttft_s'] * 1000:.0f} ms, {answer['generated']} tokens in "
        f"{answer['total_s']:.2f} s, {answer['cached']} of {answer['prompt']} prompt tokens reused"
    )


class Talk:
    """A conversation with a server, as far as it has come."""

    def __init__(self, url: str, token: str, timeout_s: float, judge: Any = None) -> None:
        self.url = url
        self._judge = judge
        self.messages: list[dict[str, str]] = []
        self.settings: dict[str, Any] = {}
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout_s = timeout_s

    def ask(self, text: str, tell: Any) -> dict[str, Any]:
        """Send one message and read the answer as it comes, writing it to `tell`."""
        import time
        import urllib.error
        import urllib.request
        from http.client import HTTPException

        self.messages.append({"role": "user", "content": text})
        body = {
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.settings,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), self._headers
        )
        began = time.monotonic()
        figures: dict[str, Any] = {"ttft_s": 0.0, "prompt": 0, "cached": 0, "generated": 0}
        told: list[str] = []
        try:
            with urllib.request.urlopen(
                request, timeout=self._timeout_s, context=self._judge
            ) as answer:
                for event in _events(answer):
                    figures["ttft_s"] = figures["ttft_s"] or time.monotonic() - began
                    told.append(self._read(event, figures))
                    _tell(tell, told[-1])
        except urllib.error.HTTPError as error:
            raise StoreError(f"{self.url} answers {error.code}: {_reason(error)}") from error
        except (OSError, ValueError, HTTPException) as error:
            raise UnavailableError(
                f"{self.url} does not answer: {error}",
                advice="name who signed its certificate with MOONCAKE_TLS_AUTHORITY"
                if "CERTIFICATE_VERIFY_FAILED" in str(error)
                else "start `mooncake serve`, or name another server with --url",
            ) from error
        finally:
            # An answer that was stopped is part of the conversation as far as it came.
            self.messages.append({"role": "assistant", "content": "".join(told)})
            _tell(tell, "\n")
        return {"answer": "".join(told), "total_s": time.monotonic() - began, **figures}

    def _read(self, event: bytes, figures: dict[str, Any]) -> str:
        """The text of an event."""
        try:
            return _text(json.loads(event), figures)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise StoreError(
                f"{self.url} answers with something else than a chat",
                advice="name a server with OpenAI's API with --url",
            ) from error


def _tell(stream: Any, text: str) -> None:
    """Write a piece of an answer, if anybody is told; at a terminal, nothing that steers it."""
    if stream is None:
        return
    if stream.isatty():
        text = printable(text, keep=TEXT)
    # Half a surrogate pair, and what the stream's encoding lacks, becomes an escape.
    stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
    stream.flush()


def _events(answer: Any) -> Any:
    """What the events of a stream hold."""
    for line in answer:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield line[6:]


def _text(piece: dict[str, Any], figures: dict[str, Any]) -> str:
    """The text of an event; the usage goes to the figures."""
    if "error" in piece:
        raise StoreError(f"the answer broke off: {piece['error']['message']}")
    usage = piece.get("usage")
    if usage:
        figures["prompt"] = usage["prompt_tokens"]
        figures["generated"] = usage["completion_tokens"]
        figures["cached"] = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return "".join(each["delta"].get("content") or "" for each in piece["choices"])


def _reason(error: Any) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return str(error.reason)

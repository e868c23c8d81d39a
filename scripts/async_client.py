"""Writes mooncake_store/client/aio.py: `AsyncClient`, made from `Client`.

    python scripts/async_client.py

Both clients name the same operations, so one of them is written by hand. Each function of
`blocking.py` that runs steps, or calls one that does, becomes a coroutine function (a generator an
asynchronous one), and the classes get their other names. What differs beyond that is marked there:

- a line that ends in `# blocking only` is left out;
- a line `# aio only: ...` is taken in.

How clients begin and end is not made but written, in `client/blocking_life.py` and
`client/aio_life.py`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["SOURCE", "TARGET", "async_client"]

CLIENT = Path(__file__).parent.parent / "mooncake_store" / "client"
SOURCE, TARGET = CLIENT / "blocking.py", CLIENT / "aio.py"
PHRASES = {"; a context manager.": ": `async with` begins it."}
NAMES = {
    "Client": "AsyncClient",
    "View": "AsyncView",
    "Writer": "AsyncWriter",
    "Iterator": "AsyncIterator",
    "blocking_life": "aio_life",
    "BlockingLife": "AsyncLife",
    "__enter__": "__aenter__",
    "__exit__": "__aexit__",
}
HEAD = '''"""`AsyncClient`: the store from asyncio, with the operations of `Client`.

    async with AsyncClient("mooncake://127.0.0.1:50051/default") as store:
        await store.put("greeting", b"hello")
        await store.get("greeting")                 # b"hello"
        async for found in store.scan("greet"):
            ...

Same names, options, results and errors; what asks the store is awaited, or iterated over with
`async for`. A client belongs to one event loop. An operation may be cancelled at any time: it
returns once no transfer touches its buffers any more. What is said in `blocking.py` holds here.

Made from `blocking.py` by `python scripts/async_client.py`: edit that file.
"""
'''
DOC = '''    """A connection to a store; an asynchronous context manager, or `connect` and `close`.

    Arguments are those of `Client`. Settings are checked here, the store is reached by `connect`.
    """
'''


def async_client(source: str) -> str:
    """The text of `aio.py` for that of `blocking.py`."""
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    lines = [_of_aio(line) for line in lines]
    for node in classes:
        _convert(node, lines)
    head, doc = tree.body[0].end_lineno, classes[0].body[0]
    before, after = lines[head : doc.lineno - 1], lines[doc.end_lineno :]
    return _formatted(HEAD + _renamed("".join(before)) + DOC + _renamed("".join(after)))


def _of_aio(line: str) -> str:
    if line.rstrip().endswith("# blocking only"):
        return ""
    return line.replace("# aio only: ", "")


def _convert(node: ast.ClassDef, lines: list[str]) -> None:
    """Make those functions of a class coroutine functions that have to wait."""
    spans = {
        part.name: range(part.lineno - 1, part.end_lineno or 0)
        for part in node.body
        if isinstance(part, ast.FunctionDef)
    }
    bodies = {name: "".join(lines[at] for at in span) for name, span in spans.items()}
    waiting = _waiting(bodies)
    call = re.compile(rf"(?<![\w.])(self\.(?:_client\.)?(?:{'|'.join(waiting)})\()")
    for name in waiting & spans.keys():
        for at in spans[name]:
            line = re.sub(r"^    def ", "    async def ", lines[at])
            line = call.sub(r"await \1", line)
            line = re.sub(r"^( +)yield from (.*)$", r"\1for each in \2:\n\1    yield each", line)
            lines[at] = line


def _waiting(bodies: dict[str, str]) -> set[str]:
    """The functions of a class that run steps, or call one that does, and how steps are run."""
    found = {"_run", "__enter__", "__exit__"}
    while True:
        calls = re.compile(rf"\bself\.(?:_client\.)?(?:{'|'.join(found)})\(")
        more = {name for name, body in bodies.items() if calls.search(body)} - found
        if not more:
            return found
        found |= more


def _renamed(text: str) -> str:
    for phrase, other in PHRASES.items():
        text = text.replace(phrase, other)
    return re.sub(r"\b(" + "|".join(NAMES) + r")\b", lambda match: NAMES[match[1]], text)


def _formatted(text: str) -> str:
    ruff = [sys.executable, "-m", "ruff"]
    for step in (["check", "--select", "I", "--fix"], ["format"]):
        command = [*ruff, *step, "--quiet", "--stdin-filename", str(TARGET), "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
        text = done.stdout
    return text


if __name__ == "__main__":
    TARGET.write_text(async_client(SOURCE.read_text()))

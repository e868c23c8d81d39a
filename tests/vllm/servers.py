"""vLLM's servers with OpenAI's API, and `mooncake serve` before them, as processes of their own.

    with served(model, name) as first, served(model, name) as second:
        with before({"a": first, "b": second}, "cache-centric") as url:
            ...

They end with the block, and what they wrote is shown where one does not start.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
START_S = 300
END_S = 60
BLOCK = 32

ENGINE_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    # Else vLLM takes every core for each engine, and those of a pair wait for each other's.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "PYTHONHASHSEED": "0",
}
SERVED = "tiny"


class Server(NamedTuple):
    """Where an engine answers, publishes its events, and tells again what it published."""

    url: str
    events: str
    replay: str


def ports(count):
    """Ports that nobody uses at present, below those that the system gives to whoever connects.

    An engine takes minutes to bind them, and others would get one of those meanwhile.
    """
    found = []
    for port in random.sample(range(10_000, 30_000), 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no port is free")


def asked(url, body=None, *, method=None, key=""):
    """The JSON that a server answers with."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=END_S) as answer:
        return json.loads(answer.read() or b"null")


@contextlib.contextmanager
def running(arguments, environment=None):
    """(process, what it wrote so far) of a program in a group of its own, which ends with it."""
    with tempfile.NamedTemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            # By its name: a position in the file would be the program's own, too.
            yield process, lambda: Path(output.name).read_text(errors="replace")
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            # Its children too, which may have outlived it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_S)


@contextlib.contextmanager
def served(model, *options, **environment):
    """A `Server` of a model; tells at most of its cached tokens and publishes events."""
    port, events, replay = ports(3)
    server = Server(*(f"{kind}://127.0.0.1:{at}" for kind, at in (
        ("http", port), ("tcp", events), ("tcp", replay)
    )))  # fmt: skip
    publishing = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": server.events.replace("127.0.0.1", "*"),
        "replay_endpoint": server.replay,
    }
    arguments = [
        "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", SERVED, "--host", "127.0.0.1", "--port", str(port),
        "--enforce-eager", "--max-model-len", "4096", "--block-size", str(BLOCK),
        "--dtype", "float32", "--seed", "0", "--enable-prompt-tokens-details",
        "--kv-events-config", json.dumps(publishing), *options,
    ]  # fmt: skip
    with running(arguments, {**ENGINE_ENV, **environment}) as (process, written):

        def answers():
            assert process.poll() is None, "the engine ended:\n" + written()[-8000:]
            with contextlib.suppress(urllib.error.URLError, ConnectionError, ValueError):
                return bool(asked(server.url + "/v1/models"))
            return False

        until(answers, START_S, "an answer of vLLM")
        yield server


@contextlib.contextmanager
def before(servers, placement):
    """The URL of a front before servers by name, which follows their events."""
    backends = [f"--backend={name}={server.url}" for name, server in servers.items()]
    arguments = ["-m", "mooncake_store", "serve", "--json", "--port", "0"]
    arguments += [f"--placement={placement}", *backends]
    with running(arguments) as (process, written):

        def told():
            assert process.poll() is None, "the front ended:\n" + written()[-8000:]
            lines = [line for line in written().splitlines() if line.startswith('{"ready"')]
            return lines and json.loads(lines[0])

        facts = until(told, START_S, "the front")
        url, key = facts["url"], Path(facts["admin_token_file"]).read_text("ascii").strip()
        for name, server in servers.items():
            asked(
                url + "/register",
                {
                    "instance_id": name,
                    "type": "vLLM",
                    "modelname": SERVED,
                    "block_size": BLOCK,
                    "endpoint": server.events,
                    "replay_endpoint": server.replay,
                },
                key=key,
            )
        yield url

"""Engines, stores and models for the tests of this directory.

What needs vLLM runs in the environment that scripts/engine.sh makes and is skipped elsewhere; an
engine is a process of its own (engine_program.py) and takes many seconds to start, so tests share
models and the answers of an engine without a store.
"""

import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading

import pytest

from mooncake_store import LocalCluster
from tests.vllm.servers import ENGINE_ENV, ROOT, START_S

ANSWER_S = 180


class Engine:
    """A running engine; calling it sends one command and returns its answer."""

    def __init__(self, model, *, transfer=None, env=None, in_process=True, **settings):
        arguments = json.dumps({"model": str(model), "transfer": transfer, **settings})
        environment = {
            **os.environ,
            **ENGINE_ENV,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
            **(env or {}),
        }
        answers, answering = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.engine_program", arguments, str(answering)],
            pass_fds=[answering],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        os.close(answering)
        self._answers = queue.Queue()
        self.output = []
        self._readers = [
            threading.Thread(target=self._read_answers, args=(answers,), daemon=True),
            threading.Thread(target=self._read_output, daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self._answer(START_S)

    def _read_answers(self, answers):
        with open(answers, encoding="utf-8") as lines:
            for line in lines:
                self._answers.put(json.loads(line))
        self._answers.put(None)

    def _read_output(self):
        for line in self.process.stdout:
            self.output.append(line)

    def _answer(self, timeout_s):
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            answer = None
        if answer is None:
            self.end()
            pytest.fail("the engine did not answer; it wrote:\n" + "".join(self.output[-60:]))
        return answer

    def __call__(self, what, timeout_s=ANSWER_S, **arguments):
        self.process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer(timeout_s)

    def close(self):
        """End it as a user would, and wait."""
        if self.process.poll() is None:
            self("quit")
            self.process.stdin.close()
            self.process.wait(60)

    def end(self):
        """End it and its children in any case."""
        # Its children too, which may have outlived it and would hold the pipes of its output.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait(30)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        for reader in self._readers:
            reader.join(30)
        self.process.stdout.close()


@pytest.fixture(scope="session")
def vllm():
    """Skips the test where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here; make test-vllm makes an environment with it")


@pytest.fixture(scope="session")
def model(vllm, tmp_path_factory):
    """A tiny model."""
    from tests.vllm.model import make_model

    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def start(vllm):
    """Starts engines that end with the test."""
    engines = []

    def launch(model, **settings):
        engine = Engine(model, **settings)
        engines.append(engine)
        return engine

    yield launch
    for engine in engines:
        engine.end()


PROMPTS = [
    [3 + (seed + number * 7) % 250 for number in range(300 + 60 * seed)] for seed in range(3)
]


@pytest.fixture(scope="session")
def plain(model):
    """What the model answers without any store."""
    engine = Engine(model)
    try:
        answers = engine("generate", prompts=PROMPTS)["tokens"]
        engine.close()
    finally:
        engine.end()
    return answers


@pytest.fixture
def store_at(free_port):
    """Starts stores on one port, one after the other."""
    running = []

    def launch(workers=1):
        cluster = LocalCluster(workers, "128MB", master={"port": free_port})
        running.append(cluster.start())
        return cluster

    launch.url = f"mooncake://127.0.0.1:{free_port}/default"
    launch.address = f"127.0.0.1:{free_port}"
    yield launch
    for cluster in running:
        cluster.close()


def ours(url, **options):
    """The configuration of our connector."""
    return {
        "transfer": {
            "kv_connector": "MooncakePyConnector",
            "kv_connector_module_path": "serving.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"url": url, "lookup_deadline_s": 10, **options},
        }
    }


def theirs(address, directory):
    """The configuration of vLLM's own store connector over the drop-in package."""
    drop_in = ROOT / "compat"
    if not (drop_in / "mooncake" / "store.py").exists():
        pytest.skip("the drop-in package is not in this checkout")
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": address,
        "protocol": "tcp",
        "device_name": "",
        "mode": "standalone-store",
        "global_segment_size": 0,
        "local_buffer_size": 16 << 20,
    }
    path = directory / "mooncake.json"
    path.write_text(json.dumps(settings))
    return {
        "transfer": {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        },
        "env": {
            "MOONCAKE_CONFIG_PATH": str(path),
            "PYTHONPATH": os.pathsep.join([str(drop_in), str(ROOT)]),
        },
    }


@pytest.fixture(params=["ours", "theirs"])
def connector(request, store_at, tmp_path):
    """Settings of an engine with either connector."""
    if request.param == "ours":
        settings = ours(store_at.url, rest_s=0.2, load_deadline_s=5)
    else:
        settings = theirs(store_at.address, tmp_path)
    settings["name"] = request.param
    return settings

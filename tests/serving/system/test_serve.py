"""`mooncake serve` with real processes: OpenAI's client, the page, failures, and a clean end."""

import asyncio
import http.server
import json
import os
import queue
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mooncake_store import Client, LocalCluster
from mooncake_store.cli.main import main
from serving.engine.config import ModelConfig
from tests.browser import Browser, installed
from tests.certificates import Authority
from tests.ground.test_environment import DOCKER, KUBERNETES
from tests.serving.system.conftest import started
from tests.terminal import Terminal
from tests.waiting import until

openai = pytest.importorskip("openai")

BLOCK_TOKENS = 64  # of a worker, unless told otherwise
LAYERS = ModelConfig.random("tiny").layers
JSON = {"Content-Type": "application/json"}
WORDS = "The pool keeps what a prompt has cost, so that nobody pays for it twice. "


@pytest.fixture
def client(server):
    with openai.OpenAI(
        base_url=server["url"] + "/v1", api_key="none", timeout=60, max_retries=0
    ) as made:
        yield made


def get(server, path):
    with urllib.request.urlopen(server["url"] + path, timeout=20) as answer:
        return answer.read().decode()


def stats(server):
    return json.loads(get(server, "/stats"))


def descendants(pid):
    """The processes below one, by /proc."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, front = [], [pid]
    while front:
        below = parents.get(front.pop(), [])
        found += below
        front += below
    return found


def alive(pids):
    states = []
    for pid in pids:
        try:
            states.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
        except OSError:
            continue
    return [state for state in states if state not in "ZX"]


def ends_without_a_trace(program, number):
    """However a server ends, its children do too."""
    below = descendants(program.process.pid)
    assert len(below) >= 2
    program.signal(number)
    assert program.wait(30) == (0 if number == signal.SIGTERM else -number), program.output
    until(lambda: not alive(below), 20, "children that outlive their parent")


def test_openais_client_completes_and_streams_the_same(client):
    asked = {"model": "tiny", "prompt": WORDS, "max_tokens": 12, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True}
    whole = client.completions.create(**asked)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    pieces = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    text, usage = "", None
    for piece in pieces:
        text += piece.choices[0].text if piece.choices else ""
        usage = piece.usage or usage
    assert text == whole.choices[0].text
    assert usage.completion_tokens == 12


def test_openais_client_chats_and_a_seed_repeats_an_answer(client):
    def ask(seed, **more):
        return client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": WORDS}],
            max_tokens=16,
            temperature=1.0,
            seed=seed,
            **more,
        )

    first = ask(7).choices[0].message.content
    assert ask(7).choices[0].message.content == first
    # Several choices are those of the seeds that follow.
    several = [choice.message.content for choice in ask(6, n=3).choices]
    assert several[1] == first
    assert len(set(several)) == 3
    assert "".join(p.choices[0].delta.content or "" for p in ask(7, stream=True)) == first
    assert ask(8).choices[0].message.content != first


def test_a_second_turn_reuses_the_first(client, server):
    shared = "Of this prompt nothing is in the pool. " + WORDS * 20
    asked = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    before = stats(server)["pool_blocks"]
    first = client.completions.create(prompt=shared + "One?", **asked)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    # The blocks of the first are on their way to the pool when it is answered, layer by layer.
    fresh = first.usage.prompt_tokens // BLOCK_TOKENS * LAYERS
    until(lambda: stats(server)["pool_blocks"] >= before + fresh, 40)
    endings = iter(range(1000))

    def reused():
        again = client.completions.create(prompt=f"{shared}Turn {next(endings)}?", **asked)
        return again.usage.prompt_tokens_details.cached_tokens > 1000

    # The first, unless loads were slow so far: then computing is predicted to be quicker.
    until(reused, 40)


def test_errors_are_those_that_openais_client_knows(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        client.completions.create(model="tiny", prompt="x", max_tokens=10_000_000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="x", temperature=9)
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_metrics_and_health(server, client):
    client.completions.create(model="tiny", prompt="x", max_tokens=2)
    assert "mooncake_serving_ttft_seconds_bucket" in get(server, "/metrics")
    health = json.loads(get(server, "/health"))
    assert health == {"serving": True, "workers": {"prefill": 1, "decode": 1}, "store": "up"}


@pytest.mark.asyncio
@pytest.mark.parametrize(("device", "width"), [("phone", 360), ("desk", 1200)])
async def test_the_page_shows_requests_in_a_browser(server, client, device, width):
    shared = f"What the {device} shows is computed once. " + WORDS * 8
    asked = {"model": "tiny", "max_tokens": 6, "extra_body": {"ignore_eos": True}}

    def ask(number):
        return client.completions.create(prompt=f"{shared}Turn {number}?", **asked)

    async with Browser(installed()) as browser:
        page = await browser.open(server["url"], width=width)
        await page.until("document.body.dataset.state == 'live'")
        bars = "[...document.querySelectorAll('#requests .bar')].map((one) => one.title)"
        for number in range(40):
            await asyncio.to_thread(ask, number)
            # The worker that computed it has kept it soon after.
            if await page.see(f"{bars}.some((one) => one.startsWith('own memory'))"):
                break
        await page.until(f"{bars}.some((one) => one.startsWith('own memory'))")
        times = "queue .+ load .+ prefill [0-9.]+.m?s, transfer .+ decode [0-9.]+.m?s"
        await page.until(f"{bars}.some((one) => /{times}/.test(one))")
        assert "worker-0" in await page.see("document.querySelector('#workers').innerText")
        # Axes with units: times up, and how long ago across.
        axes = await page.see(
            "[...document.querySelectorAll('figure text')].map((one) => one.textContent).join(';')"
        )
        assert re.search(r"[\d.]+\sms;.*5 min ago;now", axes)
        assert await page.see("document.documentElement.scrollWidth") <= width
        assert page.complaints == []
        if kept := os.environ.get("MOONCAKE_KEEP_PICTURES"):
            picture = await page.picture(whole=True)
            await asyncio.to_thread(Path(kept, f"{device}.png").write_bytes, picture)


def test_the_page_has_a_history_from_before_it_was_opened(server):
    until(lambda: len(stats(server)["history"]) >= 2)
    ages = [sample["age_s"] for sample in stats(server)["history"]]
    assert ages == sorted(ages, reverse=True)


def test_chat_talks_and_says_what_was_reused(server):
    def chat(*options, stdin=""):
        return subprocess.run(
            [sys.executable, "-m", "mooncake_store", "chat", "--url", server["url"],
             "--max-tokens", "5", *options],
            input=stdin, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    done = chat("--message", "Hello", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["generated"] <= 5
    assert answer["ttft_s"] > 0
    done = chat(stdin="Hello\nAgain\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("first token after") == 2
    done = chat("--url", "http://127.0.0.1:1", "--message", "x")
    assert done.returncode == 4
    assert "mooncake serve" in done.stderr


def test_an_answer_of_the_random_model_is_words(client):
    asked = {"model": "tiny", "prompt": WORDS, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    for temperature in (0, 1):
        text = client.completions.create(**asked, temperature=temperature).choices[0].text
        assert re.fullmatch(r"( [a-z]+)+", text), text


def test_ctrl_c_ends_the_answer_and_not_the_chat(server):
    with Terminal("chat", "--url", server["url"], "--max-tokens", "5000") as terminal:
        terminal.wait_for("> ")
        terminal.type("Hello\n")
        until(lambda: stats(server)["under_way"])
        terminal.type("\x03")
        terminal.wait_for("> ", times=2)
        # The request is cancelled wherever it was, and the conversation goes on.
        until(lambda: not stats(server)["under_way"])
        assert "stopped" in terminal.text
        terminal.type("\n")
        assert terminal.wait() == 0


def test_one_worker_may_do_both(server, start_program, tmp_path):
    """It answers as a prefill and a decode worker do, also to many at once."""
    program, facts = started(
        start_program, tmp_path, "--coupled", "1", "--setting", "step_tokens=96"
    )
    assert "1 coupled" in program.output
    assert json.loads(get(facts, "/health")) | {"store": ""} == {
        "serving": True, "workers": {"prefill": 1, "decode": 1}, "store": "",
    }  # fmt: skip

    def ask(where, number):
        body = {"prompt": WORDS * number, "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            where["url"] + "/v1/completions", json.dumps(body).encode(), JSON
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["choices"][0]["text"]

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda number: ask(facts, number), range(1, 7)))
    assert answers == [ask(server, number) for number in range(1, 7)]
    (worker,) = stats(facts)["workers"]
    assert worker["role"] == "coupled"
    ends_without_a_trace(program, signal.SIGTERM)


@pytest.mark.cold  # workers are found by their command line
def test_a_killed_worker_is_replaced_and_requests_go_on(start_program, tmp_path):
    program, facts = started(start_program, tmp_path)
    body = json.dumps({"prompt": WORDS, "max_tokens": 4, "temperature": 0}).encode()

    def ask():
        try:
            request = urllib.request.Request(facts["url"] + "/v1/completions", body, JSON)
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read())["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            if error.code not in (429, 503):
                raise
            return None

    first = ask()
    assert first is not None
    workers = [
        pid
        for pid in descendants(program.process.pid)
        if b"serving.workers.program" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    assert until(ask, 60) == first
    ends_without_a_trace(program, signal.SIGTERM)
    assert not (tmp_path / "port").exists()


@pytest.mark.cold  # the store is found by its command line
def test_the_store_may_go_away(start_program, tmp_path):
    program, facts = started(start_program, tmp_path)
    stores = [
        pid
        for pid in descendants(program.process.pid)
        if b"mooncake_store.program.local_program" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    for pid in stores:
        os.kill(pid, signal.SIGKILL)
    until(lambda: json.loads(get(facts, "/health"))["store"].startswith("down"), 30)
    body = json.dumps({"prompt": WORDS, "max_tokens": 4}).encode()
    request = urllib.request.Request(facts["url"] + "/v1/completions", body, JSON)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.loads(answer.read())["usage"]["completion_tokens"] >= 1
    ends_without_a_trace(program, signal.SIGKILL)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--prefill", "0"], 3, "at least one of each"),
        (["--admission", "never"], 3, "forecast"),
        (["--host", "0.0.0.0"], 3, "--token-file"),
        (["--model", "/nowhere"], 3, "/nowhere"),
        (["--setting", "kv_block=1"], 3, "kv_blocks"),
        (["--setting", "x"], 3, "NAME=VALUE"),
        (["--backend", "a=b"], 3, "http://"),
        (["--backend", "a=http://user:password@10.0.0.5"], 3, "--backend-key-file"),
        (["--backend", "a=http://[::1"], 3, "http://"),
        (["--engine-network", "10.0.0.0/8"], 3, "--backend"),
        (["--backend", "a=http://x", "--engine-network", "10.0.0.1/8"], 3, "write one such as"),
        (["--allow-host", "http://front.example"], 3, "front.example"),
    ],
)
def test_what_is_configured_wrong_fails_at_start(options, code, said):
    done = subprocess.run(
        [sys.executable, "-m", "mooncake_store", "serve", "--port", "0", *options],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert said in done.stderr


@pytest.fixture
def taken():
    """A port that somebody listens on."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


@pytest.fixture
def nothing_starts(monkeypatch):
    """Fail a test that starts a process."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def register(facts, key, **where):
    """The status of an attempt to register an engine."""
    body = {"instance_id": "a", "modelname": "m", "block_size": 16} | where
    request = urllib.request.Request(
        facts["url"] + "/register",
        json.dumps(body).encode(),
        JSON | {"Authorization": f"Bearer {key}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_who_shares_its_user_may_register_engines(start_program, tmp_path):
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    backend = "--backend", "a=http://127.0.0.1:1"
    program, facts = started(start_program, tmp_path, *backend, **environment)
    made = Path(facts["admin_token_file"])
    assert str(made) in program.wait_for_line("registered with the key")
    assert [register(facts, key) for key in ("wrong", made.read_text().strip())] == [401, 200]
    program.signal(signal.SIGTERM)
    assert program.wait() == 0
    assert not made.exists()


def test_a_front_has_keys_of_administrators_and_for_engines(start_program, tmp_path):
    told = queue.SimpleQueue()

    class Engine(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            told.put(self.headers["Authorization"])
            self.send_error(404)

        def log_message(self, *_):
            pass

    for name in "admin", "engine":
        (tmp_path / name).write_text(f"{name}-" * 8)
        (tmp_path / name).chmod(0o600)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine) as engine:
        thread = threading.Thread(target=engine.serve_forever)
        thread.start()
        program, facts = started(
            start_program, tmp_path, "--backend", f"a=http://127.0.0.1:{engine.server_port}",
            "--backend-key-file", tmp_path / "engine", "--admin-token-file", tmp_path / "admin",
            "--engine-network", "10.77.0.0/16",
        )  # fmt: skip
        try:
            assert told.get(timeout=60) == "Bearer " + "engine-" * 8
            key = "admin-" * 8
            assert "admin_token_file" not in facts
            assert register(facts, key, replay_endpoint="tcp://10.77.0.1:5557") == 200
            assert register(facts, key, replay_endpoint="tcp://10.78.0.1:5557") == 400
            program.signal(signal.SIGTERM)
            assert program.wait() == 0
        finally:
            engine.shutdown()
            thread.join()


@pytest.mark.parametrize("options", [[], ["--backend", "a=http://127.0.0.1:1"]])
def test_a_port_in_use_is_told_before_anything_starts(taken, options, nothing_starts, capsys):
    assert main(["serve", "--port", str(taken), *options]) == 3
    assert re.fullmatch(
        rf"error: cannot listen on 127.0.0.1:{taken}: Address already in use; [^\n]+\n",
        capsys.readouterr().err,
    )


def test_a_wrong_model_is_told_before_anything_starts(tmp_path, nothing_starts, capsys):
    def told(model):
        assert main(["serve", "--port", "0", "--model", str(model)]) == 3
        return capsys.readouterr().err

    assert "there is no model 'tyni'" in told("tyni")
    assert "config.json cannot be read" in told(tmp_path)
    config = {
        "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300,
        "intermediate_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gpt9"}))
    assert "'gpt9' are not supported" in told(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "safetensors" in told(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert "is cut off" in told(tmp_path)


def test_a_pool_that_is_not_there_is_told_before_anything_starts(free_port, nothing_starts, capsys):
    assert main(["serve", "--port", "0", "--store", f"127.0.0.1:{free_port}"]) == 4
    assert str(free_port) in capsys.readouterr().err


def test_a_pod_has_variables_of_the_same_names(start_program, tmp_path):
    """Those of services called mooncake-master and mooncake-worker, and of other tools."""
    pod = KUBERNETES | DOCKER | {"MOONCAKE_MASTER_CONTROL_BASE": "/x"}
    program, facts = started(start_program, tmp_path, **pod)
    body = json.dumps({"prompt": WORDS * 20, "max_tokens": 4}).encode()
    request = urllib.request.Request(facts["url"] + "/v1/completions", body, JSON)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.loads(answer.read())["usage"]["completion_tokens"] >= 1
    until(lambda: stats(facts)["pool_blocks"], 60)
    ends_without_a_trace(program, signal.SIGTERM)


def test_a_running_pool_is_used_and_stays(start_program, tmp_path):
    body = json.dumps({"prompt": WORDS * 20, "max_tokens": 4, "temperature": 0}).encode()
    with LocalCluster(workers=1, segment="64MB") as cluster:
        program, facts = started(start_program, tmp_path, "--store", cluster.address)
        assert facts["store"] == f"mooncake://{cluster.address}"
        request = urllib.request.Request(facts["url"] + "/v1/completions", body, JSON)
        urllib.request.urlopen(request, timeout=60).close()
        with Client(cluster.url) as store:
            until(lambda: sum(shard.objects for shard in store.store_stats()))
            program.signal(signal.SIGTERM)
            assert program.wait() == 0
            assert store.status().ready


def test_a_front_that_others_reach_speaks_https_and_so_may_its_engines(start_program, tmp_path):
    authority, asked = Authority(tmp_path), queue.SimpleQueue()
    shown = authority.signs("127.0.0.1")
    judge = ssl.create_default_context(cafile=str(authority.file))

    class Engine(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.put(self.path)
            self.send_error(404)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine) as engine:
        speaking = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        speaking.load_cert_chain(shown)
        engine.socket = speaking.wrap_socket(engine.socket, server_side=True)
        thread = threading.Thread(target=engine.serve_forever)
        thread.start()
        try:
            program, facts = started(
                start_program, tmp_path, "--insecure", "--host", "0.0.0.0",
                "--backend", f"a=https://127.0.0.1:{engine.server_port}",
                MOONCAKE_TLS_CERTIFICATE=str(shown),
                MOONCAKE_TLS_AUTHORITY=str(authority.file),
            )  # fmt: skip
            assert asked.get(timeout=60)
            assert facts["url"].startswith("https://")
            url = f"https://127.0.0.1:{facts['url'].rpartition(':')[2]}/openapi.json"
            with urllib.request.urlopen(url, timeout=60, context=judge) as answer:
                assert json.load(answer)["openapi"]
            program.signal(signal.SIGTERM)
            assert program.wait() == 0
        finally:
            engine.shutdown()
            thread.join()


def test_a_system_with_a_pool_of_its_own_speaks_https_to_whoever_believes_its_authority(
    start_program, tmp_path, monkeypatch, capsys
):
    authority = Authority(tmp_path)
    _, facts = started(
        start_program, tmp_path, "--insecure", "--host", "0.0.0.0",
        MOONCAKE_TLS_CERTIFICATE=str(authority.signs("127.0.0.1")),
    )  # fmt: skip
    url = f"https://127.0.0.1:{facts['url'].rpartition(':')[2].partition('/')[0]}"
    asked = ["chat", "--url", url, "--message", "Hello", "--max-tokens", "2", "--json"]
    assert main(asked) == 4
    assert "MOONCAKE_TLS_AUTHORITY" in capsys.readouterr().err
    monkeypatch.setenv("MOONCAKE_TLS_AUTHORITY", str(authority.file))
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out)["generated"] == 2


def test_each_line_that_it_and_its_workers_log_can_be_read_and_names_its_request(
    start_program, tmp_path
):
    program, facts = started(start_program, tmp_path, "--log-json", "--log-level", "info")
    where = facts["url"].removeprefix("http://").split(":")
    body = json.dumps({"prompt": WORDS, "max_tokens": 1500, "stream": True, "ignore_eos": True})
    with socket.create_connection((where[0], int(where[1])), timeout=60) as client:
        head = (
            "POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json",
            "X-Request-Id: mine", f"Content-Length: {len(body)}", "", "",
        )  # fmt: skip
        client.sendall("\r\n".join(head).encode() + body.encode())
        assert client.recv(100)  # it has begun
    program.wait_for_line('"serving.workers.news"')
    program.signal(signal.SIGTERM)
    program.wait(30)
    told = [line for line in program.output.splitlines() if "answers at" not in line]
    lines = [json.loads(line) for line in told]
    assert {"mooncake_store.master.running", "serving.workers.news"} <= {
        line["logger"] for line in lines
    }
    (failed,) = (line for line in lines if line["logger"] == "serving.workers.news")
    assert failed["request"].startswith("mine/cmpl-")
    assert failed["message"].startswith("cancelled: ")

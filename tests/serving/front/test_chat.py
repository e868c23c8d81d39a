"""`mooncake chat` with a server that answers what it likes: nothing of it steers the terminal."""

import http.server
import json
import subprocess
import sys
import threading

import pytest

from mooncake_store.cli.main import main
from tests.terminal import Terminal
from tests.waiting import PATIENCE_S

STEERING = "red \x1b[31m title \x1b]0;owned\x07 back \x08\r clear \x9b2J turned \u202e\u2066"
SHOWN = r"red \x1b[31m title \x1b]0;owned\x07 back \x08\r clear \x9b2J turned \u202e\u2066"


def piece(text):
    return {"choices": [{"delta": {"content": text}}]}


MALFORMED = [
    "\ud800", [1], {}, {"choices": None}, {"choices": [{}]}, {"error": "no"},
    {"choices": [{"delta": {"content": 7}}]}, {"choices": [], "usage": [1]},
    {"choices": [], "usage": {"prompt_tokens": 1}}, b"[" * 100_000,
]  # fmt: skip
ANSWERS = {f"malformed {at}": [each] for at, each in enumerate(MALFORMED)} | {
    "halves": [piece("a \ud800 b")],
    "whole": [piece(STEERING)],
    "by letters": [piece(letter) for letter in STEERING],
    "broken off": [{"error": {"message": STEERING}}],
    "refused": None,
}


@pytest.fixture(params=ANSWERS)
def server(request):
    """The URL of a server that answers so, whatever it is asked."""
    pieces = ANSWERS[request.param]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200 if pieces else 400)
            self.end_headers()
            if pieces is None:
                self.wfile.write(json.dumps({"error": {"message": STEERING}}).encode())
            for each in pieces or ():
                event = each if isinstance(each, bytes) else json.dumps(each).encode()
                self.wfile.write(b"data: " + event + b"\n\n")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield request.param, f"http://127.0.0.1:{made.server_address[1]}"
        made.shutdown()
        thread.join(PATIENCE_S)


STEERED = ["whole", "by letters", "broken off", "refused"]


@pytest.mark.parametrize("server", STEERED, indirect=True)
@pytest.mark.parametrize("asked", [("--message", "Hello"), ()])
def test_an_answer_does_not_steer_the_terminal(server, asked):
    answer, url = server
    with Terminal("chat", "--url", url, *asked, columns=200) as terminal:
        if not asked:
            terminal.type("Hello\n")
        terminal.wait_for(SHOWN)
        if not asked and answer in ("whole", "by letters"):
            terminal.type("\n")
        assert terminal.wait() == (0 if answer in ("whole", "by letters") else 1)
    assert {letter for letter in terminal.shown if not letter.isprintable()} <= {"\r", "\n"}


def ask_without_a_terminal(url):
    words = ["chat", "--url", url, "--message", "Hello"]
    return subprocess.run(
        [sys.executable, "-m", "mooncake_store", *words], capture_output=True, timeout=PATIENCE_S
    )


@pytest.mark.parametrize(
    ("server", "text"),
    [("whole", STEERING), ("by letters", STEERING), ("halves", r"a \ud800 b")],
    indirect=["server"],
)
def test_what_no_terminal_shows_is_the_answer_as_it_came(server, text):
    """But for what no stream can hold."""
    done = ask_without_a_terminal(server[1])
    assert done.returncode == 0, done.stderr
    assert text.encode() in done.stdout


@pytest.mark.parametrize(
    "server", [name for name in ANSWERS if name.startswith("malformed")], indirect=True
)
def test_an_answer_that_is_none_is_said_to_be_none(server, capsys):
    assert main(["chat", "--url", server[1], "--message", "Hello"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {server[1]} answers with something else than a chat")

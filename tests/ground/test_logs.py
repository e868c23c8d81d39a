"""What a program logs: one line a record, and states only when they change."""

import io
import json
import logging
import re
import sys
import threading

import pytest

from mooncake_store.errors import PeerLostError
from mooncake_store.program.logs import (
    PACKAGES,
    JsonFormatter,
    StateLog,
    chosen,
    configure,
    of_request,
)


@pytest.fixture(autouse=True)
def logging_as_before(monkeypatch):
    """Undo whatever `configure` did to this process."""
    root = logging.getLogger()
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr("mooncake_store.program.logs._chosen", chosen())
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in PACKAGES}
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, old in levels.items():
        logging.getLogger(name).setLevel(old)


def logged(level="info", **options):
    stream = io.StringIO()
    configure(level, stream=stream, **options)
    return stream


def test_the_human_format_is_one_line_with_time_level_logger_and_message():
    stream = logged()
    logging.getLogger("mooncake_store.master").warning("worker %s is gone", "w1")
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"
    line = f"{time} WARNING mooncake_store\\.master: worker w1 is gone\n"
    assert re.fullmatch(line, stream.getvalue())


def test_json_is_one_object_a_line():
    stream = logged(as_json=True)
    log = logging.getLogger("alloc.slab")
    log.info("a %s", 'quoted "\n" thing')
    try:
        raise OSError("disk")
    except OSError:
        log.exception("failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "info",
        "logger": "alloc.slab",
        "message": 'a quoted "\n" thing',
    }
    assert second["level"] == "error"
    assert second["exception"].endswith("OSError: disk")


def test_a_key_cannot_forge_a_line_or_steer_the_terminal():
    stream = logged()
    logging.getLogger("serving").info("key %s", "a\r\n2026 ERROR all lost\x1b[2J")
    assert stream.getvalue().endswith("key a\\r\\n2026 ERROR all lost\\x1b[2J\n")
    assert stream.getvalue().count("\n") == 1


def test_a_traceback_follows_its_line():
    stream = logged()
    try:
        raise OSError("disk\x1b[2J\x9b31m\n2026-01-01 00:00:00.000 INFO forged")
    except OSError:
        logging.getLogger("eviction").exception("failed")
    first, *trace = stream.getvalue().splitlines()
    assert first.endswith("ERROR eviction: failed")
    assert trace[-2] == "  OSError: disk\\x1b[2J\\x9b31m"
    assert all(line.startswith("  ") for line in trace)


def test_the_level_applies_to_this_project_and_others_stay_at_warnings():
    stream = logged("debug")
    logging.getLogger("transfer_engine.rpc").debug("ours")
    logging.getLogger("numba.core").info("theirs")
    logging.getLogger("numba.core").warning("their warning")
    assert "ours" in stream.getvalue()
    assert "theirs" not in stream.getvalue()
    assert "their warning" in stream.getvalue()


def test_at_error_others_are_silent_too():
    stream = logged("ERROR")
    logging.getLogger("numba.core").warning("theirs")
    logging.getLogger("mooncake_store").warning("ours")
    assert stream.getvalue() == ""


def test_configuring_again_replaces_the_handler_and_leaves_those_of_others():
    other = logging.NullHandler()
    logging.getLogger().addHandler(other)
    first, second = logged(), logged()
    logging.getLogger("mooncake_store").info("once")
    assert (first.getvalue(), second.getvalue().count("once")) == ("", 1)
    assert other in logging.getLogger().handlers


def test_standard_error_is_the_default(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    configure()
    logging.getLogger("mooncake_store").info("hello")
    assert "hello" in sys.stderr.getvalue()


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="must be one of debug, info, warning, error, not 'loud'"):
        configure("loud")


def messages(caplog):
    return [record.getMessage() for record in caplog.records]


def test_a_state_is_logged_when_it_changes_and_only_then(caplog):
    states = StateLog(logging.getLogger("mooncake_store.test"))
    with caplog.at_level(logging.INFO, logger="mooncake_store.test"):
        assert states.change("worker w1", "alive")
        assert not states.change("worker w1", "alive", "still")
        assert states.change("worker w1", "suspect", "3 pings lost", level=logging.WARNING)
        assert states.change("worker w2", "alive")
        assert not states.change("worker w1", "suspect")
    assert messages(caplog) == [
        "worker w1: alive",
        "worker w1: alive -> suspect (3 pings lost)",
        "worker w2: alive",
    ]
    assert [r.levelname for r in caplog.records] == ["INFO", "WARNING", "INFO"]


def test_a_forgotten_name_is_logged_as_new(caplog):
    states = StateLog(logging.getLogger("mooncake_store.test"))
    with caplog.at_level(logging.INFO, logger="mooncake_store.test"):
        states.change("w", "alive")
        states.forget("w")
        states.forget("never seen")
        assert states.change("w", "alive")
    assert messages(caplog) == ["w: alive", "w: alive"]


def test_the_memory_of_states_is_bounded_and_drops_what_was_silent_longest():
    states = StateLog(logging.getLogger("mooncake_store.test"), names_max=2)
    states.change("a", "up")
    states.change("b", "up")
    states.change("a", "up")
    states.change("c", "up")
    assert not states.change("a", "up")
    assert states.change("b", "up")
    with pytest.raises(ValueError, match="names_max must be at least 1"):
        StateLog(logging.getLogger("x"), names_max=0)


def test_of_many_threads_that_report_one_change_exactly_one_logs_it():
    states = StateLog(logging.getLogger("mooncake_store.test"))
    start = threading.Barrier(8)
    changed = []

    def report():
        start.wait(timeout=60)
        changed.append(states.change("w", "up"))

    threads = [threading.Thread(target=report) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(changed) == [False] * 7 + [True]


def test_what_is_no_text_can_still_be_logged_as_json():
    # Formatted directly: a record in the log would break a test runner that forwards reports.
    record = logging.LogRecord("alloc", logging.INFO, "", 0, "key %s", ("\udcff",), None)
    assert json.loads(JsonFormatter().format(record))["message"] == "key \udcff"


def as_json(*arguments, **how):
    """What is told of a line of the log, as it is read back."""
    stream = logged("debug", as_json=True)
    logging.getLogger("serving.test").warning(*arguments, **how)
    (line,) = stream.getvalue().splitlines()
    told = json.loads(line)
    return {name: told[name] for name in told.keys() - {"time", "level", "logger"}}


LOST = PeerLostError(
    "gone\nfor good", key=b"k\xff\n", peer="10.0.0.7:1", operation="get", elapsed_s=0.5
)
KNOWN = {
    "error": "PeerLostError", "code": PeerLostError.code, "key": "k\\xff\n",
    "peer": "10.0.0.7:1", "operation": "get", "elapsed_s": 0.5,
}  # fmt: skip


def test_what_an_error_knows_has_fields_of_its_own_where_it_is_an_argument():
    told = as_json("put of %s failed: %s", "x", LOST)
    assert told.pop("message") == f"put of x failed: {LOST}"
    assert told == KNOWN


def test_and_where_it_was_raised():
    try:
        raise LOST
    except PeerLostError:
        told = as_json("failed", exc_info=True)
    assert told.pop("exception").endswith(str(LOST))
    assert told == {"message": "failed"} | KNOWN


def test_what_whoever_logs_it_says_counts_before_what_an_error_says():
    told = as_json("%s", LOST, extra={"peer": "10.0.0.8:2", "request": 7})
    assert (told["peer"], told["request"], told["operation"]) == ("10.0.0.8:2", 7, "get")


def test_a_line_names_the_request_that_it_is_of_and_others_none():
    with of_request("a"):
        with of_request("b"):
            inner = as_json("in")
        outer = as_json("out")
    assert (inner["request"], outer["request"]) == ("b", "a")
    assert "request" not in as_json("after")


ODD = {
    "lines": 'a\r\n\u2028\x85{"b": 1}',
    "surrogates": "\udcff\ud800",
    "controls": "\x00\x1b[2J\x9b",
    "bytes": bytes(range(256)),
    "infinite": float("inf"),
    "cyclic": (cyclic := []),
}
cyclic.append(cyclic)


@pytest.mark.parametrize("name", ODD)
def test_each_line_is_json_whatever_is_logged(name):
    # Formatted directly: what a test runner keeps of its log it sends on, and surrogates cannot be.
    value = ODD[name]
    record = logging.LogRecord("alloc", logging.INFO, "", 0, "%s %%", (value,), None)
    record.key = record.peer = value
    (line,) = JsonFormatter().format(record).splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["message"] == f"{value} %"
    try:
        raise ValueError(value)
    except ValueError:
        record = logging.LogRecord("alloc", logging.INFO, "", 0, "failed", (), sys.exc_info())
    (line,) = JsonFormatter().format(record).splitlines()
    assert "ValueError" in json.loads(line)["exception"]


class Unshown:
    def __str__(self):
        raise OSError("it was\nclosed")


@pytest.mark.parametrize("arguments", [("%d", "x"), ("%s %s", 1), ("%s", Unshown())])
def test_a_line_whose_arguments_do_not_fit_is_one_all_the_same(arguments):
    # Formatted directly: the handler of a test runner raises what such a line raises.
    record = logging.LogRecord("alloc", logging.INFO, "", 0, arguments[0], arguments[1:], None)
    assert json.loads(JsonFormatter().format(record))["message"].startswith(arguments[0])


def test_what_nobody_caught_is_a_line_as_well(recwarn):
    stream = logged(as_json=True)
    thread = threading.Thread(target=lambda: 1 // 0)
    thread.start()
    thread.join(timeout=60)
    sys.excepthook(OSError, OSError("disk\n"), None)
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["exception"].endswith("ZeroDivisionError: integer division or modulo by zero")
    assert (second["level"], second["message"]) == ("critical", "nobody caught this: disk\n")


def test_those_that_a_program_starts_are_told_how_it_logs():
    for level, as_json in (("error", False), ("debug", True)):
        logged(level, as_json=as_json)
        assert chosen() == {"log_level": level, "log_json": as_json}

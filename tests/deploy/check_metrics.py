"""Prometheus on a real pool, with what is shipped: `python -m tests.deploy.check_metrics`.

promtool checks the rules, tries them on made-up series (`alerts_test.yml`) and checks the pages of
a running master and worker. Then a Prometheus is started with the shipped configuration, for their
ports, and is asked: every target has to be up, every query of the dashboard has to be understood,
and those that a pool at rest has an answer to must have one; no alert may be set off. It ends with
0 where all is so, with another code where not, and with 77 where prometheus or promtool is missing.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooncake_store import Client
from tests.conftest import programs
from tests.deploy.queries import ALERTS, dashboard_queries
from tests.sources import ROOT
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
TRIALS = Path(__file__).with_name("alerts_test.yml")
OF_THE_ORIGINAL = ("master_", "segment_", "standby_", "changes_")
"""Names that are not ours to choose."""
ANSWERED = 40
"""So many queries of the dashboard have an answer in a pool where little happens."""
MISSING = 77
INTERVALS = {"$__rate_interval": "1m", "$__range": "1m", "$job": ".+"}


def told(what: str) -> None:
    """Say what was checked."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def fetch(url: str) -> str:
    """What is served there."""
    with urllib.request.urlopen(url, timeout=20) as answer:
        found: str = answer.read().decode()
        return found


def check_rules() -> None:
    """Have promtool check the files."""
    for arguments in (
        ["check", "rules", str(ALERTS)],
        ["check", "config", str(CONFIG)],
        ["test", "rules", str(TRIALS)],
    ):
        subprocess.run(["promtool", *arguments], check=True)


def check_page(name: str, page: str) -> None:
    """Have promtool check a page, but for names of the original."""
    lines = page.splitlines(keepends=True)
    ours = [line for line in lines if not _of_the_original(line)]
    subprocess.run(["promtool", "check", "metrics"], input="".join(ours), text=True, check=True)
    told(f"the page of the {name} is as promtool wants it: {len(ours)} lines")


def _of_the_original(line: str) -> bool:
    return line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith(OF_THE_ORIGINAL)


@contextlib.contextmanager
def pool() -> Iterator[tuple[str, str]]:
    """Where a master and a worker of a pool show their figures."""
    starting = programs()
    start = next(starting)
    master = start("-m", "mooncake_store", "master", "--port=0", "--metrics_port=0")
    control = master.wait_for_line("control port").split()[-1]
    address = re.search(r"ready at (\S+)", master.wait_for_line("is ready"))[1]
    worker = start(
        "-m", "mooncake_store", "worker", "--master", address, "--segment", "64MiB",
        "--metrics", "127.0.0.1", "--json",
    )  # fmt: skip
    watched = json.loads(worker.wait_for_line("ready"))["metrics"]
    with Client(f"mooncake://{address}/team-a", transports=("tcp",)) as client:
        keys = [f"key-{number}" for number in range(100)]
        client.put_many(keys, [b"v" * 4096] * len(keys))
        client.get_many([*keys, "nowhere"])
    yield control, watched
    for program in (worker, master):
        program.signal(signal.SIGTERM)
        assert program.wait() == 0
    next(starting, None)


@contextlib.contextmanager
def prometheus(control: str, watched: str, folder: Path) -> Iterator[str]:
    """A Prometheus with the shipped configuration, for these two."""
    text = CONFIG.read_text(encoding="utf-8")
    for shipped, here in (("127.0.0.1:9003", control), ("127.0.0.1:9004", watched)):
        assert shipped in text
        text = text.replace(shipped, here.removeprefix("http://"))
    text = text.replace("15s", "1s").replace("alerts.yml", str(ALERTS))
    (folder / "prometheus.yml").write_text(text, encoding="utf-8")
    log = folder / "log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={folder / 'prometheus.yml'}",
             f"--storage.tsdb.path={folder / 'data'}", "--web.listen-address=127.0.0.1:0"],
            stderr=written, stdout=written,
        )  # fmt: skip
    try:
        until(lambda: "Server is ready" in log.read_text())
        found = re.search(r'Listening on" address=(\S+)', log.read_text())
        yield f"http://{found[1]}"
    finally:
        process.terminate()
        process.wait(30)


def ask(base: str, path: str, **query: str) -> Any:
    """The answer of the API."""
    url = f"{base}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    return json.loads(fetch(url))["data"]


def check_scrapes(base: str) -> None:
    """Wait until all that is scraped is up, twice; then ask all that the dashboard does."""
    both = 'count(count_over_time(up{job=~"mooncake-.+"}[1m]) >= 3)'

    def seen() -> bool:
        result = ask(base, "query", query=both)["result"]
        return bool(result) and result[0]["value"][1] == "2"

    until(seen)
    for target in ask(base, "targets")["activeTargets"]:
        assert target["health"] == "up", target
    answered = 0
    for query in dashboard_queries():
        for variable, value in INTERVALS.items():
            query = query.replace(variable, value)
        answered += bool(ask(base, "query", query=query)["result"])
    told(f"{answered} of {len(dashboard_queries())} queries of the dashboard have an answer")
    assert answered >= ANSWERED
    firing = [each["labels"]["alertname"] for each in ask(base, "alerts")["alerts"]]
    told(f"alerts of a pool that is well: {', '.join(firing) or 'none'}")
    assert not firing


def main() -> int:
    """Check; returns the exit code."""
    if not (shutil.which("promtool") and shutil.which("prometheus")):
        told("prometheus and promtool are not installed: nothing was checked")
        return MISSING
    check_rules()
    with pool() as (control, watched), tempfile.TemporaryDirectory() as folder:
        check_page("master", fetch(f"{control}/metrics"))
        check_page("worker", fetch(f"{watched}/metrics"))
        with prometheus(control, watched, Path(folder)) as base:
            check_scrapes(base)
    return 0


if __name__ == "__main__":
    sys.exit(main())

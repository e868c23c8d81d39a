"""`mooncake status`: the health of the cluster."""

from typing import Any

from mooncake_store.cli._app import JsonOption, emit, examples, make_app, table
from mooncake_store.cli._client import SecretOption, UrlOption, connected, store_options

app = make_app()


@app.command(
    no_args_is_help=False,
    epilog=examples(
        ("mooncake status", "shards, workers and segments"),
        ("mooncake status --json", "the same for a program"),
    ),
)
@store_options
def status(
    url: UrlOption = None, secret_file: SecretOption = None, as_json: JsonOption = False
) -> None:
    """Show whether the cluster takes puts, who lends memory to it, and how full that is."""
    from mooncake_store.core.records import SegmentState
    from mooncake_store.units import format_duration, format_size

    with connected(url, secret_file) as store:
        found = store.status()
    workers = {worker.name: worker for worker in found.workers}
    value = {
        "ready": found.ready,
        "version": found.version,
        "pid": found.pid,
        "uptime_s": found.uptime_ms / 1e3,
        "shards": list(found.shards),
        "workers": [
            {"name": w.name, "host": w.host, "state": w.state, "silent_s": w.silent_ms / 1e3}
            for w in found.workers
        ],
        "segments": [
            {
                "number": s.number,
                "name": s.name,
                "worker": s.worker,
                "host": s.host,
                "state": SegmentState(s.state).name.lower(),
                "size": s.nbytes,
                "used": s.used_bytes,
            }
            for s in found.segments
        ],
    }

    def human() -> Any:
        from rich.console import Group

        ready = "ready" if found.ready else "not ready: no worker lends memory"
        shards = "1 shard" if len(found.shards) == 1 else f"{len(found.shards)} shards"
        first = (
            f"{ready}; version {found.version}, {shards}, up "
            f"{format_duration(round(found.uptime_ms / 1e3))}"
        )
        columns = {
            "segment": "left",
            "worker": "left",
            "host": "left",
            "state": "left",
            "used": "right",
            "of": "right",
        }
        rows = []
        for segment in found.segments:
            owner = workers.get(segment.worker)
            state = SegmentState(segment.state).name.lower()
            if owner is not None and owner.state != "alive":
                state = f"{state}, worker {owner.state}"
            rows.append(
                (
                    segment.name,
                    segment.worker,
                    segment.host,
                    state,
                    format_size(segment.used_bytes),
                    format_size(segment.nbytes),
                )
            )
        return Group(first, table(columns, rows)) if rows else first

    emit(value, as_json=as_json, human=human)

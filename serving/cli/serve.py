"""`mooncake serve`: a serving system on this machine, or a front for engines elsewhere."""

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli._app import JsonOption, emit, examples, make_app
from mooncake_store.cli._client import SecretOption, store_url
from mooncake_store.cli._program_options import InsecureOption, PortFileOption
from mooncake_store.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.system import SystemSettings

app = make_app()

PrefillOption = Annotated[int, typer.Option(help="Workers that compute prompts.")]
DecodeOption = Annotated[int, typer.Option(help="Workers that compute answers.")]
ModelOption = Annotated[
    str, typer.Option(help="A checkpoint's directory, or a random model: tiny.")
]
NameOption = Annotated[
    str | None, typer.Option(help="What clients call the model.", show_default=False)
]
HostOption = Annotated[str, typer.Option(help="Address to listen on.")]
PortOption = Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")]
BackendOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=URL",
        help="Start nothing, send requests to this engine; may be given several times.",
        show_default=False,
    ),
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        "--url",
        "--master",
        metavar="STORE",
        help="Use this running pool, by URL or its master's address; without it one is started.",
        show_default=False,
    ),
]
SegmentOption = Annotated[str, typer.Option(help="Memory for KV blocks, of a pool it starts.")]
OvercommitOption = Annotated[
    bool,
    typer.Option(
        "--overcommit", help="Lend that memory even if there is less.", show_default=False
    ),
]
AdmissionOption = Annotated[
    str, typer.Option(help="Whom to refuse under load: forecast, load or at-decode.")
]
BalancingOption = Annotated[
    float,
    typer.Option(help="Pull a prefix that is so many times longer than the worker's own, or more."),
]
TtftOption = Annotated[str, typer.Option(help="How long a first token may take.")]
TbtOption = Annotated[str, typer.Option(help="How long a further token may take.")]
DeadlineOption = Annotated[str, typer.Option(help="How long a request may take.")]
FixedRolesOption = Annotated[
    bool, typer.Option("--fixed-roles", help="Let workers keep their role.", show_default=False)
]
PipelineOption = Annotated[
    int, typer.Option(help="Prefill workers that may share a long prompt, layer by layer.")
]
SettingOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="A setting of the serving workers, such as kv_blocks=2048.",
        show_default=False,
    ),
]
TokenFileOption = Annotated[
    str | None, typer.Option(help="File with the API key to ask for.", show_default=False)
]
LogLevelOption = Annotated[str, typer.Option(help="debug, info, warning or error.")]


@app.command(
    epilog=examples(
        ("mooncake serve", "one prefill and one decode worker of a tiny random model"),
        (
            "mooncake serve --prefill 2 --decode 2 --model ./Llama-3.2-1B",
            "a checkpoint of the Llama or Qwen2 family",
        ),
        (
            "mooncake serve --store mooncake://10.0.0.5:50051/kv",
            "with a pool that runs already, which others may share",
        ),
        (
            "mooncake serve --backend a=http://10.0.0.5:8000 --backend b=http://10.0.0.6:8000",
            "a front for vLLM servers, each request to the one that has most of its prompt",
        ),
    )
)
def serve(
    prefill: PrefillOption = 1,
    decode: DecodeOption = 1,
    model: ModelOption = "tiny",
    name: NameOption = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    backend: BackendOption = None,
    store: StoreOption = None,
    secret_file: SecretOption = None,
    segment: SegmentOption = "1GiB",
    overcommit: OvercommitOption = False,
    admission: AdmissionOption = "forecast",
    balancing: BalancingOption = 1.5,
    ttft: TtftOption = "30s",
    tbt: TbtOption = "500ms",
    deadline: DeadlineOption = "300s",
    fixed_roles: FixedRolesOption = False,
    pipeline: PipelineOption = 1,
    setting: SettingOption = None,
    token_file: TokenFileOption = None,
    insecure: InsecureOption = False,
    port_file: PortFileOption = None,
    log_level: LogLevelOption = "warning",
    as_json: JsonOption = False,
) -> None:
    """Serve a model with OpenAI's API until SIGTERM or Ctrl-C.

    Store, workers and front start on this machine and end with this command, however it ends; a
    pool named by --store was there before and stays.
    """
    try:
        from serving.system import SystemSettings
    except ModuleNotFoundError as error:
        raise StoreError(
            f"serving needs the module {error.name!r}",
            advice="install the extra that brings it: pip install 'mooncake-store[serve]'",
        ) from None
    from mooncake_store import config, logs
    from mooncake_store.units import parse_duration

    logs.configure(log_level)
    token = config.read_secret(token_file).decode() if token_file else ""
    settings = SystemSettings(
        prefill=prefill,
        decode=decode,
        model=model,
        name=name or "",
        host=host,
        port=port,
        token=token,
        insecure=insecure,
        store_url=store_url(store) if store else "",
        store_secret=secret_file or "",
        segment=segment,
        overcommit=overcommit,
        admission=admission,
        balancing=balancing,
        ttft_s=parse_duration(ttft),
        tbt_s=parse_duration(tbt),
        deadline_s=parse_duration(deadline),
        fixed_roles=fixed_roles,
        pipeline=pipeline,
        worker=dict(_pair(each, "--setting") for each in setting or ()),
    )
    _run(settings, backend or [], partial(_tell, as_json), port_file)


def _run(
    settings: "SystemSettings",
    backends: list[str],
    ready: "Callable[[dict[str, Any]], None]",
    port_file: str | None,
) -> None:
    """Serve with engines elsewhere where there are any, else with workers of our own."""
    from serving.program import run_external, run_system

    if backends:
        engines = dict(_pair(each, "--backend") for each in backends)
        run_external(settings, engines, ready, port_file)
    else:
        run_system(settings, ready, port_file)


def _tell(as_json: bool, facts: dict[str, Any]) -> None:
    """Say that requests are taken, and where."""
    emit(
        {"ready": True, **facts},
        as_json=as_json,
        human=lambda: f"mooncake serve answers at {facts['url']}/v1 ({facts['what']})",
    )
    sys.stdout.flush()


def _pair(text: str, option: str) -> tuple[str, Any]:
    """NAME=VALUE, whole numbers as such."""
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise ConfigError(f"{option} {text!r} is not NAME=VALUE")
    return name, int(value) if value.lstrip("-").isdigit() else value

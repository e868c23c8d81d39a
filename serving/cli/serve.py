"""`mooncake serve`: a serving system on this machine, or a front for engines elsewhere."""

import sys
from functools import partial
from typing import Annotated, Any

import typer

from mooncake_store.cli.shared.app import JsonOption, command, emit, taking
from mooncake_store.cli.shared.client import MASTER_NAMES, SecretOption, store_url
from mooncake_store.cli.shared.program_options import InsecureOption, PortFileOption
from mooncake_store.errors import ConfigError, StoreError


def _option(
    default: object, about: str, *names: str, kind: Any = str, metavar: str | None = None
) -> tuple[object, Any]:
    """An option of `serve`, of a type that its default shows; without one of `kind`."""
    kind = kind | None if default is None else type(default)
    return default, Annotated[kind, typer.Option(*names, help=about, metavar=metavar)]


OPTIONS = {
    "prefill": _option(None, "Workers for prompts: one, or none beside coupled ones.", kind=int),
    "decode": _option(None, "Workers for answers: one, or none beside coupled ones.", kind=int),
    "coupled": _option(0, "Workers for both: prompts in chunks beside answers."),
    "model": _option("tiny", "A checkpoint's directory, or a random model: tiny."),
    "name": _option(None, "What clients call the model."),
    "host": _option("127.0.0.1", "Address to listen on."),
    "port": _option(8000, "Port to listen on; 0 picks a free one."),
    "backend": _option(
        None,
        "Start nothing, send requests to this engine; may be given several times.",
        kind=list[str],
        metavar="NAME=URL",
    ),
    "backend_key_file": _option(None, "File with the API key that these engines ask for."),
    "engine_network": _option(
        None,
        "Let engines of this network be registered besides; may be given several times.",
        kind=list[str],
        metavar="NETWORK",
    ),
    "store": _option(
        None,
        "Use this running pool, by URL or its master's address; without it one is started.",
        *("--store", *MASTER_NAMES),
        metavar="STORE",
    ),
    "secret_file": (None, SecretOption),
    "segment": _option("1GiB", "Memory for KV blocks, of a pool it starts."),
    "overcommit": _option(False, "Lend that memory even if there is less.", "--overcommit"),
    "admission": _option(
        "forecast", "Whom to refuse under load: forecast, load, at-decode or module:Class."
    ),
    "placement": _option(
        "thrifty",
        "Who computes a prompt: thrifty, cache-centric, considerate, local-cache, least-loaded, "
        "random, round-robin, or module:Class of your own.",
    ),
    "balancing": _option(
        1.5,
        "With cache-centric: pull a prefix that is so many times longer than the worker's own, "
        "or more.",
    ),
    "ttft": _option("30s", "How long a first token may take."),
    "tbt": _option("500ms", "How long a further token may take."),
    "deadline": _option("300s", "How long a request may take."),
    "fixed_roles": _option(False, "Let workers keep their role.", "--fixed-roles"),
    "pipeline": _option(1, "Prefill workers that may share a long prompt, layer by layer."),
    "setting": _option(
        None,
        "A setting of the serving workers, such as kv_blocks=2048.",
        kind=list[str],
        metavar="NAME=VALUE",
    ),
    "record": _option("", "Write a trace of the requests to this new file.", metavar="FILE"),
    "token_file": _option(None, "File with the API key to ask for."),
    "admin_token_file": _option(
        None, "File with the key for registering engines; without it one is made."
    ),
    "allow_host": _option(
        None,
        "A further name of this server, for requests without a key; may be given several times.",
        kind=list[str],
        metavar="NAME",
    ),
    "insecure": (False, InsecureOption),
    "port_file": (None, PortFileOption),
    "log_level": _option("warning", "debug, info, warning or error."),
    "log_json": _option(False, "Log one JSON object a line.", "--log-json"),
    "as_json": (False, JsonOption),
}


@command(
    ("mooncake serve", "one prefill and one decode worker of a tiny random model"),
    (
        "mooncake serve --prefill 2 --decode 2 --model ./Llama-3.2-1B",
        "a checkpoint: Llama, Mistral, Mixtral, Qwen2 or 3",
    ),
    (
        "mooncake serve --coupled 2",
        "two workers, each of which computes prompts and answers",
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
@taking(OPTIONS)
def serve(
    *,
    name: str | None,
    backend: list[str] | None,
    backend_key_file: str | None,
    engine_network: list[str] | None,
    store: str | None,
    secret_file: str | None,
    ttft: str,
    tbt: str,
    deadline: str,
    setting: list[str] | None,
    token_file: str | None,
    admin_token_file: str | None,
    allow_host: list[str] | None,
    port_file: str | None,
    log_level: str,
    log_json: bool,
    as_json: bool,
    **as_they_are: Any,
) -> None:
    """Serve a model with OpenAI's API until SIGTERM or Ctrl-C.

    Store, workers and front start on this machine and end with this command, however it ends; a
    pool named by --store was there before and stays.
    """
    try:
        from serving.program import EngineSettings, run
        from serving.system import SystemSettings
    except ModuleNotFoundError as error:
        raise StoreError(
            f"serving needs the module {error.name!r}",
            advice="install the extra that brings it: pip install 'mooncake-store[serve]'",
        ) from None
    from mooncake_store import config
    from mooncake_store.credentials import http_tls, https_context
    from mooncake_store.program import logs
    from mooncake_store.program.descriptors import raise_limit
    from mooncake_store.units import parse_duration

    raise_limit()
    logs.configure(log_level, as_json=log_json)

    def secret(path: str | None) -> str:
        return config.read_secret(path).decode() if path else ""

    own = config.load(config.ClientConfig).value
    settings = SystemSettings(
        **as_they_are,
        tls=http_tls(own, as_they_are["host"]),
        name=name or "",
        token=secret(token_file),
        names=tuple(allow_host or ()),
        store_url=store_url(store) if store else "",
        store_secret=secret_file or "",
        ttft_s=parse_duration(ttft),
        tbt_s=parse_duration(tbt),
        deadline_s=parse_duration(deadline),
        worker=dict(_pair(each, "--setting") for each in setting or ()),
    )
    elsewhere = EngineSettings(
        dict(_pair(each, "--backend") for each in backend or ()),
        backend_key=secret(backend_key_file),
        admin_token=secret(admin_token_file),
        networks=tuple(engine_network or ()),
        judge=https_context(own),
    )
    run(settings, elsewhere, partial(_tell, as_json), port_file)


def _tell(as_json: bool, facts: dict[str, Any]) -> None:
    """Say that requests are taken, and where."""

    def human() -> str:
        text = f"mooncake serve answers at {facts['url']}/v1 ({facts['what']})"
        made = facts.get("admin_token_file")
        return f"{text}\nengines are registered with the key in {made}" if made else text

    emit({"ready": True, **facts}, as_json=as_json, human=human)
    sys.stdout.flush()


def _pair(text: str, option: str) -> tuple[str, str]:
    """Read NAME=VALUE."""
    name, _, value = text.partition("=")
    if not name or not value:
        raise ConfigError(f"{option} {text!r} is not NAME=VALUE")
    return name, value

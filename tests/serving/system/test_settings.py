"""Every setting of `mooncake serve` does something, as those of the store's programs do.

`OBSERVED` is what `tests/ground/test_effects.py` has for those: a system is started with each
setting changed, around workers that compute nothing, and what is seen of it, or what its workers
are told, differs. And every option of the command reaches its setting.
"""

import asyncio
import contextlib
import dataclasses
import functools
import os
import ssl
from pathlib import Path
from unittest import mock

import aiohttp
import pytest

from mooncake_store import AsyncClient, LocalCluster
from mooncake_store.cli.main import main
from mooncake_store.errors import StoreError
from serving.cli.serve import OPTIONS
from serving.conductor.conductor import Conductor
from serving.scheduling.policies import PLACEMENTS
from serving.scheduling.views import Demand, PrefillView
from serving.system import ServingSystem, SystemSettings, engine_placement
from tests.certificates import Authority
from tests.ground.test_effects import Observation, without_memory
from tests.serving.fakes import Fleet
from tests.serving.scheduling.test_admission import outlook
from tests.serving.scheduling.test_placement import costs
from tests.waiting import PATIENCE_S
from transfer_engine.errors import ConfigError
from transfer_engine.wire.tls import Tls

POOL, SECURED, SECRET = "<pool>", "<pool with a secret>", "<secret>"
TRACE, CERTIFICATE = "<trace>", "<certificate>"
FREE = 20_000 + os.getpid() % 10_000
WORDS = {"prompt": "some words", "max_tokens": 2}


class FakeWorkers:
    """In place of `LocalWorkers`; keeps what the workers are told."""

    def __init__(self, *, prefill, decode, coupled, **told):
        self.fleet, self.told, self.children = Fleet(prefill, decode, coupled), told, []
        self.addresses = self.fleet.addresses

    def start(self):
        return self

    def close(self):
        pass


@contextlib.asynccontextmanager
async def serving(given):
    """A system with these settings, and a session that asks it."""
    system = None

    def connect(address):
        return system.workers.fleet.connect(address)

    with (
        mock.patch("serving.system.LocalWorkers", FakeWorkers),
        mock.patch("serving.system.Conductor", functools.partial(Conductor, connect=connect)),
        mock.patch("serving.system.LocalCluster", functools.partial(LocalCluster, in_process=True)),
    ):
        system = ServingSystem(SystemSettings(**{"port": 0, "segment": "4MiB", **given}))
        timeout = aiohttp.ClientTimeout(PATIENCE_S)
        async with system, aiohttp.ClientSession(system.url, timeout=timeout) as http:
            yield system, http


def seen(look):
    """What `look(system, http)` returns of a running system, or why there is none."""

    def observe(given):
        async def run():
            try:
                async with serving(given) as (system, http):
                    return await look(system, http)
            except StoreError as error:
                return error.what

        return asyncio.run(run())

    return observe


def attribute(look):
    async def looked(system, _http):
        return look(system)

    return seen(looked)


@seen
async def members(_system, http):
    async with http.get("/health") as answer:
        return (await answer.json())["workers"]


@seen
async def models(_system, http):
    async with http.get("/v1/models") as answer:
        body = await answer.json()
        return answer.status, [model["id"] for model in body.get("data", ())]


def called(name):
    """The status of an answer to who calls the server by this name."""

    @seen
    async def observe(_system, http):
        async with http.get("/v1/models", headers={"Host": name}) as answer:
            return answer.status

    return observe


def completion(**asked):
    """The status of an answer, and what a prefill worker was asked for it."""

    @seen
    async def observe(system, http):
        async with http.post("/v1/completions", json=WORDS | asked) as answer:
            fleet = system.workers.fleet
            return answer.status, [message.decode_at for message in fleet.prefill[0].seen]

    return observe


def recorded(given):
    """How many requests are in the trace of a system that answered one, after it ended."""
    completion()(given)
    return len(Path(given["record"]).read_text().splitlines()) if "record" in given else 0


@seen
async def room(system, _http):
    async with AsyncClient(system.store_url) as client:
        return sum(shard.bytes_total for shard in await client.store_stats())


def refused(**asked):
    """Whether the system's policies refuse, with its SLO, what may be late or slow."""

    def look(system):
        found = outlook(**asked)._replace(slo=system._scheduler.slo)
        return system._scheduler.policies.admission.refusal(found) is not None

    return attribute(look)


def place(system, *views):
    wanted = Demand(5000, {"p0": 100, "pool": 160})
    return system._scheduler.policies.placement.place(wanted, views, costs())


def helpers(system):
    rule, views = system._scheduler.policies.pipeline, (PrefillView("p0"), PrefillView("p1"))
    return rule and rule.helpers(place(system, *views), 5000, views)


def changes_of_roles(system):
    balancer = system._scheduler.policies.roles
    return balancer and any(balancer.step(float(at), 9.0, 0.0, 1, 2) for at in range(100))


def told(name):
    return attribute(lambda system: system.workers.told.get(name))


def reachable(given):
    try:
        SystemSettings(host="0.0.0.0", **given).check()
    except StoreError as error:
        return error.what
    return ""


OBSERVED = {
    "prefill": Observation({"prefill": 2}, members),
    "decode": Observation({"decode": 2}, members),
    "coupled": Observation({"coupled": 2}, members),
    "model": Observation({"model": "nano,layers=2"}, told("model")),
    "name": Observation({"name": "mine"}, models),
    "host": Observation(
        {"host": "127.0.0.2"}, attribute(lambda system: system.url.rpartition(":")[0])
    ),
    "port": Observation({"port": FREE}, attribute(lambda s: s.url.endswith(f":{FREE}"))),
    "token": Observation({"token": "x" * 32}, models),
    "insecure": Observation({"insecure": True}, reachable),
    "tls": Observation({"tls": CERTIFICATE}, attribute(lambda s: s.url.partition(":")[0])),
    "names": Observation({"names": ("front.example",)}, called("front.example")),
    "store_url": Observation({"store_url": POOL}, attribute(lambda system: system.store is None)),
    "store_secret": Observation(
        {"store_secret": SECRET}, attribute(lambda s: s.store is None), {"store_url": SECURED}
    ),
    "segment": Observation({"segment": "8MiB"}, room),
    "overcommit": Observation({"overcommit": True}, without_memory(room)),
    "admission": Observation(
        {"admission": "at-decode"}, refused(batches=(90, 90)), {"admission": "load"}
    ),
    "balancing": Observation(
        {"balancing": 2.0},
        attribute(lambda system: place(system, PrefillView("p0")).pulled),
        {"placement": "cache-centric"},
    ),
    "placement": Observation(
        {"placement": "local-cache"},
        attribute(lambda system: place(system, PrefillView("p0")).pulled),
    ),
    "ttft_s": Observation({"ttft_s": 0.5}, refused(ttft_s=1.0)),
    "tbt_s": Observation({"tbt_s": 0.1}, refused(batches=(6, 6)), {"admission": "load"}),
    "deadline_s": Observation({"deadline_s": 50.0}, completion(timeout=100)),
    "requests_max": Observation({"requests_max": 0}, completion()),
    "fixed_roles": Observation({"fixed_roles": True}, attribute(changes_of_roles)),
    "push": Observation({"push": False}, completion()),
    "pipeline": Observation({"pipeline": 2}, attribute(helpers)),
    "record": Observation({"record": TRACE}, recorded),
    "worker": Observation({"worker": {"kv_blocks": 64}}, told("kv_blocks")),
}


def test_engines_of_others_are_chosen_by_the_same_policies_but_pull_nothing():
    wanted, views = Demand(5000, {"a": 100, "b": 5000}), [PrefillView("a"), PrefillView("b", 1.0)]
    chosen = {}
    for name in PLACEMENTS:
        placed = engine_placement(SystemSettings(placement=name)).place(wanted, views, costs())
        assert placed.source == ""
        chosen[name] = placed.prefill
    assert chosen.pop("random") in ("a", "b")
    assert chosen == {
        "cache-centric": "b", "thrifty": "b", "considerate": "b", "local-cache": "b",
        "least-loaded": "a", "round-robin": "a",
    }  # fmt: skip


SETTINGS = [field.name for field in dataclasses.fields(SystemSettings)]


@pytest.fixture
def pools(tmp_path):
    """What stands for two pools that run already, and the file with the secret of one of them."""
    secret = tmp_path / "secret"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    with (
        LocalCluster(1, "4MiB", in_process=True) as pool,
        LocalCluster(1, "4MiB", in_process=True, secret=b"s" * 32) as secured,
    ):
        files = {SECRET: str(secret), TRACE: str(tmp_path / "trace.jsonl")}
        files[CERTIFICATE] = Tls(certificate=str(Authority(tmp_path).signs("127.0.0.1")))
        yield {POOL: pool.url, SECURED: secured.url} | files


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_of_serving_changes_what_is_seen(setting, pools):
    assert setting in OBSERVED, f"{setting}: nothing observes that it has an effect"

    def filled(given):
        return {
            key: pools.get(value, value) if isinstance(value, str) else value
            for key, value in given.items()
        }

    observation = OBSERVED[setting]
    assert setting in observation.changed
    before = observation.observe(filled(observation.base))
    after = observation.observe(filled({**observation.base, **observation.changed}))
    assert before != after


def test_nothing_of_serving_is_observed_that_is_no_setting():
    assert set(OBSERVED) == set(SETTINGS)


FIELDS = {
    "backend": "engines", "engine_network": "networks", "backend_key_file": "backend_key",
    "admin_token_file": "admin_token", "allow_host": "names", "store": "store_url",
    "secret_file": "store_secret", "ttft": "ttft_s", "tbt": "tbt_s", "deadline": "deadline_s",
    "setting": "worker", "token_file": "token",
}  # fmt: skip
"""Where options are that are not called like their setting."""
TYPED = {
    "model": "nano,layers=2", "name": "mine", "host": "127.0.0.2", "port": "7",
    "backend": "a=http://127.0.0.1:7", "store": "127.0.0.1:7", "segment": "2MiB",
    "admission": "load", "setting": "kv_blocks=7", "log_level": "error", "token_file": SECRET,
    "admin_token_file": SECRET, "backend_key_file": SECRET, "allow_host": "front.example",
    "engine_network": "10.0.0.0/16", "secret_file": "/x", "port_file": "/x", "record": "/x",
    "ttft": "7s", "tbt": "7s", "deadline": "7s",
}  # fmt: skip


def is_context(value):
    """What is made of the settings of TLS, anew each time; no option has to do with it."""
    return isinstance(value, ssl.SSLContext)


@pytest.fixture
def started(monkeypatch):
    """Run `mooncake serve` up to where it would start; return all that it starts with."""
    seen = {}

    def run(settings, elsewhere, _ready, port_file):
        for given in (settings, elsewhere):
            told = {each.name: getattr(given, each.name) for each in dataclasses.fields(given)}
            seen.update({name: value for name, value in told.items() if not is_context(value)})
        seen["port_file"] = port_file

    monkeypatch.setattr("serving.program.run", run)
    monkeypatch.setattr(
        "mooncake_store.program.logs.configure",
        lambda level, as_json: seen.update(log_level=level, log_json=as_json),
    )

    def start(*words):
        seen.clear()
        assert main(["serve", *words]) == 0
        return dict(seen)

    return start


@pytest.mark.parametrize("option", [option for option in OPTIONS if option != "as_json"])
def test_an_option_of_serve_reaches_its_setting(started, tmp_path, option):
    secret = tmp_path / "secret"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    words = [f"--{option.replace('_', '-')}"]
    if OPTIONS[option][0] is not False:
        words.append(TYPED.get(option, "2").replace(SECRET, str(secret)))
    before, after = started(), started(*words)
    field = FIELDS.get(option, option)
    assert {name for name, value in after.items() if value != before[name]} == {field}


def test_every_setting_of_serving_has_an_option_but_those_for_programs():
    reached = {FIELDS.get(option, option) for option in OPTIONS}
    # That of TLS is made of the settings which all programs share.
    assert set(SETTINGS) - reached == {"push", "requests_max", "tls"}


@pytest.mark.asyncio
async def test_a_tokenizer_that_cannot_be_used_is_told_of_at_start(monkeypatch):
    def broken(directory, eos):
        raise ConfigError("the chat template of the model cannot be used")

    monkeypatch.setattr("serving.front.app.load_tokenizer", broken)
    with pytest.raises(ConfigError, match="chat template"):
        async with serving({}):
            pass

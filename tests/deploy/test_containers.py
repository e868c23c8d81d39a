"""The image and the compose file: what they name is there, and nothing in them is a secret."""

import json
import re
import shlex
import tomllib
from fnmatch import fnmatch

import pytest
import yaml

from mooncake_store.config import PROGRAMS
from mooncake_store.config.loading import load_settings
from mooncake_store.config.settings import MasterConfig, WorkerConfig
from tests.command_lines import parse
from tests.sources import ROOT

DOCKER = ROOT / "deploy" / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
OURS = {name: each for name, each in SERVICES.items() if each["image"] == "mooncake"}


def instructions():
    """Every instruction of the Dockerfile as its name and its words, in order."""
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for line in lines.replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            yield name, rest


def said(name):
    return [rest for each, rest in instructions() if each == name]


def copied():
    """What comes from the checkout."""
    return [source for rest in said("COPY") for source in rest.split()[:-1]]


def test_the_image_is_made_of_all_that_the_package_is():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    about = [project["project"]["readme"], *project["project"]["license-files"]]
    assert {"pyproject.toml", *wheel, *about} <= set(copied())
    assert all((ROOT / source).exists() for source in copied())


def test_what_is_copied_is_not_ignored():
    lines = (DOCKER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    kept = {line.removeprefix("!") for line in rules if line.startswith("!")}
    assert kept == set(copied())
    assert any(fnmatch("mooncake_store/__pycache__", line) for line in rules[1:])


def test_no_program_of_the_image_is_root():
    user = said("USER")[-1]
    assert user.isdigit()
    assert int(user)
    assert f"--uid {user} " in said("RUN")[-1]
    names = [name for name, _ in instructions()]
    assert names.index("USER") < names.index("ENTRYPOINT")


def test_the_image_has_no_secret_and_says_how_it_is():
    assert not re.search(
        "secret|token|password", " ".join(said("ENV") + said("ARG")), re.IGNORECASE
    )
    (health,) = said("HEALTHCHECK")
    ready = json.loads(health.partition("CMD ")[2])[-1]
    set_to = dict(shlex.split(word)[0].split("=", 1) for word in " ".join(said("ENV")).split())
    for program, variable in ((MasterConfig, "MASTER"), (WorkerConfig, "WORKER")):
        loaded = load_settings(program, PROGRAMS, environ=set_to | {"MOONCAKE_STRICT": "true"})
        assert loaded.value.port_file == set_to[f"MOONCAKE_{variable}_PORT_FILE"] == ready


@pytest.mark.parametrize("name", OURS)
def test_services_run_commands_with_settings_that_exist(name):
    service = OURS[name]
    parse(["mooncake", *service["command"]])
    program = MasterConfig if service["command"][0] == "master" else WorkerConfig
    given = service["environment"] | {"MOONCAKE_STRICT": "true"}
    settings = load_settings(program, PROGRAMS, environ=given).value
    assert settings.host == "0.0.0.0"
    assert settings.secret_file == "/run/secrets/secret"
    assert service["secrets"] == ["secret"]


def test_workers_find_the_master_and_their_memory():
    workers = [each for each in OURS.values() if each["command"][0] == "worker"]
    assert len(workers) == 2
    assert len({each["environment"]["MOONCAKE_WORKER_NAME"] for each in workers}) == 2
    for worker in workers:
        host, port = worker["environment"]["MOONCAKE_WORKER_MASTER"].split(":")
        assert host in OURS
        assert port == str(MasterConfig().port)
        assert worker["ulimits"]["memlock"] == -1
        segment = worker["command"][worker["command"].index("--segment") + 1]
        assert (segment, worker["shm_size"]) == ("1GiB", "1536m")  # it has to hold more than that


def test_what_services_mount_is_there():
    for name, service in SERVICES.items():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            there = (DOCKER / source).exists() if "/" in source else source in COMPOSE["volumes"]
            assert there, f"{name} mounts {source}"
        assert set(service["networks"]) <= COMPOSE["networks"].keys()


def test_prometheus_asks_every_program():
    settings = yaml.safe_load((DOCKER / "prometheus.yml").read_text(encoding="utf-8"))
    asked = {
        target
        for job in settings["scrape_configs"]
        for each in job["static_configs"]
        for target in each["targets"]
    }
    port_of = {"master": 9003, "worker": 9004}
    assert asked == {f"{name}:{port_of[each['command'][0]]}" for name, each in OURS.items()}

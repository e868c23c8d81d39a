"""Deployed to Kubernetes: names that meet, settings that are ours, no more rights than needed.

That the shapes are those of Kubernetes is asked of its schemas by `make deploy-check`.
"""

import json

import pytest

from mooncake_store.compat.control_api import READS
from mooncake_store.config import PROGRAMS
from mooncake_store.config.loading import load_settings
from mooncake_store.config.settings import MasterConfig, WorkerConfig
from mooncake_store.units import parse_duration
from mooncake_store.worker.worker import LEASES_S
from scripts.deploy_rules import PAGE, page
from tests.command_lines import parse
from tests.deploy.manifests import ENGINES, FOLDER, documents, of_kind, parts
from tests.sources import ROOT

SETS = of_kind("StatefulSet")
SERVICES = of_kind("Service")
PROGRAM_OF = {"kv-master": MasterConfig, "kv-worker": WorkerConfig}
READY = "/run/mooncake/ready.json"
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}


def nbytes(text):
    return int(text[:-2]) * UNITS[text[-2:]]


def pod(name):
    return SETS[name]["spec"]["template"]


def container(name):
    (only,) = pod(name)["spec"]["containers"]
    return only


def settings(name):
    """What the program of a pod runs with."""
    given = {each["name"]: each.get("value", name + "-0") for each in container(name)["env"]}
    environ = {variable: value for variable, value in given.items() if variable != "POD_NAME"}
    program = PROGRAM_OF[name]
    return load_settings(program, PROGRAMS, environ=environ | {"MOONCAKE_STRICT": "true"}).value


@pytest.mark.parametrize("name", PROGRAM_OF)
def test_pods_run_commands_with_settings_that_exist(name):
    parse(["mooncake", *container(name)["args"]])
    assert settings(name).host == "0.0.0.0"


@pytest.mark.parametrize("name", PROGRAM_OF)
def test_pods_may_do_no_more_than_they_have_to(name):
    spec, own = pod(name)["spec"], container(name)["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert f"USER {spec['securityContext']['runAsUser']}" in (
        ROOT / "deploy/docker/Dockerfile"
    ).read_text(encoding="utf-8")
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_no_service_becomes_a_setting():
    """Services describe themselves by variables, unless they have no address of their own."""
    for name, service in SERVICES.items():
        assert service["spec"]["clusterIP"] == "None", name
        assert not name.upper().replace("-", "_").startswith("MOONCAKE")
    assert not any(pod(name)["spec"]["enableServiceLinks"] for name in SETS)


@pytest.mark.parametrize("name", PROGRAM_OF)
def test_names_of_ports_and_labels_meet(name):
    labels = pod(name)["metadata"]["labels"]
    service = SERVICES[SETS[name]["spec"]["serviceName"]]
    assert SETS[name]["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == service["metadata"]["labels"] == labels
    budget = of_kind("PodDisruptionBudget")[name]["spec"]
    assert budget["selector"]["matchLabels"] == labels
    ports = {each["name"]: each["containerPort"] for each in container(name)["ports"]}
    assert ports == {each["name"]: each["port"] for each in service["spec"]["ports"]}
    given = settings(name)
    assert given.port == ports["pool" if name == "kv-master" else "data"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container(name)[probe]
        if "exec" in asked:
            assert asked["exec"]["command"][-1] == READY
            assert f"={READY}" in (ROOT / "deploy/docker/Dockerfile").read_text(encoding="utf-8")
        else:
            assert asked["httpGet"]["port"] in ports


def test_the_master_is_asked_what_it_answers_itself():
    probes = {container("kv-master")[f"{kind}Probe"]["httpGet"]["path"]
              for kind in ("startup", "readiness", "liveness")}  # fmt: skip
    assert probes <= {each.path for each in READS}
    assert (
        f"--metrics_port={SERVICES['kv-master']['spec']['ports'][1]['port']}"
        in (container("kv-master")["args"])
    )


def test_workers_find_their_master():
    namespace = of_kind("Namespace").popitem()[0]
    given = settings("kv-worker")
    assert given.master == f"kv-master-0.kv-master.{namespace}.svc:{settings('kv-master').port}"
    assert documents(FOLDER / "kustomization.yaml")[0]["namespace"] == namespace


@pytest.mark.parametrize("name", PROGRAM_OF)
def test_mounts_are_there_and_large_enough(name):
    spec = SETS[name]["spec"]
    volumes = {each["name"]: each for each in pod(name)["spec"]["volumes"]}
    volumes |= {each["metadata"]["name"]: each for each in spec.get("volumeClaimTemplates", ())}
    mounted = {each["name"]: each["mountPath"] for each in container(name)["volumeMounts"]}
    assert mounted.keys() == volumes.keys()
    (secret,) = documents(FOLDER / "secret.example.yaml")
    assert volumes["secret"]["secret"]["secretName"] == secret["metadata"]["name"]
    assert volumes["secret"]["secret"]["defaultMode"] == 0o400
    (key,) = secret["stringData"]
    assert settings(name).secret_file == f"{mounted['secret']}/{key}"
    shm = volumes["shm"]["emptyDir"]
    assert shm["medium"] == "Memory"
    lent = sum(getattr(settings(name), "segments", ()))
    assert (
        lent < nbytes(shm["sizeLimit"]) < nbytes(container(name)["resources"]["limits"]["memory"])
    )


def test_a_worker_has_the_time_to_drain():
    arguments = container("kv-worker")["args"]
    drain_s = parse_duration(arguments[arguments.index("--drain") + 1])
    assert pod("kv-worker")["spec"]["terminationGracePeriodSeconds"] > drain_s + LEASES_S


def test_prometheus_may_reach_what_it_asks():
    (policy,) = of_kind("NetworkPolicy").values()
    named = {each["port"] for each in policy["spec"]["ingress"][1]["ports"]}
    monitors = of_kind("ServiceMonitor", parts(FOLDER / "monitoring"))
    assert len(monitors) == len(SERVICES)
    for monitor in monitors.values():
        labels = monitor["spec"]["selector"]["matchLabels"]
        (service,) = [each for each in SERVICES.values() if each["metadata"]["labels"] == labels]
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in named & {each["name"] for each in service["spec"]["ports"]}


def test_the_operator_has_the_alerts_that_there_are():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python scripts/deploy_rules.py"


def strings(part):
    """Every text in what a file describes."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict | list):
        for each in part.values() if isinstance(part, dict) else part:
            yield from strings(each)


@pytest.mark.parametrize("path", sorted(ENGINES.iterdir()), ids=lambda path: path.stem)
def test_engines_find_the_pool(path):
    described = documents(path)
    texts = list(strings(described))
    (config,) = [json.loads(text) for text in texts if text.startswith("{")]
    assert config["kv_connector"] == "MooncakePyConnector"
    assert config["kv_load_failure_policy"] == "recompute"
    url = config["kv_connector_extra_config"]["url"]
    assert url == f"mooncake://{settings('kv-worker').master}/default"
    assert {"kv-pool", "/etc/mooncake", "/etc/mooncake/secret"} <= set(texts)
    (label,) = [
        each
        for rule in of_kind("NetworkPolicy")["kv-pool"]["spec"]["ingress"]
        for each in rule["from"]
        if "namespaceSelector" in each and "podSelector" in each
    ]
    ((name, value),) = label["podSelector"]["matchLabels"].items()
    assert f'"{name}": "{value}"' in json.dumps(described)

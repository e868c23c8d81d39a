"""What a package of this project says of itself, outside of a checkout."""

import re
import tomllib
from importlib import metadata

import mooncake_store
from tests.sources import ROOT, text

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_that_of_the_installed_package():
    assert mooncake_store.__version__ == metadata.version("mooncake-store")


def test_the_packages_readme_links_to_nothing_that_only_a_checkout_has():
    readme = text(PROJECT["readme"])
    targets = re.findall(r"\]\(([^)\s]+)\)", readme)
    assert targets
    assert [target for target in targets if not target.startswith("https://")] == []
    assert readme.startswith("# Mooncake store\n")


def test_the_project_names_urls():
    assert PROJECT["urls"]
    assert all(url.startswith("https://") for url in PROJECT["urls"].values())


def test_the_citation_and_the_readme_name_the_same_paper():
    url = PROJECT["urls"]["Paper"]
    assert f"url: {url}\n" in text("CITATION.cff")
    assert f"]({url})" in text("README.md")

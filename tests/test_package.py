"""What a package of this project says of itself, outside of a checkout."""

import re
import tomllib
from importlib import metadata

import mooncake_store
from tests.sources import PACKAGES, ROOT, files, text

BUILD = tomllib.loads(text("pyproject.toml"))
PROJECT = BUILD["project"]
DROP_IN = tomllib.loads(text("compat/pyproject.toml"))["project"]
INSTALLING = "docs/guide/installing.md"


def test_the_version_is_that_of_the_installed_package():
    assert mooncake_store.__version__ == metadata.version("mooncake-store")


def test_the_version_is_written_once():
    assert "version" not in PROJECT
    assert BUILD["tool"]["hatch"]["version"]["path"] == "mooncake_store/__init__.py"
    number = f'"{mooncake_store.__version__}"'
    written = [path for path in files(".py", ".toml") if number in text(path)]
    # An sdist cannot read what lies outside of it, so the drop-in has a copy.
    assert sorted(map(str, written)) == ["compat/pyproject.toml", "mooncake_store/__init__.py"]
    assert DROP_IN["version"] == mooncake_store.__version__


def test_both_distributions_carry_the_licence_and_types():
    for project in (PROJECT, DROP_IN):
        assert project["license"] == "Apache-2.0"
        assert project["license-files"] == ["LICENSE"]
    assert text("compat/LICENSE") == text("LICENSE")
    assert set(BUILD["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == set(PACKAGES)
    untyped = [name for name in (*PACKAGES, "compat/mooncake") if not typed(name)]
    assert untyped == []


def typed(package):
    return (ROOT / package / "py.typed").is_file()


def test_the_pages_name_the_pythons_that_are_supported():
    prefix = "Programming Language :: Python :: "
    supported = [c.removeprefix(prefix) for c in PROJECT["classifiers"] if c.startswith(prefix)]
    assert PROJECT["requires-python"] == DROP_IN["requires-python"] == f">={supported[0]}"
    assert BUILD["tool"]["mypy"]["python_version"] == supported[0]
    assert BUILD["tool"]["ruff"]["target-version"] == "py" + supported[0].replace(".", "")
    named = " and ".join((", ".join(supported[:-1]), supported[-1]))
    assert f"Python {named.replace('and', 'or')}. " in text(INSTALLING)
    assert f"The tests run on {named}. " in text(INSTALLING)
    # What `make` looks for comes newest first.
    wanted = " ".join(f"python{version}" for version in reversed(supported))
    assert f"for candidate in {wanted} python3;" in text("scripts/setup.sh")


def test_every_extra_is_in_the_table_of_extras():
    _, _, table = text(INSTALLING).partition("| extra | what it brings |\n|---|---|\n")
    rows = re.findall(r"^\| ([^|]+) \| \S", table.partition("\n\n")[0], re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(PROJECT["optional-dependencies"])


def test_an_extra_that_a_page_or_an_error_names_exists():
    named = {
        name
        for path in (*files(".md"), *files(".py", under=PACKAGES))
        for found in re.findall(r"pip install '?[\w.-]*\[([\w,]+)\]", text(path))
        for name in found.split(",")
    }
    assert "serve" in named
    of_both = (each["optional-dependencies"] for each in (PROJECT, DROP_IN))
    assert named <= {name for extras in of_both for name in extras}


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

"""What an installed store has to do where only the wheels and what they require are installed.

    python -P installed.py PACKAGE...

Run by `check.py`, with the interpreter of such an environment and in an empty folder. Imports every
module (one that cannot be imported has to lack what an extra brings), takes every public name,
loads every entry point, reads the data files, runs both scripts and then the demo.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

STORE, DROP_IN = "mooncake-store", "mooncake-store-dropin"
# Distributions whose modules have another name.
MODULES = {"pyzmq": "zmq"}


def modules(distribution):
    """The modules of a distribution that are not programs."""
    for file in metadata.files(distribution) or ():
        if file.suffix == ".py" and file.name != "__main__.py":
            yield ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def extras():
    """What the extras bring: the name of a module, and the extra."""
    for line in metadata.requires(STORE):
        if found := re.match(r"([\w-]+).*extra == '(\w+)'", line):
            name = found[1]
            yield MODULES.get(name, name.replace("-", "_")), found[2]


def every_module_is_imported_or_needs_an_extra():
    brought, lacking = dict(extras()), {}
    for name in (*modules(STORE), *modules(DROP_IN)):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            top = (error.name or "").partition(".")[0]
            if top not in brought:
                raise
            lacking.setdefault(top, []).append(name)
    assert len(sys.modules) > 300
    for top, names in sorted(lacking.items()):
        print(f"  {len(names)} modules need {top}, which an extra brings: {names[0]}, ...")


def every_package_is_typed_and_has_its_public_names(packages):
    for name in packages:
        package = importlib.import_module(name)
        assert all(hasattr(package, each) for each in getattr(package, "__all__", ())), name
        assert resources.files(name).joinpath("py.typed").is_file(), name


def every_entry_point_loads():
    found = [*metadata.distribution(STORE).entry_points]
    groups = {each.group for each in found}
    assert groups >= {"console_scripts", "fsspec.specs", "vllm.general_plugins"}
    assert all(callable(each.load()) for each in found)


def data_is_there():
    page = resources.files("serving.front").joinpath("page")
    assert {each.name for each in page.iterdir()} >= {"index.html", "page.css", "page.js"}
    assert len(resources.files("serving.engine").joinpath("words.txt").read_text().split()) > 100
    assert resources.files("serving.simulator").joinpath("data/a800-llama3-70b.toml").is_file()


def said(script, *words):
    """What a script of this environment prints."""
    command = [str(Path(sys.executable).with_name(script)), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def scripts_run():
    assert said("mooncake", "--version") == f"mooncake-store {metadata.version(STORE)}\n"
    assert said("mount.mooncake", "-h").startswith("usage: mount.mooncake ")
    said("mooncake", "warmup")
    subprocess.run([sys.executable, "-m", "mooncake_store.demo"], check=True)


def main(packages):
    for check, *arguments in (
        (every_module_is_imported_or_needs_an_extra,),
        (every_package_is_typed_and_has_its_public_names, packages),
        (every_entry_point_loads,),
        (data_is_there,),
        (scripts_run,),
    ):
        print(check.__name__.replace("_", " "), flush=True)
        check(*arguments)


if __name__ == "__main__":
    main(sys.argv[1:])

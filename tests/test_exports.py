"""The public surface: what is exported exists, is documented, and costs nothing to import."""

import importlib
import inspect
import subprocess
import sys

import pytest

from tests.sources import PACKAGES, library, module_name

MODULES = [module_name(path) for path in library() if path.name != "__main__.py"]

IMPORT_MS_MAX = 150
HEAVY = ("numpy", "numba", "torch", "asyncio", "rich", "fsspec")


def imported(name):
    """The module, or a skip when what it needs is an extra that is not installed here."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] in PACKAGES:
            raise
        pytest.skip(f"{name} needs {error.name}")


def public_names(module):
    """What `__all__` says, or else the public classes and functions made in the module."""
    made_here = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]
    return getattr(module, "__all__", made_here)


@pytest.mark.parametrize("name", MODULES)
def test_exported_names_exist_and_are_documented(name):
    module = imported(name)
    assert (module.__doc__ or "").strip(), f"{name} has no docstring"
    exported = public_names(module)
    assert len(set(exported)) == len(exported)
    for export in exported:
        value = getattr(module, export)
        if inspect.isclass(value) or inspect.isroutine(value):
            documented = (inspect.getdoc(value) or "").strip()
            assert documented, f"{name}.{export} has no docstring"
            # The docstring that dataclasses make up is the signature.
            assert not documented.startswith(f"{export}("), f"{name}.{export} has no docstring"


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_name_their_surface(package):
    module = importlib.import_module(package)
    assert isinstance(module.__all__, list)
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


@pytest.mark.parametrize("package", [*PACKAGES, ", ".join(PACKAGES)])
def test_importing_is_light_and_quick(package):
    program = (
        "import sys, time; started = time.process_time();"
        f"import {package};"
        "print((time.process_time() - started) * 1e3);"
        f"heavy = [name for name in {HEAVY} if name in sys.modules];"
        "sys.exit(f'also imported {heavy}' if heavy else 0)"
    )

    def milliseconds():
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return float(done.stdout)

    # Time on the processor, and the best of several: our own work, not the load of the machine.
    assert min(milliseconds() for _ in range(3)) < IMPORT_MS_MAX

"""`mooncake version`: what is installed, without importing any of it."""

import platform

from mooncake_store.cli.shared.app import JsonOption, command, emit

SHOWN = ("numpy", "numba", "msgspec", "xxhash", "fsspec", "uvloop")


@command(
    ("mooncake version", "the version of the store and of what it runs on"),
    ("mooncake version --json", "the same for a program or a bug report"),
)
def version(as_json: JsonOption = False) -> None:
    """Show the installed version and those of its main dependencies."""
    from importlib import metadata

    from mooncake_store import __version__

    def installed(distribution: str) -> str | None:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return None

    dependencies = {name: installed(name) for name in SHOWN}
    value = {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "dependencies": dependencies,
    }

    def human() -> str:
        parts = ", ".join(f"{name} {found}" for name, found in dependencies.items())
        return (
            f"mooncake-store {value['version']}\n"
            f"python {value['python']} on {value['platform']}\n{parts}"
        )

    emit(value, as_json=as_json, human=human)

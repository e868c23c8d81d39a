"""s3fs on an S3-compatible server of this machine, to be measured in the same run.

Both are installed at fixed versions into an environment of their own. The server is moto's, in
Python and in memory: no disk and no network weigh on it, but it is slower than servers that are
written for speed, so a ratio says how far a local object store is, not how far S3 is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mooncake_store.bench.parts import environment, s3_server
from mooncake_store.bench.parts.process import Child, Driver, accepts, free_ports, wait_for

if TYPE_CHECKING:
    from contextlib import ExitStack

__all__ = ["NAME", "side"]

VERSIONS = {"s3fs": "2026.9.0", "moto": "5.2.5"}
NAME = f"s3fs-{VERSIONS['s3fs']}"
REQUIREMENTS = (f"s3fs=={VERSIONS['s3fs']}", f"moto[server]=={VERSIONS['moto']}", "numpy")
START_TIMEOUT_S = 60.0


def side(stack: ExitStack, names: int) -> Driver:
    """A client of a server with so many names in `names/`; raises Missing."""
    python = str(environment.made(NAME, "s3fs with its server", REQUIREMENTS) / "bin" / "python")
    (port,) = free_ports(1)
    command = [python, str(Path(s3_server.__file__)), str(port), str(names)]
    server = stack.enter_context(Child("the S3 server", command))
    wait_for("start", lambda: accepts(port), server, START_TIMEOUT_S)
    driver = stack.enter_context(Driver("s3fs", "files", python))
    options = {
        "key": "bench",
        "secret": "bench",
        "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}"},
    }
    driver.ask("open", protocol="s3", root=s3_server.BUCKET, options=options)
    return driver

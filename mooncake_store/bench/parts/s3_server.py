"""An S3-compatible server in memory: moto's, on loopback, with a bucket of names already there.

    python s3_server.py PORT NAMES

Runs under the interpreter of the environment that `s3.py` makes, and imports nothing of this
project. The names are entered from within: put one by one over HTTP, 100,000 take ten minutes.
"""

from __future__ import annotations

import sys
import threading

BUCKET = "bench"


def main() -> None:
    """Serve until killed."""
    from moto.core import DEFAULT_ACCOUNT_ID  # type: ignore[import-not-found]
    from moto.s3.models import s3_backends  # type: ignore[import-not-found]
    from moto.server import ThreadedMotoServer  # type: ignore[import-not-found]

    port, names = int(sys.argv[1]), int(sys.argv[2])
    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    backend.create_bucket(BUCKET, "us-east-1")
    for number in range(names):
        backend.put_object(BUCKET, f"names/{number:06d}", b"x")
    ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()

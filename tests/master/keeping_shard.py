"""A shard process that says it keeps what it holds, which is nothing when it is started again."""

import sys

from mooncake_store.master import shard_process

_build = shard_process.build_service


def build(*arguments):
    """Make a service as the real one does."""
    service = _build(*arguments)
    service.site.keeps = service.site.kept = True
    return service


if __name__ == "__main__":
    shard_process.build_service = build
    sys.exit(shard_process.main())

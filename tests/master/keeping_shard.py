"""A shard process that says it keeps what it holds, which is nothing when it is started again."""

import sys

from mooncake_store.master import shard_process

_open = shard_process.open_service


async def open_service(*arguments, **options):
    """Make a service as the real one does."""
    service, loading = await _open(*arguments)
    service.site.keeps = service.site.kept = True
    return service, loading


if __name__ == "__main__":
    shard_process.open_service = open_service
    sys.exit(shard_process.main())

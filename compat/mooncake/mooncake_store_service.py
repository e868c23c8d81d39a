"""`mooncake.mooncake_store_service` of the original; needs aiohttp."""

import sys

from mooncake_store.compat import rest

if __name__ == "__main__":
    rest.sync_main()
else:
    # The module itself and not its names: a program that replaces one here, to extend the service
    # or to test with it, means the one that the service uses.
    sys.modules[__name__] = rest

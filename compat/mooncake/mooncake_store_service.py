"""`mooncake.mooncake_store_service` of the original; needs aiohttp."""

from mooncake_store.compat.rest import main, rest_application

__all__ = ["main", "rest_application"]

if __name__ == "__main__":
    main()

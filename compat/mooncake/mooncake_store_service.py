"""`mooncake.mooncake_store_service` of the original; needs aiohttp."""

from mooncake_store.compat.rest import application, main

__all__ = ["application", "main"]

if __name__ == "__main__":
    main()

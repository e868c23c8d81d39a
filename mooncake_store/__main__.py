"""`python -m mooncake_store` is `mooncake`, for places where scripts are not on the path."""

import sys

from mooncake_store.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

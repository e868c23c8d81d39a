"""The command of the store in a later version: `python -m tests.standby.later WHAT ...`.

Only WHAT is of another version: "journal", or "registers".
"""

import sys

from mooncake_store.cli.main import main
from mooncake_store.master import registers, shipping
from mooncake_store.standby import following

if __name__ == "__main__":
    if sys.argv.pop(1) == "journal":
        shipping.SHIPPING = following.SHIPPING = shipping.SHIPPING + 1
    else:
        registers.VERSION = registers._WITHOUT_HOSTS = registers.VERSION + 1
    sys.exit(main(sys.argv[1:]))

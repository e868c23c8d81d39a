"""The command of the store on a host that was started anew: `python -m tests.master.rebooted ...`.

Only what tells memory of before from that of now is another one: the boot as the journal, the state
directory and the record of a worker know it.
"""

import sys
import uuid

from mooncake_store.cli.main import main
from mooncake_store.journal import origin
from mooncake_store.master import state_directory
from mooncake_store.worker import keeping

BOOT = str(uuid.UUID(int=77))


class _BootFile:
    def read_text(self, encoding):
        return BOOT


if __name__ == "__main__":
    origin._BOOT = _BootFile()
    state_directory.host_identity = keeping.host_identity = lambda: BOOT
    sys.exit(main(sys.argv[1:]))

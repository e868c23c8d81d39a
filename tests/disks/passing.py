"""A file system that passes everything on to a folder, and fails when it is told to.

    python -m tests.disks.passing FOLDER MOUNTPOINT

It is told by lines of JSON on its standard input, and answers each with a line: `{"set": {...}}`
makes the rules those that are given, `{"blocked": true}` asks how many calls wait. A rule is
"operation": [fault, name], for calls on files whose name contains `name`. Faults are the name of
an error ("EIO"), "short" (half of what was asked), "flip" (one bit of what is read), "lost" (a
write that is acknowledged and forgotten), "slow 5000000" (so many bytes a second, of all that read)
and "block" (until the rules are others). It ends with its input.
"""

import errno
import json
import os
import sys
import threading
import time

import mfusepy

_BLOCKED_S = 120.0


class Rules:
    """What is to fail, and how many calls wait for that to be over."""

    def __init__(self):
        self._changed = threading.Condition()
        self._rules = {}
        self._blocked = 0
        self._free_at = 0.0

    def set(self, rules):
        """Replace all rules; calls that were blocked go on."""
        with self._changed:
            self._rules = rules
            self._changed.notify_all()

    @property
    def blocked(self):
        with self._changed:
            return self._blocked

    def met(self, operation, path):
        """Fail as a rule says, or return what the operation itself has to do."""
        with self._changed:
            rules = self._rules
            fault, name = rules.get(operation, ("", ""))
            if not fault or name not in os.path.basename(path):
                return ""
            if fault == "block":
                self._blocked += 1
                self._changed.wait_for(lambda: self._rules is not rules, _BLOCKED_S)
                self._blocked -= 1
                return ""
        if fault.startswith("E"):
            raise mfusepy.FuseOSError(getattr(errno, fault))
        return fault

    def pace(self, nbytes, rate):
        """Return when so many bytes, behind those of others, have come at a rate."""
        with self._changed:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + nbytes / rate
            left_s = self._free_at - now
        threading.Event().wait(left_s)


class Passing(mfusepy.Operations):
    """The calls of the kernel, on a folder."""

    use_ns = True

    def __init__(self, folder, rules, ready):
        self._folder, self._rules, self._ready = folder, rules, ready

    def _at(self, path):
        return os.path.join(self._folder, path.lstrip("/"))

    def init_with_config(self, conn_info, config):
        if config is not None:
            config.use_ino = config.hard_remove = config.direct_io = 1
            config.attr_timeout = config.entry_timeout = config.negative_timeout = 0.0
        self._ready()

    def getattr(self, path, fh=None):
        self._rules.met("getattr", path)
        found = os.lstat(self._at(path)) if fh is None else os.fstat(fh)
        names = ("mode", "ino", "nlink", "uid", "gid", "size", "blocks")
        value = {f"st_{name}": getattr(found, f"st_{name}") for name in names}
        return value | {f"st_{at}time": getattr(found, f"st_{at}time_ns") for at in "acm"}

    def readdir(self, path, fh):
        # Names alone would come with inode 0, which programs take for no entry.
        yield ".", self.getattr(path), 0
        for name in os.listdir(self._at(path)):
            yield name, self.getattr(os.path.join(path, name)), 0

    def access(self, path, amode):
        return 0

    def statfs(self, path):
        found = os.statvfs(self._folder)
        names = ("bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "favail")
        return {f"f_{name}": getattr(found, f"f_{name}") for name in names} | {"f_namemax": 255}

    def open(self, path, flags):
        self._rules.met("open", path)
        # Offsets and lengths of any kind: what the kernel made of O_DIRECT is its own business.
        return os.open(self._at(path), flags & ~(os.O_DIRECT | os.O_EXCL | os.O_CREAT))

    def create(self, path, mode, fi=None):
        self._rules.met("open", path)
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def read(self, path, size, offset, fh):
        fault = self._rules.met("read", path)
        content = os.pread(fh, max(1, size // 2) if fault == "short" else size, offset)
        if fault.startswith("slow"):
            self._rules.pace(len(content), float(fault.split()[1]))
        if fault == "flip" and content:
            changed = bytearray(content)
            changed[len(changed) // 2] ^= 1
            return bytes(changed)
        return content

    def write(self, path, data, offset, fh):
        fault = self._rules.met("write", path)
        if fault == "lost":
            return len(data)
        return os.pwrite(fh, data[: max(1, len(data) // 2)] if fault == "short" else data, offset)

    def fsync(self, path, datasync, fh):
        self._rules.met("sync", path)
        return 0

    def fsyncdir(self, path, datasync, fh):
        self._rules.met("sync", path)
        return 0

    def fallocate(self, path, mode, offset, size, fh):
        self._rules.met("fallocate", path)
        os.posix_fallocate(fh, offset, size)
        return 0

    def truncate(self, path, length, fh=None):
        os.truncate(self._at(path) if fh is None else fh, length)

    def unlink(self, path):
        os.unlink(self._at(path))

    def rename(self, old, new):
        os.rename(self._at(old), self._at(new))

    def release(self, path, fh):
        os.close(fh)
        return 0


def _listen(rules):
    for line in sys.stdin:
        told = json.loads(line)
        if "set" in told:
            rules.set(told["set"])
        sys.stdout.write(json.dumps({"blocked": rules.blocked}) + "\n")
        sys.stdout.flush()
    os._exit(0)


def main():
    folder, mountpoint = sys.argv[1:]
    rules = Rules()

    def ready():
        sys.stdout.write('{"ready": true}\n')
        sys.stdout.flush()
        threading.Thread(target=_listen, args=(rules,), daemon=True).start()

    mfusepy.FUSE(
        Passing(folder, rules, ready), mountpoint, foreground=True, fsname="passing",
    )  # fmt: skip


if __name__ == "__main__":
    main()

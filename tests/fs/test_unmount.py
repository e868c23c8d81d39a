"""What is asked to unmount: whichever program the system has for it."""

import subprocess
from types import SimpleNamespace

import pytest

from mooncake_store.errors import StoreError
from mooncake_store.fs.mount import program


@pytest.mark.parametrize(
    ("there", "command"),
    [
        ({"fusermount3", "fusermount"}, ["/bin/fusermount3", "-u", "-z"]),
        ({"fusermount3"}, ["/bin/fusermount3", "-u", "-z"]),
        ({"fusermount"}, ["/bin/fusermount", "-u", "-z"]),
        (set(), ["umount", "-l"]),
    ],
)
def test_the_program_that_is_there_is_asked(monkeypatch, there, command):
    asked = []

    def ran(arguments, **_):
        asked.append(arguments)
        return SimpleNamespace(returncode=1, stderr="not there\n")

    monkeypatch.setattr(
        program.shutil, "which", lambda name: f"/bin/{name}" if name in there else None
    )
    monkeypatch.setattr(subprocess, "run", ran)
    with pytest.raises(StoreError, match="cannot unmount /nowhere: not there"):
        program.unmount("/nowhere", lazy=True)
    assert asked == [[*command, "--", "/nowhere"]]

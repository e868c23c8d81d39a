"""Kernels of a made-up package: found, warmed up, announced, and recompiled when stale."""

import os
import pwd
import subprocess
import sys
import tempfile
import textwrap

import pytest

from kernel_cache.places import STAMP_NAME, cache_of, places_tried
from mooncake_store.program import kernels
from mooncake_store.program.kernels import find_kernels, forget_stale_caches

KERNELS = """
    from fakekernels.kernels.step import step
    from kernel_cache import njit


    @njit(cache=True)
    def twice(x):
        return step(x) + step(x)


    def warmup():
        twice(1)
"""

STEP = """
    from kernel_cache import njit


    @njit(cache=True)
    def step(x):
        return x + {by}


    def warmup():
        step(1)
"""


@pytest.fixture
def package(tmp_path):
    """A package `fakekernels` with kernels on two levels, one of which calls the other's file."""
    folder = tmp_path / "site" / "fakekernels"
    for place in (folder, folder / "deep"):
        (place / "kernels").mkdir(parents=True)
        (place / "kernels" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("")
    (folder / "deep" / "__init__.py").write_text("raise AssertionError('searching imports')\n")
    (folder / "other.py").write_text("raise AssertionError('searching imports')\n")
    (folder / "kernels" / "first.py").write_text(textwrap.dedent(KERNELS))
    set_step(folder, 10)
    return folder


def set_step(folder, by):
    (folder / "kernels" / "step.py").write_text(textwrap.dedent(STEP).format(by=by))


def python(package, code, **environ):
    """Run `code` in a process of its own that knows the package; return what it printed."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**inherited, "PYTHONPATH": str(package.parent), **environ},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


TWICE = "from fakekernels.kernels.first import twice; print(twice(1))"
FORGET = """
    from mooncake_store.program.kernels import forget_stale_caches
    print(forget_stale_caches(["fakekernels"]))
"""


def test_kernels_are_found_without_importing_anything(package, monkeypatch):
    monkeypatch.syspath_prepend(str(package.parent))
    (package / "deep" / "kernels" / "more.py").write_text("")
    found = find_kernels(["fakekernels", "not_installed_at_all"])
    assert [kernel.module for kernel in found] == [
        "fakekernels.deep.kernels.more",
        "fakekernels.kernels.first",
        "fakekernels.kernels.step",
    ]
    assert found[1].path == package / "kernels" / "first.py"
    assert "fakekernels" not in sys.modules


@pytest.mark.slow
def test_a_kernel_whose_callee_changed_is_stale_until_forgotten(package):
    assert python(package, FORGET) == "0"
    assert python(package, TWICE) == "22"
    # An index and a data file for each of the two kernels; nothing changed, nothing goes.
    assert python(package, FORGET) == "0"
    assert len(list((package / "kernels" / "__pycache__").glob("*.nb[ic]"))) == 4
    set_step(package, 100)
    # This is numba's limitation that the stamp exists for: if it ever goes, so may the stamp.
    assert python(package, TWICE) == "22"
    assert int(python(package, FORGET)) >= 4
    assert not list((package / "kernels" / "__pycache__").glob("*.nb[ic]"))
    assert python(package, TWICE) == "202"
    assert python(package, FORGET) == "0"


@pytest.mark.slow
def test_kernels_without_a_warmup_of_their_own_are_warmed_up_by_their_folders(package):
    (package / "deep" / "__init__.py").write_text("")
    bare = textwrap.dedent(STEP).format(by=1).partition("def warmup")[0]
    (package / "deep" / "kernels" / "bare.py").write_text(bare)
    (package / "deep" / "warmup.py").write_text(
        "from fakekernels.deep.kernels.bare import step\n\ndef warmup():\n    step(1)\n"
    )
    code = """
        from mooncake_store.program.kernels import warmup
        warmup(["fakekernels"])
        from fakekernels.deep.kernels.bare import step
        print(len(step.signatures))
    """
    assert python(package, code) == "1"


LISTEN = """
    from kernel_cache.telling import listen

    class Heard(list):
        def compiling(self, *what):
            self.append(what)

        def rested(self):
            self.append("rest")

    heard = Heard()
    listen(heard)
"""


@pytest.mark.slow
def test_warming_up_tells_how_far_it_is_and_fills_the_cache(package):
    (package / "deep" / "__init__.py").write_text("")
    code = f"""{LISTEN}
    from mooncake_store.program.kernels import warmup
    print(warmup(["fakekernels"]), heard)
    """
    told = [
        "2 [('fakekernels.kernels.first', 1, 2), ('fakekernels.kernels.step', 2, 2), 'rest'",
        # The second one's own warmup finds its kernel compiled already.
        "]",
    ]
    assert python(package, code) == "".join(told)
    assert len(list((package / "kernels" / "__pycache__").glob("*.nbi"))) == 2
    assert python(package, code) == "2 []"


@pytest.mark.slow
def test_without_a_listener_the_log_is_told_loudly_once(package):
    code = """
        import logging, sys
        lines = "%(levelname)s %(message)s"
        logging.basicConfig(stream=sys.stdout, level=logging.INFO, format=lines)
        from fakekernels.kernels.first import twice
        twice(1); twice(1.5)
    """
    line = "compiling fakekernels.kernels.{}, once per machine ({} of 2 modules); `mooncake warmup`"
    said = [text.partition(" does it")[0] for text in python(package, code).splitlines()]
    assert said == [f"WARNING {line.format('first', 1)}", f"INFO {line.format('step', 2)}"]
    assert python(package, code) == ""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["NUMBA_CACHE_DIR", "XDG_CACHE_HOME"])
def test_the_stamp_lies_where_numba_caches(package, tmp_path, where):
    if where == "XDG_CACHE_HOME":
        # A file in place of the directory cannot be written into by anyone, root included.
        (package / "kernels" / "__pycache__").write_text("")
    environ = {where: str(tmp_path / "cache")}
    assert python(package, FORGET, **environ) == "0"
    assert python(package, TWICE, **environ) == "22"
    (index,) = (tmp_path / "cache").rglob("first.*.nbi")
    (stamp,) = (tmp_path / "cache").rglob(STAMP_NAME)
    assert index.parent == stamp.parent
    set_step(package, 100)
    assert int(python(package, FORGET, **environ)) >= 4
    assert python(package, TWICE, **environ) == "202"


def test_where_nothing_can_be_written_nothing_happens(package, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(package.parent))
    (package / "kernels" / "__pycache__").write_text("")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    assert forget_stale_caches(["fakekernels"]) == 0


def test_only_cached_kernels_are_deleted_and_only_once(package, monkeypatch):
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    cache = package / "kernels" / "__pycache__"
    cache.mkdir()
    for name in ("first.f-1.py311.nbi", "first.f-1.py311.1.nbc", "step.g-1.nbi"):
        (cache / name).write_bytes(b"")
    (cache / "first.cpython-311.pyc").write_bytes(b"")
    assert forget_stale_caches(["fakekernels"]) == 3
    left = sorted(path.name for path in cache.iterdir())
    assert left == sorted([STAMP_NAME, "first.cpython-311.pyc"])
    (cache / "first.f-1.py311.nbi").write_bytes(b"")
    assert forget_stale_caches(["fakekernels"]) == 0


def test_kernels_count_as_loaded_before_only_while_nothing_changed(tmp_path, monkeypatch):
    """Else a program would serve while its kernels are being compiled."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "fake" / "kernels" / "first.py"
    source.parent.mkdir(parents=True)
    source.write_text("one")
    found = [kernels.KernelFile("fake.kernels.first", source)]
    monkeypatch.setattr(kernels, "find_kernels", lambda packages=(): found)
    home = source.parent
    assert not kernels.loaded_before(home)
    kernels.note_loaded(home)
    assert kernels.loaded_before(home)
    os.utime(source, ns=(1, 1))
    assert not kernels.loaded_before(home)
    kernels.note_loaded(home)
    assert kernels.loaded_before(home)
    kernels.forget_stale_caches()  # nobody stamped this cache yet
    assert not kernels.loaded_before(home)
    monkeypatch.setattr(kernels, "cache_of", lambda folder: None)
    kernels.note_loaded(home)
    assert not kernels.loaded_before(home)


def test_a_fork_waits_for_a_kernel_that_is_being_compiled(package):
    """Else the child has half of a compilation in its memory, and is aborted when it ends."""
    program = """
        import os, threading
        import fakekernels.kernels.first
        from numba.core.compiler_lock import global_compiler_lock

        compiling, compiled = threading.Event(), []

        def compile():
            with global_compiler_lock:
                compiling.set()
                threading.Event().wait(0.5)
                compiled.append(True)

        thread = threading.Thread(target=compile)
        thread.start()
        compiling.wait(60)
        child = os.fork()
        if not child:
            with global_compiler_lock:
                os._exit(7 if compiled else 1)
        thread.join(60)
        with global_compiler_lock:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert python(package, program).split() == ["7"]


def test_a_user_that_is_only_a_number_has_a_place_too(tmp_path, monkeypatch):
    """As in a container that runs as any number: no entry of it, no HOME."""
    folder = tmp_path / "kernels"
    folder.write_text("a file, so that nothing can be kept below it")
    for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)

    def nobody(number):
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = cache_of(folder)
    assert place is not None
    assert place.parent == tmp_path / f"mooncake-kernels-{os.geteuid()}"
    assert "~" not in places_tried(folder)

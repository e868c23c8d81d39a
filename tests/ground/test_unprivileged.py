"""A user with a read-only package and no home, as in most containers: everything works, warm.

The package is copied, with the kernels that are compiled beside it, to where only root may write,
which is what an image is that was built with `mooncake warmup`. It is used by nobody, who may read
everything here (so that it does not matter where Python is) and write to one directory.
"""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from mooncake_store.program.kernels import warmup
from tests.sources import PACKAGES, ROOT

NOBODY = 65534
AS_NOBODY = (
    "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups",
    "--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search",
    "--bounding-set=-all,+dac_read_search",
)  # fmt: skip


def able():
    """Whether this process may become nobody with that one capability."""
    try:
        return subprocess.run([*AS_NOBODY, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not able(), reason="needs root, setpriv and CAP_DAC_READ_SEARCH"
)


def package(site, name):
    """Copy a package and what is compiled beside it, as an image has them."""
    shutil.copytree(ROOT / name, site / name, ignore=shutil.ignore_patterns("*.pyc"))


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """Everything as root installed it and warmed it up."""
    warmup()
    site = tmp_path_factory.mktemp("image") / "site"
    for name in PACKAGES:
        package(site, name)
    return site


@pytest.fixture
def as_nobody(start_program, tmp_path):
    """A function that runs Python as nobody, with packages from a folder, to the end or not."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    environ = {
        "HOME": "/nonexistent",
        "TMPDIR": str(temporary),
        "NUMBA_CACHE_DIR": "",
        "XDG_CACHE_HOME": "",
        "PYTHONSAFEPATH": "1",  # else the folder it is started in would come first
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def start(site, *arguments, **more):
        return start_program(
            *AS_NOBODY, sys.executable, *arguments, **environ, PYTHONPATH=str(site), **more
        )

    return start


def mooncake(as_nobody, site, *arguments, codes=(0,)):
    """Run one command to its end and return what it said."""
    done = as_nobody(site, "-m", "mooncake_store", *arguments)
    assert done.wait() in codes, done.output
    assert "compiling" not in done.output, "what the image brings was not used"
    assert "cannot be kept" not in done.output
    return done.output


@pytest.mark.slow
def test_every_program_starts_warm(as_nobody, image, tmp_path):
    doctor = json.loads(mooncake(as_nobody, image, "doctor", "--json", codes=(0, 10, 11)))
    kept = next(f for f in doctor["findings"] if f["name"] == "compiled kernels")
    assert str(tmp_path / "tmp" / f"mooncake-kernels-{NOBODY}") in kept["found"]
    mooncake(as_nobody, image, "warmup")

    master = as_nobody(image, "-m", "mooncake_store", "master", "--port", "0", "--json")
    address = json.loads(master.wait_for_line('"ready": true'))["address"]
    worker = as_nobody(
        image, "-m", "mooncake_store", "worker", "--master", address, "--segment", "16MiB", "--json"
    )
    worker.wait_for_line('"ready": true')
    note = tmp_path / "note"
    note.write_text("hello")
    url = ("--url", f"mooncake://{address}")
    assert "stored greeting" in mooncake(as_nobody, image, "put", "greeting", note, *url)
    assert mooncake(as_nobody, image, "get", "greeting", "-", *url).startswith("hello")
    for program in (worker, master):
        program.signal(signal.SIGTERM)
        assert program.wait() == 0, program.output
        assert "compiling" not in program.output


@pytest.mark.slow
def test_serve_answers(as_nobody, image, tmp_path):
    pytest.importorskip("torch")
    port_file = tmp_path / "tmp" / "port"
    serve = as_nobody(
        image, "-m", "mooncake_store", "serve", "--port", "0", "--port-file", port_file,
        "--segment", "256MB",
    )  # fmt: skip
    serve.wait_for_line("answers at", 100)
    assert "compiling" not in serve.output
    serve.signal(signal.SIGTERM)
    assert serve.wait() == 0, serve.output


KERNEL = """
from kernel_cache import njit


@njit(cache=True, nogil=True)
def double(x):
    return 2 * x


def warmup():
    double(1)
"""
DOUBLE = ("-c", "from fake.kernels.one import double; print(double(4))")


@pytest.fixture
def cold(tmp_path):
    """A small package with a kernel that nobody compiled, and the cache it uses."""
    site = tmp_path / "site"
    (site / "fake" / "kernels").mkdir(parents=True)
    for folder in (site / "fake", site / "fake" / "kernels"):
        (folder / "__init__.py").write_text("")
    (site / "fake" / "kernels" / "one.py").write_text(KERNEL)
    package(site, "kernel_cache")
    return site


def said(program):
    assert program.wait() == 0, program.output
    return program.output


@pytest.mark.slow
def test_what_nobody_compiled_is_compiled_once_and_kept_for_this_user_only(
    as_nobody, cold, tmp_path
):
    assert "compiling fake.kernels.one" in said(as_nobody(cold, *DOUBLE))
    assert said(as_nobody(cold, *DOUBLE)) == "8\n"
    kept = tmp_path / "tmp" / f"mooncake-kernels-{NOBODY}"
    assert (kept.stat().st_uid, kept.stat().st_mode & 0o777) == (NOBODY, 0o700)
    (cold / "fake" / "kernels" / "one.py").write_text(KERNEL.replace("2 * x", "3 * x"))
    assert said(as_nobody(cold, *DOUBLE)).endswith("12\n")


@pytest.mark.slow
@pytest.mark.parametrize("planted", ["of another user", "open to all", "a link", "no directory"])
def test_nothing_is_loaded_from_where_another_user_can_put_it(as_nobody, cold, tmp_path, planted):
    kept = tmp_path / "tmp" / f"mooncake-kernels-{NOBODY}"
    elsewhere = kept
    if planted == "a link":
        elsewhere = tmp_path / "elsewhere"
        kept.symlink_to(elsewhere)
    if planted == "no directory":
        kept.write_text("")
    else:
        elsewhere.mkdir()
        elsewhere.chmod(0o777 if planted == "open to all" else 0o755)
        os.chown(elsewhere, 0 if planted == "of another user" else NOBODY, 0)
    told = said(as_nobody(cold, *DOUBLE))
    assert told.endswith("8\n")
    assert told.count("cannot be kept") == 1
    assert "NUMBA_CACHE_DIR" in told
    assert str(kept) in told
    assert kept.is_file() or not list(elsewhere.iterdir())


@pytest.mark.slow
def test_without_any_place_what_lies_beside_the_sources_is_still_used(as_nobody, cold, tmp_path):
    warm = ("-c", "from mooncake_store.program.kernels import warmup; print(warmup(['fake']))")
    root = subprocess.run(
        [sys.executable, *warm],
        env=os.environ | {"PYTHONPATH": f"{cold}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert root.stdout == "1\n", root.stderr
    (tmp_path / "tmp" / f"mooncake-kernels-{NOBODY}").write_text("")
    assert said(as_nobody(cold, *DOUBLE)) == "8\n"

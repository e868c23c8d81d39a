"""How programs end that did not close their client, and what their forked children may do."""

import asyncio
import os
import subprocess
import sys
import textwrap

import pytest

from mooncake_store import AsyncClient, Client, InvalidArgumentError, UnavailableError

RUNS = 4
"""One in ten ended in a segmentation fault; that no thread was left says it of each."""


def end_of(program, **environ):
    """Run a program of its own; return its exit code and what it printed.

    Not what it logged: where kernels are not compiled yet, it says that it compiles them.
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=100,
    )
    print(done.stderr)
    return done.returncode, done.stdout


# `atexit` runs after everything that is ended in order, and before what is torn out.
TELL_THREADS = """
    import atexit, threading
    atexit.register(lambda: print(sorted(
        thread.name for thread in threading.enumerate() if "mooncake" in thread.name)))
"""


@pytest.mark.slow
def test_a_local_store_that_nobody_closed_ends_with_the_program():
    program = f"""{TELL_THREADS}
    from mooncake_store import Client
    store = Client("mooncake://local", segment="16MB")
    store.put("a", b"x")
    """
    assert {end_of(program) for _ in range(RUNS)} == {(0, "[]\n")}


@pytest.mark.slow
def test_so_does_one_that_nobody_holds_any_more_and_one_of_asyncio():
    program = f"""{TELL_THREADS}
    import asyncio
    from mooncake_store import AsyncClient, Client

    def put():
        Client("mooncake://local", segment="16MB").put("a", b"x")

    async def put_too():
        await (await AsyncClient("mooncake://local", segment="16MB").connect()).put("a", b"x")

    put()
    asyncio.run(put_too())
    """
    assert end_of(program) == (0, "[]\n")


@pytest.mark.slow
def test_memory_that_was_lent_is_taken_back_when_the_program_ends(cluster):
    program = """
    import os
    from mooncake_store import Client
    store = Client(os.environ["URL"], segment="16MB")
    print(sum(worker.state == "alive" for worker in store.status().workers))
    """
    with Client(cluster.url) as store:

        def alive():
            return sum(worker.state == "alive" for worker in store.status().workers)

        before = alive()
        assert end_of(program, URL=cluster.url) == (0, f"{before + 1}\n")
        assert alive() == before, "the master was not told"


@pytest.mark.slow
def test_a_forked_child_uses_its_parents_local_store_and_ends_alone():
    program = """
    import os, sys
    from mooncake_store import Client
    store = Client("mooncake://local", segment="16MB")
    store.put("a", b"parent's")
    for _ in range(3):
        child = os.fork()
        if not child:
            assert store.get("a") == b"parent's"
            store.put("b", b"child's", upsert=True)
            sys.exit(7)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), store.get("b"), store.get("a"),
              flush=True)  # a child would write again what waits here
    """
    assert end_of(program) == (0, '7 b"child\'s" b"parent\'s"\n' * 3)


def test_an_async_client_must_be_connected_first():
    async def use():
        store = AsyncClient("mooncake://127.0.0.1:1")
        with pytest.raises(UnavailableError, match=r"not connected.*async with"):
            await store.get("a")
        await store.close()

    asyncio.run(use())


def test_an_async_client_belongs_to_one_loop(cluster):
    store = AsyncClient(cluster.url)
    with asyncio.Runner() as own:
        own.run(store.connect())
        for use in (store.connect, lambda: store.put("loops", b"x")):
            with pytest.raises(InvalidArgumentError, match=r"another event loop.*in each loop"):
                asyncio.run(use())
        # Nothing was broken by the attempts.
        assert not own.run(store.exists("loops"))
        own.run(store.close())

"""A pool whose shards are merged and split while clients use it: none has an error."""

import threading

import pytest

from mooncake_store import StoreError
from mooncake_store.client import single, writes
from mooncake_store.wire.hosts import MERGE, Merge
from tests.hosting.test_hosts import KEYS, check_all, put_all, value_of
from tests.waiting import until


def change(pool, *what):
    """Let people ask for other shards; return how the command ended, and what it said."""
    program = pool.run("change", "shard", *what, "--master", pool.named(), wait=False)
    return program.wait(), program.output


class Load:
    """Clients that read and write all the time; each of them notes what went wrong."""

    def __init__(self, pool, count=2):
        self._ends = threading.Event()
        self._pool = pool
        self.wrong = []
        self.rounds = [0] * count
        self._threads = [threading.Thread(target=self._run, args=(at,)) for at in range(count)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _run(self, at):
        client = self._pool.client()
        while not self._ends.is_set():
            number = self.rounds[at]
            some = [KEYS[(7 * number + step) % len(KEYS)] for step in range(16)]
            mine = [f"mine/{at}/{number % 50}/{step}" for step in range(4)]
            values = [value_of(key, number) for key in mine]
            try:
                client.put_many(mine, values, upsert=True).check()
                got = client.get_many([*some, *mine]).check().values
            except StoreError as error:
                self.wrong.append(repr(error))
                return
            wanted = [value_of(key) for key in some] + values
            self.wrong += [
                key
                for key, value, want in zip([*some, *mine], got, wanted, strict=True)
                if bytes(value) != want
            ]
            self.rounds[at] += 1

    def goes_on(self):
        """Wait until each of them has read and written once more."""
        before = list(self.rounds)
        until(
            lambda: self.wrong or all(n > b + 1 for n, b in zip(self.rounds, before, strict=True)),
            what="clients go on",
        )


def test_clients_go_on_while_shards_are_merged_and_split(pool):
    pool.lead("--shards", 4)
    pool.lend()
    client = pool.client()
    put_all(client)
    with Load(pool) as load:
        for what, factor, shards in (("merge", 4, 1), ("split", 4, 4), ("merge", 2, 2)):
            load.goes_on()
            code, said = change(pool, what, factor)
            assert code == 0, said
            load.goes_on()
            assert len(client.store_stats()) == shards
    assert not load.wrong
    check_all(client)
    pool.stop("master")
    pool.lead("--shards", 4)
    assert len(client.store_stats()) == 2
    check_all(client)


def test_puts_that_do_not_end_in_time_begin_anew(pool, monkeypatch):
    pool.lead("--shards", 2)
    pool.lend()
    client = pool.client()
    end, write = writes.Putting.end, single._write
    asked = []

    def changed(*what):
        if what not in asked:
            asked.append(what)
            code, said = change(pool, *what)
            assert code == 0, said

    def end_late(putting, index):
        changed("merge", 2)
        yield from end(putting, index)

    def write_late(*arguments):
        written = yield from write(*arguments)
        changed("split", 2)
        return written

    client.put("known", b"who lends memory")
    monkeypatch.setattr(writes.Putting, "end", end_late)
    put_all(client)
    monkeypatch.setattr(single, "_write", write_late)
    client.put("alone", b"a value")
    assert asked == [("merge", 2), ("split", 2)]
    assert bytes(client.get("alone")) == b"a value"
    check_all(client)


def test_what_cannot_be_merged_goes_on_as_it_was_and_says_why(pool):
    pool.lead("--shards", 2, "--objects-max", 150)
    pool.host("other")
    pool.lend()
    client = pool.client()
    put_all(client)
    code, said = change(pool, "merge", 2)
    assert (code != 0, "would have 200 objects, and may have 150" in said) == (True, True), said
    check_all(client)
    code, said = change(pool, "merge", 3)
    assert (code != 0, "2 shards cannot become one of every 3" in said) == (True, True), said
    assert pool.move(1, "other").state == "done"
    with pytest.raises(StoreError, match="some of its shards lead on other hosts"):
        pool.ask(MERGE, Merge(2))
    check_all(client)
    assert len(client.store_stats()) == 2

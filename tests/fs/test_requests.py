"""How many requests the store answers: a batch costs what a single file or slice does."""

import pytest

from tests.fs.test_files import PART, content

FILES = 300


@pytest.fixture
def requests(fs, store):
    """Return a function: how many requests the client made during a call."""
    fs.ls("")  # connected

    def during(call):
        before = store.stats().requests
        call()
        return store.stats().requests - before

    return during


@pytest.fixture
def many(fs):
    """Small files, written by another filesystem: nothing of them is leased here."""
    files = {f"d/{number}": content(600, number) for number in range(FILES)}
    files |= {f"large/{number}": content(3 * PART, number) for number in range(3)}
    fs.pipe(files)
    fs.client.release_many(list(files))
    return files


def test_slices_of_one_file_are_one_request(fs, requests, many):
    starts = list(range(0, 500, 5))
    paths = ["d/1"] * len(starts)
    got = []
    assert requests(lambda: got.extend(fs.cat_ranges(paths, starts, [s + 9 for s in starts]))) == 1
    assert got == [many["d/1"][start : start + 9] for start in starts]


def test_slices_of_many_files_are_one_request(fs, requests, many):
    paths = [f"d/{number}" for number in range(FILES)]
    got = []
    assert requests(lambda: got.extend(fs.cat_ranges(paths, 100, -100))) == 1
    assert got == [many[path][100:-100] for path in paths]


def test_slices_of_files_in_parts_cost_one_more_for_manifests_and_one_for_parts(fs, requests, many):
    spans = [(start, start + PART) for start in range(7, 2 * PART, 100)]
    paths = [f"large/{at % 3}" for at in range(len(spans))]
    starts, ends = [start for start, _ in spans], [end for _, end in spans]
    got = []
    assert requests(lambda: got.extend(fs.cat_ranges(paths, starts, ends))) <= 4
    assert got == [
        many[path][start:end] for path, start, end in zip(paths, starts, ends, strict=True)
    ]


def test_whole_files_are_one_request(fs, requests, many):
    paths = [path for path in many if path.startswith("d/")]
    assert requests(lambda: fs.cat(paths)) == requests(lambda: fs.cat(["large/0"])) - 1


def test_writing_many_costs_what_writing_one_does(fs, requests):
    fs.pipe({f"v/{n}": content(700) for n in range(FILES)})  # both segments are known now
    one = requests(lambda: fs.pipe({"one": content(700)}))
    many = requests(lambda: fs.pipe({f"w/{n}": content(700, n) for n in range(FILES)}))
    assert many == one <= 3  # what is replaced, where the bytes go, that they are there


def test_removing_many_costs_what_removing_one_does(fs, requests, many):
    one = requests(lambda: fs.rm(["d/0"]))
    assert requests(lambda: fs.rm([f"d/{n}" for n in range(1, FILES)])) <= one + 1


def test_an_open_file_leases_its_parts_by_one_request(fs, requests):
    fs.pipe_file("file", content(50 * PART))

    def read():
        with fs.open("file") as file:
            assert file.read() == content(50 * PART)

    assert requests(read) <= 5  # size, manifest, leases; giving both back


def test_renaming_moves_no_bytes(fs, store, requests, many):
    before = sum(store.stats().bytes_written.values())
    assert requests(lambda: fs.mv("d/5", "moved")) <= 5
    assert requests(lambda: fs.mv("large/1", "moved-too")) <= 5
    assert sum(store.stats().bytes_written.values()) == before
    assert fs.cat(["moved", "moved-too"]) == {"moved": many["d/5"], "moved-too": many["large/1"]}

"""Histories that one store could have told, and such as none could."""

import itertools
import random

import pytest

from tests.hosts.history import ABSENT, OK, PRESENT, UNKNOWN, Operation, unexplained


def put(begin, end, value, outcome=OK, client="a"):
    return Operation(client, "put", "k", begin, end, outcome, value)


def get(begin, end, value=None, client="b"):
    return Operation(client, "get", "k", begin, end, ABSENT if value is None else OK, value)


def exists(begin, end, outcome, client="b"):
    return Operation(client, "exists", "k", begin, end, outcome)


def remove(begin, end, outcome=OK, client="a"):
    return Operation(client, "remove", "k", begin, end, outcome)


RIGHT = {
    "nothing": [],
    "one after the other": [get(0, 1), put(2, 3, 7), get(4, 5, 7), remove(6, 7), get(8, 9)],
    "while it is put it may be there": [put(0, 9, 7), get(1, 2, 7), get(3, 4, 7)],
    "or not yet": [put(0, 9, 7), get(1, 2), get(3, 4, 7)],
    "while it is removed it may be there": [put(0, 1, 7), remove(2, 9), get(3, 4, 7), get(5, 6)],
    "of two puts one is first": [put(0, 5, 7), put(0, 6, 8, PRESENT), get(7, 8, 7)],
    "a put that failed took effect": [put(0, 1, 7, UNKNOWN), get(2, 3, 7)],
    "much later": [put(0, 1, 7, UNKNOWN), get(2, 3), exists(4, 5, ABSENT), get(6, 7, 7)],
    "or never": [put(0, 1, 7, UNKNOWN), get(2, 3), put(4, 5, 8), get(6, 7, 8)],
    "one that failed is in the way": [put(0, 1, 7, UNKNOWN), put(2, 3, 8, PRESENT), get(4, 5)],
    "one that is under way as well": [
        put(0, 9, 7), put(2, 3, 8, PRESENT), get(4, 5), get(6, 7, 7),
    ],
    "a failed one is seen by others": [put(0, 1, 7, UNKNOWN), exists(2, 3, PRESENT)],
    "a remove that failed took effect": [
        put(0, 1, 7), remove(2, 3, UNKNOWN), get(4, 5, 7), get(6, 7),
    ],
    "and was undone": [
        put(0, 1, 7), remove(2, 3, UNKNOWN), get(4, 5, 7), get(6, 7), get(8, 9, 7), get(10, 11, 7),
    ],
    "a put that failed was seen and undone": [put(0, 1, 7, UNKNOWN), get(2, 3, 7), get(4, 5)],
    "or never did": [put(0, 1, 7), remove(2, 3, UNKNOWN), get(4, 5, 7), get(6, 7, 7)],
    "a remove may be sent twice": [
        put(0, 1, 7), remove(2, 9), get(3, 4), put(5, 6, 8), get(9.5, 10),
    ],
    "a read that failed says nothing": [put(0, 1, 7), Operation("b", "get", "k", 2, 3, UNKNOWN)],
    "put again": [put(0, 1, 7), remove(2, 3), put(4, 5, 8), get(6, 7, 8)],
}  # fmt: skip

WRONG = {
    "a stale read after a remove": [put(0, 1, 7), remove(2, 3), get(4, 5, 7)],
    "an acknowledged put is lost": [put(0, 1, 7), get(2, 3)],
    "lost to who asks whether it exists": [put(0, 1, 7), exists(2, 3, ABSENT)],
    "two values at once": [put(0, 1, 7), put(2, 3, 8), get(4, 5, 7), get(6, 7, 8)],
    "a value that nobody put": [put(0, 1, 7), get(2, 3, 9)],
    "a value before it was put": [get(0, 1, 7), put(2, 3, 7)],
    "there, and then not yet": [put(0, 9, 7), get(1, 2, 7), get(3, 4)],
    "gone, and there again": [put(0, 1, 7), remove(2, 9), get(3, 4), get(5, 6, 7)],
    "refused for nothing": [put(0, 1, 8, PRESENT)],
    "stored over what is there": [put(0, 1, 7), put(2, 3, 8)],
    "one that failed comes back twice": [
        put(0, 1, 7, UNKNOWN), get(2, 3, 7), remove(4, 5), get(6, 7), get(8, 9, 7),
    ],
    "a remove that failed is undone twice": [
        put(0, 1, 7), remove(2, 3, UNKNOWN), get(4, 5), get(6, 7, 7), get(8, 9), get(10, 11, 7),
        get(12, 13), get(14, 15, 7),
    ],
    "what is undone is not what was there": [
        put(0, 1, 7), remove(2, 3), put(4, 5, 8), remove(6, 7, UNKNOWN), get(8, 9), get(10, 11, 7),
    ],
    "a remove that was answered is undone": [
        put(0, 1, 7), remove(2, 3, UNKNOWN), remove(4, 5), get(6, 7, 7),
    ],
    "something that nobody put exists": [exists(0, 1, PRESENT)],
    "two clients see another order": [
        put(0, 9, 7), remove(0, 9.5, client="c"), get(1, 2, 7), get(3, 4), get(5, 6, 7),
    ],
    "a remove that was over takes effect later": [
        put(0, 1, 7), remove(2, 3), put(4, 5, 8), get(6, 7),
    ],
}  # fmt: skip


@pytest.mark.parametrize("which", RIGHT)
def test_what_one_store_could_have_told_is_explained(which):
    assert unexplained(RIGHT[which]) == ""


@pytest.mark.parametrize("which", WRONG)
def test_what_no_store_could_have_told_is_not(which):
    assert "no order explains" in unexplained(WRONG[which])


def test_keys_are_looked_at_each_by_itself_and_what_is_shown_is_about_one():
    other = [each._replace(key="other") for each in RIGHT["one after the other"]]
    said = unexplained([*other, *WRONG["an acknowledged put is lost"], get(50, 51, 7)])
    assert "told of k" in said
    assert "other" not in said
    assert "50.000" not in said  # that is not needed to see that it is wrong


class Store:
    """One that is right: it does each operation at a moment between its begin and its end."""

    def __init__(self, chance, failing):
        self._chance, self._failing = chance, failing
        self._value = None
        self._values = itertools.count(1)

    def history(self, clients, count):
        """Some operations of clients that each have one at a time."""
        moments, told = [], []
        for client in clients:
            now = 0.0
            for _ in range(count):
                begin = now + self._chance.random()
                end = begin + self._chance.random() * 3
                moments.append((self._chance.uniform(begin, end), client, begin, end))
                now = end
        for _, client, begin, end in sorted(moments):
            kind = self._chance.choice(("put", "put", "get", "get", "exists", "remove"))
            told.append(self._do(kind, client, begin, end))
        return told

    def _do(self, kind, client, begin, end):
        value = next(self._values) if kind == "put" else None
        failed = self._chance.random() < self._failing
        if failed and self._chance.random() < 0.5:
            return Operation(client, kind, "k", begin, end, UNKNOWN, value)
        there, outcome = self._value is not None, OK
        if kind == "put":
            outcome = PRESENT if there else OK
            self._value = self._value if there else value
        elif kind == "remove":
            outcome, self._value = OK if there else ABSENT, None
        elif kind == "get":
            outcome, value = OK if there else ABSENT, self._value
        else:
            outcome = PRESENT if there else ABSENT
        if failed:
            outcome, value = UNKNOWN, value if kind == "put" else None
        return Operation(client, kind, "k", begin, end, outcome, value)


@pytest.mark.parametrize("failing", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(10))
def test_all_that_a_right_store_tells_is_explained(seed, failing):
    told = Store(random.Random(seed), failing).history("abc", 12)
    assert unexplained(told) == ""


@pytest.mark.parametrize("seed", range(10))
def test_a_read_of_another_value_is_found_among_many(seed):
    told = Store(random.Random(seed), 0.1).history("abc", 12)
    last = max(each.end for each in told)
    told += [remove(last + 1, last + 2), put(last + 3, last + 4, 999)]
    told.append(get(last + 5, last + 6, 998))
    assert "998" in unexplained(told)

"""The bench `transfer`: its rows, its options, and what it refuses to count."""

import itertools

import pytest

from mooncake_store.bench import transfer
from mooncake_store.bench.harness import Report
from mooncake_store.errors import InvalidArgumentError
from mooncake_store.units import KIB, MIB
from tests.bench.rounds import one_round

SIZES = {"4KiB": 4 * KIB, "1MiB": MIB}
TINY = transfer.Plan(
    sizes=tuple(SIZES.values()),
    batches=(1, 32),
    threads=2,
    buffer_bytes=8 * MIB,
    budget_s=0.001,
    repeats=1,
    total_s=0.0,
)


@pytest.fixture(scope="module")
def rows():
    report = Report("transfer", quick=True)
    with one_round():
        transfer.measure_all(report, TINY, ("raw",))
    return {row.name: row for row in report.rows}


def test_every_combination_has_its_row(rows):
    names = itertools.product(("read", "write"), transfer.TRANSPORTS, SIZES, ("b1", "b32"))
    assert set(rows) == {"/".join(name) for name in names}


def test_rows_have_figures_and_what_they_are_compared_with(rows):
    for name, row in rows.items():
        if name.endswith("1MiB/b32"):
            assert row.value is None
            assert "do not fit into 8MiB" in row.why
        else:
            assert row.value > 0, name
            assert row.vs["raw"].value > 0


def test_only_what_is_asked_for_is_measured():
    report = Report("transfer", quick=True)
    with pytest.MonkeyPatch.context() as patch:
        planned = []
        patch.setattr(transfer, "measure_all", lambda report, plan, vs: planned.append(plan))
        transfer.run(
            report, quick=True, vs=(), sizes="64KiB, 2MiB", batches="8", transports="shm",
            operations="write", threads=3,
        )  # fmt: skip
    (plan,) = planned
    assert plan.sizes == (64 * KIB, 2 * MIB)
    assert (plan.batches, plan.transports, plan.operations) == ((8,), ("shm",), ("write",))
    assert plan.threads == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"transports": "udp"}, "tcp, shm, local"),
        ({"operations": "erase"}, "read, write"),
        ({"batches": "0"}, "1 to 100000"),
        ({"batches": "x"}, "1 to 100000"),
        ({"threads": 0}, "1 to 64"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options, said):
    with pytest.raises(InvalidArgumentError, match=said):
        transfer.run(Report("transfer"), quick=True, vs=(), **options)

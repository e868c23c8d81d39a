"""The connector's own logic, without vLLM: lookups, plans, moves, and what failures lead to."""

import threading

import pytest

from mooncake_store import Client, LocalCluster
from mooncake_store.errors import ConfigError
from serving.connectors.counts import Counts
from serving.connectors.link import StoreLink
from serving.connectors.vllm.layout import Group
from serving.connectors.vllm.lookup import longest_prefix, present_prefix
from serving.connectors.vllm.messages import SaveOutcome, StepPlan, WorkerReport
from serving.connectors.vllm.options import Options
from serving.connectors.vllm.scheduler import HANDOFF, SchedulerSide
from serving.connectors.vllm.worker import WorkerSide
from tests.held import assert_nothing_held
from tests.paces import measured
from tests.vllm.fakes import BLOCK, Blocks, Link, Pool, Request, Store, hashes, layout, step
from tests.waiting import long_before, until

torch = pytest.importorskip("torch")

FULL = Group(0, BLOCK, 1, 0, 1)
WINDOW = Group(1, BLOCK, 1, 9, 1)


def _trust(group, block_hash):
    return True


class Engine:
    """Both sides over one store, with blocks of two layers."""

    def __init__(self, store=None, shape=(16, 2, BLOCK, 3), plan=None, link=None, **options):
        self.store = store or Store()
        self.link = link or Link(self.store)
        self.counts = Counts()
        self.options = Options(**options)
        self.layout = plan or layout()
        self.pool = Pool(shape[0])
        self.scheduler = SchedulerSide(
            self.layout,
            self.link,
            self.options,
            workers=1,
            saves=True,
            feeds=True,
            count=self.counts.add,
        )
        self.scheduler.bind(self.pool)
        self.worker = WorkerSide(
            self.layout, self.link, self.options, self.counts, tensor_rank=0, pipeline_rank=0
        )
        self.caches = {f"layer{n}": torch.zeros(shape) for n in range(2)}
        groups = [type("G", (), {"layer_names": list(self.caches)})] * len(self.layout.groups)
        self.worker.register(self.caches, groups, shape[0])

    def match(self, request, computed=0):
        found = until(lambda: self.scheduler.matched(request, computed)[0] is not None and 1)
        assert found
        return self.scheduler.matched(request, computed)

    def load(self, request, blocks, tokens):
        """Load into blocks; the blocks that failed."""
        self.scheduler.allocated(request, Blocks(blocks), tokens)
        self.worker.begin(self.scheduler.plan(step({}, {})))
        until(lambda: request.request_id in self.worker.take_finished()[0])
        bad = self.worker.take_bad_blocks()
        self.report()
        return bad

    def run(self, request, blocks, scheduled=None):
        """Compute a request in these blocks, and wait until its saves are reported."""
        if request.request_id not in self.scheduler._tracked:
            self.scheduler.allocated(request, Blocks(blocks), 0)
        scheduled = request.num_tokens if scheduled is None else scheduled
        plan = self.scheduler.plan(
            step({request.request_id: scheduled}, {request.request_id: (blocks,)})
        )
        self.worker.begin(plan)
        self.worker.save(plan, lambda: None)
        until(lambda: self.report() or not self.scheduler.busy)
        return plan

    def report(self):
        report = self.worker.take_report()
        if report is not None:
            self.scheduler.report(report)
        return not self.scheduler.busy

    def close(self):
        self.scheduler.close()
        self.worker.close()


@pytest.fixture
def engine():
    made = []

    def make(**options):
        made.append(Engine(**options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def _fill(engine, blocks):
    for number, cache in enumerate(engine.caches.values()):
        for block in blocks:
            cache[block] = torch.rand(cache[block].shape) + number


def test_second_engine_loads_what_the_first_one_computed(engine):
    first = engine()
    request = Request("a", 13, hashes(3))
    _fill(first, [5, 2, 9])
    first.run(request, [5, 2, 9, 1])
    assert len(first.store.objects) == 3
    assert first.pool.references == [0] * 16
    assert first.store.calls == ["put_many"]

    second = engine(store=first.store)
    assert second.match(Request("b", 13, hashes(3))) == (12, True)
    assert second.load(Request("b", 13, hashes(3)), [1, 3, 4, 6], 12) == set()
    for mine, theirs in zip(second.caches.values(), first.caches.values(), strict=True):
        assert torch.equal(mine[[1, 3, 4]], theirs[[5, 2, 9]])
        assert not mine[6].any()
    # One round trip for the lookup, one for the load.
    assert first.store.calls == ["put_many", "find_prefix", "get_into_many"]


def test_lookup_changes_nothing_and_begins_where_the_engine_ends(engine):
    one = engine()
    one.run(Request("a", 13, hashes(3)), [1, 2, 3, 4])
    other = Request("b", 13, hashes(3))
    before = dict(one.store.objects)
    assert [one.match(other, 4), one.match(other, 4)] == [(8, True)] * 2
    assert one.match(other, 12) == (0, False)
    assert one.store.objects == before
    assert not any(one.pool.references)


def test_what_was_loaded_is_not_offered_again_but_the_rest_is(engine):
    one = engine()
    one.run(Request("a", 9, hashes(2)), [1, 2, 3])
    longer = Request("b", 17, hashes(4))
    assert one.match(longer) == (8, True)
    assert one.load(longer, [4, 5, 6, 7, 8], 8) == set()
    longer.num_computed_tokens = 8
    plan = one.run(longer, [4, 5, 6, 7, 8], scheduled=9)
    assert [blocks.numbers for job in plan.saves for blocks in job.groups] == [[2, 3]]


@pytest.mark.parametrize("how", ["unreadable", "corrupt", "lost"])
def test_failed_read_is_reported_and_not_believed_again(engine, how):
    one = engine()
    one.run(Request("a", 13, hashes(3)), [1, 2, 3, 4])
    bad_key = sorted(one.store.objects)[1]
    getattr(one.store, how).add(bad_key)
    other = Request("b", 13, hashes(3))
    assert one.match(other) == (12, True)
    assert one.load(other, [5, 6, 7, 8], 12) == {6}
    # No livelock: the same request is not told of that block again.
    assert one.match(Request("c", 13, hashes(3))) == (4, True)
    assert (bad_key in one.store.objects) == (how == "unreadable")
    # Computed anew and stored anew, it is believed again.
    getattr(one.store, how).clear()
    one.store.objects.pop(bad_key, None)
    one.run(other, [5, 6, 7, 8])
    assert one.match(Request("d", 13, hashes(3))) == (12, True)


def test_distrust_ends_by_itself(engine):
    one = engine(distrust_s=0.5)
    one.run(Request("a", 9, hashes(2)), [1, 2, 3])
    one.store.unreadable.update(one.store.objects)
    one.match(Request("b", 9, hashes(2)))
    assert one.load(Request("b", 9, hashes(2)), [4, 5, 6], 8) == {4, 5}
    assert one.match(Request("c", 9, hashes(2))) == (0, False)
    assert until(lambda: one.match(Request("d", 9, hashes(2))) == (8, True))


def test_store_that_is_away_is_a_miss_and_a_counter(engine):
    one = engine()
    one.run(Request("a", 9, hashes(2)), [1, 2, 3])
    other = Request("b", 9, hashes(2))
    assert one.match(other) == (8, True)
    one.link.up = False
    assert one.load(other, [4, 5, 6], 8) == {4, 5}
    assert one.match(Request("c", 9, hashes(2))) == (0, False)
    one.run(Request("d", 9, hashes(2, b"d")), [7, 8, 9])
    counts = one.counts.take()
    assert counts["load_failures"] == 2
    assert counts["save_skipped_down"] == 2
    assert not any(one.pool.references)


def test_full_store_skips_saves_for_a_while(engine):
    one = engine(pressure_pause_s=60)
    one.store.full = True
    one.run(Request("a", 9, hashes(2)), [1, 2, 3])
    one.run(Request("b", 9, hashes(2, b"b")), [4, 5, 6])
    counts = one.counts.take()
    assert counts["save_failures"] == 2
    assert counts["save_skipped_pressure"] == 2
    assert one.store.calls == ["put_many"]
    assert not any(one.pool.references)


def test_saves_hold_no_more_than_their_share(engine):
    one = engine(pinned_share=0.25)
    request = Request("a", 25, hashes(6))
    one.scheduler.allocated(request, Blocks([1, 2, 3, 4, 5, 6, 7]), 0)
    plan = one.scheduler.plan(step({"a": 25}, {"a": ([1, 2, 3, 4, 5, 6, 7],)}))
    assert plan.saves == []
    assert one.counts.take()["save_skipped_busy"] == 6
    assert not any(one.pool.references)


def test_null_blocks_and_decode_are_left_out(engine):
    one = engine(save_decode=False)
    request = Request("a", 13, hashes(3), num_prompt_tokens=9)
    plan = one.run(request, [0, 2, 3, 4])
    assert [b.numbers for job in plan.saves for b in job.groups] == [[1]]


def test_requests_to_a_master_and_what_is_held_afterwards(engine):
    with LocalCluster(1, "32MiB", in_process=True) as cluster:
        link = StoreLink(cluster.url)
        assert link.warm_up()  # as the connector does before it serves
        one = engine(link=link, lookup_wait_s=30, lookup_deadline_s=30)

        def requests():
            return link.client.stats().requests

        _fill(one, [5, 2, 9])
        before = requests()
        one.run(Request("a", 13, hashes(3)), [5, 2, 9, 1])
        assert requests() - before == 2  # where to put a batch, and that it is there
        other = Request("b", 13, hashes(3))
        before = requests()
        assert one.scheduler.matched(other, 0) == (12, True)
        assert requests() - before == 1
        before = requests()
        assert one.load(other, [3, 4, 6, 7], 12) == set()
        assert requests() - before == 1
        link.close()
        with Client(cluster.url) as client:
            assert_nothing_held(client, [item.key for item in client.list()])


def test_layers_are_objects_of_their_own_and_the_last_one_counts(engine):
    one = engine(layers_per_object=1)
    request = Request("a", 9, hashes(2))
    _fill(one, [1, 2])
    one.scheduler.allocated(request, Blocks([1, 2, 3]), 0)
    plan = one.scheduler.plan(step({"a": 9}, {"a": ([1, 2, 3],)}))
    one.worker.begin(plan)
    one.worker.layer_saved(plan, "layer0", lambda: None)
    until(lambda: len(one.store.objects) == 2)
    assert one.match(Request("b", 9, hashes(2))) == (0, False)
    one.worker.layer_saved(plan, "layer1", lambda: None)
    one.worker.save(plan, lambda: None)
    until(one.report)
    assert len(one.store.objects) == 4
    other = Request("c", 9, hashes(2))
    assert one.match(other) == (8, True)
    assert one.load(other, [4, 5, 6], 8) == set()
    for cache in one.caches.values():
        assert torch.equal(cache[[4, 5]], cache[[1, 2]])
    # All layers of a request in one batch.
    assert one.store.calls.count("get_into_many") == 1


def test_layer_that_failed_never_has_a_last_one(engine):
    one = engine(layers_per_object=1, pressure_pause_s=0)
    one.store.full = True
    request = Request("a", 9, hashes(2))
    one.scheduler.allocated(request, Blocks([1, 2, 3]), 0)
    plan = one.scheduler.plan(step({"a": 9}, {"a": ([1, 2, 3],)}))
    one.worker.layer_saved(plan, "layer0", lambda: None)
    until(lambda: one.store.calls)
    until(lambda: one.counts._sums.get("save_failures"))
    one.store.full = False
    one.worker.save(plan, lambda: None)
    until(one.report)
    assert one.store.objects == {}


@pytest.mark.parametrize("tokens", [13, 12])
def test_feed_tells_of_new_blocks_with_their_tokens(engine, tokens):
    one = engine()
    one.run(Request("a", 9, hashes(2)), [1, 2, 3])
    stored, gone = one.scheduler.take_feed()
    assert gone == []
    assert [(run.hashes, run.parent, run.tokens) for run in stored] == [
        (hashes(2), None, list(range(8)))
    ]
    one.run(Request("b", tokens, hashes(3)), [4, 5, 6, 7])
    stored, _ = one.scheduler.take_feed()
    assert [(run.hashes, run.parent) for run in stored] == [([hashes(3)[2]], hashes(3)[1])]
    one.store.unreadable.update(one.store.objects)
    one.match(Request("c", 9, hashes(2)))
    one.load(Request("c", 9, hashes(2)), [8, 9, 10], 8)
    assert sorted(one.scheduler.take_feed()[1]) == [(0, each) for each in hashes(2)]


def test_decoding_engine_waits_for_what_was_announced(engine):
    one = engine(handoff_wait_s=30)
    prefill = Request("a", 9, hashes(2), kv_transfer_params={"do_remote_decode": True})
    decode = Request("b", 9, hashes(2), kv_transfer_params={HANDOFF: 8})
    assert one.scheduler.matched(decode, 0) == (None, False)
    one.run(prefill, [1, 2, 3])
    assert one.scheduler.finished(prefill)[HANDOFF] == 8
    assert one.scheduler.finished(Request("x", 9, hashes(2))) is None
    assert one.match(decode) == (8, True)


def test_decoding_engine_does_not_wait_for_ever(engine):
    one = engine(handoff_wait_s=0.05)
    decode = Request("b", 9, hashes(2), kv_transfer_params={HANDOFF: 8})
    assert one.match(decode) == (0, False)


def test_step_waits_once_for_a_slow_store_however_many_requests_wait(engine):
    one = engine(lookup_wait_s=1.0)
    answered = threading.Event()
    one.store.find_prefix = lambda keys, **options: answered.wait(30) and 0
    with long_before(40 * 1.0):
        for number in range(40):
            request = Request(str(number), 9, hashes(2, bytes([number])))
            assert one.scheduler.matched(request, 0) == (None, False)
    answered.set()


def test_clear_removes_this_model_only(engine):
    one = engine()
    one.run(Request("a", 9, hashes(2)), [1, 2, 3])
    one.store.objects["other"] = b"x"
    assert one.scheduler.clear(1)
    assert one.store.objects == {"other": b"x"}
    one.link.up = False
    assert not one.scheduler.clear(1)


@pytest.mark.parametrize(
    ("full", "window", "tokens"),
    [
        ([1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], 24),
        ([1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], 20),
        ([1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], 24),  # the window's tail is enough
        ([1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1], 24),
        ([1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1], 0),
        ([1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 0], 12),
        ([0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], 0),
    ],
)
def test_windows_need_only_their_tail(full, window, tokens):
    plan = layout(FULL, WINDOW)
    present = [list(map(bool, full)), list(map(bool, window))]
    assert longest_prefix(plan, present, 0) == tokens


def test_lookup_of_several_groups_is_one_round_trip():
    plan = layout(FULL, WINDOW)
    store = Store()
    for group in plan.groups:
        for each in hashes(3):
            store.objects[plan.part(group, 0, 0) + each.hex()] = b""
    assert present_prefix(plan, hashes(4), 0, "", _trust)(store, 1.0) == 12
    assert present_prefix(plan, hashes(4), 4, "", _trust)(store, 1.0) == 8
    assert store.calls == ["exists_many"] * 2


def test_what_does_not_load_a_tenth_sooner_than_it_is_computed_is_a_miss(engine):
    one = engine(prefill_tokens_per_s=1000)
    one.run(Request("a", 13, hashes(3)), [1, 2, 3, 4])
    one.store.object_s = 0.89 * BLOCK / 1000
    assert one.match(Request("b", 13, hashes(3))) == (12, True)
    one.store.object_s = 0.91 * BLOCK / 1000
    assert one.match(Request("c", 13, hashes(3))) == (0, False)
    # What another engine announced is loaded all the same: it would be waited for.
    announced = Request("d", 13, hashes(3), kv_transfer_params={HANDOFF: 12})
    assert one.match(announced) == (12, True)
    assert one.store.calls[1:] == ["read_cost", "read_cost", "find_prefix"]


def test_several_groups_are_loaded_together_or_not_at_all():
    plan = layout(FULL, WINDOW)
    store = Store()
    for group in plan.groups:
        for each in hashes(6):
            store.objects[plan.part(group, 0, 0) + each.hex()] = b""
    # 24 tokens are six blocks, and the last two or three of the window.
    needed = 6 + 6 - WINDOW.first_needed(24)
    for share, tokens in ((0.99, 24), (1.01, 0)):
        store.object_s = share * 24 / 1000 / needed
        assert present_prefix(plan, hashes(6), 0, "", _trust, 0.001)(store, 1.0) == tokens
    needed = 5 + 6 - WINDOW.first_needed(24)
    for share, tokens in ((0.99, 20), (1.01, 0)):
        store.object_s = share * 20 / 1000 / needed
        assert present_prefix(plan, hashes(6), 4, "", _trust, 0.001)(store, 1.0) == tokens
    assert store.calls == ["read_cost"] * 4


def test_what_may_be_quick_again_is_tried_with_little():
    store = Store(object_s=10 * BLOCK / 1000, hoped_s=0.0)
    one = layout(FULL)
    names = [one.part(FULL, 0, 0) + each.hex() for each in hashes(6)]
    store.objects.update(dict.fromkeys(names, b""))
    assert present_prefix(one, hashes(6), 0, "", _trust, 0.001)(store, 1.0) == BLOCK
    # A block of which each rank has a part is tried whole.
    split = layout(FULL, tensor_ranks=2)
    parts = [split.part(FULL, rank, 0) for rank in range(2)]
    names = [part + each.hex() for each in hashes(6) for part in parts]
    store.objects.update(dict.fromkeys(names, b""))
    assert present_prefix(split, hashes(6), 0, "", _trust, 0.001)(store, 1.0) == BLOCK
    del store.objects[names[1]]
    assert present_prefix(split, hashes(6), 0, "", _trust, 0.001)(store, 1.0) == 0
    both = layout(FULL, WINDOW)
    names = [both.part(group, 0, 0) + each.hex() for group in both.groups for each in hashes(6)]
    store.objects.update(dict.fromkeys(names, b""))
    step = both.step_tokens
    assert present_prefix(both, hashes(6), 0, "", _trust, 0.001)(store, 1.0) == step
    assert present_prefix(both, hashes(6), step, "", _trust, 0.001)(store, 1.0) == step
    assert present_prefix(both, hashes(6), 0, "", _trust)(store, 1.0) == 6 * BLOCK
    store.hoped_s = None
    assert present_prefix(both, hashes(6), 0, "", _trust, 0.001)(store, 1.0) == 0


def test_the_scheduler_predicts_by_what_the_workers_measure(engine):
    with LocalCluster(1, "32MiB", in_process=True) as cluster:
        planning, moving = StoreLink(cluster.url), StoreLink(cluster.url)
        one = engine(link=planning, prefill_tokens_per_s=1000)
        one.worker._moves.link = moving
        request = Request("a", 13, hashes(3))
        one.run(request, [1, 2, 3, 4])
        names = [item.key for item in planning.client.list()]
        moving.client.get_many(names).check()
        usual = planning.client.read_cost(names).seconds
        measured(moving.client, 100.0, nbytes=1000)
        one.scheduler.report(WorkerReport(rates={(0, 0): one.worker._moves.rates()}))
        assert (planning.client.read_cost(names).seconds > 1000 * usual).all()
        assert one.match(Request("c", 13, hashes(3))) == (0, False)
        planning.close()
        moving.close()


def test_a_load_reports_what_reads_take_where_it_is_weighed(engine):
    for rate, reported in ((1000, {("tcp", 0): (1.0, 2.0, 3.0)}), (0, None)):
        one = engine(prefill_tokens_per_s=rate)
        one.worker._moves.rates = lambda: {("tcp", 0): (1.0, 2.0, 3.0)}
        one.run(Request("a", 9, hashes(2)), [1, 2, 3])
        one.match(Request("b", 9, hashes(2)))
        one.scheduler.allocated(Request("b", 9, hashes(2)), Blocks([4, 5, 6]), 8)
        one.worker.begin(one.scheduler.plan(step({}, {})))
        until(lambda one=one: "b" in one.worker.take_finished()[0])
        if reported:
            assert until(one.worker.take_report).rates == {(0, 0): reported}
        else:
            assert one.worker.take_report() is None


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_load_takes_as_long_as_its_slowest_rank(engine, steps, slow):
    """Whichever reports last, be it in one step or in two."""
    with LocalCluster(1, "32MiB", in_process=True) as cluster:
        links = [StoreLink(cluster.url) for _ in range(3)]
        planning, *moving = links
        one = engine(link=planning, prefill_tokens_per_s=1000)
        one.worker._moves.link = moving[0]
        one.run(Request("a", 13, hashes(3)), [1, 2, 3, 4])
        names = [item.key for item in planning.client.list()]
        usual = planning.client.read_cost(names).seconds
        reports = []
        for rank, link in enumerate(moving):
            link.client.get_many(names).check()
            measured(link.client, 100.0 if rank == slow else 0.001, nbytes=1000)
            one.worker._moves.link = link
            reports.append(WorkerReport(rates={(rank, 0): one.worker._moves.rates()}))
        if steps == 1:
            reports = [reports[0].aggregate(reports[1])]
        for report in reports:
            assert report
            one.scheduler.report(report)
        assert (planning.client.read_cost(names).seconds > 1000 * usual).all()
        for link in links:
            link.close()


def test_every_rank_must_hold_a_block_and_equal_ranks_share_one():
    split = layout(Group(0, BLOCK, 1, 0, 1), tensor_ranks=2)
    store = Store()
    for rank in range(2):
        store.objects[split.part(split.groups[0], rank, 0) + hashes(1)[0].hex()] = b""
    store.objects[split.part(split.groups[0], 0, 0) + hashes(2)[1].hex()] = b""
    assert present_prefix(split, hashes(2), 0, "", _trust)(store, 1.0) == BLOCK

    alike = layout(Group(0, BLOCK, 1, 0, 2), tensor_ranks=2)
    assert alike.part(alike.groups[0], 0, 0) == alike.part(alike.groups[0], 1, 0)
    assert len(alike.parts(alike.groups[0])) == 1


def test_equal_ranks_take_turns_in_writing():
    alike = layout(Group(0, BLOCK, 1, 0, 2), tensor_ranks=2)
    store = Store()
    link = Link(store)
    plan = StepPlan()
    from serving.connectors.vllm.messages import GroupBlocks, SaveJob

    plan.saves.append(SaveJob(0, [GroupBlocks(0, hashes(4), [1, 2, 3, 4], [0, 1, 2, 3])]))
    workers = []
    for rank in range(2):
        worker = WorkerSide(alike, link, Options(), Counts(), tensor_rank=rank, pipeline_rank=0)
        worker.register({"l": torch.ones(8, 3)}, [type("G", (), {"layer_names": ["l"]})], 8)
        worker.save(plan, lambda: None)
        workers.append(worker)
    reports = [until(worker.take_report) for worker in workers]
    for worker in workers:
        worker.close()
    assert [len(report.saves[0].stored) for report in reports] == [2, 2]
    merged = reports[0].aggregate(reports[1])
    assert merged.saves[0].workers == 2
    assert len(merged.saves[0].stored) == 4
    assert len(store.objects) == 4


def test_reports_of_workers_add_up():
    one = WorkerReport({1: SaveOutcome(1, {(0, b"a")})}, {(0, b"x")}, {"r"})
    two = WorkerReport({1: SaveOutcome(1, set(), {(0, b"a")}), 2: SaveOutcome()})
    both = one.aggregate(two)
    assert both.saves[1] == SaveOutcome(2, {(0, b"a")}, {(0, b"a")})
    assert both.saves[2].workers == 1
    assert not WorkerReport()


@pytest.mark.parametrize(
    "given", [{"ulr": "x"}, {"distrust_s": 0}, {"client": 3}, {"prefill_tokens_per_s": -1}]
)
def test_wrong_options_are_named(given):
    with pytest.raises(ConfigError, match=next(iter(given))):
        Options.parse(given, "options")
    with pytest.raises(ConfigError, match="whole blocks"):
        Options.parse({"prefill_tokens_per_s": 1, "layers_per_object": 1}, "options")
    options = {"url": "mooncake://h:1/n", "lookup_wait_s": 1}
    assert Options.parse(options, "options").lookup_wait_s == 1

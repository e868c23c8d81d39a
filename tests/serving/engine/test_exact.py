"""What an answer may depend on: its prompt and its seed, not on who or what shares the engine."""

import itertools

import numpy as np
import pytest
import torch

from serving.engine.sampling import choose, likelihood
from serving.engine.sequence import PrefixLost
from serving.workers.protocol import Sampling
from tests.serving.engine.support import Notes, add, answer, make_engine, prompts, run

SEEDED = Sampling(temperature=0.8, top_p=0.95, top_k=50, seed=11)


@pytest.fixture(scope="module")
def alone():
    """Prompts and their answers, each computed by an engine that did nothing else."""
    engine = make_engine()
    given = prompts(24, seed=1)
    samplings = [Sampling() if at % 2 else SEEDED for at in range(len(given))]
    answers = [
        answer(engine, prompt, count=12, sampling=sampling)
        for prompt, sampling in zip(given, samplings, strict=True)
    ]
    assert len({tuple(each) for each in answers}) > 20  # the model does not always say the same
    return given, samplings, answers


def test_answers_do_not_depend_on_the_batch(alone):
    given, samplings, answers = alone
    engine = make_engine(blocks=400, chunk_tokens=48, running_max=24)
    notes = [
        add(engine, prompt, count=12, sampling=sampling)
        for prompt, sampling in zip(given, samplings, strict=True)
    ]
    most = 0
    while engine.step():
        most = max(most, len(engine.running))
    assert most > 4  # they did share steps
    assert [each.tokens for each in notes] == answers


@pytest.mark.parametrize("chunk_tokens", [16, 64, 1024])
def test_answers_do_not_depend_on_chunks(alone, chunk_tokens):
    given, samplings, answers = alone
    engine = make_engine(chunk_tokens=chunk_tokens)
    for prompt, sampling, expected in list(zip(given, samplings, answers, strict=True))[:8]:
        assert answer(engine, prompt, count=12, sampling=sampling) == expected


def test_answers_do_not_depend_on_where_blocks_lie(alone):
    given, samplings, answers = alone
    engine = make_engine(blocks=40)
    # Every second block is taken, so that no two blocks of a sequence are neighbours.
    taken = engine.cache.acquire(40)
    engine.cache.release(taken[::2])
    assert isinstance(engine.cache.place(taken[::2]), torch.Tensor)
    for prompt, sampling, expected in list(zip(given, samplings, answers, strict=True))[:8]:
        assert answer(engine, prompt, count=12, sampling=sampling) == expected


class Reusing(Notes):
    """A prefix that was computed before, by a longer or shorter prompt, is copied in per layer."""

    def __init__(self, engine, cached, keys, values, fails_at=-1):
        super().__init__(engine, cached)
        self.keys, self.values, self.fails_at = keys, values, fails_at

    def before_layer(self, layer):
        if self.fails_at == layer:
            self.fails_at = -1
            raise PrefixLost
        blocks = self.sequence.blocks[: self.cached // self.engine.cache.block_tokens]
        if blocks and self.sequence.computed == self.cached:
            self.engine.cache.keys[layer][blocks] = self.keys[layer][: len(blocks)]
            self.engine.cache.values[layer][blocks] = self.values[layer][: len(blocks)]


def contents(engine, notes):
    blocks = notes.sequence.blocks
    return (
        [layer[blocks].clone() for layer in engine.cache.keys],
        [layer[blocks].clone() for layer in engine.cache.values],
    )


@pytest.mark.parametrize("fails_at", [-1, 0, 2])
def test_answers_do_not_depend_on_hits(fails_at):
    """Also when a layer of the prefix turns out to be lost after others were used."""
    engine = make_engine()
    prompt = prompts(1, seed=8, shortest=90, longest=90)[0]
    writer = add(engine, prompt[:70], count=1)
    run(engine)
    kept = contents(engine, writer)
    expected = answer(make_engine(), prompt, count=12)
    for cached in (16, 48, 64):
        torch.nn.init.normal_(engine.cache.keys[1])  # whatever was in there before
        reader = Reusing(engine, cached, *kept, fails_at=fails_at)
        add(engine, prompt, count=12, notes=reader)
        run(engine)
        assert reader.tokens == expected
        assert ("lost" in reader.layers) == (fails_at >= 0)
        engine.release(reader.sequence)


@pytest.mark.parametrize("stages", [2, 3])
def test_answers_do_not_depend_on_stages(stages):
    """Layers split over engines that pass hidden states on; KV of each equals the whole's."""
    prompt = prompts(1, seed=9, shortest=100, longest=100)[0]
    whole = make_engine(chunk_tokens=32)
    expected = add(whole, prompt, count=1)
    run(whole)
    engines = [make_engine(chunk_tokens=32) for _ in range(stages)]
    borders = [3 * at // stages for at in range(stages + 1)]
    notes = []
    for at, engine in enumerate(engines):
        inbox = {} if at else None
        layers = range(*borders[at : at + 2])
        notes.append(add(engine, prompt, layers=layers, inbox=inbox, decodes=False))
    for note, following in itertools.pairwise(notes):
        note.sequence.forward = lambda start, end, hidden, to=following: to.sequence.inbox.update(
            {start: hidden}
        )
    for engine in engines:
        run(engine)
    assert notes[-1].tokens == expected.tokens
    assert [note.tokens for note in notes[:-1]] == [[]] * (stages - 1)
    keys, _ = contents(whole, expected)
    for at, (engine, note) in enumerate(zip(engines, notes, strict=True)):
        theirs, _ = contents(engine, note)
        for layer in range(*borders[at : at + 2]):
            assert torch.equal(keys[layer], theirs[layer])


def test_answers_go_on_elsewhere():
    """A prompt's KV and its first token are all that another engine needs."""
    prompt = prompts(1, seed=10, shortest=77, longest=77)[0]
    expected = answer(make_engine(), prompt, count=10, sampling=SEEDED)
    first = make_engine()
    prefill = add(first, prompt, count=10, sampling=SEEDED, decodes=False)
    run(first)
    assert prefill.tokens == expected[:1]
    assert prefill.reason == "prefill"
    second = make_engine(chunk_tokens=16)
    for cached in (0, 64):
        reader = Reusing(second, cached, *contents(first, prefill))
        add(second, prompt + expected[:1], count=10, sampling=SEEDED, notes=reader)
        reader.sequence.prompt = reader.sequence.target = len(prompt)
        run(second)
        assert reader.tokens == expected[1:]
        second.release(reader.sequence)


def test_kv_of_an_answer_computed_anew_is_that_of_a_prompt():
    """What goes back to the pool has the bits a prefill of the same tokens has."""
    engine = make_engine()
    prompt = prompts(1, seed=12, shortest=40, longest=40)[0]
    notes = add(engine, prompt, count=30)
    run(engine)
    assert notes.reason == "length"
    engine.reopen(notes.sequence, 32, 64)
    run(engine)
    keys, values = contents(engine, notes)
    other = make_engine()
    again = add(other, (prompt + notes.tokens)[:64], count=1)
    run(other)
    expected_keys, expected_values = contents(other, again)
    for layer in range(3):
        assert torch.equal(keys[layer][:4], expected_keys[layer][:4])
        assert torch.equal(values[layer][:4], expected_values[layer][:4])


def test_layers_are_told_in_order_and_whole():
    engine = make_engine(chunk_tokens=32)
    notes = add(engine, prompts(1, shortest=70, longest=70)[0], count=1)
    run(engine)
    expected = [(la, a, b) for a, b in ((0, 32), (32, 64), (64, 70)) for la in range(3)]
    assert notes.layers == expected
    assert notes.loads == [layer for layer, _, _ in expected]


def test_priority_goes_before_order_and_nothing_is_thrown_out():
    """A full cache makes requests wait; none of those admitted loses its blocks."""
    engine = make_engine(blocks=8, chunk_tokens=16)
    order = []

    class Order(Notes):
        def finished(self, reason):
            super().finished(reason)
            order.append(self.sequence.priority)
            engine.release(self.sequence)

    notes = [
        add(engine, [1] * 40, count=20, priority=priority, notes=Order(engine))
        for priority in (0, 0, 5, 1)
    ]
    waited = 0
    while engine.step():
        engine.cache.check_integrity([s.blocks for s in engine.opened + engine.running])
        waited += bool(engine.waiting)
    assert waited
    assert order == [5, 1, 0, 0]
    assert [len(note.tokens) for note in notes] == [20] * 4
    assert engine.cache.used == 0


def test_the_cache_notices_a_second_release():
    engine = make_engine(blocks=4)
    blocks = engine.cache.acquire(2)
    engine.cache.release(blocks)
    with pytest.raises(AssertionError, match="twice"):
        engine.cache.release(blocks)
    engine.cache.acquire(1)
    with pytest.raises(AssertionError, match="lost"):
        engine.cache.check_integrity([])


def test_stop_tokens_end_an_answer():
    engine = make_engine()
    tokens = answer(engine, [5, 6, 7], count=10)
    stop = tokens[4]
    notes = add(engine, [5, 6, 7], count=10, stop_tokens=frozenset([stop]))
    run(engine)
    assert notes.reason == "stop"
    assert notes.tokens == tokens[: tokens.index(stop) + 1]


def test_sampling_follows_the_distribution_and_its_cuts():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))

    def draws(**settings):
        picks = [choose(logits, Sampling(seed=3, **settings), at) for at in range(4000)]
        return np.bincount(picks, minlength=4) / 4000

    np.testing.assert_allclose(draws(temperature=1.0), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(draws(temperature=1.0, top_k=2), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(draws(temperature=1.0, top_p=0.7), [0.625, 0.375, 0, 0], atol=0.03)
    assert draws(temperature=0.01)[0] == 1
    assert choose(logits, Sampling(), 0) == 0
    assert choose(np.zeros(4, np.float32), Sampling(), 0) == 0  # the lowest of equals


def test_what_is_banned_is_not_chosen_before_its_position():
    logits = np.log(np.array([0.6, 0.1, 0.29, 0.01], np.float32))
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature, seed=5, banned=(0, 2), banned_before=300)
        picks = [choose(logits, sampling, at) for at in range(600)]
        assert set(picks[:300]) == ({1} if not temperature else {1, 3})
        assert {0, 2} & set(picks[300:])


@pytest.mark.parametrize("count", [0, 1, 3, 7, 50, 80])
def test_a_likelihood_is_the_log_softmax_of_the_logits(count):
    generator = torch.Generator().manual_seed(count)
    logits = torch.randn(50, generator=generator) * 20
    logits[10:20] = logits[5]  # equals: the lower numbers come first
    expected = torch.log_softmax(logits.double(), 0)
    told = likelihood(logits.numpy(), 33, count)
    assert told.chosen == pytest.approx(expected[33].item(), abs=1e-9)
    order = sorted(range(50), key=lambda token: (-expected[token].item(), token))[:count]
    assert list(told.tokens) == order
    assert list(told.logprobs) == pytest.approx([expected[token].item() for token in order])

"""Steps that compute a chunk of a prompt beside answers: the same bits, within a bound."""

import pytest
import torch

from serving.workers.protocol import Sampling
from tests.serving.engine.support import Notes, add, make_engine, prompts, run

LONG = prompts(1, seed=71, shortest=400, longest=400)[0]
SHORT = prompts(5, seed=72, shortest=3, longest=30)
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=5)
BLOCK = 16


def made(**settings):
    return make_engine(**{"blocks": 200, "chunk_tokens": 64, "running_max": 8} | settings)


def answering(engine, count=200):
    """Five requests that are being answered."""
    notes = [add(engine, prompt, count=count, sampling=SEEDED) for prompt in SHORT]
    while len(engine.running) < len(notes):
        assert engine.step()
    return notes


def kv(engine, notes):
    blocks = notes.sequence.blocks
    return torch.stack([torch.stack((k[blocks], v[blocks])) for k, v in zip(
        engine.cache.keys, engine.cache.values, strict=True
    )])  # fmt: skip


@pytest.mark.parametrize("step_tokens", [0, 24, 36, 68])
def test_mixed_steps_compute_what_separate_ones_do(step_tokens):
    """Answers to the end before the prompt begins, and beside it: tokens and KV to the last bit."""
    apart = made()
    before = answering(apart, 40)
    run(apart)
    alone = add(apart, LONG, count=6)
    run(apart)
    mixed = made(step_tokens=step_tokens)
    beside = answering(mixed, 40)
    late = add(mixed, LONG, count=6)
    together = 0
    while mixed.step():
        together += bool(mixed.prompt_tokens and mixed.running)
    assert together > 4
    assert [each.tokens for each in beside] == [each.tokens for each in before]
    assert late.tokens == alone.tokens
    for theirs, ours in zip((*before, alone), (*beside, late), strict=True):
        # The last token's KV is never computed.
        assert torch.equal(_known(apart, theirs), _known(mixed, ours))


def _known(engine, notes):
    kinds = kv(engine, notes).flatten(2, 3)
    return kinds[:, :, : len(notes.sequence.tokens) - 1]


def test_mixed_steps_in_quick_arithmetic_are_near():
    """Chunks of other lengths round otherwise, and no more than that."""
    whole, cut = (made(exact=False, chunk_tokens=512, step_tokens=budget) for budget in (0, 40))
    notes = []
    for engine in (whole, cut):
        answering(engine)
        notes.append(add(engine, LONG, count=1))
        while not notes[-1].reason:
            engine.step()
    assert notes[0].tokens == notes[1].tokens
    assert torch.allclose(kv(whole, notes[0]), kv(cut, notes[1]), atol=1e-4)


@pytest.mark.parametrize(
    ("step_tokens", "chunk"), [(0, 64), (24, 16), (36, 16), (38, 32), (68, 48)]
)
def test_every_answer_has_a_token_between_two_chunks_and_a_step_has_a_bound(step_tokens, chunk):
    engine = made(step_tokens=step_tokens)
    notes = answering(engine)
    late = add(engine, LONG, count=6)
    chunks = []
    while not late.tokens:
        before = [len(each.tokens) for each in notes]
        assert engine.step()
        chunks.append(engine.prompt_tokens)
        assert [len(each.tokens) for each in notes] == [count + 1 for count in before]
        assert engine.prompt_tokens + len(notes) <= engine.step_tokens
    assert chunks == [chunk] * (400 // chunk) + [400 % chunk] * bool(400 % chunk)
    # Its own first step as an answer is the one behind its last chunk.
    assert len(late.tokens) == 1
    engine.step()
    assert len(late.tokens) == 2


def test_chunks_are_longer_when_answers_have_ended():
    engine = made(step_tokens=50)
    answering(engine, 8)
    late = add(engine, LONG, count=1)
    seen = set()
    while not late.reason:
        answers = len(engine.running)
        engine.step()
        seen.add((answers, engine.prompt_tokens))
    assert {(5, 32), (0, 48)} <= seen


def test_a_prompt_gets_on_beside_as_many_answers_as_there_may_be():
    engine = made(running_max=6, step_tokens=6 + BLOCK)
    answering(engine)
    late = add(engine, LONG, count=1)
    while not late.reason:
        engine.step()
        assert engine.prompt_tokens in (0, BLOCK)
    assert len(engine.running) == 5


def test_a_prompt_of_higher_priority_goes_before_those_that_are_open():
    """As many as are opened ahead have blocks already: it is opened all the same, and computed."""
    engine = made(chunk_tokens=16)
    low = [add(engine, LONG, count=1) for _ in range(4)]
    engine.step()
    assert len(engine.opened) == 2
    high = add(engine, SHORT[0] * 3, count=1, priority=1)
    while not high.reason:
        engine.step()
    assert not any(each.tokens for each in low)
    assert len(engine.opened) == 2  # of low priority, and no more than before
    run(engine)
    assert all(each.tokens for each in low)


class Returning(Notes):
    """Its KV is computed anew once it is answered, as for the pool."""

    again = False

    def finished(self, reason):
        super().finished(reason)
        if not self.again:
            self.again = True
            self.engine.reopen(self.sequence, 0, 4 * BLOCK, behind=True)


def test_what_is_computed_for_the_pool_waits_for_prompts_that_were_there():
    engine = made(chunk_tokens=16)
    first = add(engine, LONG[: 4 * BLOCK], count=2, notes=Returning(engine))
    for _ in range(4):
        engine.step()
    waiting = add(engine, LONG, count=1)
    while not first.again:
        engine.step()
    while not waiting.reason:
        assert first.sequence.computed == 0
        engine.step()
    run(engine)
    assert first.sequence.computed == 4 * BLOCK

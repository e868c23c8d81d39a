"""An engine driven by hand, and a listener that writes down what it is told."""

import torch

from serving.engine.cache import KVCache
from serving.engine.engine import Engine
from serving.engine.loading import load_model
from serving.engine.sequence import Sequence
from serving.workers.protocol import Sampling

GREEDY = Sampling()


class Notes:
    """A listener that keeps everything."""

    def __init__(self, engine, cached=0):
        self.engine = engine
        self.cached = cached
        self.sequence = None
        self.tokens = []
        self.likelihoods = []
        self.layers = []
        self.reason = ""
        self.loads = []

    def opened(self):
        self.sequence.computed = self.cached
        self.sequence.ready = True

    def before_layer(self, layer):
        self.loads.append(layer)

    def after_layer(self, layer, start, end):
        self.layers.append((layer, start, end))

    def prefix_lost(self):
        self.layers.append("lost")

    def prefilled(self, token, likelihood):
        if token >= 0:
            self.token(token, likelihood)

    def token(self, token, likelihood):
        self.tokens.append(token)
        self.likelihoods.append(likelihood)

    def finished(self, reason):
        self.reason = reason


def make_engine(model="nano", *, blocks=64, block_tokens=16, exact=None, dtype="", **settings):
    torch.set_num_threads(1)
    decoder = load_model(model, dtype=dtype, exact=exact).decoder
    cache = KVCache(decoder.config, blocks, block_tokens, decoder.device)
    return Engine(decoder, cache, **settings)


def add(engine, tokens, *, count=8, sampling=GREEDY, notes=None, **fields):
    notes = notes or Notes(engine)
    sequence = Sequence(
        tokens=list(tokens),
        prompt=len(tokens),
        sampling=sampling,
        max_new_tokens=count,
        listener=notes,
        layers=fields.pop("layers", range(engine.decoder.config.layers)),
        **fields,
    )
    notes.sequence = sequence
    engine.submit(sequence)
    return notes


def run(engine, steps_max=10_000):
    for _ in range(steps_max):
        if not engine.step():
            return
    raise AssertionError("the engine never came to rest")


def answer(engine, tokens, **settings):
    """Tokens of one request, alone."""
    notes = add(engine, tokens, **settings)
    run(engine)
    engine.release(notes.sequence)
    return notes.tokens


def prompts(count, *, seed=0, shortest=1, longest=120, vocabulary=256):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]

"""Workers without a model: they answer as `WorkerClient` does, and fail when they are told to.

The "answer" to a prompt is a function of all tokens before, so a request that goes on elsewhere has
to end with the tokens of one that was never interrupted.
"""

import asyncio

from serving.workers import protocol as p
from transfer_engine.errors import PeerLostError

CARD = p.ModelCard(
    name="fake",
    revision="r1",
    dtype="float32",
    layout="fake",
    layers=2,
    kv_heads=1,
    head_dim=4,
    vocabulary=300,
    context_max=4096,
    block_tokens=16,
    kv_bytes_per_token=64,
    eos=(257,),
)


def following(tokens):
    """The token after these: a letter."""
    return 97 + (sum(tokens) + len(tokens)) % 26


def answer(tokens, count):
    """The tokens that follow a prompt."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(following(tokens))
    return tokens[-count:]


def likelihoods(tokens, sampling):
    """What is told of the token after these, where it is asked for: made up, but their own."""
    if sampling.likeliest < 0:
        return ()
    first, made_up = following(tokens), -1 - sum(tokens) % 1000 / 1000
    likely = tuple((first + number) % CARD.vocabulary for number in range(sampling.likeliest))
    below = tuple(made_up - number for number in range(sampling.likeliest))
    return (p.Likelihood(made_up, likely, below),)


class FakeWorker:
    """One worker. `at` names stages; `fail[stage]` is what happens there, once or `always`."""

    def __init__(self, name, role, card=CARD, kv_blocks=256):
        self.address = name
        self.role = role
        self.card = card
        self.kv_blocks = kv_blocks
        self.pool_tokens = 0  # of a prompt, if it may load them
        self.own_tokens = 0  # of these, those that it says it had itself
        self.lent_tokens = 0  # and those that another worker lent
        self.alive = True
        self.fail = {}
        self.hold = {}
        self.seen = []
        self.running = set()
        self.cancelled = []
        self.roles = []
        self.kept = []
        self.steps = ()
        self.followers = []

    def __call__(self):
        return _Link(self)

    def die(self):
        """No answer to anything from now on; what runs breaks off."""
        self.alive = False

    def keep(self, names):
        """Say that blocks are kept now."""
        self.kept += names
        for take in self.followers:
            take(p.Held(False, b"".join(names), b""))

    def check(self):
        """What a dead worker answers."""
        if not self.alive:
            raise PeerLostError("the worker is gone", peer=self.address)

    async def stage(self, name):
        """A place where a test may hold a request, or make it fail."""
        self.check()
        if name in self.hold:
            reached, go = self.hold[name]
            reached.set()
            await go.wait()
        self.check()
        failure = self.fail.pop(name, None)
        if isinstance(failure, Exception):
            raise failure
        return failure

    def holding(self, name):
        """Hold requests at a stage: (reached, go)."""
        self.hold[name] = (asyncio.Event(), asyncio.Event())
        return self.hold[name]


class _Link:
    """A connection to a fake worker, in place of `WorkerClient`."""

    def __init__(self, worker):
        self.worker = worker
        self.address = worker.address

    async def hello(self, timeout_s=5.0):
        w = self.worker
        w.check()
        return p.Hello(w.address, w.role, 1, w.card, "", w.kv_blocks, 8, 100_000, 256)

    async def load(self, timeout_s=5.0):
        w = self.worker
        w.check()
        return p.Load(w.role, False, 0, len(w.running), w.kv_blocks, 0, 0.0, w.steps, 0)

    async def follow_kept(self, take):
        w = self.worker
        w.check()
        w.followers.append(take)
        take(p.Held(True, b"".join(w.kept), b""))
        await asyncio.Event().wait()

    async def set_role(self, role, *, drain_s=30.0):
        self.worker.check()
        self.worker.role = role
        self.worker.roles.append(role)

    async def cancel(self, request_id, timeout_s=5.0):
        self.worker.cancelled.append(request_id)

    async def close(self):
        pass

    async def prefill(self, message):
        w, ended = self.worker, False
        w.seen.append(message)
        w.running.add(message.request_id)
        tokens = p.unpack_tokens(message.tokens).tolist()
        first = following(tokens)
        told = likelihoods(tokens, message.sampling)
        try:
            failure = await w.stage("prefill")
            if failure is not None:
                ended = True
                yield failure
                return
            yield p.Queued(0)
            cached = w.pool_tokens if message.prefix_blocks else 0
            yield p.Started(cached)
            stopped = "length" if message.max_new_tokens == 1 else ""
            last = p.Chosen(first, *told) if first in message.stop_tokens else None
            if last is None:
                yield p.FirstToken(first, *told)
            else:
                stopped = "stop"
            await w.stage("transfer")
            ended = True
            seconds = {"compute": 0.01, "queue": 0.0}
            place = p.KVPlace(pushed=True)
            computed, found = len(tokens) - cached, (w.own_tokens, w.lent_tokens)
            yield p.Done(computed, cached, seconds, place, stopped, *found, last=last)
        finally:
            w.running.discard(message.request_id)
            if not ended:
                w.cancelled.append(message.request_id)

    async def generate(self, message):
        w, ended = self.worker, False
        w.seen.append(message)
        w.running.add(message.request_id)
        tokens = p.unpack_tokens(message.tokens).tolist()
        try:
            failure = await w.stage("prefill")
            if failure is not None:
                ended = True
                yield failure
                return
            yield p.Queued(0)
            yield p.Started(0)
            told = likelihoods(tokens, message.sampling)
            tokens.append(following(tokens))
            yield p.FirstToken(tokens[-1], *told)
            yield p.Computed(len(tokens) - 1, 0, {"compute": 0.01, "queue": 0.0})
            for number in range(message.max_new_tokens - 1):
                failure = await w.stage(f"token {number}")
                if failure is not None:
                    ended = True
                    yield failure
                    return
                told = likelihoods(tokens, message.sampling)
                tokens.append(following(tokens))
                yield p.Tokens((tokens[-1],), told)
                await asyncio.sleep(0)
            await w.stage("end")
            ended = True
            yield p.Finished("length", {"decode": 0.01})
        finally:
            w.running.discard(message.request_id)
            if not ended:
                w.cancelled.append(message.request_id)

    async def decode(self, message):
        w, ended = self.worker, False
        w.seen.append(message)
        w.running.add(message.request_id)
        tokens = [*p.unpack_tokens(message.tokens).tolist(), message.first_token]
        try:
            failure = await w.stage("admission")
            if failure is not None:
                ended = True
                yield failure
                return
            yield p.Admitted(0)
            for number in range(message.max_new_tokens - 1):
                failure = await w.stage(f"token {number}")
                if failure is not None:
                    ended = True
                    yield failure
                    return
                told = likelihoods(tokens, message.sampling)
                tokens.append(following(tokens))
                if tokens[-1] in message.stop_tokens:
                    ended = True
                    last = p.Chosen(tokens[-1], *told)
                    yield p.Finished("stop", {"decode": 0.01}, last=last)
                    return
                yield p.Tokens((tokens[-1],), told)
                await asyncio.sleep(0)
            await w.stage("end")
            ended = True
            yield p.Finished("length", {"decode": 0.01})
        finally:
            w.running.discard(message.request_id)
            if not ended:
                w.cancelled.append(message.request_id)


class Fleet:
    """Fake workers by address; `connect` is what a conductor is given."""

    def __init__(self, prefill=2, decode=2, coupled=0):
        self.prefill = [FakeWorker(f"p{n}", "prefill") for n in range(prefill)]
        self.decode = [FakeWorker(f"d{n}", "decode") for n in range(decode)]
        self.coupled = [FakeWorker(f"c{n}", "coupled") for n in range(coupled)]
        self.workers = {w.address: w for w in (*self.prefill, *self.decode, *self.coupled)}

    @property
    def addresses(self):
        return list(self.workers)

    def connect(self, address):
        return self.workers[address]()

    def idle(self):
        """Whether nothing runs anywhere."""
        return not any(w.running for w in self.workers.values())

"""Letting something happen in the middle of what a client does."""

from mooncake_store.client import single as straight


class SlowTransfers:
    """Runs `between` behind each transfer, as a slow network would let happen."""

    def __init__(self, store, between):
        self.move = store._driver._move
        self.between = between
        store._driver._move = self

    def __call__(self, step):
        outcome = self.move(step)
        self.between()
        return outcome


def during_copies(monkeypatch, between):
    """Run `between` once, after the bytes of a single object were copied straight."""
    copy, left = straight.copy_one, [between]

    def slow_copy(source, target, nbytes):
        found = copy(source, target, nbytes)
        while left:
            left.pop()()
        return found

    monkeypatch.setattr(straight, "copy_one", slow_copy)
    return left

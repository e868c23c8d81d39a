"""What a codec makes of bytes is these bytes again, or is told from it; of numbers it is less."""

import sys

import numpy as np
import pytest
import zstandard

from transfer_engine.errors import ConfigError
from transfer_engine.segments.codec import HEAD_BYTES, Codec


def bf16(count, seed=0):
    """Numbers as keys and values have them, two bytes each."""
    numbers = np.random.default_rng(seed).normal(0, 0.7, count).astype(np.float32)
    return numbers.view(np.uint16)[1::2].tobytes()


def noise(nbytes, seed=0):
    return np.random.default_rng(seed).bytes(nbytes)


SAMPLES = {
    "bf16": bf16(100_000),
    "fp16": np.random.default_rng(1).normal(0, 0.7, 100_000).astype(np.float16).tobytes(),
    "noise": noise(200_000),
    "zeros": bytes(100_000),
    "text": b"the same again and again " * 5000,
    "noise first": noise(300_000) + bytes(300_000),
    "noise last": bytes(300_000) + noise(300_000),
    "odd": bf16(50_000) + b"!",
    "nothing": b"",
    "one": b"1",
    "two": b"12",
    "three": b"123",
}


@pytest.fixture
def codec():
    return Codec()


def back(codec, stored, nbytes):
    """What is made of stored bytes; None where the codec says that it is nothing."""
    memory = bytearray(nbytes)
    return bytes(memory) if codec.decode(stored, memoryview(memory)) else None


@pytest.mark.parametrize("name", SAMPLES)
def test_what_was_encoded_comes_back_and_is_hardly_ever_longer(codec, name):
    data = SAMPLES[name]
    stored = codec.encode(memoryview(data))
    assert back(codec, stored, len(data)) == data
    assert len(stored) <= len(data) + HEAD_BYTES
    assert back(codec, stored, len(data) + 1) is None
    assert back(codec, stored, max(0, len(data) - 1)) is None or not data


def test_of_numbers_a_third_is_saved_and_of_noise_nothing(codec):
    numbers = memoryview(SAMPLES["bf16"])
    assert len(codec.encode(numbers)) < 0.72 * len(numbers)
    assert codec.gains(numbers)
    assert codec.gains(memoryview(SAMPLES["fp16"]))
    assert not codec.gains(memoryview(SAMPLES["noise"]))
    assert not codec.gains(memoryview(b"1"))


@pytest.mark.parametrize("name", ["bf16", "noise", "zeros", "odd"])
def test_damage_is_no_exception_and_never_more_than_there_is_room_for(codec, name):
    data = SAMPLES[name][:20_001]
    stored = codec.encode(memoryview(data))
    rng = np.random.default_rng(3)
    for length in [*range(min(64, len(stored))), *rng.integers(0, len(stored), 50).tolist()]:
        assert back(codec, stored[:length], len(data)) is None
    for at in [*range(min(64, len(stored))), *rng.integers(0, len(stored), 300).tolist()]:
        changed = bytearray(stored)
        changed[at] ^= 1 << int(rng.integers(8))
        found = back(codec, bytes(changed), len(data))
        assert found is None or len(found) == len(data)
    assert back(codec, noise(1000), len(data)) is None


def test_a_frame_that_says_it_is_larger_is_not_expanded(codec):
    """It would be made in memory, however large it says that it is."""
    stored = codec.encode(memoryview(bytes(2000)))
    frame = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    head = bytearray(stored[:HEAD_BYTES])
    head[8:12] = len(frame).to_bytes(4, "little")
    lower = stored[HEAD_BYTES + int.from_bytes(stored[8:12], "little") :]
    assert back(codec, bytes(head) + frame + lower, 2000) is None


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match="pip install zstandard"):
        Codec()

"""What a client knows of segments, whatever their numbers."""

import msgspec

from mooncake_store.client.directory import Directory
from mooncake_store.core.records import SegmentState
from mooncake_store.wire.cluster import SegmentEntry
from transfer_engine import TransferEngine
from transfer_engine.testing import OwnerProcess


def test_segments_of_any_number_are_met_and_forgotten():
    with OwnerProcess() as owner, TransferEngine() as engine:
        descriptor = owner.publish(4096, 1).encode()
        directory = Directory(engine)
        for number in (0, 4095, 4096, 32_767):
            assert directory.unknown([number], now=1) == {number}
            state = int(SegmentState.OK)
            entry = SegmentEntry(number, b"u" * 16, "a", "host", 4096, state, descriptor)
            directory.learn([number], [entry], now=1)
            assert directory.unknown([number], now=1) == set()
            assert directory.known[number].entry is entry
        directory.learn([4096], [], now=1)
        assert sorted(directory.known) == [0, 4095, 32_767]
        # Nobody knew it a moment ago, so it is not asked for again at once.
        assert directory.unknown([4096], now=1) == set()
        assert directory.unknown([4096], now=1 << 62) == {4096}


def test_a_segment_with_a_bad_descriptor_is_left_alone_and_others_are_met():
    with OwnerProcess() as owner, TransferEngine() as engine:
        good = owner.publish(4096, 1)
        bad = msgspec.structs.replace(good, tcp_host="a" * 64)
        directory, state = Directory(engine), int(SegmentState.OK)
        found = [
            SegmentEntry(number, b"u" * 16, "a", "host", 4096, state, descriptor)
            for number, descriptor in enumerate((bad.encode(), b"\x91" * 100, good.encode()))
        ]
        directory.learn([0, 1, 2], found, now=1)
        assert list(directory.known) == [2]
        assert directory.unknown([0, 1, 2], now=1) == set()  # not asked for with each batch
        assert directory.unknown([0, 1, 2], now=1 << 62) == {0, 1}

"""Cold segments in S3, on an S3-compatible server: what any other store of fsspec does."""

import time

import numpy as np
import pytest

from tests.interop.conftest import S3_KEYS
from tests.waiting import until
from transfer_engine.base import TRUNCATED
from transfer_engine.errors import ChecksumMismatchError, StoreError
from transfer_engine.segments.cold import ColdSegment

s3fs = pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")

MIB = 1 << 20


def soon():
    return time.monotonic() + 60


def data(nbytes, seed):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def write(segment, offset, content):
    columns = (np.array([each], np.int64) for each in (offset, len(content), content.ctypes.data))
    return segment.write(*columns, soon()).tolist()


def read(segment, offset, length):
    memory = np.zeros(length, np.uint8)
    columns = (np.array([each], np.int64) for each in (offset, length, memory.ctypes.data))
    (status,) = segment.read(*columns, soon()).tolist()
    return status, memory.tobytes()


def opened(url="s3://bucket/pool", uuid=None):
    segment = ColdSegment.open(url, "mine", 64 * MIB, uuid=uuid)
    segment.tend()
    return segment


def test_a_segment_in_s3_is_written_read_and_found_again(s3):
    with opened() as segment:
        small, large = data(1000, 1), data(9 * MIB, 2)
        assert write(segment, 0, small) == [0]
        assert write(segment, MIB, large) == [0]
        assert read(segment, 0, 1000) == (0, small.tobytes())
        assert read(segment, 5 * MIB - 5, 10) == (0, large[4 * MIB - 5 : 4 * MIB + 5].tobytes())
    with opened(uuid=segment.uuid) as again:
        assert read(again, MIB, 9 * MIB) == (0, large.tobytes())
        again.forget(again.after(MIB, 1))
        again.tend()
        assert read(again, MIB, 10)[0] == TRUNCATED
        s3.invalidate_cache()
        assert len(s3.find("bucket/pool")) == 2  # the mark, and what is left


def test_what_somebody_put_in_its_place_is_found_out(s3):
    with opened("s3://bucket/other") as segment:
        write(segment, 0, data(1000, 1))
        (name,) = [each for each in s3.find("bucket/other") if "/0-" in each]
        s3.pipe_file(name, data(1000, 2).tobytes())
        assert read(segment, 0, 1000)[0] == ChecksumMismatchError.code


def test_who_has_no_credentials_is_told_so(s3, monkeypatch):
    with opened("s3://bucket/third") as segment:
        write(segment, 0, data(1000, 1))
        for name in S3_KEYS:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        s3fs.S3FileSystem.clear_instance_cache()
        other = ColdSegment.open("s3://bucket/third", "mine", 64 * MIB, uuid=segment.uuid)
        with other, pytest.raises(StoreError, match="credentials"):
            other.tend()
        assert "credentials" in other.health.fault
        assert read(segment, 0, 1000) == (0, data(1000, 1).tobytes())  # who had them before


def test_a_server_that_is_gone_is_a_failure_in_time_and_serves_when_it_is_back(s3):
    with opened("s3://bucket/fourth") as segment:
        write(segment, 0, data(1000, 1))
        host, port = s3.server.get_host_and_port()
        s3.server.stop()
        began = time.monotonic()
        with pytest.raises(StoreError):
            read(segment, 0, 1000)
        assert time.monotonic() - began < 60
        assert segment.health.fault
        again = moto.ThreadedMotoServer(ip_address=host, port=port)
        again.start()
        try:
            until(lambda: served(segment, 1000) == data(1000, 1).tobytes())
        finally:
            again.stop()


def served(segment, length):
    try:
        return read(segment, 0, length)[1]
    except StoreError:
        return None


def test_a_bucket_that_is_not_there_is_an_error_and_is_not_made(s3):
    with pytest.raises(StoreError):
        opened("s3://nowhere/pool")
    s3.invalidate_cache()
    assert not s3.exists("nowhere")

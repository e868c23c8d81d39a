"""What the writer of an object hears when its put was given up, or can be placed nowhere now."""

import pytest

from mooncake_store import Client, LocalCluster
from mooncake_store.client.failures import error_of
from mooncake_store.core.records import Status
from mooncake_store.errors import NoSpaceError, NotFoundError


@pytest.mark.parametrize("operation", ["put", "commit"])
def test_a_writer_is_told_that_its_put_was_given_up(operation):
    error = error_of(Status.NOT_FOUND, key="key", operation=operation)
    assert isinstance(error, NotFoundError)
    assert "given up" in str(error)
    assert "never put" not in str(error)


def test_a_pool_without_workers_is_not_said_to_be_full():
    with LocalCluster(0, in_process=True) as cluster, Client(cluster.url) as client:
        with pytest.raises(NoSpaceError, match="no worker lends any now") as raised:
            client.put("key", b"value", deadline=0.5)
        assert "0B of 0B" not in str(raised.value)

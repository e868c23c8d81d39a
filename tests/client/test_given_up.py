"""What the writer of an object hears when the store gave its put up before it was complete."""

import pytest

from mooncake_store.client.failures import error_of
from mooncake_store.core.records import Status
from mooncake_store.errors import NotFoundError


@pytest.mark.parametrize("operation", ["put", "commit"])
def test_a_writer_is_told_that_its_put_was_given_up(operation):
    error = error_of(Status.NOT_FOUND, key="key", operation=operation)
    assert isinstance(error, NotFoundError)
    assert "given up" in str(error)
    assert "never put" not in str(error)

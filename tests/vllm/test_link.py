"""A link to a store that comes and goes."""

import logging

import pytest

from mooncake_store import LocalCluster
from mooncake_store.errors import ConfigError, NoSpaceError, UnavailableError
from serving.connectors.link import StoreLink
from tests.waiting import until


def _fail(error):
    def function(client):
        raise error

    return function


def test_store_that_is_not_there_is_said_once_and_tried_again(free_port, caplog):
    url = f"mooncake://127.0.0.1:{free_port}/default"
    with caplog.at_level(logging.WARNING):
        link = StoreLink(url, {"connect_timeout": 0.5}, rest_s=0.05)
        assert not link.up
        assert link.client is None
        assert link.call(lambda client: client.exists("x")) is None
        assert not link.warm_up()
        assert len(caplog.records) == 1
        with LocalCluster(1, "16MiB", master={"port": free_port}, in_process=True):
            assert until(lambda: link.call(lambda c: [c.exists("x")]), 60) == [False]
            assert link.up
            assert link.warm_up()
            assert link.client.list() == []
            link.close()
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "no store",
        "the store is back; blocks are kept again",
    ]
    assert link.outages == 1


def test_calls_rest_after_a_failure_but_not_after_a_full_store():
    with LocalCluster(1, "16MiB", in_process=True) as cluster:
        link = StoreLink(cluster.url, rest_s=60)
        assert link.call(_fail(NoSpaceError("full"))) is None
        assert link.call(lambda client: 1) == 1
        assert link.call(_fail(UnavailableError("gone"))) is None
        assert not link.up
        assert link.client is None
        # It rests: the function is not even called.
        assert link.call(_fail(AssertionError("called"))) is None
        link.close()
        link.close()


def test_what_a_former_client_fails_with_late_is_no_outage():
    with LocalCluster(1, "16MiB", in_process=True) as cluster:
        link = StoreLink(cluster.url, rest_s=60)

        def fail_late(client):
            link.doubt()
            assert link.call(lambda another: another is not client)
            raise UnavailableError("gone")

        assert link.call(fail_late) is None
        assert link.up
        assert link.outages == 0
        link.close()


def test_a_client_that_is_made_while_the_link_closes_is_closed(monkeypatch):
    made = []

    class Late:
        """Connects at the second attempt, during which the link is closed."""

        def __init__(self, url, **settings):
            self.open = True
            made.append(self)
            if len(made) == 1:
                raise UnavailableError("not yet")
            link.close()

        def close(self):
            self.open = False

    monkeypatch.setattr("mooncake_store.Client", Late)
    link = StoreLink("mooncake://127.0.0.1:1/default", rest_s=0)
    assert link.call(lambda client: 1) is None
    assert len(made) == 2
    assert not made[1].open


def test_wrong_settings_stop_the_start():
    with pytest.raises(ConfigError):
        StoreLink("mooncake://127.0.0.1:1/default", {"lease_tll": 3})


def test_store_that_was_restarted_is_used_again(free_port):
    with LocalCluster(1, "16MiB", master={"port": free_port}) as cluster:
        link = StoreLink(cluster.url, rest_s=0.05)
        assert link.warm_up()
        cluster.kill_master()
        assert link.call(lambda client: client.exists("x", deadline=5)) is None
    with LocalCluster(1, "16MiB", master={"port": free_port}):
        assert until(link.warm_up, 60)
        link.doubt()
        assert link.client is None
        assert link.warm_up()
        link.close()

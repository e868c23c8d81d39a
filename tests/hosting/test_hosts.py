"""One pool whose shards lead on several hosts; clients and workers know of nothing but the master."""

KEYS = [f"key/{number}" for number in range(200)]


def value_of(key, version=0):
    return f"{key} {version} ".encode() * 300


def put_all(client, version=0):
    values = [value_of(key, version) for key in KEYS]
    client.put_many(KEYS, values, upsert=True).check()


def check_all(client, version=0):
    got = client.get_many(KEYS).check().values
    assert [bytes(value) for value in got] == [value_of(key, version) for key in KEYS]


def begin(pool, *options):
    """A pool of two shards, one of which leads on another host."""
    pool.lead("--shards", 2, "--lead", "0", *options, wait=False)
    pool.host("other", "--lead", "1")
    pool.ready("master")
    pool.lend()


def test_two_hosts_are_one_pool(pool):
    begin(pool)
    client = pool.client()
    put_all(client)
    check_all(client)
    assert (pool.leads("master"), pool.leads("other")) == ([0], [1])
    assert client.remove_many(KEYS[:100]).removed == 100
    assert list(client.exists_many(KEYS)) == [False] * 100 + [True] * 100


def test_a_shard_is_moved_there_and_back_while_it_holds_objects(pool):
    pool.lead("--shards", 2)
    pool.host("other")
    pool.lend()
    client = pool.client()
    put_all(client)
    for at, to in enumerate(("other", "master", "other")):
        state = pool.move(1, to)
        assert state.state == "done", state.why
        assert pool.leads(to) == ([1] if to == "other" else [0, 1])
        check_all(client, at)
        put_all(client, at + 1)
        check_all(client, at + 1)

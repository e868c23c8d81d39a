"""Calls with bytes: numbers and results of the original, call by call."""

import asyncio

import pytest

from mooncake_store.compat.store import MooncakeDistributedStore, MooncakeDistributedStoreAsync
from mooncake_store.compat.values import ReplicateConfig, SoftPinAction

MIB = 1 << 20


def config(**changes):
    made = ReplicateConfig()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


# -- setup


def test_both_forms_of_setup(master):
    store = MooncakeDistributedStore()
    positional = ("localhost", "http://127.0.0.1:8080/metadata", 4 * MIB, MIB, "tcp", "", master)
    assert store.setup(*positional, None, tenant_id="one") == 0
    host, port = store.get_hostname().split(":")
    assert host == "localhost"
    assert 12300 <= int(port) <= 14300
    assert store.put("key", b"one") == 0
    assert (
        store.setup(
            {
                "local_hostname": "localhost",
                "metadata_server": "P2PHANDSHAKE",
                "global_segment_size": "4MB",
                "local_buffer_size": "1 MB",
                "master_server_address": master,
                "tenant_id": "one",
                "unknown": 1,
            }
        )
        == 0
    )
    assert store.get("key") == b""  # went with the segment of the former setup
    assert store.close() == 0
    assert store.close() == 0


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"local_hostname": "a"},
        {"local_hostname": "a", "metadata_server": "b", "global_segment_size": "50%"},
        {"local_hostname": "a", "metadata_server": "b", "protocol": "pigeon"},
        {"local_hostname": "10.1.2.3", "metadata_server": "b", "global_segment_size": -1},
    ],
)
def test_impossible_settings_are_invalid(given):
    assert MooncakeDistributedStore().setup(given) == -600


def test_unknown_arguments_are_type_errors(master):
    store = MooncakeDistributedStore()
    positional = ("localhost", "P2PHANDSHAKE", 0, MIB, "tcp", "", master)
    for bad in (("a",), positional[:6], (*positional[:2], "16MB", *positional[3:])):
        with pytest.raises(TypeError):
            store.setup(*bad)
    with pytest.raises(TypeError, match="setup"):
        store.setup(*positional, session_ids=1)


@pytest.mark.parametrize("between", [";", ","])
def test_the_one_that_leads_of_several_masters_is_found(master, free_port, between):
    """Between addresses the original writes semicolons."""
    store = MooncakeDistributedStore()
    masters = f"127.0.0.1:{free_port}{between}{master}"
    given = {"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE"}
    sizes = {"global_segment_size": 4 * MIB, "local_buffer_size": MIB}
    try:
        assert store.setup(given | sizes | {"master_server_address": masters}) == 0
        assert store.put("key", b"value") == 0
        assert store.get("key") == b"value"
    finally:
        store.close()


def test_a_service_that_knows_the_master_is_not_asked(caplog):
    given = {"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE"}
    entry = "redis://10.0.0.1:6379"
    assert MooncakeDistributedStore().setup(given | {"master_server_addr": entry}) < 0
    assert (
        "name the masters themselves, such as host1:50051,host2:50051, or the etcd" in caplog.text
    )


def test_no_master_is_a_number(free_port):
    store = MooncakeDistributedStore()
    address = f"127.0.0.1:{free_port}"
    assert store.setup("localhost", "P2PHANDSHAKE", 0, MIB, "tcp", "", address) < 0
    assert store.health_check() == 1


def test_before_setup_every_call_answers():
    store = MooncakeDistributedStore()
    assert store.get("a") == b""
    assert store.put("a", b"b") == -1
    assert store.is_exist("a") == 0
    assert store.batch_is_exist(["a"]) == [-1]
    assert store.get_buffer("a") is None
    assert store.get_size("a") == -1
    assert store.remove("a") == -1
    assert store.remove_all() == -1
    assert store.register_buffer(1, 1) == -1
    assert store.get_replica_desc("a") == []
    assert store.health_check() == 1
    assert store.close() == 0


def test_tenants_do_not_see_each_other(make):
    one, other = make(tenant_id="red"), make(tenant_id="blue")
    assert one.put("key", b"red") == 0
    assert other.is_exist("key") == 0
    assert other.remove_all(True) == 0
    assert one.get("key") == b"red"


def test_health(store):
    assert store.health_check() == 0
    store.close()
    assert store.health_check() == 1


# -- puts and gets


def test_a_put_of_an_existing_key_succeeds_and_changes_nothing(store):
    assert store.put("key", b"first") == 0
    assert store.put("key", b"second") == 0
    assert store.get("key") == b"first"
    assert store.get_size("key") == 5


def test_what_is_not_there(store):
    assert store.get("none") == b""
    assert store.get_size("none") == -704
    assert store.is_exist("none") == 0
    assert store.remove("none") == -704
    assert store.get_buffer("none") is None


def test_what_cannot_be_put(store):
    assert store.put("", b"x") == -600
    assert store.put("empty", b"") == -600
    assert store.is_exist("") == 0
    for nonsense in ("text", 5, None):
        with pytest.raises(TypeError):
            store.put("key", nonsense)
    with pytest.raises(TypeError):
        store.put(b"key", b"value")
    with pytest.raises(TypeError):
        store.batch_is_exist("key")


def test_any_buffer_is_a_value(store):
    for at, value in enumerate((b"abc", bytearray(b"abc"), memoryview(b"abc"))):
        assert store.put(f"key-{at}", value) == 0
        assert store.get(f"key-{at}") == b"abc"


def test_batches(store):
    keys, values = ["a", "b", "c"], [b"1", b"22", b"333"]
    assert store.put_batch(keys, values) == 0
    assert store.get_batch([*keys, "none"]) == [*values, b""]
    assert store.put_batch(keys, values[:2]) == -600
    assert store.put_batch([], []) == 0
    assert store.get_batch([]) == [b""]
    assert store.batch_is_exist(["a", "none"]) == [1, 0]
    assert store.batch_is_exist([]) == []
    assert store.put_batch(["d", ""], [b"4", b"5"]) == -600
    assert store.get("d") == b"4"


def test_one_request_for_a_batch(store):
    keys = [f"key-{at}" for at in range(64)]
    store.put("warm", b"x")
    requests = lambda: store.client.stats().requests  # noqa: E731
    for call, cost in (
        (lambda: store.put_batch(keys, [b"value"] * 64), 2),
        (lambda: store.batch_is_exist(keys), 1),
        (lambda: store.get_batch(keys), 0),  # under the leases of the probe
        (lambda: store.batch_remove(keys), 2),  # the leases back, on the same connection
    ):
        before = requests()
        call()
        assert requests() - before == cost


def test_without_a_local_buffer_values_are_refused_and_registered_memory_is_not(make, buffer_of):
    store, other = make(local_buffer_size=0), make()
    assert store.put("key", b"value") == -600
    assert store.put_batch(["key"], [b"value"]) == -600
    assert store.put_parts("key", b"value") == -600
    assert store.upsert("key", b"value") == -600
    assert store.is_exist("key") == 0
    memory = buffer_of(store, 4096)
    memory.write(b"value")
    assert store.put_from("key", memory.ptr, 5) == 0
    assert store.get("key") == other.get("key") == b"value"


def test_parts(store):
    assert store.put_parts("parts", b"ab", bytearray(b"cd"), memoryview(b"ef")) == 0
    assert store.get("parts") == b"abcdef"
    assert store.put_parts("nothing") == 0
    assert store.put_parts("nothing", b"", b"") == 0
    assert store.is_exist("nothing") == 0
    with pytest.raises(TypeError):
        store.put_parts("text", "text")
    with pytest.raises(RuntimeError):
        store.put_parts("square", memoryview(bytes(4)).cast("B", (2, 2)))


def test_upserts_replace(store):
    assert store.upsert("key", b"one") == 0
    assert store.upsert("key", b"longer than one") == 0
    assert store.get("key") == b"longer than one"
    assert store.upsert_parts("key", b"p", b"q") == 0
    assert store.get("key") == b"pq"
    assert store.upsert_batch(["key", "new"], [b"1", b"2"]) == 0
    assert store.get_batch(["key", "new"]) == [b"1", b"2"]


def test_an_upsert_that_another_overtook_is_a_success(make, buffer_of):
    store, other = make(), make(segment=0)
    buffer = buffer_of(store, 4096)
    assert store.upsert_batch(["key", "key"], [b"1", b"2"]) == 0
    assert store.get("key") == b"2"
    assert store.batch_put_session_start(["late"], [1]) == [0]
    at = buffer.ptr
    assert store.batch_put_from_multi_buffer_ranges(["late"], [[at]], [[1]], [[0]]) == [1]
    assert other.upsert("late", b"newer") == 0
    assert store.batch_put_session_end(["late"]) == [0]
    assert other.get("late") == b"newer"


def test_a_buffer_is_memory(store):
    store.put("key", b"0123456789")
    handle = store.get_buffer("key")
    assert (handle.size(), len(handle), bytes(handle)) == (10, 10, b"0123456789")
    import ctypes

    assert ctypes.string_at(handle.ptr(), 10) == b"0123456789"
    found = store.batch_get_buffer(["none", "key"])
    assert found[0] is None
    assert bytes(found[1]) == b"0123456789"
    store.remove("key")
    assert bytes(handle) == b"0123456789"  # its own


# -- removal and leases


def test_what_another_reads_is_not_removed(make):
    writer, reader = make(), make(segment=0)
    assert writer.put("key", b"value") == 0
    assert reader.is_exist("key") == 1  # leases
    assert writer.remove("key") == -706
    assert writer.batch_remove(["key", "none"]) == [-706, -704]
    assert writer.remove_all() == 0
    assert writer.remove_by_regex("k.*") == 0
    assert reader.get("key") == b"value"
    assert writer.remove("key", force=True) == 0
    assert writer.is_exist("key") == 0


def test_a_client_may_remove_what_only_it_reads(store):
    store.put("key", b"value")
    store.get("key")
    assert store.remove("key") == 0


def test_removal_by_pattern(store):
    store.put_batch([f"red-{i}" for i in range(3)] + ["blue"], [b"x"] * 4)
    assert store.remove_by_regex("^red-[01]$") == 2
    assert store.remove_by_regex("(") == -600
    assert store.remove_by_regex("nothing") == 0
    assert store.remove_all() == 2
    assert store.remove_all() == 0


# -- configurations


def test_soft_pins_take_the_originals_rules(store):
    enabled = config(soft_pin_action=SoftPinAction.ENABLE, soft_pin_ttl_ms=1000)
    assert store.put("key", b"value", enabled) == 0
    assert store.upsert("key", b"value", config(soft_pin_ttl_ms=1000)) == -600
    disabled = config(soft_pin_action=SoftPinAction.DISABLE)
    assert store.upsert("key", b"value", disabled) == 0
    assert store.client.stat("key").soft_pin_s == 0
    assert store.put("hard", b"value", config(with_hard_pin=True)) == 0
    assert store.client.stat("hard").hard_pin
    assert store.remove("hard") == 0


def test_replicas_and_preferences(make):
    one, other = make(), make()
    twice = config(replica_num=2)
    assert one.put("twice", b"value", twice) == 0
    names = {
        replica.get_memory_descriptor().buffer_descriptor.transport_endpoint
        for replica in one.get_replica_desc("twice")
    }
    assert names == {one.get_hostname(), other.get_hostname()}
    for target in (one, other):
        wish = config(preferred_segment=target.get_hostname())
        assert one.put(f"at {target.get_hostname()}", b"value", wish) == 0
        replica = one.get_replica_desc(f"at {target.get_hostname()}")[0]
        where = replica.get_memory_descriptor().buffer_descriptor.transport_endpoint
        assert where == target.get_hostname()
    assert one.put("mine", b"value", config(prefer_alloc_in_same_node=True)) == 0
    replica = one.get_replica_desc("mine")[0].get_memory_descriptor().buffer_descriptor
    assert (replica.transport_endpoint, replica.size) == (one.get_hostname(), 5)
    assert one.put("none", b"value", config(replica_num=0)) == -600
    assert one.put("nvme", b"value", config(nof_replica_num=1)) == -1012


def test_groups(store):
    keys = ["a", "b", "c"]
    assert store.put_batch(keys, [b"1"] * 3, config(group_ids=["g", "", "g"])) == 0
    assert [store.client.stat(key).group for key in keys] == ["g", "", "g"]
    assert store.put_batch(["d", "e"], [b"1"] * 2, config(group_ids=["g"])) == -600
    assert store.put("f", b"1", config(group_ids=["g"])) == 0


def test_what_can_never_fit_is_minus_200(make):
    store = make(segment=2 * MIB)
    assert store.put("big", bytes(64 * MIB)) == -200


# -- asynchronous


def test_the_async_store_has_every_call(make):
    store = make(kind=MooncakeDistributedStoreAsync)

    async def main():
        assert await store.async_put("key", b"value") == 0
        assert await store.async_get("key") == b"value"
        assert await asyncio.gather(*(store.async_is_exist("key") for _ in range(8))) == [1] * 8
        with pytest.raises(AttributeError):
            store.async_nothing  # noqa: B018
        with pytest.raises(AttributeError):
            store.nothing  # noqa: B018

    asyncio.run(main())


def test_a_dummy_client_has_memory_of_its_own(make, master):
    owner = make(tenant_id="default")
    assert owner.put("key", b"value") == 0
    dummy = MooncakeDistributedStore()
    assert dummy.setup_dummy(MIB, MIB, master) == 0
    try:
        address = dummy.alloc_from_mem_pool(4096)
        assert address
        assert dummy.register_buffer(address, 4096) == 0
        assert dummy.unregister_buffer(address) == 0
        assert dummy.get_into("key", address, 4096) == 5
        assert dummy.put_from("dummy", address, 5) == 0
        assert owner.get("dummy") == b"value"
    finally:
        dummy.close()
        owner.remove_all(True)


def test_probes_over_http(make):
    import urllib.error
    import urllib.request

    store = make(enable_client_http_server="true", client_http_port=0)
    store.put("key", b"value")
    base = f"http://{store._http.address}"

    def fetch(path):
        with urllib.request.urlopen(base + path, timeout=60) as answer:
            return answer.read().decode()

    assert fetch("/health") == "OK\n"
    assert "mooncake_client_requests_total" in fetch("/metrics")
    assert "# HELP" not in fetch("/metrics/summary")
    with pytest.raises(urllib.error.HTTPError) as refused:
        fetch("/else")
    refused.value.close()

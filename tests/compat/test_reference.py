"""docs/reference/compat.md speaks of every call of the original, and is right about which exist."""

import inspect
import re
from pathlib import Path

import pytest

from mooncake_store.compat.engine import TransferEngine
from mooncake_store.compat.store import MooncakeDistributedStore

PAGE = (Path(__file__).resolve().parents[2] / "docs/reference/compat.md").read_text()

STORE = """
alloc_from_mem_pool allocate_and_mount_segment batch_get_buffer batch_get_into
batch_get_into_multi_buffer_ranges batch_get_into_multi_buffers batch_get_replica_desc
batch_get_session_end batch_get_session_start batch_get_tensor batch_get_tensor_into
batch_get_tensor_into_cuda batch_get_tensor_with_parallelism
batch_get_tensor_with_parallelism_into batch_get_tensor_with_tp batch_get_tensor_with_tp_into
batch_is_exist batch_pub_tensor batch_pub_tensor_with_tp batch_put_from
batch_put_from_multi_buffer_ranges batch_put_from_multi_buffers batch_put_session_end
batch_put_session_revoke batch_put_session_start batch_put_tensor batch_put_tensor_from
batch_put_tensor_with_parallelism batch_put_tensor_with_parallelism_from
batch_put_tensor_with_tp batch_put_tensor_with_tp_from batch_remove batch_replica_clear
batch_upsert_from batch_upsert_pub_tensor batch_upsert_tensor batch_upsert_tensor_from
batch_upsert_tensor_with_parallelism batch_upsert_tensor_with_parallelism_from close
create_copy_task create_move_task get get_batch get_buffer get_hostname get_into get_into_ranges
get_offload_rpc_read_count get_replica_desc get_size get_tensor get_tensor_into
get_tensor_into_cuda get_tensor_with_parallelism get_tensor_with_parallelism_into
get_tensor_with_tp get_tensor_with_tp_into health_check init_all is_exist
load_tensor_from_safetensor mount_segment pub_tensor pub_tensor_with_tp put put_batch put_from
put_from_with_metadata put_parts put_tensor put_tensor_from put_tensor_with_parallelism
put_tensor_with_parallelism_from put_tensor_with_tp put_tensor_with_tp_from query_task
register_buffer remove remove_all remove_by_regex save_tensor_to_safetensor setup setup_dummy
unmount_and_free_segment unmount_local_disk_segment unmount_segment unregister_buffer upsert
upsert_batch upsert_from upsert_parts upsert_pub_tensor upsert_tensor upsert_tensor_from
upsert_tensor_with_parallelism upsert_tensor_with_parallelism_from
"""

ENGINE = """
allocate_managed_buffer batch_register_memory batch_transfer_async batch_transfer_async_read
batch_transfer_async_write batch_transfer_sync batch_transfer_sync_read
batch_transfer_sync_write batch_unregister_memory free_managed_buffer get_batch_transfer_status
get_engine get_engine_ptr get_first_buffer_address get_local_topology get_notifies get_rpc_port
initialize initialize_ext read_bytes_from_buffer register_memory send_probe
transfer_check_status transfer_submit_write transfer_sync transfer_sync_read transfer_sync_write
unregister_memory warmup_efa_segment write_bytes_to_buffer
"""


@pytest.mark.parametrize("name", STORE.split())
def test_store(name):
    assert re.search(rf"`{name}`", PAGE)
    assert callable(getattr(MooncakeDistributedStore, name))


@pytest.mark.parametrize("name", ENGINE.split())
def test_engine(name):
    assert re.search(rf"`{name}`", PAGE)
    assert callable(getattr(TransferEngine, name))


@pytest.mark.parametrize(
    ("kind", "name", "arguments"),
    [
        (MooncakeDistributedStore, "pub_tensor", "key tensor config"),
        (MooncakeDistributedStore, "batch_put_tensor", "keys tensors_list"),
        (MooncakeDistributedStore, "get_tensor_into", "key buffer_ptr size"),
        (
            MooncakeDistributedStore,
            "put_tensor_with_tp_from",
            "key buffer_ptr size tp_rank tp_size split_dim",
        ),
        (
            MooncakeDistributedStore,
            "batch_put_tensor_with_tp",
            "base_keys tensors_list tp_rank tp_size split_dim",
        ),
        (
            MooncakeDistributedStore,
            "upsert_tensor_with_parallelism",
            "key tensor parallelism config writer_partition",
        ),
        (
            TransferEngine,
            "transfer_submit_write",
            "target_hostname buffer peer_buffer_address length transport_hint",
        ),
        (
            TransferEngine,
            "batch_transfer_sync_read",
            "target_hostname buffers peer_buffer_addresses lengths transport_hint",
        ),
    ],
)
def test_calls_made_from_others_show_the_original_s_arguments(kind, name, arguments):
    call = getattr(kind, name)
    shown = list(inspect.signature(call).parameters.values())
    assert [each.name for each in shown] == ["self", *arguments.split()]
    assert (call.__name__, call.__qualname__.rpartition(".")[2]) == (name, name)
    assert call.__doc__
    with pytest.raises(TypeError, match=re.escape(shown[2].name)):
        call(kind(), "first")

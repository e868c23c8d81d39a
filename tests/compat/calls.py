"""The same calls for the original and for the drop-in: prints what each of them answers, as JSON.

    python tests/compat/calls.py HOST:PORT

`scripts/compat_check.py` runs it in both worlds and compares. It imports `mooncake.store` only.
"""

import ctypes
import json
import os
import sys

from mooncake.store import MooncakeDistributedStore, ReplicateConfig, SoftPinAction

MIB = 1 << 20


memory = ctypes.create_string_buffer(b"0123456789", 4096)
p = ctypes.addressof(memory)
soft, ttl_only, two_groups = ReplicateConfig(), ReplicateConfig(), ReplicateConfig()
soft.soft_pin_action, soft.soft_pin_ttl_ms = SoftPinAction.ENABLE, 1000
ttl_only.soft_pin_ttl_ms = 1000
two_groups.group_ids = ["a", "b"]

CALLS = [
    ("register_buffer", p, 4096),
    ("health_check",),
    ("get_size", "none"),
    ("put", "a", b"hello"),
    ("put", "a", b"other"),
    ("get", "a"),
    ("get", "none"),
    ("put", "", b"x"),
    ("put", "empty", b""),
    ("is_exist", "a"),
    ("is_exist", "none"),
    ("is_exist", ""),
    ("batch_is_exist", ["a", "none"]),
    ("batch_is_exist", []),
    ("get_size", "a"),
    ("remove", "none"),
    ("remove", "a", True),
    ("put_batch", ["b1", "b2"], [b"1", b"22"]),
    ("put_batch", ["b1", "b2"], [b"1"]),
    ("put_batch", [], []),
    ("get_batch", ["b1", "none", "b2"]),
    ("get_batch", []),
    ("batch_remove", ["none"]),
    ("batch_remove", ["b1", "none"], True),
    ("remove_by_regex", "b.*", True),
    ("remove_by_regex", "("),
    ("put_parts", "p", b"ab", b"cd"),
    ("get", "p"),
    ("put_parts", "p0"),
    ("put_parts", "p1", b""),
    ("put", "r", b"0123456789"),
    ("upsert", "r", b"new"),
    ("get", "r"),
    ("upsert_batch", ["r", "s"], [b"1", b"2"]),
    ("upsert_parts", "r", b"x", b"y"),
    ("get_batch", ["r", "s"]),
    ("get_buffer", "none"),
    ("get_replica_desc", "none"),
    ("batch_get_replica_desc", ["none"]),
    ("get_tensor", "none"),
    ("put_tensor", "t", 3),
    ("create_copy_task", "r", ["nowhere"]),
    ("create_copy_task", "none", ["nowhere"]),
    ("create_move_task", "r", "a", "b"),
    ("query_task", (1, 2)),
    ("batch_replica_clear", ["none"]),
    ("get_offload_rpc_read_count",),
    ("register_buffer", p, 4096),
    ("unregister_buffer", 1),
    ("put_from", "f", p, 10),
    ("put_from", "f", p, 10),
    ("get", "f"),
    ("get_into", "f", p + 100, 10),
    ("get_into", "f", p + 100, 5),
    ("get_into", "f", p + 100, 100),
    ("get_into", "none", p + 100, 10),
    ("put_from", "z", p, 0),
    ("batch_put_from", ["f1", "f2"], [p, p + 5], [10, 5]),
    ("batch_put_from", ["f1", "f2"], [p], [10, 10]),
    ("batch_put_from", [], [], []),
    ("batch_get_into", ["f1", "none"], [p + 100, p + 200], [10, 10]),
    ("batch_get_into", ["f1", "f2"], [p + 100], [10]),
    ("batch_get_into", ["f1", "f2"], [p + 100, p + 200], [5, 10]),
    ("batch_get_into", [], [], []),
    ("batch_put_from_multi_buffers", ["m1", "m2"], [[p, p + 5], [p]], [[5, 5], [7]]),
    (
        "batch_get_into_multi_buffers",
        ["m1", "none"],
        [[p + 100, p + 200], [p + 300]],
        [[5, 5], [7]],
    ),
    ("batch_get_into_multi_buffers", ["m1"], [[p + 100, p + 200]], [[5, 4]]),
    ("batch_get_into_multi_buffers", ["m1"], [[p + 100, p + 200]], [[5, 6]]),
    ("batch_get_into_multi_buffers", ["m1"], [[p + 100]], [[5, 5]]),
    (
        "get_into_ranges",
        [p + 400],
        [["f1", "none"]],
        [[[0, 20], [40]]],
        [[[0, 5], [0]]],
        [[[5, 5], [4]]],
    ),
    ("get_into_ranges", [p + 400], [["f1"]], [[[0]]], [[[8]]], [[[5]]]),
    ("get_into_ranges", [p], [], [], [], []),
    ("batch_put_session_start", ["s1", "f1"], [10, 10]),
    ("batch_put_from_multi_buffer_ranges", ["s1"], [[p]], [[5]], [[0]]),
    ("is_exist", "s1"),
    ("batch_put_from_multi_buffer_ranges", ["s1"], [[p + 5]], [[5]], [[5]]),
    ("batch_put_session_end", ["s1"]),
    ("batch_put_from_multi_buffer_ranges", ["s1"], [[p]], [[5]], [[5]]),
    ("get", "s1"),
    ("batch_put_session_end", ["none"]),
    ("batch_put_session_revoke", ["s1"]),
    ("batch_put_session_start", ["s2"], [10]),
    ("batch_put_session_revoke", ["s2"]),
    ("is_exist", "s2"),
    ("batch_get_session_start", ["f1", "none"]),
    ("batch_get_into_multi_buffer_ranges", ["f1"], [[p + 100, p + 150]], [[3, 4]], [[0, 6]]),
    ("batch_get_into_multi_buffer_ranges", ["f2"], [[p + 100]], [[3]], [[0]]),
    ("batch_get_into_multi_buffer_ranges", ["f1"], [[p + 100]], [[3]], [[9]]),
    ("batch_get_session_end", ["f1"]),
    ("put_from_with_metadata", "meta", p + 2, p, 8, 2),
    ("get", "meta"),
    ("upsert_from", "f", p, 4),
    ("get", "f"),
    ("batch_upsert_from", ["f", "n"], [p, p], [4, 5]),
    ("get_batch", ["f", "n"]),
    ("register_buffer", p, 4096),
    ("unregister_buffer", p),
    ("unregister_buffer", p),
    ("put", "soft", b"x", soft),
    ("upsert", "soft", b"x", ttl_only),
    ("put", "grouped", b"x", two_groups),
    ("remove_all", True),
    ("close",),
    ("health_check",),
    ("close",),
    ("get", "f"),
]


def label(value):
    """A call as text: addresses, which differ from run to run, count from 0."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(label, value))
    if isinstance(value, ReplicateConfig):
        return "config"
    return value - p if isinstance(value, int) and 0 <= value - p <= 4096 else value


def shown(value):
    """A result as JSON can hold it."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return json.loads(json.dumps(value, default=repr))


def main():
    store = MooncakeDistributedStore()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", 64 * MIB, 16 * MIB, "tcp", "", sys.argv[1])
    sys.stdout.write(json.dumps(["setup", store.setup(*arguments)]) + "\n")
    for call in CALLS:
        name, *given = call
        try:
            answer = shown(getattr(store, name)(*given))
        except Exception as error:
            answer = type(error).__name__
        sys.stdout.write(json.dumps([repr(label(call)), answer]) + "\n")
        sys.stdout.flush()
    # The original may crash while the interpreter ends.
    os._exit(0)


if __name__ == "__main__":
    main()

"""SGLang's cache controller with its own threads, on the dynamic backend: back up, then prefetch.

Of the controller's constructor only what concerns an accelerator is left out.
"""

import threading

import pytest
import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.utils import get_storage_hash_str

from mooncake_store import Client
from tests.sglang.conftest import PAGE, config, extra, mha_pool, pages

WAIT_S = 60


class Controller(HiCacheController):
    """One rank without a device; it knows its configuration instead of asking for ranks."""

    def __init__(self, pool, url):
        self.mem_pool_host = self.storage_host_pool = pool
        self.page_size = PAGE
        self.host_memory_mode = "cache"
        self.enable_storage = False
        self.storage_stop_event = threading.Event()
        self.attn_cp_group = self.attn_tp_group = self.tp_group = self.pp_group = None
        self.url = url
        self.attach_storage_backend("dynamic", PAGE, "models/tiny", extra(url))

    def _generate_storage_config(self, model_name=None, storage_backend_extra_config=None):
        return config(model_name=model_name, extra_config=storage_backend_extra_config)

    def _create_sync_groups(self):
        return []

    def back_up(self, tokens, *numbers):
        hashes = get_storage_hash_str(tokens, None, page_size=PAGE)
        self.write_storage(pages(*numbers), tokens, hash_value=hashes)
        return self.ack_backup_queue.get(timeout=WAIT_S).completed_tokens

    def fetch(self, tokens, *numbers):
        """Prefetch as the scheduler does; how many tokens came."""
        operation = self.prefetch("request", tokens)
        operation = self.prefetch_hit_queue.get(timeout=WAIT_S)
        hits = operation.storage_hit_count
        operation.host_indices = pages(*numbers)[:hits]
        self.prefetch_buffer.put(operation)
        came = 0
        while True:
            ack = self.ack_prefetch_queue.get(timeout=WAIT_S)
            came = ack.completed_tokens if ack.completed_tokens is not None else came
            if ack.completed_req:
                return hits, came


@pytest.fixture
def controller(cluster, monkeypatch):
    monkeypatch.setattr(
        "sglang.srt.managers.cache_controller.get_parallel",
        lambda: type("Parallel", (), {"attn_dcp_size": 1})(),
    )
    made = []

    def make(pool):
        made.append(Controller(pool, cluster.url))
        return made[-1]

    yield make
    for each in made:
        each.detach_storage_backend()


def test_what_one_engine_backs_up_another_prefetches(controller):
    first, second = mha_pool(), mha_pool()
    first.kv_buffer.copy_(torch.rand(first.kv_buffer.shape))
    tokens = list(range(100, 100 + 5 * PAGE))
    assert controller(first).back_up(tokens, 0, 1, 2, 3, 4) == 5 * PAGE
    reader = controller(second)
    assert reader.page_get_func == reader._page_get_zero_copy
    longer = [*tokens, *range(8)]
    assert reader.fetch(longer, 9, 8, 7, 6, 5, 4, 3) == (5 * PAGE, 5 * PAGE)
    for source, target in enumerate((9, 8, 7, 6, 5)):
        assert torch.equal(second.get_data_page(target * PAGE), first.get_data_page(source * PAGE))
    assert reader.fetch([1, 2, 3, 4], 0) == (0, 0)


def test_detached_controller_leaves_no_lease(controller, cluster):
    pool = mha_pool()
    tokens = list(range(300, 300 + 2 * PAGE))
    one = controller(pool)
    one.back_up(tokens, 0, 1)
    assert one.fetch(tokens, 2, 3) == (2 * PAGE, 2 * PAGE)
    hashes = get_storage_hash_str(tokens, None, page_size=PAGE)
    names = one.storage_backend._pools["kv"].names(hashes)
    one.detach_storage_backend()
    assert one.storage_backend is None
    with Client(cluster.url) as client:
        client.remove_many(names).check()  # which a lease would refuse

"""Prefill in one engine, decode in another: point to point, and through the store."""

import json
import os
import urllib.request

import pytest

from tests.vllm.conftest import PROMPTS, ROOT, ours

BLOCK = 32


def test_store_hands_blocks_from_prefill_to_decode(start, model, plain, store_at):
    url = store_at().url
    prefill = ours(url)
    prefill["transfer"]["kv_role"] = "kv_producer"
    decode = ours(url, handoff_wait_s=30)
    decode["transfer"]["kv_role"] = "kv_consumer"
    first = start(model, in_process=False, **prefill)
    second = start(model, in_process=False, **decode)
    for prompt, tokens in zip(PROMPTS, plain, strict=True):
        asked = {"do_remote_decode": True}
        answer = first("generate", prompts=[prompt], tokens=1, handoff=asked)
        told = answer["handoff"][0]
        assert told["do_remote_prefill"]
        answer = second("generate", prompts=[prompt], handoff=told)
        assert answer["tokens"] == [tokens]
    # Of such requests vLLM reports what the prefilling engine had cached, so ask the counter.
    hits = second("metrics")["vllm:external_prefix_cache_hits"]
    assert hits == sum(len(prompt) // BLOCK * BLOCK for prompt in PROMPTS)
    first.close()
    second.close()


def test_vllms_own_pair_over_the_drop_ins_engine(start, model, plain, free_port):
    drop_in = ROOT / "compat"
    if not (drop_in / "mooncake" / "engine.py").exists():
        pytest.skip("the drop-in package is not in this checkout")
    environment = {
        "PYTHONPATH": os.pathsep.join([str(drop_in), str(ROOT)]),
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(free_port),
    }

    def launch(role):
        return start(
            model,
            in_process=False,
            env=environment,
            transfer={
                "kv_connector": "MooncakeConnectorOnCpu",
                "kv_connector_module_path": "tests.vllm.on_cpu",
                "kv_role": role,
                "engine_id": role,
                "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
            },
        )

    prefill, decode = launch("kv_producer"), launch("kv_consumer")
    address = f"http://127.0.0.1:{free_port}"
    with urllib.request.urlopen(f"{address}/query", timeout=60) as known:
        (entry,) = json.load(known).values()
    for number, (prompt, tokens) in enumerate(zip(PROMPTS, plain, strict=True)):
        transfer = {"transfer_id": f"transfer-{number}"}
        prefill(
            "generate",
            prompts=[prompt],
            tokens=1,
            handoff={"do_remote_decode": True, "do_remote_prefill": False, **transfer},
        )
        answer = decode(
            "generate",
            prompts=[prompt],
            handoff={
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_engine_id": entry["engine_id"],
                "remote_bootstrap_addr": address,
                **transfer,
            },
        )
        assert answer["tokens"] == [tokens]
        assert answer["cached"][0] >= len(prompt) // BLOCK * BLOCK
    prefill.close()
    decode.close()

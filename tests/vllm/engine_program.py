"""An engine that does what it is told: one JSON command a line in, one JSON answer a line out.

Answers go to a descriptor of their own, named on the command line: libraries write where they like.

    python -m tests.vllm.engine_program '{"model": ..., "transfer": {...}, ...}' 5

It runs in a process of its own, as an engine does: vLLM keeps state that cannot be undone, and a
second engine that finds the first one's blocks proves that they went through the store.
"""

from __future__ import annotations

import json
import os
import sys
import time

import msgspec

from tests.waiting import until


def main() -> None:
    """Start the engine, then serve commands until the input ends."""
    settings = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams

    transfer = settings.pop("transfer", None)
    if transfer is not None:
        from vllm.config import KVTransferConfig

        transfer = KVTransferConfig(**transfer)
    events = settings.pop("events", None)
    if events is not None:
        from vllm.config import KVEventsConfig

        events = KVEventsConfig(**events)
    llm = LLM(
        enforce_eager=True,
        max_model_len=settings.pop("max_model_len", 1024),
        block_size=32,
        max_num_seqs=8,
        disable_log_stats=False,
        skip_tokenizer_init=True,
        dtype="float32",
        seed=0,
        kv_transfer_config=transfer,
        kv_events_config=events,
        **settings,
    )
    answer({"ready": os.getpid()})
    for line in sys.stdin:
        command = json.loads(line)
        what = command.pop("do")
        if what == "generate":
            answer(generate(llm, SamplingParams, **command))
        elif what == "reset":
            answer({"reset": llm.reset_prefix_cache(**command)})
        elif what == "metrics":
            answer(metrics(llm))
        elif what == "settle":
            answer({"steps": settle(llm)})
        elif what == "weigh":
            answer({"weighs": weigh(llm, **command)})
        else:
            break
    llm.llm_engine.engine_core.shutdown()
    answer({"closed": True})


def generate(
    llm: object,
    params: type,
    prompts: list[list[int]],
    tokens: int = 8,
    handoff: dict | None = None,
) -> dict:
    """Tokens, hits and time of a batch of prompts; `handoff` is what a proxy sends along."""
    extra = {"kv_transfer_params": handoff} if handoff else None
    Watched.seconds, began = 0.0, time.perf_counter()
    outputs = llm.generate(
        [{"prompt_token_ids": each} for each in prompts],
        params(
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            extra_args=extra,
        ),
        use_tqdm=False,
    )
    seconds = time.perf_counter() - began
    return {
        "tokens": [list(each.outputs[0].token_ids) for each in outputs],
        "cached": [each.num_cached_tokens for each in outputs],
        "first_token_s": [
            each.metrics.first_token_latency if each.metrics else None for each in outputs
        ],
        "seconds": seconds,
        "watched_s": Watched.seconds,
        "handoff": [each.kv_transfer_params for each in outputs],
    }


def settle(llm: object) -> int:
    """Step until saves have given their memory back."""
    core = llm.llm_engine.engine_core.engine_core
    steps = 0

    def settled() -> bool:
        nonlocal steps
        core.step_fn()
        steps += 1
        return not core.scheduler.connector.has_pending_push_work()

    until(settled, 60, "the end of all saves")
    return steps


def weigh(llm: object, tokens_per_s: float) -> float:
    """Have loads weighed against computing so many tokens a second from now on, by both sides."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    deciding = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler
    moving = get_kv_transfer_group()._worker
    for side in deciding, moving:
        side._options = msgspec.structs.replace(side._options, prefill_tokens_per_s=tokens_per_s)
    if not Watched.methods:
        for name in "matched", "report":
            Watched.watch(deciding, name)
    return tokens_per_s


class Watched:
    """Seconds in methods of the connector that a first token waits for and weighing is part of.

    What a load took is told once it is over, beside the model.
    """

    seconds = 0.0
    methods = 0

    @classmethod
    def watch(cls, side: object, name: str) -> None:
        """Count what a method takes from now on."""
        method = getattr(side, name)

        def timed(*given: object) -> object:
            began = time.perf_counter()
            try:
                return method(*given)
            finally:
                cls.seconds += time.perf_counter() - began

        setattr(side, name, timed)
        cls.methods += 1


def metrics(llm: object) -> dict:
    """Counters by name, as vLLM exports them."""
    return {
        each.name: each.value
        for each in llm.get_metrics()
        if isinstance(getattr(each, "value", None), int | float)
    }


def answer(value: dict) -> None:
    """Write one answer, whole."""
    os.write(int(sys.argv[2]), (json.dumps(value) + "\n").encode())


if __name__ == "__main__":
    main()

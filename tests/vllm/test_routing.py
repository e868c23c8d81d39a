"""Two servers of vLLM behind `mooncake serve --backend`: a prefix attracts, and tokens stay."""

import pytest

from tests.vllm.conftest import PROMPTS
from tests.vllm.model import add_tokenizer, make_model
from tests.vllm.servers import BLOCK, SERVED, asked, before, served
from tests.waiting import until

TOKENS = 8


@pytest.fixture(scope="module")
def servers(vllm, tmp_path_factory):
    model = add_tokenizer(make_model(tmp_path_factory.mktemp("served") / "tiny"))
    # One after the other: a start takes all cores.
    with served(model) as first, served(model) as second:
        yield {"a": first, "b": second}


def answer(url, prompt):
    """(tokens of an answer, tokens of the prompt that were cached)."""
    body = {
        "model": SERVED, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    told = asked(url + "/v1/completions", body)
    details = told["usage"].get("prompt_tokens_details") or {}
    return told["choices"][0]["token_ids"], details.get("cached_tokens") or 0


def held(url):
    """Blocks that each engine has told of."""
    told = asked(url + "/global_view")
    return {name.partition("|")[0]: each["blocks"] for name, each in told.items()}


def test_a_turn_goes_to_the_engine_that_holds_the_one_before(servers, plain):
    turns = []
    with before(servers, "cache-centric") as url:
        assert asked(url + "/health")["serving"]
        for prompt, expected in zip(PROMPTS, plain, strict=True):
            before_it = held(url)
            tokens, _ = answer(url, prompt)
            assert tokens == expected
            until(lambda was=before_it: held(url) != was, what="events of a prompt")
            turns.append([*prompt, *tokens, *range(3, 3 + BLOCK)])
        # In the other order, so that taking turns would not lead there by itself.
        kept = held(url)
        assert all(kept.values())
        for prompt, turn in zip(reversed(PROMPTS), reversed(turns), strict=True):
            _, cached = answer(url, turn)
            assert cached >= len(prompt) // BLOCK * BLOCK
        loads = until(lambda: _loads(url), what="the loads of both engines")
        assert [load["missing"] for load in loads.values()] == [[], []]
        assert all(load["free_tokens"] > 1000 for load in loads.values())


def _loads(url):
    loads = asked(url + "/stats")["load"]
    return loads if len(loads) == 2 and all("running" in each for each in loads.values()) else {}


def test_engines_answer_alike_whoever_is_chosen_and_text_is_routed_too(servers, plain):
    with before(servers, "round-robin") as url:
        for prompt, expected in zip(PROMPTS, plain, strict=True):
            assert [answer(url, prompt)[0] for _ in range(2)] == [expected] * 2
    with before(servers, "cache-centric") as url:
        text = "What a prompt has cost is kept for the next one. " * 8
        first, _ = answer(url, text)
        until(lambda: sum(held(url).values()), what="events of a prompt")
        for _ in range(3):
            tokens, cached = answer(url, text)
            assert tokens == first
            assert cached >= len(text) // BLOCK * BLOCK - BLOCK

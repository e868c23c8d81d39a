"""A checkpoint behind `mooncake serve`: what a user is answered is what its reference says."""

import json
import urllib.request

import pytest
import torch

from tests.serving.engine.support import prompts
from tests.serving.engine.test_reference import make_checkpoint
from tests.serving.system.conftest import started

tokenizers = pytest.importorskip("tokenizers")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COUNT = 12


def reference_answer(model, prompt):
    with torch.inference_mode():
        whole = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=COUNT, do_sample=False, pad_token_id=0,
        )  # fmt: skip
    return whole[0, len(prompt) :].tolist()


def add_words(directory):
    """A tokenizer that has a word for each token: w0, w1, ..."""
    words = {f"w{number}": number for number in range(300)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(directory / "tokenizer.json"))


def test_answers_are_those_of_the_reference(start_program, tmp_path):
    """Computed by one worker and gone on with by another, from hits as well, up to its end."""
    directory = tmp_path / "model"
    model = make_checkpoint(directory, "qwen3, yarn", max_shard_size="100KB")
    add_words(directory)
    first = prompts(1, seed=2, shortest=200, longest=200, vocabulary=300)[0]
    second = first[:150] + first[:40]
    expected = reference_answer(model, first)
    # A token that ends answers according to a list of them, and none that came before it.
    end = max(at for at in range(COUNT) if expected[at] not in expected[:at])
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [expected[end]]}))
    _, facts = started(start_program, tmp_path, "--model", directory)

    def ask(prompt, **body):
        body |= {"prompt": " ".join(f"w{token}" for token in prompt), "max_tokens": COUNT}
        request = urllib.request.Request(
            facts["url"] + "/v1/completions",
            json.dumps(body | {"temperature": 0}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            choice = json.loads(answer.read())["choices"][0]
        return [int(word[1:]) for word in choice["text"].split()], choice["finish_reason"]

    assert ask(first, ignore_eos=True) == (expected, "length")
    assert ask(second, ignore_eos=True) == (reference_answer(model, second), "length")
    assert ask(first) == (expected[:end], "stop")

"""The bytes of tokens: joined they are the text, whichever way a tokenizer writes them."""

import pytest

from serving.engine.forms.known import check_vocabulary
from serving.engine.tokenizer import load_tokenizer
from tests.serving.system.checkpoints import TEXTS, byte_level
from transfer_engine.errors import InvalidArgumentError

tokenizers = pytest.importorskip("tokenizers")

SAMPLES = [
    *TEXTS,
    " leading, \n\ttabs & \x00 control",
    '{"é": "\\n€😀"}',
    "日本語 is unknown to it",
]


def with_marks(path):
    """A tokenizer as Llama 2 and Mistral have it: a mark for spaces, bytes for what is unknown."""
    letters = sorted({letter for text in TEXTS for letter in text if letter.isascii()} - {" "})
    pieces = [
        "<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", *letters,
        "▁t", "he", "▁the",
    ]  # fmt: skip
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    model = tokenizers.models.BPE(
        vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    made = tokenizers.Tokenizer(model)
    normal, step = tokenizers.normalizers, tokenizers.decoders
    made.normalizer = normal.Sequence([normal.Prepend("▁"), normal.Replace(" ", "▁")])
    made.decoder = step.Sequence(
        [step.Replace("▁", " "), step.ByteFallback(), step.Fuse(), step.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.save(str(path / "tokenizer.json"))


@pytest.mark.parametrize(("make", "before"), [(byte_level, b""), (with_marks, b" ")])
def test_the_bytes_of_tokens_are_the_text(tmp_path, make, before):
    make(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    vocabulary = check_vocabulary(tokenizer.vocabulary)
    for text in SAMPLES:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert b"".join(vocabulary.pieces[token] for token in tokens) == before + text.encode()
        assert all(vocabulary.shown[token] for token in tokens)
    hidden = {vocabulary.pieces[at] for at, shown in enumerate(vocabulary.shown) if not shown}
    assert {b"<s>", b"</s>"} <= hidden
    assert tokenizer.piece(vocabulary.pieces.index(b"</s>")) == b"</s>"
    assert tokenizer.piece(1 << 20) == b""


def test_a_tokenizer_of_words_has_no_bytes_but_names(tmp_path):
    words = {"<unk>": 0, "hello": 1, "world": 2}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    plain.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.vocabulary is None
    assert tokenizer.piece(2) == b"world"
    with pytest.raises(InvalidArgumentError, match="not known"):
        check_vocabulary(tokenizer.vocabulary)

"""Text of answers: the same however tokens are cut, and nothing of a stop string."""

from hypothesis import example, given
from hypothesis import strategies as st

from serving.engine.tokenizer import ByteTokenizer
from serving.front.text import AnswerText, Stopping

TOKENIZER = ByteTokenizer()
texts = st.text(st.sampled_from("ab\néß€😀 "), max_size=60)
stops = st.lists(st.text("ab\né", min_size=1, max_size=4), max_size=3)


def play(text, stops, sizes):
    """The text told when the bytes come in pieces of these sizes, and whether it stopped."""
    answer = AnswerText(TOKENIZER, Stopping(tuple(stops)))
    tokens, told = list(text.encode()), ""
    while tokens and answer.stop is None:
        size = sizes.pop() if sizes else 1
        told += answer.add(tokens[:size])
        tokens = tokens[size:]
    return told + answer.finish(), answer.stop is not None


@given(texts, stops, st.lists(st.integers(1, 5), max_size=80))
@example("aa€😀😀😀", [], [2, 4, 4, 4])  # each piece ends within a character
def test_an_answer_ends_before_the_first_stop_string(text, stops, sizes):
    told, stopped = play(text, stops, sizes)
    assert not any(stop in told for stop in stops)
    if stopped:
        assert text.startswith(told)
        assert any(text[len(told) :].startswith(stop) for stop in stops)
    else:
        assert told == text


def test_what_cannot_begin_a_stop_string_is_told_at_once():
    answer = AnswerText(TOKENIZER, Stopping(("END",)))
    assert answer.add(b"abc") == "abc"
    assert answer.add(b"EN") == ""
    assert answer.add(b"Q") == "ENQ"
    assert answer.add(b"xE") == "x"
    assert answer.finish() == "E"

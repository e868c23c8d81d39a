"""Keys and blocks of tokens that meet in one digest: under XXH3, and not under a secret."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_store.identity import SECRET_BYTES, Keyed, Unkeyed
from tests.hashing.meeting import VOCABULARY, meeting_keys, meeting_tokens


def test_printable_keys_meet_under_xxh3_and_not_under_a_secret():
    namespace, key, other = meeting_keys()
    assert key != other
    assert key.decode().isprintable()
    assert other.decode().isprintable()
    unkeyed, keyed = Unkeyed(namespace), Keyed(bytes(range(SECRET_BYTES)))
    assert unkeyed.digest(key) == unkeyed.digest(other)  # the attack works
    assert keyed.digest(key) != keyed.digest(other)
    digests = keyed.digests([key, other])
    assert digests[0].tolist() != digests[1].tolist()


def test_blocks_of_tokens_meet_under_xxh3_and_not_under_a_secret():
    tokens, other = meeting_tokens()
    assert tokens.tolist() != other.tolist()
    assert max(tokens.max(), other.max()) < VOCABULARY
    assert min(tokens.min(), other.min()) >= 0
    unkeyed = Unkeyed("")
    assert unkeyed.hash_blocks(tokens, 64).tolist() == unkeyed.hash_blocks(other, 64).tolist()
    keyed = Keyed(bytes(range(SECRET_BYTES)))
    assert keyed.hash_blocks(tokens, 64).tolist() != keyed.hash_blocks(other, 64).tolist()


@settings(max_examples=50)
@given(secret=st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES))
def test_no_secret_brings_them_together(secret):
    tokens, other = meeting_tokens()
    keyed = Keyed(secret)
    assert keyed.hash_blocks(tokens, 64).tolist() != keyed.hash_blocks(other, 64).tolist()

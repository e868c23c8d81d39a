"""SipHash-2-4 with 128 bits as the paper and the reference implementation describe it, in Python.

Slow and plain, and shares no code with what it is compared with.
"""

import struct

_MASK = 2**64 - 1


def _rotl(value, bits):
    return ((value << bits) & _MASK) | (value >> (64 - bits))


def _rounds(v, count):
    for _ in range(count):
        v[0] = (v[0] + v[1]) & _MASK
        v[2] = (v[2] + v[3]) & _MASK
        v[1] = _rotl(v[1], 13) ^ v[0]
        v[3] = _rotl(v[3], 16) ^ v[2]
        v[0] = _rotl(v[0], 32)
        v[2] = (v[2] + v[1]) & _MASK
        v[0] = (v[0] + v[3]) & _MASK
        v[1] = _rotl(v[1], 17) ^ v[2]
        v[3] = _rotl(v[3], 21) ^ v[0]
        v[2] = _rotl(v[2], 32)


def sip128(key, data):
    """The digest of some bytes under a key of 16."""
    low, high = struct.unpack("<QQ", key)
    first = struct.unpack("<QQQQ", b"uespemosmodnarodarenegylsetybdet")
    v = [first[0] ^ low, first[1] ^ high ^ 0xEE, first[2] ^ low, first[3] ^ high]
    padded = data + bytes(7 - len(data) % 8) + bytes([len(data) % 256])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        _rounds(v, 2)
        v[0] ^= word
    v[2] ^= 0xEE
    _rounds(v, 4)
    half = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    _rounds(v, 4)
    return struct.pack("<QQ", half, v[0] ^ v[1] ^ v[2] ^ v[3])


def chain(tokens, block_tokens, parent, link, block):
    """The keys of a prompt's blocks, the last of which may be shorter."""
    keys = []
    for begin in range(0, len(tokens), block_tokens):
        part = tokens[begin : begin + block_tokens]
        parent = sip128(link, sip128(block, struct.pack(f"<{len(part)}q", *part)) + parent)
        keys.append(parent)
    return keys

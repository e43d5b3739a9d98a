"""The mock's tokenizer: a token is 4 bytes of UTF-8, whatever they mean; the last one may be shorter.

Every text has at least one token. The id of a token is its bytes read as one big-endian number, so that ids
can be turned back into text (but for a NUL in front, which reads as nothing).
"""

import struct
from collections.abc import Iterable

BYTES_PER_TOKEN = 4
IDS_END = 2 ** (8 * BYTES_PER_TOKEN)


def text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def count_tokens(bytes_of_text: int) -> int:
    return max(1, -(-bytes_of_text // BYTES_PER_TOKEN))


def token_ids(text: str) -> list[int]:
    data = text.encode()
    whole, rest = divmod(len(data), BYTES_PER_TOKEN)
    ids = list(struct.unpack_from(f">{whole}I", data))
    if rest or not ids:
        ids.append(int.from_bytes(data[len(data) - rest :], "big"))
    return ids


def text_of(ids: Iterable[int]) -> str:
    """Of ids from 0 to `IDS_END`; bytes that are no UTF-8 become replacement marks."""
    return b"".join(id.to_bytes(-(-id.bit_length() // 8), "big") for id in ids).decode(errors="replace")

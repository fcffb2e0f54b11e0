"""The wire format of protobuf: a message is a sequence of fields, each a tag and a value.

protobuf.dev/programming-guides/encoding. tag = number << 3 | wire type: 0 a varint, 1 eight bytes, 2 a length and that
many bytes, 5 four bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moe_a2a.files.json_fields import FieldError, quoted

LONGEST_VARINT = 10  # bytes: 64 bits, 7 in each


def fields(message: Any) -> Iterator[tuple[int, Any]]:
    """Numbers and values: int, or bytes where the value has a length."""
    if not isinstance(message, bytes):
        raise FieldError(f"a field holds {quoted(message)}, not a message")
    value: Any
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        wire_type = tag & 7
        if wire_type == 0:
            value, at = _varint(message, at)
        elif wire_type == 2:
            length, at = _varint(message, at)
            value, at = message[at : at + length], at + length
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
            value, at = int.from_bytes(message[at : at + size], "little"), at + size
        else:
            raise FieldError(f"a field at byte {at} of a message has the wire type {wire_type}: it is not protobuf")
        if at > end:
            raise FieldError(f"a field reaches to byte {at} of a message of {end}: the file is cut or damaged")
        yield tag >> 3, value


def number(value: Any) -> int:
    if not isinstance(value, int):
        raise FieldError(f"a field holds {quoted(value)}, not a number")
    return value


def signed(value: Any) -> int:
    return number(value) - (1 << 64) if number(value) >= 1 << 63 else value


def text(value: Any) -> str:
    if not isinstance(value, bytes):
        raise FieldError(f"a field holds {quoted(value)}, not a string")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise FieldError(f"a field holds {quoted(value)}, which is not UTF-8") from None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 7 * LONGEST_VARINT, 7):
        if at == len(data):
            raise FieldError(f"a number at byte {at} of a message has no end: the file is cut or damaged")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & ((1 << 64) - 1), at
    raise FieldError(f"a number at byte {at} of a message has more than {LONGEST_VARINT} bytes: it is not protobuf")

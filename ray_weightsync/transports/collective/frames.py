"""What a group's store and its clients send each other. Pure.

A frame is a big-endian ``uint32``, the number of bytes that follow, and these. A request's are the group's nonce (32 characters) and a JSON
object with ``id``, ``do`` and what `store` takes for it; an answer's a JSON object, either ``id`` and ``values`` (in base64, by key), or
``refused``, why the connection is closed.
"""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

MAX_FRAME_BYTES = 1 << 20

_LENGTH = struct.Struct("!I")
LENGTH_BYTES = _LENGTH.size


class MalformedFrame(ValueError):
    """What arrived is nothing that this protocol has."""


def framed(value: dict[str, Any], nonce: str = "") -> bytes:
    """The frame of a JSON object.

    Raises:
        MalformedFrame: if it is larger than `MAX_FRAME_BYTES`.
    """
    body = nonce.encode() + json.dumps(value).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise MalformedFrame(f"a frame of {len(body)} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return _LENGTH.pack(len(body)) + body


def take_frame(received: bytearray) -> bytes | None:
    """Take the first frame from what was received; None while it is incomplete.

    Raises:
        MalformedFrame: if it is empty or larger than `MAX_FRAME_BYTES`.
    """
    if len(received) < _LENGTH.size:
        return None
    (num_bytes,) = _LENGTH.unpack_from(received)
    if not 0 < num_bytes <= MAX_FRAME_BYTES:
        raise MalformedFrame(f"a frame of {num_bytes} bytes; from 1 to {MAX_FRAME_BYTES} are allowed")
    end = _LENGTH.size + num_bytes
    if len(received) < end:
        return None
    frame = bytes(received[_LENGTH.size : end])
    del received[:end]
    return frame


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object in a frame.

    Raises:
        MalformedFrame: if there is none.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedFrame(f"no JSON: {type(error).__name__}") from error
    if not isinstance(value, dict):
        raise MalformedFrame("no JSON object")
    return value


def encoded(value: bytes) -> str:
    return base64.b64encode(value).decode()


def decoded(value: str) -> bytes:
    """What `encoded` made a string of.

    Raises:
        MalformedFrame: if it was not made so.
    """
    try:
        return base64.b64decode(value, validate=True)
    except ValueError as error:
        raise MalformedFrame("a value that is not in base64") from error

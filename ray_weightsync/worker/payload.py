"""Reading payloads, and telling what went wrong in words.

Payloads come from another process, and a worker that crashes on one takes its engine with it: everything is checked, and each
complaint names the field and what was found there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

AGREE_LIMIT_S = 60.0
"""Seconds that ranks wait for each other where a call names no limit of its own."""

MAX_WORDS = 2000
"""Characters of one rank's words; a loader's error may quote a whole list of names."""


class Malformed(ValueError):
    """A payload that lacks a field or has one of the wrong type. Recorded or agreed upon like any failure; it never escapes."""


def _field(info: object, key: str) -> Any:
    if not isinstance(info, Mapping):
        raise Malformed(f"a payload must be a dict, not {type(info).__name__}")
    if key not in info:
        raise Malformed(f"the payload lacks {key!r}")
    return info[key]


def text(info: object, key: str) -> str:
    """The non-empty str at ``key``."""
    value = _field(info, key)
    if not isinstance(value, str) or not value:
        raise Malformed(f"{key!r} must be a non-empty str, not {_short(value)}")
    return value


def count(info: object, key: str) -> int:
    """The int of at least 0 at ``key``."""
    value = _field(info, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Malformed(f"{key!r} must be an int of at least 0, not {_short(value)}")
    return value


def flag(info: object, key: str, *, default: bool) -> bool:
    """The bool at ``key``, or ``default`` if the payload has none."""
    if isinstance(info, Mapping) and key not in info:
        return default
    value = _field(info, key)
    if not isinstance(value, bool):
        raise Malformed(f"{key!r} must be a bool, not {_short(value)}")
    return value


def mapping(info: object, key: str) -> Mapping[str, Any]:
    """The dict at ``key``."""
    value = _field(info, key)
    if not isinstance(value, Mapping):
        raise Malformed(f"{key!r} must be a dict, not {_short(value)}")
    return value


def limit_s(info: object) -> float:
    """The seconds at ``"limit_s"``, or `AGREE_LIMIT_S` if the payload names none."""
    if isinstance(info, Mapping) and "limit_s" not in info:
        return AGREE_LIMIT_S
    value = _field(info, "limit_s")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise Malformed(f"'limit_s' must be a positive number of seconds, not {_short(value)}")
    return float(value)


def _short(value: object) -> str:
    return repr(value)[:80] if isinstance(value, str | int | float) or value is None else type(value).__name__


def listed(names: Sequence[str], most: int) -> str:
    """The first ``most`` of ``names``, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def words_of(error: BaseException) -> str:
    """An exception in at most `MAX_WORDS` characters: its text, after its type where the text alone would not explain itself."""
    text = " ".join(str(error).split())
    plain = type(error) in (ValueError, Malformed, TimeoutError) and text
    said = text if plain else f"{type(error).__name__}: {text}" if text else type(error).__name__
    return said if len(said) <= MAX_WORDS else said[: MAX_WORDS - 3] + "..."

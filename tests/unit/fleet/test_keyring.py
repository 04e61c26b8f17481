"""Literal api_keys in the coordinator: fetched once, by reference; a lost one is said to be lost when it is needed."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Generator
from typing import Any

import pytest
from ray.exceptions import OwnerDiedError

from ray_weightsync.engines.ref import EngineRef, literal_keys
from ray_weightsync.errors import ConfigError
from ray_weightsync.fleet.keyring import Keyring
from ray_weightsync.protocol.urls import Secret

GIVEN = (EngineRef("http://a", id="a", api_key="s3cret"), EngineRef("http://b", id="b", api_key="env:K"), EngineRef("gen", id="c"))
ARRIVED: tuple[EngineRef, ...] = tuple(pickle.loads(pickle.dumps(GIVEN)))


class Reference:
    """Of an object in another process."""

    def __init__(self, value: dict[str, str] | Exception) -> None:
        self.value = value
        self.asked = 0

    def __await__(self) -> Generator[Any, None, dict[str, str]]:
        yield from asyncio.sleep(0).__await__()
        self.asked += 1
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def keyring(*references: Reference) -> Keyring:
    made = Keyring()
    made.add(references)  # type: ignore[arg-type]
    return made


def test_keys_come_back_to_the_references_that_left_them_and_are_fetched_once() -> None:
    keys = Reference(literal_keys(GIVEN))
    ring = keyring(keys, keys)
    for _ in range(2):
        assert asyncio.run(ring.fitted(ARRIVED, limit_s=1)) == GIVEN
    assert keys.asked == 1
    assert ring.references == (keys,)


def test_nothing_is_fetched_for_references_that_left_nothing() -> None:
    keys = Reference({})
    assert asyncio.run(keyring(keys).fitted(ARRIVED[1:], limit_s=1)) == GIVEN[1:]
    assert keys.asked == 0


def test_a_key_whose_giver_is_gone_is_said_to_be_lost_when_it_is_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    lost = Reference(OwnerDiedError("00" * 28, "", ""))
    (ref, *_) = asyncio.run(keyring(lost).fitted(ARRIVED, limit_s=1))
    assert "literal api_keys were lost with the process that gave them" in caplog.text
    assert isinstance(ref.api_key, Secret)
    with pytest.raises(ConfigError, match="did not travel with the reference"):
        _ = ref.api_key.value


def test_a_key_that_does_not_come_in_time_is_not_said_to_be_lost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    asyncio.run(keyring(Reference(TimeoutError())).fitted(ARRIVED, limit_s=1))
    assert "literal api_keys did not come in time" in caplog.text
    assert "lost" not in caplog.text


def test_keys_of_engines_that_join_are_added() -> None:
    first, joined = Reference({}), Reference(literal_keys(GIVEN))
    ring = keyring(first)
    ring.add((joined,))  # type: ignore[arg-type]
    assert asyncio.run(ring.fitted(ARRIVED, limit_s=1)) == GIVEN
    assert ring.references == (first, joined)

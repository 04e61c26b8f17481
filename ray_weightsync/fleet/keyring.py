"""Literal api_keys on their way to the coordinator, and there: in no task's arguments, no journal, no log.

They lie in an object of the process that gave them. Coordinators are told a reference to it, inside of another value (an object that is an
argument itself would be stored and shown as one), and leave it to their successors, who find the keys as long as that process lives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from ray_weightsync.engines.ref import EngineRef, literal_keys, with_keys
from ray_weightsync.protocol.urls import Secret

if TYPE_CHECKING:
    from ray import ObjectRef

logger = logging.getLogger(__name__)

Keys: TypeAlias = "tuple[ObjectRef[dict[str, str]], ...]"
"""References to tokens by replica id."""


def by_reference(refs: Iterable[EngineRef]) -> Keys:
    """The literal api_keys of ``refs``, which stay behind when those travel. Whoever calls keeps the answer as long as it may be needed."""
    import ray

    keys = literal_keys(refs)
    return (ray.put(keys),) if keys else ()


class Keyring:
    """The literal api_keys of one session, in its coordinator.

    Attributes:
        references: Where they lie.
    """

    def __init__(self) -> None:
        self.references: Keys = ()
        self._keys: dict[str, str] = {}

    def add(self, keys: Keys) -> None:
        """Learn where more of them lie."""
        self.references = tuple(dict.fromkeys((*self.references, *keys)))

    async def fitted(self, refs: Iterable[EngineRef], *, limit_s: float) -> tuple[EngineRef, ...]:
        """``refs`` with the keys that stayed behind. One whose key is lost is returned without it, and says so when it is used."""
        given = tuple(refs)
        if any(isinstance(ref.api_key, Secret) and not ref.api_key.is_here and str(ref.id) not in self._keys for ref in given):
            await self._fetch(limit_s)
        return with_keys(given, self._keys)

    async def _fetch(self, limit_s: float) -> None:
        from ray.exceptions import RayError

        for each in self.references:
            try:
                self._keys.update(await asyncio.wait_for(each, limit_s))
            except (RayError, TimeoutError) as error:
                lost = "did not come in time" if isinstance(error, TimeoutError) else "were lost with the process that gave them"
                logger.warning("literal api_keys %s (%s)", lost, type(error).__name__)

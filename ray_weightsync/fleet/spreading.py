"""Who serves whom when bytes go from one node to many. Knows neither nodes nor bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

FAN_OUT = 2
"""To how many others a node sends at once: two fill the link of a node that has 10 of them, and the others need not wait for it."""


async def spread(sources: Iterable[str], targets: Iterable[str], copy: Callable[[str, str], Awaitable[None]]) -> None:
    """Call ``copy(source, target)`` once for each target; whoever has got the bytes serves others.

    So the time grows with the logarithm of the number of targets.

    Args:
        sources: Who has the bytes; at least one, unless there are no targets.
        targets: Who is to get them.
        copy: Copies; an error it raises is its target's alone, who then serves nobody. Never raised here.
    """
    free: asyncio.Queue[str] = asyncio.Queue()

    def joins(source: str) -> None:
        for _ in range(FAN_OUT):
            free.put_nowait(source)

    async def served(target: str) -> None:
        source = await free.get()
        try:
            await copy(source, target)
        except Exception:
            free.put_nowait(source)
            return
        free.put_nowait(source)
        joins(target)

    for source in sources:
        joins(source)
    await asyncio.gather(*map(served, targets))

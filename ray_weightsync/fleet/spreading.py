"""Who serves whom when bytes go from one node to many. Knows neither nodes nor bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

FAN_OUT = 2
"""To how many others a node sends at once: two fill the link of a node that has 10 of them, and the others need not wait for it."""


class SourceLost(Exception):
    """A copy failed since its source has the bytes no more. Says nothing of the target."""


async def spread(sources: Iterable[str], targets: Iterable[str], copy: Callable[[str, str], Awaitable[None]]) -> None:
    """Have each target served by ``copy(source, target)``; whoever has got the bytes serves others.

    So the time grows with the logarithm of the number of targets.

    Args:
        sources: Who has the bytes. Without any, nobody is served.
        targets: Who is to get them.
        copy: Copies. `SourceLost` takes its source out, and the target is served by another one; with none left, targets stay without.
            Any other error is its target's alone, who then serves nobody. Never raised here.
    """
    free: asyncio.Queue[str | None] = asyncio.Queue()
    living: set[str] = set()
    under_way = 0

    def joins(source: str) -> None:
        living.add(source)
        for _ in range(FAN_OUT):
            free.put_nowait(source)

    def end_if_nobody_is_left() -> None:
        if not living and not under_way:
            free.put_nowait(None)

    async def is_served(source: str, target: str) -> bool:
        """Whether that is the end of it for the target."""
        nonlocal under_way
        under_way += 1
        try:
            await copy(source, target)
            joins(target)
        except SourceLost:
            living.discard(source)
            return False
        except Exception:
            return True
        finally:
            under_way -= 1
            free.put_nowait(source)
            end_if_nobody_is_left()
        return True

    async def served(target: str) -> None:
        while (source := await free.get()) is not None:
            if source in living and await is_served(source, target):
                return
        free.put_nowait(None)  # for the others who wait

    for source in sources:
        joins(source)
    end_if_nobody_is_left()
    await asyncio.gather(*map(served, targets))

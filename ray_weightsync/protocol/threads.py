"""Blocking calls, awaited without keeping the process alive."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Await ``function()`` on a daemon thread of its own: asyncio's executor would keep the process alive until a hung server answers."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return  # whoever asked has stopped waiting
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = function()
        except StopIteration as raised:  # which no future takes: it would never be over
            error = RuntimeError(f"StopIteration: {raised}")
            error.__cause__ = raised
        except BaseException as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            logger.debug("an answer came after its loop was closed: %r", error if error is not None else result)

    threading.Thread(target=work, name="rws-blocking-call", daemon=True).start()
    return await future

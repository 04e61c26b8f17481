"""Work on another thread, for tests whose own thread does the other half of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

LIMIT_S = 30.0


class Aside:
    """A thread whose result or exception is asked for with a limit."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._result: Any = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._result = work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def result(self) -> Any:
        """What the work returned.

        Raises:
            BaseException: what it raised.
        """
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the thread is stuck"
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result

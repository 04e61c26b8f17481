"""Requests that are in flight while something happens to their engine."""

from __future__ import annotations

import threading

import ray

from tests.vllm.support import CALL_LIMIT_S, PROMPTS, Driver


class Stream:
    """Two requests at a time on one engine until it is stopped; each must end.

    Attributes:
        spans: By request that has ended, the versions that made its tokens, in order.
    """

    def __init__(self, engine: Driver, *, num_tokens: int = 80) -> None:
        self.spans: list[list[str]] = []
        self._engine = engine
        self._num_tokens = num_tokens
        self._stop = threading.Event()
        self._failed: list[BaseException] = []
        self._threads = [threading.Thread(target=self._ask, args=(prompt,)) for prompt in PROMPTS[:2]]

    @property
    def versions(self) -> set[str]:
        """Every version that made a token."""
        return {version for spans in self.spans for version in spans}

    def __enter__(self) -> Stream:
        for thread in self._threads:
            thread.start()
        ray.get(self._engine.handle.generate.remote(PROMPTS[0], 2), timeout=CALL_LIMIT_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=CALL_LIMIT_S)
            assert not thread.is_alive(), "a request waits for ever"
        assert not self._failed, self._failed

    def _ask(self, prompt: list[int]) -> None:
        try:
            while not self._stop.is_set():
                _, spans = ray.get(self._engine.handle.generate.remote(prompt, self._num_tokens), timeout=CALL_LIMIT_S)
                self.spans.append([version for version, _, _ in spans])
        except BaseException as error:  # told by the test's own thread, whatever it is
            self._failed.append(error)

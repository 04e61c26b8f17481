"""Running the user's own probe on the engines that a round has committed: does each give the outputs that it should?"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ray_weightsync.errors import ConfigError, ReplicasLost
from ray_weightsync.report import SyncReport

logger = logging.getLogger(__name__)

Probe = Callable[[Any], object]
"""Takes an engine as it was attached (a handle, a URL, a client), or as it was spawned, and answers something true if its outputs are
right. It runs on a thread, after the engine was resumed, beside the other engines' probes."""


def require_probe(probe: object) -> None:
    """Raise `ConfigError` unless ``probe`` is a function, or None."""
    if probe is not None and not callable(probe):
        raise ConfigError(f"probe must be a function of an engine, not {type(probe).__name__}")


def probed(
    act: Callable[[], SyncReport],
    probe: Probe | None,
    engines: Mapping[str, Any],
    *,
    refuse: Callable[[SyncReport, dict[str, str]], SyncReport],
    limit_s: float,
) -> SyncReport:
    """Run a round, and then the probe on every engine that it committed.

    Args:
        act: The round.
        probe: The probe, if there is one.
        engines: The session's engines, by replica id.
        refuse: Has the coordinator take the version back from those complained of; raises what holds then.
        limit_s: Seconds for the probes.

    Raises:
        WeightSyncError: as of ``act`` and ``refuse``.
    """
    lost: ReplicasLost | None = None
    try:
        report = act()
    except ReplicasLost as error:
        if probe is None or error.report is None:
            raise
        lost, report = error, error.report
    if probe is not None:
        here = dict(engines)  # one may be replaced, on another thread
        said = complaints(probe, {name: here[name] for name in report.committed if name in here}, limit_s=limit_s)
        if said:
            report = refuse(report, said)
    if lost is not None:
        raise lost
    return report


def complaints(probe: Probe, engines: Mapping[str, Any], *, limit_s: float) -> dict[str, str]:
    """Probe every engine at once; by id, what was wrong with those that did not pass.

    Args:
        probe: See `Probe`.
        engines: The engines to probe, by replica id.
        limit_s: Seconds for all of them. A probe that has not answered then counts as failed; its thread is left to itself.
    """
    said: dict[str, str] = {}

    def run(name: str, engine: Any) -> None:
        try:
            answer = probe(engine)
            words = "" if answer else f"the probe answered {answer!r}"
        except BaseException as error:  # whatever the user's function raises is its verdict
            logger.info("the probe of %s raised", name, exc_info=True)
            words = f"the probe raised {type(error).__name__}: {error}"
        said[name] = words

    threads = {
        name: threading.Thread(target=run, args=(name, engine), name=f"rws-probe-{name}", daemon=True) for name, engine in engines.items()
    }
    deadline = time.monotonic() + limit_s
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    answered = dict(said)
    unanswered = {name: f"the probe did not answer within {limit_s:.1f} s" for name in threads if name not in answered}
    return {name: words for name, words in {**answered, **unanswered}.items() if words}

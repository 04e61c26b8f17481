"""A sender that cannot go on says so, and its caller hears why, whatever becomes of the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ray_weightsync.errors import FleetTorn, RoundAborted, WeightSyncError
from ray_weightsync.trainer.giving_up import give_up

SILENT = WeightSyncError("The coordinator did not answer; what holds now is not known here.")
TORN = FleetTorn("No replica serves.")


class Link:
    """A coordinator that is told something, and answers or does not."""

    name = "s"

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.told: list[tuple[Any, ...]] = []

    def ask(self, *args: Any, limit_s: float) -> None:
        self.told.append(args)
        if self.error is not None:
            raise self.error


def raised(error: BaseException, link: Link, committed: Callable[[], Any] | None = None) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        give_up(link, "f" * 32, error, live=None, committed=committed, limit_s=1)  # type: ignore[arg-type]
    return caught.value


def torn() -> None:
    raise TORN


@pytest.mark.parametrize("silence", [None, SILENT])
def test_what_ended_the_source_is_told_to_both_also_if_the_coordinator_is_silent(silence: BaseException | None) -> None:
    link, error = Link(silence), ValueError("a NaN")
    told = raised(error, link)
    assert isinstance(told, RoundAborted)
    assert told.__cause__ is error
    assert "ValueError: a NaN" in str(told)
    assert "a NaN" in link.told[0][2]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), RoundAborted("Nothing changed: the slot was lost.")])
@pytest.mark.parametrize("silence", [None, SILENT])
def test_an_interruption_and_an_error_of_ours_get_out_as_they_are(error: BaseException, silence: BaseException | None) -> None:
    assert raised(error, Link(silence)) is error


@pytest.mark.parametrize("silence", [None, SILENT])
def test_where_engines_were_at_it_already_the_round_s_own_end_is_waited_for_and_counts(silence: BaseException | None) -> None:
    error = ValueError("a NaN")
    told = raised(error, Link(silence), torn)
    assert told is TORN
    assert told.__cause__ is error


def test_an_interruption_of_such_a_round_stays_one_and_what_holds_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    error = KeyboardInterrupt()
    assert raised(error, Link(), torn) is error
    assert "No replica serves" in caplog.text

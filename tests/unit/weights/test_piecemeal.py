"""Work in pieces: it runs only while time is lent to it."""

from __future__ import annotations

import threading
import time

import pytest

from ray_weightsync.weights.piecemeal import Cancelled, Piecemeal, yield_point


def counting(steps: int, seen: list[int]) -> str:
    for each in range(steps):
        seen.append(each)
        yield_point()
    return "done"


class TestPieces:
    def test_nothing_happens_before_time_is_lent_and_nothing_between_two_pieces(self) -> None:
        seen: list[int] = []
        work = Piecemeal(lambda: counting(5, seen), name="work")
        assert seen == []
        for each in range(1, 6):
            assert work.advance(0.0) is False
            assert len(seen) == each
        assert work.advance(0.0) is True
        assert work.result() == "done"

    def test_a_piece_ends_at_the_first_yield_point_after_its_time(self) -> None:
        def busy() -> None:
            while True:
                yield_point()

        work = Piecemeal(busy, name="work")
        began = time.monotonic()
        assert work.advance(0.05) is False
        assert time.monotonic() - began >= 0.05
        work.cancel()

    def test_result_works_to_the_end(self) -> None:
        seen: list[int] = []
        work = Piecemeal(lambda: counting(1000, seen), name="work")
        work.advance(0.0)
        assert work.result() == "done"
        assert seen == list(range(1000))
        assert work.advance(0.0) is True  # and stays done

    def test_what_the_work_raises_is_raised_by_result_alone(self) -> None:
        def fails() -> None:
            yield_point()
            raise KeyError("no")

        work = Piecemeal(fails, name="work")
        assert work.advance(0.0) is False
        assert work.advance(0.0) is True
        with pytest.raises(KeyError, match="no"):
            work.result()

    @pytest.mark.parametrize("pieces", [0, 1, 3])
    def test_cancelled_work_unwinds_where_it_stands_and_its_thread_ends(self, pieces: int) -> None:
        unwound: list[str] = []

        def work() -> None:
            try:
                counting(100, [])
            except Exception:  # a loader that catches everything cannot keep it alive
                unwound.append("caught")
            finally:
                unwound.append("finally")

        piecemeal = Piecemeal(work, name="to be cancelled")
        for _ in range(pieces):
            piecemeal.advance(0.0)
        piecemeal.cancel()
        piecemeal.cancel()
        assert unwound == (["finally"] if pieces else [])
        assert not [each for each in threading.enumerate() if each.name == "to be cancelled" and not _ends(each)]
        with pytest.raises(Cancelled):
            piecemeal.result()

    def test_work_that_catches_everything_is_raised_at_until_it_ends(self) -> None:
        raised: list[int] = []

        def stubborn() -> None:
            for number in range(5):
                try:
                    yield_point()
                except BaseException:
                    raised.append(number)

        piecemeal = Piecemeal(stubborn, name="stubborn")
        piecemeal.advance(0.0)
        piecemeal.cancel()
        assert raised == [0, 1, 2, 3, 4]
        assert piecemeal.done

    def test_work_that_never_began_is_cancelled_without_a_thread(self) -> None:
        before = threading.active_count()
        Piecemeal(lambda: None, name="never").cancel()
        assert threading.active_count() == before

    def test_it_runs_in_one_thread_that_is_not_its_owners(self) -> None:
        threads = set()

        def work() -> None:
            for _ in range(5):
                threads.add(threading.get_ident())
                yield_point()

        piecemeal = Piecemeal(work, name="work")
        while not piecemeal.advance(0.0):
            pass
        assert len(threads) == 1
        assert threading.get_ident() not in threads


def test_a_yield_point_outside_of_any_piecemeal_does_nothing() -> None:
    yield_point()


def _ends(thread: threading.Thread) -> bool:
    thread.join(timeout=10)
    return not thread.is_alive()

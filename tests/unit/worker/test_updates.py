"""The record of an update, and the rule that only the last rank raises."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch

from ray_weightsync.weights.piecemeal import Cancelled, Piecemeal, yield_point
from ray_weightsync.weights.plan import ParamMeta, Plan
from ray_weightsync.worker.payload import MAX_WORDS, words_of
from ray_weightsync.worker.plans import MAX_PLANS
from ray_weightsync.worker.receiver import Received
from ray_weightsync.worker.seams import SoleRank
from ray_weightsync.worker.updates import MARKER, WorkerUpdates

PLAN = Plan.from_metadata([ParamMeta("a", torch.float32, (2,)), ParamMeta("b", torch.float32, (3,))])
RECEIVED = Received(snapshot="snap-1", digest="d1", num_bytes=20, num_tensors=2)


class FakeModel:
    """A model of plain slots with vLLM's habit: between start and finish it is open, and a second start on top would be wrong."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.fail_at: set[str] = set()
        self.problems: list[str] = []
        self.doubts: list[str] = []
        self.stands_still = 0
        self.interrupted = False
        self.loaded: dict[str, torch.Tensor] = {}
        self.open = False

    def _step(self, name: str) -> None:
        self.order.append(name)
        if name in self.fail_at:
            raise RuntimeError(f"made to fail in {name}")

    def check(self, plan: Plan) -> list[str]:
        self._step("check")
        try:
            for _ in range(self.stands_still):
                yield_point()
        except Cancelled:
            self.interrupted = True
            raise
        return list(self.problems)

    def unjudged(self) -> list[str]:
        return list(self.doubts)

    def start(self) -> None:
        self.open = True
        self._step("start")

    def load(self, pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        for count, (name, tensor) in enumerate(pairs):
            self.loaded[name] = tensor
            if count == 0:
                self._step("load")

    def finish(self) -> None:
        self.open = False
        self._step("finish")


class FakeDelivery:
    def __init__(self, owner: FakeReceiver) -> None:
        self.owner = owner

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        yield "b", torch.ones(3)

    def received(self) -> Received:
        return self.owner.received

    def close(self) -> None:
        self.owner.closed += 1
        if self.owner.fail_close:
            raise OSError("made to fail in close")


class FakeReceiver:
    def __init__(self) -> None:
        self.received = RECEIVED
        self.opened: list[Plan] = []
        self.closed = 0
        self.fail_close = False
        self.seen: list[Mapping[str, Any]] = []
        self.shut = 0

    def see(self, probe: Mapping[str, Any]) -> None:
        self.seen.append(probe)
        if probe.get("hidden"):
            raise OSError("nothing there")

    def open(self, plan: Plan, update: Mapping[str, Any]) -> FakeDelivery:
        if update["slot"] == "gone":
            raise FileNotFoundError("no such slot")
        self.opened.append(plan)
        return FakeDelivery(self)

    def close(self) -> None:
        self.shut += 1


class Worker:
    """One rank: its `WorkerUpdates` over fakes."""

    def __init__(self, agreement: Any = None, everyone: Any = None) -> None:
        self.model = FakeModel()
        self.receiver = FakeReceiver()
        self.updates = WorkerUpdates(self.model, agreement or SoleRank(), {"host": self.receiver}, everyone=everyone)

    def plan(self, plan: Plan = PLAN) -> None:
        self.updates.init({"op": "plan", "plan": plan.to_wire()})

    def session(self, round: str = "r1", epoch: int = 1, **changes: Any) -> None:
        self.updates.start()
        self.updates.update(update(round, epoch, **changes))
        self.updates.finish()

    def outcome(self, round: str = "r1", epoch: int = 1, **changes: Any) -> None:
        self.updates.init(outcome(round, epoch, **changes))


def update(round: str = "r1", epoch: int = 1, **changes: Any) -> dict[str, Any]:
    return {"transport": "host", "round": round, "epoch": epoch, "plan": PLAN.digest, "limit_s": 5, "slot": "here"} | changes


def outcome(round: str = "r1", epoch: int = 1, **changes: Any) -> dict[str, Any]:
    expected = {"plan": PLAN.digest, "snapshot": "snap-1", "digest": "d1", "num_bytes": 20, "num_tensors": 2} | changes
    return {"op": "outcome", "round": round, "epoch": epoch, "expected": expected, "limit_s": 5}


@pytest.fixture
def worker() -> Worker:
    it = Worker()
    it.plan()
    return it


class Ranks:
    """The ranks of one engine in threads; each call is made on all of them, as an executor makes it.

    With ``engines_of_one`` each is a data-parallel engine of its own, and all of them agree on an outcome.
    """

    def __init__(self, size: int, *, engines_of_one: bool = False) -> None:
        self._barrier = threading.Barrier(size)
        self._words: list[str | None] = [None] * size
        agreements = [_ThreadAgreement(rank, size, self) for rank in range(size)]
        self.workers = [Worker(SoleRank(), each) if engines_of_one else Worker(each) for each in agreements]

    def gather(self, rank: int, words: str | None) -> list[str | None]:
        self._words[rank] = words
        self._barrier.wait(5)
        everyone = list(self._words)
        self._barrier.wait(5)
        return everyone

    def call(self, method: str, *args: Any) -> list[BaseException | None]:
        """Call on every rank; each rank's exception, by rank."""
        raised: list[BaseException | None] = [None] * len(self.workers)

        def run(rank: int) -> None:
            try:
                getattr(self.workers[rank].updates, method)(*args)
            except BaseException as error:
                raised[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.workers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        return raised


class _ThreadAgreement:
    def __init__(self, rank: int, world_size: int, ranks: Ranks) -> None:
        self.rank, self.world_size, self._ranks = rank, world_size, ranks

    def gather(self, words: str | None, limit_s: float) -> list[str | None]:
        return self._ranks.gather(self.rank, words)


class TestRound:
    def test_a_complete_round_is_attested(self, worker: Worker) -> None:
        worker.session()
        worker.outcome()
        assert worker.model.order == ["check", "start", "load", "finish"]
        assert set(worker.model.loaded) == {"a", "b"}
        assert worker.receiver.closed == 1

    def test_the_outcome_may_be_asked_again(self, worker: Worker) -> None:
        worker.session()
        worker.outcome()
        worker.outcome()

    @pytest.mark.parametrize("field", ["snapshot", "digest", "plan"])
    def test_an_outcome_that_expects_other_text_is_refused_with_both(self, worker: Worker, field: str) -> None:
        worker.session()
        with pytest.raises(ValueError, match=f"^rws: rank 0: {field}: expected other, received "):
            worker.outcome(**{field: "other"})

    @pytest.mark.parametrize("field", ["num_bytes", "num_tensors"])
    def test_an_outcome_that_expects_other_numbers_is_refused_with_both(self, worker: Worker, field: str) -> None:
        worker.session()
        with pytest.raises(ValueError, match=f"{field}: expected 99, received {getattr(RECEIVED, field)}"):
            worker.outcome(**{field: 99})

    def test_an_outcome_of_another_round_is_refused(self, worker: Worker) -> None:
        worker.session("r1")
        with pytest.raises(ValueError, match="round r2 of epoch 1 was asked for, the latest update is round r1 of epoch 1"):
            worker.outcome("r2")

    def test_an_outcome_of_another_epoch_is_refused(self, worker: Worker) -> None:
        worker.session("r1", 1)
        with pytest.raises(ValueError, match="of epoch 2 was asked for"):
            worker.outcome("r1", 2)

    def test_an_update_that_moved_nothing_is_refused(self, worker: Worker) -> None:
        worker.updates.start()
        worker.updates.finish()
        with pytest.raises(ValueError, match="nothing was transferred"):
            worker.outcome()

    def test_an_engine_that_never_updated_says_so(self, worker: Worker) -> None:
        with pytest.raises(ValueError, match="no update has been started"):
            worker.outcome()

    def test_an_outcome_before_finish_is_refused(self, worker: Worker) -> None:
        worker.updates.start()
        worker.updates.update(update())
        with pytest.raises(ValueError, match="finish_weight_update has not been called"):
            worker.outcome()

    def test_an_older_record_never_answers_for_a_newer_session(self, worker: Worker) -> None:
        worker.session("r1")
        worker.outcome("r1")
        worker.updates.start()
        worker.updates.finish()
        with pytest.raises(ValueError, match="nothing was transferred"):
            worker.outcome("r1")

    def test_an_outcome_that_asks_for_no_bytes_compares_the_session_alone(self, worker: Worker) -> None:
        worker.session()
        worker.outcome(attested=False, digest=None, snapshot=None)
        with pytest.raises(ValueError, match="plan: expected other"):
            worker.outcome(attested=False, plan="other")
        with pytest.raises(ValueError, match="round r2 of epoch 1 was asked for"):
            worker.outcome("r2", attested=False)

    def test_bytes_that_came_without_a_snapshot_are_compared_all_the_same(self, worker: Worker) -> None:
        worker.receiver.received = Received(snapshot=None, digest="d1", num_bytes=20, num_tensors=2)
        worker.session()
        worker.outcome()
        with pytest.raises(ValueError, match=r"^rws: rank 0: digest: expected other, received d1$"):
            worker.outcome(digest="other")


class TestFailures:
    @pytest.mark.parametrize("step", ["start", "load", "finish"])
    def test_a_failing_step_is_recorded_told_by_the_outcome_and_the_next_round_works(self, worker: Worker, step: str) -> None:
        worker.model.fail_at = {step}
        worker.session("r1")
        assert not worker.model.open
        with pytest.raises(ValueError, match=f"^rws: rank 0: .*made to fail in {step}"):
            worker.outcome("r1")
        worker.model.fail_at = set()
        worker.session("r2")
        worker.outcome("r2")

    def test_nothing_is_loaded_after_a_failed_start(self, worker: Worker) -> None:
        worker.model.fail_at = {"start"}
        worker.session()
        assert worker.model.order[1:] == ["start", "finish"]
        assert worker.receiver.opened == []

    def test_what_others_wait_for_is_received_and_dropped_after_a_failed_start(self, worker: Worker) -> None:
        drained: list[tuple[Plan, str]] = []
        worker.receiver.drain = lambda plan, info: drained.append((plan, info["round"]))  # type: ignore[attr-defined]
        for name in ("r1", "r2"):
            worker.model.fail_at = {"start"}
            worker.updates.start()
            worker.updates.update(update(name))
            worker.updates.update(update(name))
            worker.updates.finish()
            with pytest.raises(ValueError, match="made to fail in start"):
                worker.outcome(name)
        assert worker.model.order[1:] == ["start", "finish"] * 2
        assert worker.receiver.opened == []
        assert [(plan.digest, named) for plan, named in drained] == [(PLAN.digest, "r1"), (PLAN.digest, "r2")], "once in a round"
        worker.model.fail_at = set()
        worker.updates.start()
        worker.updates.update(update("r3"))
        worker.updates.update(update("r3"))
        assert len(drained) == 2, "it was received"
        worker.updates.start()  # over the open one, which has had its update
        worker.updates.update(update("r4"))
        assert [named for _, named in drained[2:]] == ["r4"]

    def test_a_failing_load_closes_its_delivery_and_both_failures_are_told(self, worker: Worker) -> None:
        worker.model.fail_at = {"load"}
        worker.receiver.fail_close = True
        worker.session()
        told = r"closing the delivery: OSError: made to fail in close; update_weights: .*made to fail in load"
        with pytest.raises(ValueError, match=told):
            worker.outcome()

    def test_a_second_update_in_one_session_spoils_it(self, worker: Worker) -> None:
        worker.updates.start()
        worker.updates.update(update())
        worker.updates.update(update())
        worker.updates.finish()
        assert worker.model.order.count("load") == 1
        with pytest.raises(ValueError, match="update_weights came twice"):
            worker.outcome()

    def test_a_start_over_an_open_session_spoils_it_and_the_next_one_works(self, worker: Worker) -> None:
        worker.updates.start()
        worker.updates.update(update())
        worker.updates.start()
        worker.updates.update(update())
        worker.updates.finish()
        with pytest.raises(ValueError, match="start_weight_update came while an update was open"):
            worker.outcome()
        assert not worker.model.open
        worker.session("r2")
        worker.outcome("r2")

    @pytest.mark.parametrize("verb", ["update", "finish"])
    def test_a_call_without_start_is_recorded_and_spoils_what_was_attested_before(self, worker: Worker, verb: str) -> None:
        worker.session()
        worker.updates.update(update()) if verb == "update" else worker.updates.finish()
        assert worker.model.order[-1] == "finish"
        with pytest.raises(ValueError, match="came without start_weight_update"):
            worker.outcome()

    def test_an_older_epoch_is_refused_and_the_same_one_accepted(self, worker: Worker) -> None:
        worker.session("r5", 5)
        worker.session("r4", 4)
        with pytest.raises(ValueError, match="epoch 4 of this update is older than 5"):
            worker.outcome("r4", 4)
        worker.session("r5b", 5)
        worker.outcome("r5b", 5)

    def test_an_update_whose_plan_is_not_known_is_refused(self, worker: Worker) -> None:
        worker.session(plan="0" * 32)
        with pytest.raises(ValueError, match="is not known here; send it with op 'plan' first"):
            worker.outcome()
        assert worker.receiver.opened == []

    def test_a_receiver_that_finds_nothing_is_told(self, worker: Worker) -> None:
        worker.session(slot="gone")
        with pytest.raises(ValueError, match="FileNotFoundError: no such slot"):
            worker.outcome()

    def test_the_end_of_the_process_is_not_recorded(self, worker: Worker) -> None:
        def end(pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
            raise KeyboardInterrupt

        worker.model.load = end  # type: ignore[method-assign]
        worker.updates.start()
        with pytest.raises(KeyboardInterrupt):
            worker.updates.update(update())
        assert worker.receiver.closed == 1

    def test_very_long_words_are_cut(self) -> None:
        assert len(words_of(ValueError("x" * 10_000))) == MAX_WORDS

    def test_an_error_without_text_is_named_by_its_type(self) -> None:
        assert words_of(AssertionError()) == "AssertionError"


class TestPayloads:
    BAD_UPDATES: ClassVar[list[Any]] = [
        None,
        [],
        "text",
        7,
        {},
        *({**update(), key: bad} for key in ("transport", "round", "plan") for bad in (None, 7, "", [], {})),
        *({**update(), "epoch": bad} for bad in (None, "1", -1, True, 1.5)),
        *({**update(), "limit_s": bad} for bad in (None, "1", 0, -1, True, float("inf"), float("nan"))),
        *({k: v for k, v in update().items() if k != key} for key in ("transport", "round", "epoch", "plan")),
        update(transport="carrier pigeon"),
    ]

    @pytest.mark.parametrize("bad", BAD_UPDATES, ids=lambda bad: json.dumps(bad)[:60])
    def test_a_malformed_update_is_recorded_in_words_and_the_next_round_works(self, worker: Worker, bad: Any) -> None:
        worker.updates.start()
        worker.updates.update(bad)
        worker.updates.finish()
        assert worker.model.loaded == {}
        with pytest.raises(ValueError, match=r"^rws: rank 0: update_weights: \S+ "):
            worker.outcome()
        worker.session("r2")
        worker.outcome("r2")

    BAD_INITS: ClassVar[list[Any]] = [
        None,
        [],
        7,
        {},
        {"op": None},
        {"op": "dance"},
        {"op": "plan"},
        {"op": "judge"},
        {"op": "judge", "plan": {}},
        {"op": "plan", "plan": None},
        {"op": "plan", "plan": {}},
        {"op": "plan", "plan": {**PLAN.to_wire(), "digest": "0" * 32}},
        {"op": "see", "transport": "host"},
        {"op": "see", "transport": "host", "probe": 7},
        {"op": "see", "transport": "carrier pigeon", "probe": {}},
        {"op": "outcome"},
        {**outcome(), "round": 7},
        {**outcome(), "epoch": "1"},
        {**outcome(), "expected": None},
        {**outcome(), "limit_s": "soon"},
        *({**outcome(), "expected": {**outcome()["expected"], key: None}} for key in outcome()["expected"]),
    ]

    @pytest.mark.parametrize("bad", BAD_INITS, ids=lambda bad: json.dumps(bad)[:60])
    def test_a_malformed_op_is_refused_by_the_last_rank_alone(self, bad: Any) -> None:
        ranks = Ranks(2)
        first, last = ranks.call("init", bad)
        assert first is None
        assert isinstance(last, ValueError)
        assert str(last).startswith(f"{MARKER}rank 0: ")
        assert "; rank 1: " in str(last)
        assert ranks.call("init", {"op": "plan", "plan": PLAN.to_wire()}) == [None, None]


class TestPlans:
    def test_a_refused_plan_is_not_kept_and_every_problem_is_told(self) -> None:
        worker = Worker()
        worker.model.problems = ["a: wrong shape", "c is unknown"]
        with pytest.raises(ValueError, match=r"^rws: rank 0: a: wrong shape; c is unknown$"):
            worker.plan()
        assert worker.updates.describe("n")["plans"] == []

    def test_a_plan_that_one_rank_refuses_is_kept_by_none(self) -> None:
        ranks = Ranks(2)
        ranks.workers[0].model.problems = ["wrong shape"]
        first, last = ranks.call("init", {"op": "plan", "plan": PLAN.to_wire()})
        assert first is None
        assert str(last) == "rws: rank 0: wrong shape"
        assert [worker.updates.describe("n")["plans"] for worker in ranks.workers] == [[], []]

    def test_a_known_plan_is_not_checked_again(self, worker: Worker) -> None:
        worker.plan()
        assert worker.model.order == ["check"]

    def test_the_last_plans_are_kept_and_use_counts(self, worker: Worker) -> None:
        others = [Plan.from_metadata([ParamMeta(f"t{index}", torch.float32, (2,))]) for index in range(MAX_PLANS)]
        for other in others[:-1]:
            worker.plan(other)
        worker.session()  # PLAN is the oldest, but in use
        worker.plan(others[-1])
        plans = worker.updates.describe("n")["plans"]
        assert len(plans) == MAX_PLANS
        assert PLAN.digest in plans
        assert others[0].digest not in plans

    def test_a_plan_is_not_checked_while_an_update_is_open(self, worker: Worker) -> None:
        worker.updates.start()
        with pytest.raises(ValueError, match="cannot be checked while an update is open"):
            worker.plan(Plan.from_metadata([ParamMeta("z", torch.float32, (2,))]))

    def test_a_check_that_raises_refuses_the_plan(self) -> None:
        worker = Worker()
        worker.model.fail_at = {"check"}
        with pytest.raises(ValueError, match="made to fail in check"):
            worker.plan()

    def test_what_the_check_could_not_judge_is_described_by_plan(self) -> None:
        worker = Worker()
        worker.model.doubts = ["k_scale is not in the plan"]
        worker.plan()
        assert worker.updates.describe("n")["unjudged"] == {PLAN.digest: ["k_scale is not in the plan"]}


class TestJudging:
    """Judged piece by piece: what comes of it, and who may interrupt it. The model of these workers stands still three times."""

    @pytest.fixture
    def judging(self, monkeypatch: pytest.MonkeyPatch) -> Worker:
        monkeypatch.setattr("ray_weightsync.worker.plans.PIECE_S", 0.0)
        worker = Worker()
        worker.model.stands_still = 3
        worker.updates.init({"op": "judge", "plan": PLAN.to_wire()})
        return worker

    def looks(self, worker: Worker) -> int:
        for count in range(1000):
            if worker.updates.describe("n")["judging"] is None:
                return count
        raise AssertionError("it never comes to an end")

    def look_until_it_checks(self, worker: Worker) -> None:
        while not worker.model.order:
            worker.updates.describe("n")

    def test_nothing_is_judged_before_the_first_look_and_a_piece_by_each(self, judging: Worker) -> None:
        assert judging.model.order == []
        assert judging.updates.describe("n")["judging"] == PLAN.digest
        assert self.looks(judging) > 3
        assert judging.updates.describe("n")["plans"] == [], "no plan is known before all ranks agreed"
        judging.plan()
        assert judging.updates.describe("n")["plans"] == [PLAN.digest]
        assert judging.model.order == ["check"]

    @pytest.mark.parametrize("looks", [0, 2, 1000])
    def test_however_far_it_has_come_the_plan_op_tells_what_came_of_it(self, judging: Worker, looks: int) -> None:
        judging.model.problems = ["a: wrong shape"]
        for _ in range(looks):
            judging.updates.describe("n")
        with pytest.raises(ValueError, match=r"^rws: rank 0: a: wrong shape$"):
            judging.plan()
        judging.model.problems = []
        judging.plan()
        assert judging.model.order == ["check", "check"], "a refusal is not kept"

    def test_a_session_that_starts_meanwhile_ends_it_where_it_stands(self, judging: Worker) -> None:
        self.look_until_it_checks(judging)
        judging.updates.start()
        assert judging.model.interrupted
        assert judging.updates.describe("n")["judging"] is None
        judging.updates.finish()
        judging.plan()
        assert judging.model.order == ["check", "start", "finish", "check"]

    def test_another_plan_takes_its_place(self, judging: Worker) -> None:
        other = Plan.from_metadata([ParamMeta("z", torch.float32, (2,))])
        judging.updates.describe("n")
        judging.updates.init({"op": "judge", "plan": other.to_wire()})
        assert judging.updates.describe("n")["judging"] == other.digest
        judging.plan()
        assert judging.updates.describe("n")["judging"] is None
        assert judging.updates.describe("n")["plans"] == [PLAN.digest]

    def test_asked_for_again_it_goes_on_and_a_known_plan_is_not_judged_at_all(self, judging: Worker) -> None:
        judging.updates.describe("n")
        judging.updates.init({"op": "judge", "plan": PLAN.to_wire()})
        self.looks(judging)
        judging.plan()
        judging.updates.init({"op": "judge", "plan": PLAN.to_wire()})
        assert judging.updates.describe("n")["judging"] is None
        assert judging.model.order == ["check"]

    def test_what_is_no_plan_is_found_out_by_judging_and_told_by_the_plan_op(self, judging: Worker) -> None:
        wire = {**PLAN.to_wire(), "digest": "0" * 32}
        judging.updates.init({"op": "judge", "plan": wire})
        self.looks(judging)
        with pytest.raises(ValueError, match="it was changed on the way"):
            judging.updates.init({"op": "plan", "plan": wire})

    def test_closing_ends_it(self, judging: Worker) -> None:
        self.look_until_it_checks(judging)
        judging.updates.close()
        assert judging.model.interrupted

    def test_a_judgement_that_hangs_is_told_and_raises_nowhere(self, judging: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        def hangs(self: object, for_s: float) -> bool:
            raise TimeoutError("rws-judge did not pause for 600 s")

        monkeypatch.setattr(Piecemeal, "advance", hangs)
        assert judging.updates.describe("n")["failure"] == "a plan could not be judged: rws-judge did not pause for 600 s"
        monkeypatch.undo()


class TestSee:
    def test_a_probe_reaches_the_receiver_and_its_refusal_is_told(self, worker: Worker) -> None:
        worker.updates.init({"op": "see", "transport": "host", "probe": {"name": "x"}})
        with pytest.raises(ValueError, match=r"^rws: rank 0: OSError: nothing there$"):
            worker.updates.init({"op": "see", "transport": "host", "probe": {"hidden": True}})
        assert worker.receiver.seen == [{"name": "x"}, {"hidden": True}]


class FakeDelegate(FakeReceiver):
    """A receiver with sessions of its own, which keeps what it was asked for."""

    many_updates = True

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self.fail_at: set[str] = set()

    def _step(self, name: str) -> None:
        self.order.append(name)
        if name in self.fail_at:
            raise RuntimeError(f"made to fail in {name}")

    def prepare(self, info: Mapping[str, Any]) -> None:
        self._step("prepare")

    def join(self) -> None:
        self._step("join")

    def course(self) -> FakeDelegate:
        self._step("course")
        return self

    def start(self) -> None:
        self._step("start")

    def update(self, plan: Plan, info: Mapping[str, Any]) -> Received:
        self._step("update")
        return self.received

    def drop(self, info: Mapping[str, Any]) -> None:
        self._step("drop")

    def finish(self) -> None:
        self._step("finish")


def choose(round: str = "r1", epoch: int = 1, **changes: Any) -> dict[str, Any]:
    return {"op": "native", "backend": "ipc", "init_info": {}, "round": round, "epoch": epoch, "limit_s": 5} | changes


def native(round: str = "r1", epoch: int = 1) -> dict[str, Any]:
    return update(round, epoch, transport="native")


class TestDelegates:
    @pytest.fixture
    def delegate(self, worker: Worker) -> FakeDelegate:
        delegate = FakeDelegate()
        worker.updates._receivers["native"] = delegate
        return delegate

    def test_the_next_session_is_the_delegates_and_the_one_after_it_is_ours(self, worker: Worker, delegate: FakeDelegate) -> None:
        worker.updates.init(choose())
        worker.updates.start()
        worker.updates.update(native())
        worker.updates.update(native())
        worker.updates.finish()
        worker.outcome()
        assert delegate.order == ["prepare", "join", "course", "start", "update", "update", "finish"]
        assert worker.model.order == ["check"]
        worker.session("r2")
        worker.outcome("r2")
        assert worker.model.order == ["check", "start", "load", "finish"]

    def test_a_round_of_ours_takes_over_a_session_that_its_chooser_never_began(self, worker: Worker, delegate: FakeDelegate) -> None:
        worker.updates.init(choose())
        worker.session("r2", 2)
        worker.outcome("r2", 2)
        assert delegate.order[-2:] == ["start", "finish"]
        assert worker.model.order == ["check", "start", "load", "finish"]

    def test_but_not_one_that_has_received_something(self, worker: Worker, delegate: FakeDelegate) -> None:
        worker.updates.init(choose())
        worker.updates.start()
        worker.updates.update(native())
        worker.updates.update(update("r2"))
        worker.updates.finish()
        assert "load" not in worker.model.order
        with pytest.raises(ValueError, match=r"this update is of round r2 of epoch 1, the session was begun for round r1 of epoch 1"):
            worker.outcome("r1")

    @pytest.mark.parametrize("step", ["course", "start", "update", "finish"])
    def test_whatever_fails_in_it_is_recorded_and_dropped_and_the_next_session_is_ours(
        self, worker: Worker, delegate: FakeDelegate, step: str
    ) -> None:
        worker.updates.init(choose())
        delegate.fail_at = {step}
        worker.updates.start()
        worker.updates.update(native())
        worker.updates.update(native())
        worker.updates.finish()
        assert delegate.order.count("drop") == {"course": 0, "start": 2, "update": 1, "finish": 0}[step]
        with pytest.raises(ValueError, match=f"made to fail in {step}"):
            worker.outcome()
        worker.session("r2")
        worker.outcome("r2")

    def test_a_refusal_chooses_nothing(self, worker: Worker, delegate: FakeDelegate) -> None:
        for step in ("prepare", "join"):
            delegate.fail_at = {step}
            with pytest.raises(ValueError, match=f"^rws: rank 0: RuntimeError: made to fail in {step}$"):
                worker.updates.init(choose())
        worker.session()
        worker.outcome()
        assert delegate.order == ["prepare", "prepare", "join"]

    def test_a_second_choice_takes_the_place_of_the_first(self, worker: Worker, delegate: FakeDelegate) -> None:
        worker.updates.init(choose())
        delegate.fail_at = {"prepare"}
        with pytest.raises(ValueError, match="made to fail in prepare"):
            worker.updates.init(choose("r2"))
        worker.session("r3")
        worker.outcome("r3")

    @pytest.mark.parametrize("key", ["round", "epoch"])
    def test_it_has_to_say_which_round_it_is_for(self, worker: Worker, delegate: FakeDelegate, key: str) -> None:
        with pytest.raises(ValueError, match=f"{key!r} must be "):
            worker.updates.init(choose(**{key: None}))
        assert delegate.order == []

    def test_a_worker_without_one_says_what_it_receives_from(self, worker: Worker) -> None:
        for info in (choose(), {"op": "see", "transport": "native", "probe": {"backend": "ipc"}}):
            with pytest.raises(ValueError, match=r"^rws: rank 0: transport 'native' is not known here; this worker receives from: host$"):
                worker.updates.init(info)

    def test_a_receiver_that_only_delivers_is_none(self, worker: Worker) -> None:
        worker.updates._receivers["native"] = FakeReceiver()
        with pytest.raises(ValueError, match="takes no sessions of its own"):
            worker.updates.init(choose())

    @pytest.mark.parametrize("failing", [0, 1])
    def test_no_rank_joins_when_another_cannot_and_the_ranks_stay_in_step(self, failing: int) -> None:
        ranks = Ranks(2)
        assert ranks.call("init", {"op": "plan", "plan": PLAN.to_wire()}) == [None, None]
        delegates = [FakeDelegate(), FakeDelegate()]
        for worker, delegate in zip(ranks.workers, delegates, strict=True):
            worker.updates._receivers["native"] = delegate
        delegates[failing].fail_at = {"prepare"}
        first, last = ranks.call("init", choose())
        assert first is None
        assert str(last) == f"rws: rank {failing}: RuntimeError: made to fail in prepare"
        assert [delegate.order for delegate in delegates] == [["prepare"]] * 2
        delegates[failing].fail_at = {"join"}
        first, last = ranks.call("init", choose())
        assert first is None
        assert str(last) == f"rws: rank {failing}: RuntimeError: made to fail in join"
        for call in (("start",), ("update", update()), ("finish",), ("init", outcome())):
            assert ranks.call(*call) == [None, None]

    def test_a_partial_plan_is_not_loaded_in_a_session_of_ours(self, worker: Worker) -> None:
        some = Plan.from_metadata([ParamMeta("a", torch.float32, (2,))], partial=True)
        worker.plan(some)
        worker.session(plan=some.digest)
        assert worker.receiver.opened == []
        with pytest.raises(ValueError, match="is partial; it can only be brought by a backend that patches a model in place"):
            worker.outcome(plan=some.digest)


class TestManyRanks:
    @pytest.mark.parametrize("failing", [{0}, {1}, {2}, {0, 1, 2}], ids=str)
    @pytest.mark.parametrize("step", ["start", "load", "finish"])
    def test_whoever_fails_wherever_only_the_last_rank_raises_and_a_good_round_follows(self, failing: set[int], step: str) -> None:
        ranks = Ranks(3)
        assert ranks.call("init", {"op": "plan", "plan": PLAN.to_wire()}) == [None] * 3
        for rank in failing:
            ranks.workers[rank].model.fail_at = {step}
        for call in (("start",), ("update", update("r1")), ("finish",)):
            assert ranks.call(*call) == [None] * 3
        *others, last = ranks.call("init", outcome("r1"))
        assert others == [None, None]
        assert isinstance(last, ValueError)
        assert [f"rank {rank}: " in str(last) for rank in range(3)] == [rank in failing for rank in range(3)]
        for worker in ranks.workers:
            worker.model.fail_at = set()
        for call in (("start",), ("update", update("r2")), ("finish",), ("init", outcome("r2"))):
            assert ranks.call(*call) == [None] * 3

    def test_one_rank_that_read_another_snapshot_is_named(self) -> None:
        ranks = Ranks(2)
        ranks.call("init", {"op": "plan", "plan": PLAN.to_wire()})
        ranks.workers[0].receiver.received = Received(snapshot="snap-0", digest="d0", num_bytes=20, num_tensors=2)
        for call in (("start",), ("update", update()), ("finish",)):
            ranks.call(*call)
        _, last = ranks.call("init", outcome())
        assert str(last) == "rws: rank 0: snapshot: expected snap-1, received snap-0; digest: expected d1, received d0"

    @pytest.mark.parametrize("failing", [0, 1, 2])
    def test_every_data_parallel_engine_answers_for_all_in_an_outcome(self, failing: int) -> None:
        ranks = Ranks(3, engines_of_one=True)
        assert ranks.call("init", {"op": "plan", "plan": PLAN.to_wire()}) == [None] * 3
        ranks.workers[failing].model.fail_at = {"load"}
        for call in (("start",), ("update", update()), ("finish",)):
            ranks.call(*call)
        raised = [str(each) for each in ranks.call("init", outcome())]
        assert len(set(raised)) == 1
        assert raised[0].startswith(f"rws: rank {failing}: update_weights: ")
        assert [worker.updates.describe("n")["attesting"] for worker in ranks.workers] == [3] * 3

    def test_a_plan_that_one_data_parallel_engine_refuses_is_refused_by_that_one_and_the_others_need_not_wait_for_it(self) -> None:
        ranks = Ranks(2, engines_of_one=True)
        ranks.workers[1].model.problems = ["too wide"]
        ranks.workers[0].plan()
        with pytest.raises(ValueError, match=r"^rws: rank 0: .*too wide"):
            ranks.workers[1].plan()

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_broken_agreement_raises_on_the_last_rank_only(self, rank: int) -> None:
        class Broken:
            world_size = 2

            def __init__(self) -> None:
                self.rank = rank

            def gather(self, words: str | None, limit_s: float) -> list[str | None]:
                raise ConnectionError("the store is gone")

        worker = Worker(Broken())
        if rank == 0:
            worker.plan()
        else:
            with pytest.raises(ValueError, match="rank 1: cannot agree with the other ranks: ConnectionError: the store is gone"):
                worker.plan()
        assert worker.updates.describe("n")["plans"] == []


class TestDescribe:
    def test_it_echoes_the_nonce_and_is_plain_json(self, worker: Worker) -> None:
        worker.session("r1", 3)
        told = worker.updates.describe("n1")
        assert json.loads(json.dumps(told)) == told
        assert told["nonce"] == "n1"
        assert (told["rank"], told["world_size"], told["epoch"], told["round"]) == (0, 1, 3, "r1")
        assert told["resident"] == ["weights", "kv_cache"]
        assert told["failure"] is None
        assert told["plans"] == [PLAN.digest]

    def test_it_says_whether_an_update_is_open_and_what_failed(self, worker: Worker) -> None:
        worker.model.fail_at = {"start"}
        worker.updates.start()
        assert worker.updates.describe("n")["update_open"] is True
        worker.updates.finish()
        told = worker.updates.describe("n")
        assert told["update_open"] is False
        assert told["failure"] == "start_weight_update: RuntimeError: made to fail in start"

    def test_a_failing_probe_of_what_is_resident_is_told_and_not_raised(self) -> None:
        def broken() -> list[str]:
            raise RuntimeError("no allocator")

        told = WorkerUpdates(FakeModel(), SoleRank(), {}, resident=broken).describe("n")
        assert told["resident"] == []
        assert told["failure"] == "what is resident is not known: RuntimeError: no allocator"

    def test_it_says_where_the_model_is(self) -> None:
        told = WorkerUpdates(FakeModel(), SoleRank(), {}).describe("n")
        assert told["device"] == {"type": "cpu", "uuid": None}
        assert told["nccl"] is False

    def test_two_workers_are_two_incarnations(self) -> None:
        assert Worker().updates.describe("n")["incarnation"] != Worker().updates.describe("n")["incarnation"]


class TestClose:
    def test_it_flushes_what_is_open_closes_the_receivers_and_forgets_plans_but_not_the_epoch(self, worker: Worker) -> None:
        worker.session("r1", 7)
        worker.updates.start()
        worker.updates.close()
        worker.updates.close()
        told = worker.updates.describe("n")
        assert not worker.model.open
        assert (told["plans"], told["epoch"], told["update_open"]) == ([], 7, False)
        assert worker.receiver.shut == 2

    def test_a_worker_works_again_after_it(self, worker: Worker) -> None:
        worker.updates.close()
        worker.plan()
        worker.session()
        worker.outcome()

    def test_a_receiver_that_cannot_be_closed_does_not_stop_it(self, worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
        def broken() -> None:
            raise OSError("busy")

        worker.receiver.close = broken  # type: ignore[method-assign]
        worker.updates.close()
        assert "the host receiver could not be closed" in caplog.text

"""The parts of ``benchmarks/cluster.py`` that need no cluster: what is measured, what comes of a failure, and what is written of it."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import re
import struct
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

import ray_weightsync as rws
from ray_weightsync.report import ReplicaReport
from tests.unit.fleet.fakes import FakeFleet as FakeCoordinated
from tests.unit.fleet.fakes import FakeTrainerEngine
from tests.unit.fleet.test_auto_rounds import SENDER, Placed

ROOT = Path(__file__).parents[2]
SIZE = 4 << 20
PHASES_S = {"preflight": 0.1, "stage": 0.2, "update": 0.4}
OPTIONS = Namespace(bucket_megabytes=None, directory="/dev/shm", interface=None, warm_up=1, rounds=2)


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """The modules beside the script, which find each other as they do when it is run."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        parts = {name: importlib.import_module(f"cluster_{name}") for name in ("report", "fleet", "probes")}
        yield SimpleNamespace(script=importlib.import_module("cluster"), **parts)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def sync_report(seconds: float = 1.0, **phases_s: float) -> rws.SyncReport:
    return rws.SyncReport(
        version="v",
        ordinal=1,
        round_id="r",
        epoch=1,
        plan_digest="p",
        weights_digest="w",
        transport="host",
        transport_reason="asked for",
        num_bytes=SIZE,
        num_tensors=2,
        phases_s=PHASES_S | phases_s,
        apply_s=0.5 * seconds,
        replicas=(ReplicaReport(id="r0", state="SERVING", version="v", phases_s={"update": 0.3}, pause_s=0.6),),
        pause_s=0.6,
        trainer_blocked_s=0.2,
        total_s=seconds,
    )


def yardstick(gb_per_s: float) -> dict[str, Any]:
    return {"gb_per_s": {"median": gb_per_s, "min": gb_per_s, "max": gb_per_s}}


def case(scripts: SimpleNamespace, transport: str = "host", **fields: Any) -> Any:
    return scripts.report.Case(**({"layout": "separate", "engines": 2, "megabytes": 4.0, "transport": transport} | fields))


def measured(scripts: SimpleNamespace, *seconds: float, transport: str = "host", **yardsticks: Any) -> dict[str, Any]:
    rows = [scripts.report.round_row(sync_report(each), each) for each in seconds]
    told: dict[str, Any] = scripts.report.measurement(case(scripts, transport), "measured", rounds=rows, yardsticks=yardsticks)
    return told


def test_every_placement_is_reserved_once_and_every_size_started_once(scripts: SimpleNamespace) -> None:
    cases = scripts.report.cases(["separate", "colocated"], [1, 2], [1, 16], ["host", "collective"])
    assert list(cases) == [("separate", 1), ("separate", 2), ("colocated", 1), ("colocated", 2)]
    assert [list(by_size) for by_size in cases.values()] == [[1, 16]] * 4
    assert cases["colocated", 2][16] == [
        scripts.report.Case(layout="colocated", engines=2, megabytes=16, transport=name) for name in ("host", "collective")
    ]


def test_transports_take_the_options_that_are_theirs(scripts: SimpleNamespace) -> None:
    made = scripts.report.transports(directory="$SHM", interface="eth1", bucket_bytes=8192)
    assert made["host"] == rws.Host(directory="$SHM", bucket_bytes=8192)
    assert made["host+overlap"].overlap
    assert made["collective+snapshot"] == rws.Collective(
        interface="eth1", keep_snapshot=True, host=rws.Host(directory="$SHM"), bucket_bytes=8192
    )
    assert made["native:ipc"] == rws.Native("ipc")


def test_rates_are_of_the_median_round_and_shares_of_the_yardsticks(scripts: SimpleNamespace) -> None:
    found = measured(scripts, 0.5, 1.0, 2.0, link=yardstick(SIZE / 1e9 * 4), memcpy=yardstick(SIZE / 1e9 * 10))["summary"]
    assert found["wall_s"] == {"median": 1.0, "min": 0.5, "max": 2.0}
    assert found["gb_per_s"] == {"median": SIZE / 1e9, "min": SIZE / 2e9, "max": SIZE / 0.5e9}
    assert found["share_of_link"] == pytest.approx(0.25)
    assert found["share_of_memcpy"] == pytest.approx(0.1)
    assert list(found["phases_s"]) == ["preflight", "stage", "update"], "in the order of a round"


@pytest.mark.parametrize(("phases_s", "moving", "seconds"), [({}, "update", 0.4), ({"relay": 0.05}, "relay", 0.05)])
def test_bytes_move_in_relay_where_they_leave_the_node_else_in_update(
    scripts: SimpleNamespace, phases_s: dict[str, float], moving: str, seconds: float
) -> None:
    rows = [scripts.report.round_row(sync_report(**phases_s), 1.0)]
    found = scripts.report.summary(rows, yardstick(SIZE / 1e9), None)
    assert (found["moving_phase"], found["moving_gb_per_s"]["median"]) == (moving, pytest.approx(SIZE / seconds / 1e9))
    assert found["moving_share_of_link"] == pytest.approx(1 / seconds)


def test_without_a_yardstick_rounds_are_told_without_their_share(scripts: SimpleNamespace) -> None:
    found = measured(scripts, 1.0, link={"error": "OSError: no route"})
    assert (found["summary"]["share_of_link"], found["summary"]["share_of_memcpy"]) == (None, None)
    assert found["summary"]["gb_per_s"]["median"] == pytest.approx(SIZE / 1e9)
    assert re.search(r"host +1\.000 \(1\.000-1\.000\) +0\.600 +0\.00419 +- +- +0\.0105 \(update\) +-$", scripts.report.table([found]))


def test_the_table_has_a_line_for_what_failed_and_each_reason_once(scripts: SimpleNamespace) -> None:
    refused = [scripts.report.measurement(case(scripts, f"native:{name}"), "not available", reason="use host") for name in ("ipc", "nccl")]
    failed = scripts.report.measurement(case(scripts, "collective"), "failed", reason="RoundAborted: nothing changed\nmore")
    lines = scripts.report.table([measured(scripts, 1.0), failed, *refused, *refused]).splitlines()
    assert [line.split()[3] for line in lines[1:3]] == ["host", "collective"]
    assert lines[2].endswith("failed")
    assert lines[3:] == ["collective: failed: RoundAborted: nothing changed", "more", "native:ipc, native:nccl: not available: use host"]
    assert scripts.report.line(failed).endswith("failed: RoundAborted: nothing changed")


def test_every_key_that_is_written_is_described_in_the_docs(scripts: SimpleNamespace) -> None:
    document = scripts.report.document(
        started="now",
        arguments={},
        versions={},
        nodes=[scripts.report.node_row({"NodeID": "n", "NodeManagerAddress": "a", "Resources": {}})],
    )
    one = measured(scripts, 1.0, link=yardstick(1.0), memcpy=yardstick(1.0))
    document["measurements"].append(one)
    assert json.loads(json.dumps(document)) == document
    keys = {*document, *document["nodes"][0], *one, *one["case"], *one["rounds"][0], *one["summary"]} - {"arguments", "versions"}
    described = set(re.findall(r"`([a-z_]+)`", (ROOT / "docs" / "benchmarks.md").read_text()))
    assert keys <= described, keys - described


def test_a_nodes_gpus_are_told_with_their_kind(scripts: SimpleNamespace) -> None:
    resources = {"CPU": 16.0, "GPU": 8.0, "accelerator_type:H200": 1.0, "node:10.0.0.1": 1.0}
    row = scripts.report.node_row({"NodeID": "n", "NodeManagerAddress": "10.0.0.1", "Resources": resources})
    assert (row["cpus"], row["gpus"], row["gpu_kinds"]) == (16.0, 8.0, ["H200"])


class FakeFleet:
    """Stands for engines; what a transport does is in `answers`."""

    answers: dict[str, Any] = {}  # noqa: RUF012 - set anew for each test
    started: list[FakeFleet] = []  # noqa: RUF012

    def __init__(self, *_: Any) -> None:
        if (error := self.answers.get("start")) is not None:
            self.started.append(self)
            raise error
        self.devices, self.closed, self.used = ["cpu"], 0, list[str]()
        self.started.append(self)

    def rounds(self, name: str, transport: Any, *, warm_up: int, rounds: int) -> tuple[str, list[dict[str, Any]]]:
        self.used.append(name)
        if (error := self.answers.get(name)) is not None:
            raise error
        return "group of 2", self.answers["rows"]

    def close(self) -> None:
        self.closed += 1


def told(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, **answers: Exception
) -> tuple[list[tuple[str, str | None]], list[FakeFleet]]:
    """What is told of three transports, and the fleets that they took."""
    monkeypatch.setattr(scripts.fleet, "Fleet", FakeFleet)
    FakeFleet.answers = {"rows": [scripts.report.round_row(sync_report(), 1.0)], **answers}
    FakeFleet.started = []
    cases = [case(scripts, name) for name in ("collective", "native:ipc", "host")]
    found = list(scripts.fleet.measure_size(SimpleNamespace(trainers=(), engines=()), cases, {}, OPTIONS))
    return [(each["status"], each["reason"]) for each in found], FakeFleet.started


def test_a_transport_that_failed_costs_its_engines_and_the_next_one_gets_new_ones(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, fleets = told(scripts, monkeypatch, collective=rws.FleetTorn("torn"))
    assert results == [("failed", "FleetTorn: torn"), ("measured", None), ("measured", None)]
    assert [(fleet.used, fleet.closed) for fleet in fleets] == [(["collective"], 1), (["native:ipc", "host"], 1)]


def test_a_transport_that_does_not_fit_is_told_with_its_reason_and_the_engines_are_kept(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, fleets = told(scripts, monkeypatch, **{"native:ipc": scripts.report.NotAvailable("ConfigError: not in this version")})
    assert results == [("measured", None), ("not available", "ConfigError: not in this version"), ("measured", None)]
    assert [(fleet.used, fleet.closed) for fleet in fleets] == [(["collective", "native:ipc", "host"], 1)]


def test_engines_that_do_not_start_are_not_started_for_every_transport(scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    results, fleets = told(scripts, monkeypatch, start=rws.AttachError("no memory"))
    assert results == [("failed", "AttachError: no memory")] * 3
    assert len(fleets) == 1


def raised_by_an_actor(error: Exception) -> Any:
    """As Ray hands it on."""
    made: Any = RayTaskError  # it has no annotations
    return made("rws_send_weights", "a traceback", error).as_instanceof_cause()


REFUSED = {
    "ipc to another GPU, a collective on the trainer's own": rws.RoundAborted("no way", phase="open"),
    "two engines of nccl_m2n": rws.RoundAborted("no ranks", phase="preflight"),
    "vLLM is missing in the trainer": rws.ConfigError("no vLLM"),
    "nccl4py is missing in the trainer": raised_by_an_actor(ModuleNotFoundError("No module named 'nccl'")),
}
BROKEN = {
    "an engine died": rws.RoundAborted("r1 is gone", phase="preflight", elapsed_s=0.1, limit_s=60),
    "an engine did not answer": rws.RoundAborted("no answer", phase="preflight", elapsed_s=60, limit_s=60),
    "the round before does not end": rws.RoundAborted("in progress", phase="open", elapsed_s=9, limit_s=9),
    "it was paused already": rws.RoundAborted("no pause", phase="pause"),
    "torn": rws.FleetTorn("torn", phase="preflight"),
    "Ray": raised_by_an_actor(ValueError("no")),
}


class FakeSync:
    """Stands for a session: each round ends as it is told."""

    def __init__(self, *ends: Exception | rws.SyncReport) -> None:
        self.ends, self.versions = list(ends), list[str]()

    def send_weights(self, *, version: str) -> rws.SyncReport:
        self.versions.append(version)
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end


def sent(scripts: SimpleNamespace, *ends: Exception | rws.SyncReport, name: str = "host", engines: int = 1) -> tuple[FakeSync, Any]:
    """Rounds that end so, the first one not told."""
    sync = FakeSync(*ends)
    return sync, scripts.fleet.send_rounds(sync, name, engines=engines, change=lambda: None, warm_up=1, rounds=len(ends) - 1)


def test_rounds_are_told_without_the_first_ones_under_versions_of_their_own(scripts: SimpleNamespace) -> None:
    sync, rows = sent(scripts, sync_report(), sync_report(), sync_report(2.0), name="host+overlap")
    assert [row["total_s"] for row in rows] == [1.0, 2.0]
    assert len(set(sync.versions)) == 3


@pytest.mark.parametrize("error", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_before_an_engine_is_touched_is_not_available(scripts: SimpleNamespace, error: Exception) -> None:
    with pytest.raises(scripts.report.NotAvailable) as caught:
        sent(scripts, error, sync_report())
    assert "traceback" not in str(caught.value)
    assert str(caught.value).startswith(type(getattr(error, "cause", error)).__name__)


@pytest.mark.parametrize("error", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_after_a_round_has_failed(scripts: SimpleNamespace, error: Exception) -> None:
    with pytest.raises(type(error)):
        sent(scripts, sync_report(), error)


@pytest.mark.parametrize("error", BROKEN.values(), ids=BROKEN)
def test_what_breaks_has_failed_in_the_first_round_too(scripts: SimpleNamespace, error: Exception) -> None:
    with pytest.raises(type(error)):
        sent(scripts, error, sync_report())


def caught_from(transport: Any, *uuids: str, fault: str | None = None) -> rws.RoundAborted:
    """What a coordinator ends the first round with whose engines are on these GPUs."""

    async def story() -> None:
        fleet = FakeCoordinated(len(uuids), transport=transport)
        fleet.engines = [Placed(f"r{index}", uuid) for index, uuid in enumerate(uuids)]
        await fleet.attach()
        if fault is not None:
            fleet.engines[-1].faults["inspect"] = fault
        fleet.coordinator.choose_transport(SENDER)
        await fleet.relay(1, engine=FakeTrainerEngine(transport.backend))

    with pytest.raises(rws.RoundAborted, match="Nothing changed") as caught:
        asyncio.run(asyncio.wait_for(story(), 30))
    return caught.value


def test_the_coordinators_refusals_are_told_from_its_failures(scripts: SimpleNamespace) -> None:
    refused = scripts.report.refused
    assert refused(caught_from(rws.Native("ipc"), "mine", "a"))
    assert refused(caught_from(rws.Collective(), "a", "mine"))
    assert refused(caught_from(rws.Native("nccl_m2n"), "a", "b"))
    assert not refused(caught_from(rws.Native("nccl"), "a", "b", fault="die"))
    assert not refused(caught_from(rws.Native("nccl"), "a", "b", fault="raise"))


@pytest.mark.parametrize(
    ("fields", "engines", "why"),
    [
        ({"transport": "host", "transport_reason": "patches alone"}, 1, "this round went by host: patches alone"),
        ({"transport": "native:nccl"}, 2, "only r0 of 2 took part"),
        ({"transport": "native:nccl", "repeated": True}, 1, "nothing was sent"),
    ],
)
def test_a_round_by_another_transport_to_fewer_engines_or_without_bytes_has_failed(
    scripts: SimpleNamespace, fields: dict[str, Any], engines: int, why: str
) -> None:
    with pytest.raises(RuntimeError, match=why):
        sent(scripts, dataclasses.replace(sync_report(), **fields), name="native:nccl", engines=engines)


def test_only_backends_that_can_be_measured_are_among_the_transports(scripts: SimpleNamespace) -> None:
    backends = {each.backend for each in scripts.report.transports().values() if isinstance(each, rws.Native)}
    assert backends == {"ipc", "nccl", "nccl_m2n"}, "neither patches of weights, nor what needs engines that are started in another way"


def test_the_plot_shows_rates_and_phases_of_what_was_measured(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from matplotlib import pyplot

    drawn: list[Any] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    document = scripts.report.document(started="now", arguments={}, versions={}, nodes=[])
    document["measurements"] += [
        measured(scripts, 0.5, 1.0, link=yardstick(1.0)),
        scripts.report.measurement(case(scripts, "collective"), "failed", reason="torn"),
        measured(scripts, 2.0, transport="native:ipc"),
    ]
    image = tmp_path / "cluster.png"
    assert scripts.script.drawn(document, image) == f"written: {image}"
    written = image.read_bytes()
    assert written.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", written[16:24]) == (1920, 840)

    monkeypatch.undo()
    (figure,) = drawn
    pyplot.close(figure)
    rates, seconds = figure.axes
    cases = ["host, 2 (separate)", "native:ipc, 2 (separate)"]
    assert set(rates.get_legend_handles_labels()[1]) == {*cases, "link"}, "and no memcpy: it was not measured"
    (points,) = [each.lines[0].get_xydata().tolist() for each in rates.containers if each.get_label() == cases[0]]
    assert points == [[4.0, pytest.approx((SIZE / 0.5e9 + SIZE / 1e9) / 2)]]
    assert [each.get_text() for each in seconds.get_yticklabels()] == cases
    assert set(seconds.get_legend_handles_labels()[1]) == {*PHASES_S, "round"}
    widths = {each.get_label(): [bar.get_width() for bar in each] for each in seconds.containers}
    assert widths == {phase: pytest.approx([value] * 2) for phase, value in PHASES_S.items()}


def test_with_nothing_measured_the_plot_is_empty_and_no_error(scripts: SimpleNamespace, tmp_path: Path) -> None:
    image = tmp_path / "cluster.png"
    empty = scripts.report.document(started="now", arguments={}, versions={}, nodes=[])
    assert scripts.script.drawn(empty, image) == f"written: {image}"
    assert image.stat().st_size > 1000


def test_without_matplotlib_the_plot_is_left_out_and_how_to_get_it_is_said(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    told = scripts.script.drawn(scripts.report.document(started="now", arguments={}, versions={}, nodes=[]), tmp_path / "cluster.png")
    assert told.startswith("no plot: ")
    assert told.endswith("pip install 'ray_weightsync[bench]'")
    assert not list(tmp_path.iterdir())

"""What `cluster.py` measures, and what it makes of it: cases, statistics, the JSON document, a table, a plot. Nothing is started here."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray_weightsync as rws

SCHEMA = 1
"""Grows when a key of the document gets another meaning."""

VLLM_BACKENDS = ("ipc", "nccl", "nccl_m2n")
"""Those that send whole weights to engines in places. ``sparse_nccl`` sends patches alone; the workers of ``sharded_rdt`` are actors of
vLLM's own, and the GPUs of a place are the engine actor's."""

MEASURED, FAILED, NOT_AVAILABLE = "measured", "failed", "not available"

BEFORE_ENGINES = ("open", "preflight")
"""Phases of a round in which no engine is touched."""


class NotAvailable(Exception):
    """The engines cannot receive by a transport, in words. They are as they were."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure.

    Attributes:
        layout: As of `ray_weightsync.placement.reserve`.
        engines: How many.
        megabytes: Weights to send, in units of 2**20 bytes; None: as many as the model has.
        transport: A name from `transports`.
    """

    layout: str
    engines: int
    megabytes: float | None
    transport: str


def transports(*, directory: str = "/dev/shm", interface: str | None = None, bucket_bytes: int | None = None) -> dict[str, Any]:
    """Every transport by the name that the benchmark gives it.

    Args:
        directory: Of `ray_weightsync.Host`, also where a broadcast is kept.
        interface: Of `ray_weightsync.Collective`.
        bucket_bytes: Of both; None for the default of each.
    """
    bucket = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
    return {
        "host": rws.Host(directory=directory, **bucket),
        "host+overlap": rws.Host(directory=directory, overlap=True, **bucket),
        "collective": rws.Collective(interface=interface, **bucket),
        "collective+snapshot": rws.Collective(interface=interface, keep_snapshot=True, host=rws.Host(directory=directory), **bucket),
        **{f"native:{backend}": rws.Native(backend) for backend in VLLM_BACKENDS},
    }


def cases(
    layouts: Iterable[str], engines: Iterable[int], megabytes: Iterable[float | None], names: Iterable[str]
) -> dict[tuple[str, int], dict[float | None, list[Case]]]:
    """What to measure, in the order in which it costs least to set up: by placement, then by size, since every size needs new engines."""
    sizes, chosen = list(megabytes), list(names)
    return {
        (layout, count): {size: [Case(layout=layout, engines=count, megabytes=size, transport=name) for name in chosen] for size in sizes}
        for layout, count in itertools.product(layouts, engines)
    }


def refused(error: BaseException) -> bool:
    """Whether what the first round of a transport ended with says that it does not fit these engines.

    That is found from what is known of them: what ended with a call that failed or took too long has a limit, and may go another time.
    A package that is missing is found before a round begins.
    """
    if isinstance(error, rws.RoundAborted):
        return error.phase in BEFORE_ENGINES and error.limit_s is None
    return isinstance(error, rws.ConfigError | ModuleNotFoundError)


def amiss(report: rws.SyncReport, transport: str, engines: int) -> str | None:
    """Why a round that ended well is not the one that was to be measured; None if it is.

    Args:
        report: The round's.
        transport: A name from `transports`.
        engines: How many were to receive.
    """
    if report.transport != transport.partition("+")[0]:
        return f"this round went by {report.transport}: {report.transport_reason}"
    if len(report.committed) < engines:
        return f"only {', '.join(report.committed) or 'no replica'} of {engines} took part: {report}"
    return "nothing was sent: the engines had these weights" if report.repeated else None


# --- statistics ---------------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def rate(num_bytes: int, seconds: Sequence[float]) -> dict[str, float]:
    """The same of 1e9 bytes a second."""
    return spread([num_bytes / each / 1e9 for each in seconds])


def round_row(report: rws.SyncReport, wall_s: float) -> dict[str, Any]:
    """What is kept of one round.

    Args:
        report: The library's.
        wall_s: What the caller of ``send_weights`` saw, in seconds.
    """
    kept = ("version", "transport", "transport_reason", "num_bytes", "num_tensors", "total_s", "pause_s", "apply_s", "trainer_blocked_s")
    return {
        **{name: getattr(report, name) for name in kept},
        "wall_s": wall_s,
        "phases_s": dict(report.phases_s),
        "replicas": {each.id: {"pause_s": each.pause_s, "phases_s": dict(each.phases_s)} for each in report.replicas},
        "notes": list(report.notes),
        "missing": list(report.missing),
    }


def moving_phase(phases_s: Mapping[str, float]) -> str:
    """The phase in which bytes leave the trainer's node, or, where they do not, reach the engines."""
    return "relay" if phases_s.get("relay") else "update"


def share(value: float, of: Mapping[str, Any] | None) -> float | None:
    """``value`` over the median of a yardstick; None if that could not be measured."""
    return value / of["gb_per_s"]["median"] if of and "gb_per_s" in of else None


def summary(rounds: Sequence[Mapping[str, Any]], link: Mapping[str, Any] | None, memcpy: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the measured rounds come to.

    Args:
        rounds: At least one `round_row`.
        link: The yardstick between the nodes, with ``gb_per_s`` unless it failed.
        memcpy: The same for one memcpy.
    """
    num_bytes = rounds[0]["num_bytes"]
    phases = sorted({phase for each in rounds for phase in each["phases_s"]}, key=_order)
    phases_s = {phase: spread([each["phases_s"].get(phase, 0.0) for each in rounds]) for phase in phases}
    whole = rate(num_bytes, [each["wall_s"] for each in rounds])
    moving = moving_phase({phase: values["median"] for phase, values in phases_s.items()})
    moved_s = [each["phases_s"].get(moving, 0.0) for each in rounds]
    moved = rate(num_bytes, moved_s) if all(moved_s) else None
    return {
        "num_bytes": num_bytes,
        **{name: spread([each[name] for each in rounds]) for name in ("wall_s", "total_s", "pause_s", "apply_s", "trainer_blocked_s")},
        "phases_s": phases_s,
        "gb_per_s": whole,
        "share_of_link": share(whole["median"], link),
        "share_of_memcpy": share(whole["median"], memcpy),
        "moving_phase": moving,
        "moving_gb_per_s": moved,
        "moving_share_of_link": share(moved["median"], link) if moved else None,
    }


def _order(phase: str) -> int:
    from ray_weightsync.report import PHASES

    return PHASES.index(phase) if phase in PHASES else len(PHASES)


def said(error: BaseException) -> str:
    """The error's name and words; of one that a Ray actor raised, without Ray's traceback around them."""
    told = getattr(error, "cause", None) or error
    return f"{type(told).__name__}: {told}"


# --- the document -------------------------------------------------------------------------------------------------------------


def measurement(
    case: Case,
    status: str,
    *,
    reason: str | None = None,
    placed: Sequence[str] = (),
    devices: Sequence[str] = (),
    ranks: str | None = None,
    rounds: Sequence[Mapping[str, Any]] = (),
    yardsticks: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One entry of the document's ``measurements``."""
    link, memcpy = (yardsticks or {}).get("link"), (yardsticks or {}).get("memcpy")
    return {
        "case": asdict(case),
        "status": status,
        "reason": reason,
        "placed": list(placed),
        "devices": list(devices),
        "ranks": ranks,
        "link": link,
        "memcpy": memcpy,
        "rounds": list(rounds),
        "summary": summary(rounds, link, memcpy) if status == MEASURED else None,
    }


def document(
    *, started: str, arguments: Mapping[str, Any], versions: Mapping[str, str | None], nodes: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The document before anything is measured."""
    about = {"schema": SCHEMA, "started": started, "arguments": dict(arguments), "versions": dict(versions)}
    return {**about, "nodes": [dict(node) for node in nodes], "measurements": []}


def node_row(node: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of one entry of ``ray.nodes()``. Ray tells a GPU's kind as a resource ``accelerator_type:<kind>``."""
    resources = node["Resources"]
    kinds = sorted(name.removeprefix("accelerator_type:") for name in resources if name.startswith("accelerator_type:"))
    return {
        "node_id": node["NodeID"],
        "node_ip": node["NodeManagerAddress"],
        "cpus": resources.get("CPU", 0),
        "gpus": resources.get("GPU", 0),
        "gpu_kinds": kinds,
        "memory_bytes": resources.get("memory"),
        "object_store_bytes": resources.get("object_store_memory"),
    }


# --- what is shown ------------------------------------------------------------------------------------------------------------

HEADER = ("layout", "engines", "MB", "transport", "round s (min-max)", "pause s", "GB/s", "of link", "of memcpy", "moving GB/s", "of link")


def line(measured: Mapping[str, Any]) -> str:
    """One measurement as it ends."""
    reason = f": {measured['reason'].splitlines()[0]}" if measured["reason"] else ""
    return "  ".join(_cells(measured)) + reason


def table(measurements: Sequence[Mapping[str, Any]]) -> str:
    """One line for each measurement that was made or failed, and every reason once."""
    rows = [HEADER, *(_cells(each) for each in measurements if each["status"] != NOT_AVAILABLE)]
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]
    reasons: dict[str, list[str]] = {}
    for each in measurements:
        if each["status"] != MEASURED:
            reasons.setdefault(f"{each['status']}: {each['reason']}", []).append(each["case"]["transport"])
    return "\n".join([*lines, *(f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items())])


def _cells(measured: Mapping[str, Any]) -> tuple[str, ...]:
    case, found = measured["case"], measured["summary"]
    size = case["megabytes"] if case["megabytes"] is not None else found["num_bytes"] / 2**20 if found else None
    first = (case["layout"], str(case["engines"]), "model" if size is None else f"{size:g}", case["transport"])
    if found is None:
        return (*first, measured["status"])
    seconds, moved = found["wall_s"], found["moving_gb_per_s"]
    return (
        *first,
        f"{seconds['median']:.3f} ({seconds['min']:.3f}-{seconds['max']:.3f})",
        f"{found['pause_s']['median']:.3f}",
        f"{found['gb_per_s']['median']:.3g}",
        _percent(found["share_of_link"]),
        _percent(found["share_of_memcpy"]),
        f"{moved['median']:.3g} ({found['moving_phase']})" if moved else "-",
        _percent(found["moving_share_of_link"]),
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Rates by size, and where the seconds of the largest size go; one line and one bar for each layout, number of engines and transport.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [each for each in document["measurements"] if each["status"] == MEASURED]
    figure, (rates, seconds) = pyplot.subplots(1, 2, figsize=(16, 7), layout="constrained")
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for each in measured:
        case = each["case"]
        lines.setdefault(f"{case['transport']}, {case['engines']} ({case['layout']})", []).append(each["summary"])
    for label, found in lines.items():
        sizes, values = [each["num_bytes"] / 2**20 for each in found], [each["gb_per_s"] for each in found]
        middle = [value["median"] for value in values]
        low, high = [value["median"] - value["min"] for value in values], [value["max"] - value["median"] for value in values]
        rates.errorbar(sizes, middle, yerr=[low, high], marker="o", capsize=3, label=label)
    for name, style in (("link", ":"), ("memcpy", "--")):
        found_rates = {each[name]["gb_per_s"]["median"] for each in measured if each[name] and "gb_per_s" in each[name]}
        if found_rates:
            rates.axhline(statistics.median(found_rates), linestyle=style, color="grey", label=name)
    rates.set(xscale="log", yscale="log", xlabel="MB of weights", ylabel="GB/s, one copy of the weights over the whole round")
    largest = {label: max(found, key=lambda each: each["num_bytes"]) for label, found in lines.items()}
    begin = dict.fromkeys(largest, 0.0)
    for phase in dict.fromkeys(phase for found in largest.values() for phase in found["phases_s"]):
        widths = [found["phases_s"].get(phase, {"median": 0.0})["median"] for found in largest.values()]
        seconds.barh(list(largest), widths, left=list(begin.values()), label=phase)
        begin = {label: left + width for (label, left), width in zip(begin.items(), widths, strict=True)}
    # A broadcast's "stage" lasts as long as its "update": only the mark says how long the round took.
    whole = [found["wall_s"]["median"] for found in largest.values()]
    seconds.plot(whole, list(largest), linestyle="", marker="|", markersize=24, color="black", label="round")
    seconds.set(xlabel="seconds per phase, largest size (median; phases may overlap)")
    seconds.invert_yaxis()
    for axes in (rates, seconds):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

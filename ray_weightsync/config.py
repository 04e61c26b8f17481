"""What users choose: deadlines, policies, transports. Frozen, validated, picklable values with units in their names."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ray_weightsync.errors import ConfigError

PauseMode = Literal["keep", "wait", "abort"]
CachePolicy = Literal["recompute", "keep", "salt"]
PreflightMode = Literal["structural"]
AdoptPolicy = Literal["reported", "never"]
AfterStart = Literal["quarantine", "all_or_none"]

TOMBSTONE_PREFIX = "!rws:"
"""A version label that starts with this says: torn, or not committed. No valid version may."""

MAX_VERSION_CHARS = 256
MIN_BUCKET_BYTES = 4096


def require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise `ConfigError` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def version_label(version: int | str) -> str:
    """The label that engines keep for ``version``: a non-empty printable string of at most 256 characters.

    Raises:
        ConfigError: for any other type (``bool`` too), an empty or over-long label, one with control characters,
            surrounding white space or unpaired surrogates, or one that starts like a tombstone.
    """
    if isinstance(version, bool) or not isinstance(version, int | str):
        raise ConfigError(f"version must be an int or a str, not {type(version).__name__}")
    label = str(version)
    if not label:
        raise ConfigError("version must not be empty")
    if len(label) > MAX_VERSION_CHARS:
        raise ConfigError(f"version must have at most {MAX_VERSION_CHARS} characters, this one has {len(label)}")
    if not label.isprintable() or label != label.strip():
        raise ConfigError(f"version must be printable, without surrounding white space: {label!r}")
    if label.startswith(TOMBSTONE_PREFIX):
        raise ConfigError(f"version must not start with {TOMBSTONE_PREFIX!r}, which marks torn weights: {label!r}")
    return label


def tombstone(of: str) -> str:
    """The label of an engine whose weights are torn or not committed, since ``of``: a round, or what else was done to it."""
    return f"{TOMBSTONE_PREFIX}{of}"


def is_tombstone(label: str | None) -> bool:
    """Whether an engine's label says that its weights are torn or not committed."""
    return label is not None and label.startswith(TOMBSTONE_PREFIX)


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """One deadline a phase of a round, in seconds. `stage_s`, `update_s` and `finish_s` grow with the bytes moved.

    Attributes:
        attach_s: To reach an engine and learn what it is.
        connect_s: For the coordinator and the snapshot stores to start or be found, and for a group to meet.
        gather_s: For a trainer to come to a round, and, beside `stage_s`, to read its source.
        attest_s: For the outcome, in which the workers say what they loaded; and for a ``probe``.
        heal_s: For a new engine to start.
        status_s: For `status`.
        health_interval_s: Between two looks at the engines while no round is in progress.
        warn_every_s: Between two lines of the log that say who is waited for.
        min_rate_bytes_per_s: The slowest rate of bytes that is allowed.

    Raises:
        ConfigError: if a field is not a positive, finite number.
    """

    attach_s: float = 60
    connect_s: float = 120
    preflight_s: float = 60
    stage_s: float = 120
    gather_s: float = 300
    pause_s: float = 60
    start_s: float = 60
    update_s: float = 120
    finish_s: float = 120
    attest_s: float = 30
    commit_s: float = 30
    resume_s: float = 30
    heal_s: float = 300
    status_s: float = 5
    health_interval_s: float = 10
    warn_every_s: float = 10
    min_rate_bytes_per_s: float = 50e6

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ConfigError(f"Timeouts.{each.name} must be a positive number, not {value!r}")

    def for_bytes(self, phase: Literal["stage", "update", "finish"], num_bytes: int) -> float:
        """The deadline of ``phase`` in seconds when it moves ``num_bytes``: the fixed part plus bytes over the slowest rate allowed."""
        return float(getattr(self, f"{phase}_s")) + num_bytes / self.min_rate_bytes_per_s

    def staging_s(self, num_bytes: int) -> float:
        """The longest that a sender may hold a round open before its snapshot is sealed, in seconds."""
        return self.gather_s + self.for_bytes("stage", num_bytes)

    def round_s(self, num_bytes: int) -> float:
        """The longest that the rest of a round may take when every phase uses up its deadline, in seconds."""
        looking = 2 * (6 * self.preflight_s + self.finish_s)  # beside the packing, and before the pause
        crossing = 3 * self.for_bytes("stage", num_bytes)  # to other nodes: a slot there beside either look, and the bytes
        pausing = 2 * self.preflight_s + self.pause_s
        applying = 2 * self.apply_s(num_bytes)  # the turn of a synchronous LLM may wait as long for the requests before it
        return looking + crossing + pausing + applying + 8 * self.commit_s + 6 * self.resume_s

    def apply_s(self, num_bytes: int) -> float:
        """The longest that one engine may take from *start* to its outcome when every call uses up its deadline, in seconds."""
        return self.start_s + self.for_bytes("update", num_bytes) + self.for_bytes("finish", num_bytes) + self.attest_s


@dataclass(frozen=True, kw_only=True)
class FailurePolicy:
    """What happens to replicas that fail after *start*.

    Attributes:
        after_start: ``"quarantine"`` fences what failed and lets the others commit; ``"all_or_none"`` brings every touched replica back to
            the version committed before. Of the first round nothing can be taken back: there it fences. It refuses engines that nobody
            could keep from serving before the others are attested: a synchronous ``LLM``, and those on vLLM's own backends.
        min_serving: With at least this many replicas serving the new version, lost ones are reported and not raised. None raises always.
        release_requests: Abort requests frozen on a fenced replica, so that no client waits for ever.
        auto_heal: Between rounds, bring fenced replicas back from the committed snapshot, and give up those that are gone.
        max_heals: How often one replica is healed so, before a round that it gets through, until it is given up: retired, and replaced
            if there is an ``engine_factory``.
    """

    after_start: AfterStart = "quarantine"
    min_serving: int | None = None
    release_requests: bool = True
    auto_heal: bool = True
    max_heals: int = 3

    def __post_init__(self) -> None:
        for name in ("release_requests", "auto_heal"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"FailurePolicy.{name} must be a bool, not {getattr(self, name)!r}")
        require_choice("FailurePolicy.after_start", self.after_start, ("quarantine", "all_or_none"))
        if self.min_serving is not None and (
            isinstance(self.min_serving, bool) or not isinstance(self.min_serving, int) or self.min_serving < 1
        ):
            raise ConfigError(f"FailurePolicy.min_serving must be None or at least 1, not {self.min_serving!r}")
        if isinstance(self.max_heals, bool) or not isinstance(self.max_heals, int) or self.max_heals < 0:
            raise ConfigError(f"FailurePolicy.max_heals must be an int of at least 0, not {self.max_heals!r}")


def _check_bucket_bytes(owner: str, bucket_bytes: object) -> None:
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < MIN_BUCKET_BYTES:
        raise ConfigError(f"{owner}.bucket_bytes must be an int of at least {MIN_BUCKET_BYTES}, not {bucket_bytes!r}")


@dataclass(frozen=True, kw_only=True)
class Host:
    """Sealed snapshots in shared memory. Extra memory: ``num_slots`` times the model, on the host.

    Attributes:
        overlap: Engines load what is sealed while the sender packs on; the pause then covers the staging too.
        num_slots: Slots kept for reuse: one committed, the others for staging. At least 2.
        bucket_bytes: How often the sender makes progress visible, in bytes. A tensor may be larger.
        directory: A memory-backed directory that trainer and engines on one node share. Where it differs from node to node it names an
            environment variable (``"$RWS_SHM"``, ``"/dev/shm/${USER}"``), which each node's Ray was started with (``RWS_SHM=/mnt/shm ray
            start ...``).
    """

    overlap: bool = False
    num_slots: int = 2
    bucket_bytes: int = 256 << 20
    directory: str = "/dev/shm"

    def __post_init__(self) -> None:
        _check_bucket_bytes("Host", self.bucket_bytes)
        if not isinstance(self.overlap, bool):
            raise ConfigError(f"Host.overlap must be a bool, not {self.overlap!r}")
        if isinstance(self.num_slots, bool) or not isinstance(self.num_slots, int) or self.num_slots < 2:
            raise ConfigError(f"Host.num_slots must be an int of at least 2 (one committed, one being staged), not {self.num_slots!r}")
        if not isinstance(self.directory, str) or not self.directory.startswith(("/", "$")):
            raise ConfigError(
                f"Host.directory must be an absolute path, or begin with an environment variable ($NAME), not {self.directory!r}"
            )


def _check_host(owner: str, host: object) -> None:
    if not isinstance(host, Host):
        raise ConfigError(f"{owner}.host must be a Host, not {host!r}")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A broadcast over a private group of the sender and every worker. Extra memory: ``num_buckets`` buckets per GPU.

    A replica that is lost while bytes move takes the others of its round with it: the next round makes a new group of those that answer.

    Attributes:
        bucket_bytes: Bytes in one broadcast. A larger tensor is sent in several.
        num_buckets: Buckets that each side holds at a time. At least 2.
        interface: The network interface of the sender that the workers are to reach, such as ``"eth0"``, by its IPv4 address; by default
            the one of its node's address in Ray.
        keep_snapshot: Also keep what was sent in the sender's host memory, so that replicas can be healed and added without the trainer.
        host: How it is kept there.
    """

    bucket_bytes: int = 1 << 30
    num_buckets: int = 2
    interface: str | None = None
    keep_snapshot: bool = False
    host: Host = Host()

    def __post_init__(self) -> None:
        _check_bucket_bytes("Collective", self.bucket_bytes)
        _check_host("Collective", self.host)
        if isinstance(self.num_buckets, bool) or not isinstance(self.num_buckets, int) or self.num_buckets < 2:
            raise ConfigError(f"Collective.num_buckets must be an int of at least 2, not {self.num_buckets!r}")
        if self.interface is not None and (not isinstance(self.interface, str) or not self.interface):
            raise ConfigError(f"Collective.interface must be None or the name of a network interface, not {self.interface!r}")
        if not isinstance(self.keep_snapshot, bool):
            raise ConfigError(f"Collective.keep_snapshot must be a bool, not {self.keep_snapshot!r}")


@dataclass(frozen=True)
class Native:
    """One of vLLM's own data planes, driven by its own trainer engine, such as ``Native("ipc")``. Needs vLLM in the trainer.

    Attributes:
        backend: Its name in vLLM: ``"ipc"``, ``"nccl"``, ``"sparse_nccl"``, ``"sharded_rdt"``, ``"nccl_m2n"``, or one that you registered.
        options: Fields of that backend's own ``TrainerInitInfo``, such as ``{"packed": True}``. Rank, world size and the place to meet are
            filled in.
    """

    backend: str
    options: dict[str, Any] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.backend, str) or not self.backend:
            raise ConfigError(f"Native.backend must be the name of a vLLM weight-transfer backend, not {self.backend!r}")
        if not isinstance(self.options, dict) or not all(isinstance(name, str) for name in self.options):
            raise ConfigError(f"Native.options must be a dict of keyword arguments, not {self.options!r}")


Transport = Host | Collective | Native


def transport_name(transport: Transport) -> str:
    """``"host"``, ``"collective"`` or ``"native:<backend>"``: what users call one that is no `Auto`; see `as_transport`."""
    if isinstance(transport, Native):
        return f"native:{transport.backend}"
    return "collective" if isinstance(transport, Collective) else "host"


@dataclass(frozen=True, kw_only=True)
class Auto:
    """One of the others, chosen anew for each round by where weights and workers are; each round's report says which, and why.

    Attributes:
        host: How what goes through host memory, or is kept there, is kept; see `Host`.
    """

    host: Host = Host()

    def __post_init__(self) -> None:
        _check_host("Auto", self.host)


def as_transport(value: Transport | Auto | str) -> Transport | Auto:
    """The transport that ``value`` is or names: ``"auto"``, ``"host"``, ``"collective"`` or ``"native:<backend>"``.

    Raises:
        ConfigError: for anything else.
    """
    if isinstance(value, Auto | Host | Collective | Native):
        return value
    if value == "auto":
        return Auto()
    if value == "host":
        return Host()
    if value == "collective":
        return Collective()
    if isinstance(value, str) and value.startswith("native:"):
        return Native(value.removeprefix("native:"))
    raise ConfigError(
        f"transport must be 'auto', 'host', 'collective', 'native:<backend>', an Auto, a Host, a Collective or a Native, not {value!r}"
    )

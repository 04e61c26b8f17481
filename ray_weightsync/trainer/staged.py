"""What a trainer holds of weights that are staged."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StagedWeights:
    """A sealed snapshot that no engine has seen yet.

    Attributes:
        session: Name of the session it belongs to.
        snapshot: The snapshot's id.
        version: The version it will be committed under.
        weights_digest: Digest of its bytes; equals ``weights_digest(source)``.
        num_bytes: Bytes of weights.
        stage_s: Seconds the trainer was blocked.
    """

    session: str
    snapshot: str
    version: int | str
    weights_digest: str
    num_bytes: int
    stage_s: float

"""A fault kit for tests: make a named replica, or one rank of it, fail, hang, die, answer late or lie, at a named phase of a round.

::

    with Faults(sync) as faults:
        faults.inject("r1", "update", "raise")                # at the replica, as its coordinator sees it
        faults.inject("r0", "load", "raise", rank=1)          # inside one worker
        sync.send_weights(model, version=2)

It is imported explicitly, and nothing in the product knows of it. See `Faults.inject`.
"""

from ray_weightsync.testing.faults import Fault, Faults
from ray_weightsync.testing.spec import FaultNotReached, InjectedFault
from ray_weightsync.testing.vllm_args import FAULTY_EXTENSION, vllm_engine_args

__all__ = ["FAULTY_EXTENSION", "Fault", "FaultNotReached", "Faults", "InjectedFault", "vllm_engine_args"]

"""Makes `protocol_actors` importable for the tests here; Ray's workers get what they need of it by value and never import it."""

from __future__ import annotations

import sys
from pathlib import Path

import ray.cloudpickle

sys.path.insert(0, str(Path(__file__).parent))

import protocol_actors

ray.cloudpickle.register_pickle_by_value(protocol_actors)

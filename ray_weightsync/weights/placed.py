"""Where a source's weights are, told without moving or reading any."""

from __future__ import annotations

import torch

from ray_weightsync.weights.source_base import WeightSource


def device_of(source: WeightSource) -> torch.device | None:
    """The device that the tensors of ``source`` are yielded on, as far as its first one tells; None if it does not say.

    1. A source says it by an attribute ``device`` (a `torch.device`, or the name of one): all of ours do, and yours may.
    2. Ours look at their first tensor: a module's first parameter (else its first buffer), a mapping's first tensor. A `DTensor` says
       where its shards are, which is where they are gathered. Safetensors files are read into host memory. A module that is spread over
       several devices is thus told to be where it begins: whoever lends its memory out has to look at each tensor.
    3. A transform is taken to leave tensors where they are. It has run over meta tensors by then, which nothing can be moved from, so only
       one that goes out of its way (``if not tensor.is_meta``) could move them.

    It is asked anew in each round: a trainer may have put its weights aside, into host memory, since the last one.
    """
    device = getattr(source, "device", None)
    if isinstance(device, torch.device):
        return device
    if not isinstance(device, str):
        return None
    try:
        return torch.device(device)
    except RuntimeError:  # an attribute of that name which means something else
        return None

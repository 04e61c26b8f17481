"""What runs in an engine's own process to tell which tensors its checkpoint holds. Standard library only, since it travels by value."""

from __future__ import annotations

import json
import os
from typing import Any

from ray_weightsync.protocol.remote import config_of, source

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 << 20
"""The format's own limit."""


def tell(actor: Any, path: str) -> dict[str, Any]:
    """The headers of the checkpoint that the engine in ``path`` was started from: ``tensors`` (dtype and shape by name), the ``dtype`` that
    it computes in, and ``tied`` (the output head is the input embedding). Where they cannot be read, ``problem`` says why. Never raises."""
    try:
        model = config_of(source(actor, path)).model_config
        directory = str(model.model)
        if not os.path.isdir(directory):
            return {"problem": f"its model, {directory!r}, is no directory that its process could read"}
        tensors: dict[str, list[Any]] = {}
        for name in files_in(directory):
            tensors.update(header_of(os.path.join(directory, name)))
        tied = getattr(getattr(model, "hf_text_config", None), "tie_word_embeddings", False)
        dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
        if not tensors:
            return {"problem": f"{directory} holds no .safetensors file"}
        return {"tensors": tensors, "dtype": dtype, "tied": bool(tied)}
    except Exception as error:  # told to whoever asks
        return {"problem": f"its checkpoint's headers cannot be read: {type(error).__name__}: {error}"[:400]}


def files_in(directory: str) -> list[str]:
    """The checkpoint's files. Some directories hold the weights twice: in one file, and in those of the index."""
    try:
        with open(os.path.join(directory, INDEX), encoding="utf-8") as index:
            return sorted({os.path.basename(file) for file in json.load(index)["weight_map"].values()})
    except FileNotFoundError:
        return sorted(name for name in os.listdir(directory) if name.endswith(".safetensors"))


def header_of(file: str) -> dict[str, list[Any]]:
    """Dtype and shape of each tensor of a safetensors file."""
    with open(file, "rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"{file} is no safetensors file: its header would have {size} bytes")
        header = json.loads(opened.read(size))
    return {name: [each["dtype"], each["shape"]] for name, each in header.items() if name != "__metadata__"}

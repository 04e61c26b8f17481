"""Safetensors files as a source: a checkpoint on disk is sent as it is. The ``safetensors`` package is imported only when one is used."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from ray_weightsync.errors import ConfigError
from ray_weightsync.weights.dtype_names import SAFETENSORS_DTYPES
from ray_weightsync.weights.plan import ParamMeta
from ray_weightsync.weights.source_base import SourceBase, matching
from ray_weightsync.weights.transforms import Transform

INDEX_NAME = "model.safetensors.index.json"


class SafetensorsSource(SourceBase):
    """The tensors of a safetensors file, or of a directory of them (by its index if it has one).

    ``metadata()`` reads headers only. Tensors are read one at a time.

    Args:
        path: A ``.safetensors`` file, or a directory such as ``save_pretrained`` writes.
        transform: ``(name, tensor) -> iterable of (name, tensor)``, see `ray_weightsync.weights.transforms`.
        skip: Names or `fnmatch` patterns that are not sent.
        reject_nonfinite: Raise for NaN and infinite values, naming the tensor. By default they are sent as they are.

    Raises:
        ConfigError: when made and again each round: if the package is missing, there is no such file, it is damaged, a shard or a
            tensor that the index names is missing, two files hold the same name, or a dtype cannot be sent.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        transform: Transform | None = None,
        skip: str | Iterable[str] = (),
        reject_nonfinite: bool = False,
    ) -> None:
        super().__init__(transform=transform, skip=skip, reject_nonfinite=reject_nonfinite)
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"SafetensorsSource takes a path, not {type(path).__name__}")
        self._path = Path(path)
        self._entries()

    @property
    def device(self) -> torch.device:
        """The CPU: files are read into host memory."""
        return torch.device("cpu")

    def _entries(self) -> dict[Path, list[ParamMeta]]:
        found: dict[Path, list[ParamMeta]] = {}
        home: dict[str, Path] = {}
        files, indexed = _files_of(self._path)
        for file in files:
            found[file] = []
            with _opened(file) as shard:
                # As they lie in the file, so that it is read from front to back; older versions only have them sorted.
                for name in shard.offset_keys() if hasattr(shard, "offset_keys") else shard.keys():
                    if indexed is not None and indexed.get(name) != file:
                        continue
                    if name in home:
                        raise ConfigError(f"tensor name {name!r} is there twice: in {home[name]} and in {file}")
                    home[name] = file
                    header = shard.get_slice(name)
                    found[file].append(ParamMeta(name, _torch_dtype(name, header.get_dtype()), tuple(header.get_shape())))
        for name, file in (indexed or {}).items():
            if name not in home:
                raise ConfigError(f"{file} does not hold {name!r}, which the index says it does")
        if self._skip:
            skipped = matching("skip", self._skip, home)
            found = {file: [meta for meta in metas if meta.name not in skipped] for file, metas in found.items()}
        return found

    def _declared(self) -> list[ParamMeta]:
        return [meta for metas in self._entries().values() for meta in metas]

    def _values(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        for file, metas in self._entries().items():
            with _opened(file) as shard:
                for meta in metas:
                    yield meta.name, lambda shard=shard, name=meta.name: shard.get_tensor(name)  # type: ignore[misc]


def _files_of(path: Path) -> tuple[list[Path], dict[str, Path] | None]:
    """The files to read, in order; and where the index, if there is one, says that each tensor is."""
    if path.is_file():
        return [path], None
    if not path.is_dir():
        raise ConfigError(f"there is no file or directory {path}")
    index = path / INDEX_NAME
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            indexed = {str(name): path / _base_name(str(file)) for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is not a safetensors index: {type(error).__name__}: {error}") from error
        return sorted(set(indexed.values())), indexed
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"the directory {path} holds no .safetensors file")
    return files, None


def _base_name(file: str) -> str:
    if file != os.path.basename(file) or file in ("", ".", ".."):
        raise ValueError(f"a shard must be named without a directory, not {file!r}")
    return file


def _opened(file: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ConfigError("SafetensorsSource needs the package safetensors", hint="pip install 'ray_weightsync[safetensors]'") from error
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be read as safetensors: {error}") from error


def _torch_dtype(name: str, dtype: str) -> torch.dtype:
    found = getattr(torch, SAFETENSORS_DTYPES.get(dtype, ""), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"{name!r} has the safetensors dtype {dtype}, which cannot be sent", hint=f"leave it out with skip=[{name!r}]")
    return found

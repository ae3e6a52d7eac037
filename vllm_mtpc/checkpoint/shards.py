"""The tensors of another model's folder, one at a time, each out of the file that holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from vllm_mtpc.checkpoint.load import checked
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import MAX_INDEX, MAX_NAME, check_lengths, open_tensors, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ROWS = 1 << 14  # of a matrix that are held at once


class Shards:
    """`files`: the file of each tensor, by the index of the folder or its only file. Raises CheckpointError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if folder.joinpath(INDEX).exists():
            named = read_json(folder / INDEX, MAX_INDEX).get("weight_map")
            self.files = {name: self._shard(name, file) for name, file in _mapping(folder, named).items()}
            check_lengths(folder / INDEX, self.files)
        else:
            with open_tensors(folder / SINGLE) as handle:
                self.files = dict.fromkeys(handle.keys(), folder / SINGLE)

    def _shard(self, tensor: str, name: object) -> Path:
        if not isinstance(name, str) or Path(name).name != name or not name.isprintable() or len(name) > MAX_NAME:
            raise CheckpointError(
                f"{self.folder / INDEX}: weight_map has {name!r} for {tensor}; allowed: the name of a file next to it; "
                "copy the folder again"
            )
        return self.folder / name

    def shape(self, name: str) -> tuple[int, ...]:
        with open_tensors(self._file(name)) as handle:
            return tuple(self._slice(handle, name).get_shape())

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        """A tensor, or some of its rows, float and finite."""
        with open_tensors(self._file(name)) as handle:
            part = self._slice(handle, name)
            whole = start is None and stop is None
            return checked(self._file(name), name, handle.get_tensor(name) if whole else part[start:stop])

    def ending(self, end: str) -> str | None:
        """The tensor called `end`, alone or below a model's parts; None where there is none or there are several."""
        found = [name for name in self.files if name == end or name.endswith(f".{end}")]
        return found[0] if len(found) == 1 else None

    def _file(self, name: str) -> Path:
        if name not in self.files:
            raise CheckpointError(f"{self.folder}: has no {name}; copy it whole, or name another model")
        return self.files[name]

    def _slice(self, handle: Any, name: str) -> Any:
        if name not in handle.keys():  # noqa: SIM118
            raise CheckpointError(f"{self._file(name)}: has no {name}, which its index says; copy the folder again")
        return handle.get_slice(name)


def unequal_rows(shards: Shards, name: str, others: Shards, other: str, rows: int) -> list[int]:
    """Which of the first `rows` rows of two matrices differ, compared in the shorter of their types."""
    found = []
    for start in range(0, rows, ROWS):
        a, b = (one.read(tensor, start, min(start + ROWS, rows)) for one, tensor in ((shards, name), (others, other)))
        if a.dtype != b.dtype:
            shorter = a.dtype if a.element_size() < b.element_size() else b.dtype
            a, b = a.to(shorter), b.to(shorter)
        found += [start + int(row) for row in (a != b).any(dim=1).nonzero()[:, 0]]
    return found


def _mapping(folder: Path, named: object) -> dict[str, object]:
    if isinstance(named, dict) and named:
        return named
    raise CheckpointError(f"{folder / INDEX}: has no weight_map; copy the folder again")

"""Read single tensors of a model's folder, in one safetensors file or several with an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from vllm_mtpc.checkpoint.load import check_values
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import MAX_INDEX, MAX_NAME, check_lengths, open_tensors, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ROWS = 1 << 14  # of a matrix in memory at once


class Shards:
    """The tensors of a folder.

    Args:
        folder: Of a model.

    Attributes:
        files: The file of each tensor.

    Raises:
        CheckpointError: No readable safetensors file or index, or a file name in the index is not plain.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / INDEX).exists():
            with open_tensors(folder / SINGLE) as handle:
                self.files = dict.fromkeys(handle.keys(), folder / SINGLE)
            return
        named = read_json(folder / INDEX, MAX_INDEX).get("weight_map")
        if not isinstance(named, dict) or not named:
            raise CheckpointError(f"{folder / INDEX}: has no weight_map; copy the folder again")
        for tensor, name in named.items():
            if not isinstance(name, str) or Path(name).name != name or not name.isprintable() or len(name) > MAX_NAME:
                raise CheckpointError(
                    f"{folder / INDEX}: weight_map has {name!r} for {tensor}; allowed: the name of a file next to it; "
                    "copy the folder again"
                )
        self.files = {tensor: folder / name for tensor, name in named.items()}
        check_lengths(folder / INDEX, self.files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; raises CheckpointError if it does not exist."""
        return tuple(self._with_slice(name, lambda handle, part: part.get_shape()))

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        """Return a tensor, or its rows from `start` to `stop`; raises CheckpointError unless all are finite floats."""
        if start is None and stop is None:
            tensor = self._with_slice(name, lambda handle, part: handle.get_tensor(name))
        else:
            tensor = self._with_slice(name, lambda handle, part: part[start:stop])
        return check_values(self.files[name], name, tensor)

    def find_suffix(self, end: str) -> str | None:
        """Return the only tensor named `end` or `PREFIX.end`, None if there is no such tensor or several."""
        found = [name for name in self.files if name == end or name.endswith(f".{end}")]
        return found[0] if len(found) == 1 else None

    def _with_slice(self, name: str, read: Any) -> Any:
        if name not in self.files:
            raise CheckpointError(f"{self.folder}: tensor(s) missing: {name}; copy it whole, or name another model")
        with open_tensors(self.files[name]) as handle:
            if name not in handle.keys():  # noqa: SIM118
                raise CheckpointError(f"{self.files[name]}: has no {name}, but its index has; copy the folder again")
            return read(handle, handle.get_slice(name))


def unequal_rows(shards: Shards, name: str, others: Shards, other: str, rows: int) -> list[int]:
    """Return which of the first `rows` rows of two matrices differ, in the narrower of their dtypes."""
    found = []
    for start in range(0, rows, ROWS):
        a, b = (one.read(tensor, start, min(start + ROWS, rows)) for one, tensor in ((shards, name), (others, other)))
        if a.dtype != b.dtype:
            narrow = a.dtype if a.element_size() < b.element_size() else b.dtype
            a, b = a.to(narrow), b.to(narrow)
        found += [start + int(row) for row in (a != b).any(dim=1).nonzero()[:, 0]]
    return found

"""Read single tensors of a model's folder, in one safetensors file or several with an index."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from vllm_mtpc.checkpoint.load import check_values
from vllm_mtpc.checkpoint.locate import WEIGHTS_FILE
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import MAX_INDEX, MAX_NAME, check_lengths, open_tensors, read_json

INDEX_FILE = "model.safetensors.index.json"


class Shards:
    """The tensors of a model's folder; raises CheckpointError without a readable file or index with plain names.

    Attributes:
        files: The file of each tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, index = folder, folder / INDEX_FILE
        if not index.exists():
            with open_tensors(folder / WEIGHTS_FILE) as handle:
                self.files = dict.fromkeys(handle.keys(), folder / WEIGHTS_FILE)
            return
        named = read_json(index, MAX_INDEX).get("weight_map")
        if not isinstance(named, dict) or not named:
            raise CheckpointError(f"{index}: has no weight_map; copy the folder again")
        for tensor, name in named.items():
            if not isinstance(name, str) or Path(name).name != name or not name.isprintable() or len(name) > MAX_NAME:
                reason = f"weight_map has {name!r} for {tensor}; allowed: the name of a file next to it"
                raise CheckpointError(f"{index}: {reason}; copy the folder again")
        self.files = {tensor: folder / name for tensor, name in named.items()}
        check_lengths(index, self.files)

    def read(self, name: str) -> Tensor:
        """Return a tensor, memory-mapped; raises CheckpointError unless it exists and all its values are finite."""
        if name not in self.files:
            raise CheckpointError(f"{self.folder}: tensor(s) missing: {name}; copy it whole, or name another model")
        with open_tensors(self.files[name]) as handle:  # raises for a name that only the index has
            return check_values(self.files[name], name, handle.get_tensor(name))

    def find_suffix(self, end: str) -> str | None:
        """Return the only tensor named `end` or `PREFIX.end`, None if there is no such tensor or several."""
        found = [name for name in self.files if name == end or name.endswith(f".{end}")]
        return found[0] if len(found) == 1 else None

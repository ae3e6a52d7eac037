"""Files of a cache of hidden states: its index, its shards, and what tells one cache from another."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_mtpc.errors import UsageError, one_line
from vllm_mtpc.files import replacing

if TYPE_CHECKING:
    from vllm_mtpc.data.rows import Rows
    from vllm_mtpc.hf import Target

INDEX_FILE, ROWS_FILE = "index.json", "rows.safetensors"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
STORED = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}  # as safetensors names them
SAMPLED_WEIGHTS = 64  # of each parameter, in a target's fingerprint


class Index(BaseModel):
    """`index.json`; every key is explicit."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format_version: Literal[1]
    target: str
    target_fingerprint: str
    data_fingerprint: str
    num_rows: PositiveInt
    seq_len: PositiveInt
    hidden_size: PositiveInt
    dtype: Literal["float16", "bfloat16", "float32"]
    layer: NonNegativeInt | None
    rows_per_shard: PositiveInt

    @property
    def num_shards(self) -> int:
        return -(-self.num_rows // self.rows_per_shard)

    @property
    def row_bytes(self) -> int:
        return self.seq_len * self.hidden_size * DTYPES[self.dtype].itemsize

    def rows_of(self, shard: int) -> range:
        return range(shard * self.rows_per_shard, min(self.num_rows, (shard + 1) * self.rows_per_shard))


def data_fingerprint(rows: Rows) -> str:
    """sha256 over shape and content of the rows, the same for every way they are stored."""
    digest = hashlib.sha256(json.dumps(list(rows.tokens.shape)).encode())
    for tensor, dtype in zip(rows, (torch.int32, torch.int32, torch.bool), strict=True):
        for part in tensor.split(4096):
            digest.update(part.to("cpu", dtype).contiguous().numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def target_fingerprint(target: Target) -> str:
    """sha256 over the target's config and up to 64 evenly spread values of each parameter.

    The values are rounded to bfloat16, so that loading a model in another dtype leaves the fingerprint as it is.
    """
    config = target.config.to_dict()
    for key in ("transformers_version", "_name_or_path", "dtype", "torch_dtype"):
        config.pop(key, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in sorted(target.model.named_parameters()):
        values = parameter.detach().flatten()[:: max(1, parameter.numel() // SAMPLED_WEIGHTS)][:SAMPLED_WEIGHTS]
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(values.bfloat16().view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file beside `path` and moves it there once it is on the disk."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with replacing(path) as (partial,):
        save_file(tensors, partial, {"format": "pt", **metadata})
        partial.chmod(0o644)  # safetensors writes for the owner alone


@contextmanager
def disk(folder: Path) -> Iterator[None]:
    """Turns a failed write into one line; safetensors reports those of the system under its own name."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or f"os error {errno.ENOSPC}" in str(error)
        reason = "the disk is full" if full else str(error)
        raise UsageError(
            f"{folder}: hidden states could not be written ({reason}); finished shards are intact: "
            "make room and run again, it continues there"
        ) from None


def check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UsageError(
            f"{folder}: hidden states need {needed / 1e9:.3f} GB more, {free / 1e9:.3f} GB are free there; "
            "make room, name a folder elsewhere, use dtype bfloat16 or fewer rows, or train without a cache"
        )


def read_index(folder: Path) -> Index:
    path = folder / INDEX_FILE
    try:
        return Index.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{folder} has no {INDEX_FILE}; name a folder that `vllm-mtpc cache` has written") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); name a readable folder") from None
    except ValidationError as error:
        raise UsageError(f"{path}: {one_line(error, Index)}; delete the folder and make the cache again") from None


def read_rows(folder: Path, index: Index) -> Rows:
    from vllm_mtpc.data.rows import Rows

    shape = [index.num_rows, index.seq_len]
    expected = {"tokens": ("I32", shape), "document": ("I32", shape), "trained": ("BOOL", shape)}
    _check_file(folder / ROWS_FILE, expected, {"data": index.data_fingerprint})
    return Rows(**read_tensors(folder / ROWS_FILE, list(expected)))


def check_shard(folder: Path, index: Index, shard: int) -> bool:
    """Whether the shard is there; raises UsageError where it is but cannot be used."""
    path = folder / shard_name(shard)
    if not path.is_file():
        return False
    shape = [len(index.rows_of(shard)), index.seq_len, index.hidden_size]
    _check_file(path, {"hidden": (STORED[index.dtype], shape)}, identity(index))
    return True


def _check_file(path: Path, expected: dict[str, tuple[str, list[int]]], metadata: dict[str, str]) -> None:
    """Raises UsageError unless the file's header names these tensors (dtype, shape) and holds this metadata."""
    try:
        with safe_open(path, framework="pt") as handle:
            parts = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
            given = {name: (part.get_dtype(), list(part.get_shape())) for name, part in parts.items()}
            found = handle.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from None
    if given != expected:
        raise _damaged(path, f"it holds {given}, {expected} is expected")
    if any(found.get(key) != value for key, value in metadata.items()):
        raise _damaged(path, f"it belongs to other rows or another target than {INDEX_FILE} names")


def read_tensors(path: Path, names: list[str]) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, reason: str) -> UsageError:
    what = "the folder" if path.name == ROWS_FILE else "it"
    return UsageError(f"{path} is not usable ({reason}); delete {what} and run the command that made it again")


def identity(index: Index) -> dict[str, str]:
    return {"data": index.data_fingerprint, "target": index.target_fingerprint}


def shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.safetensors"

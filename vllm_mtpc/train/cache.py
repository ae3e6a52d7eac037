"""Hidden states of packed rows: computed on the fly, or kept on disk and memory-mapped.

`Computed` and `HiddenCache` have the same methods and return the same numbers. A cache is a folder:

    index.json                 target, data, sizes
    shard-00000.safetensors    hidden [R, S, D] of rows 0..R-1, and so on; the last shard may be shorter

Shards are written one after the other, each complete or absent; an interrupted run continues with the first absent one.
States of padding are zero.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_mtpc.data.rows import Rows
from vllm_mtpc.errors import UsageError, one_line
from vllm_mtpc.files import replace_file, replacing
from vllm_mtpc.progress import Bar

if TYPE_CHECKING:
    from vllm_mtpc.hf import Target

SHARD_BYTES = 1 << 29  # of a shard: the work that an interruption may lose
BATCH_ROWS = 8  # rows of one forward pass
SLOW_ROWS = 64  # number of rows from which on progress is shown
SAMPLED_WEIGHTS = 64  # of each parameter, in a target's fingerprint
INDEX_FILE = "index.json"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def data_fingerprint(rows: Rows) -> str:
    """Return the sha256 of shape and content of the rows, for any dtype they are stored in."""
    digest = hashlib.sha256(json.dumps(list(rows.tokens.shape)).encode())
    for tensor, dtype in zip(rows, (torch.int32, torch.int32, torch.bool), strict=True):
        for part in tensor.split(4096):
            digest.update(part.to("cpu", dtype).contiguous().numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def target_fingerprint(target: Target) -> str:
    """Return the sha256 of the target's config and of up to 64 evenly spaced values of each parameter.

    The values are rounded to bfloat16, so that the fingerprint does not depend on the dtype of the model.
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


class HiddenSource(Protocol):
    """Rows and the states of some of them."""

    rows: Rows

    def hidden(self, row_indices: Tensor) -> Any: ...


class Index(BaseModel):
    """Content of `index.json`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format_version: Literal[1]
    target: str
    target_fingerprint: str
    data_fingerprint: str
    num_rows: PositiveInt
    seq_len: PositiveInt
    hidden_size: PositiveInt
    dtype: Literal["float16", "bfloat16", "float32"]
    layer: None  # states after the final norm
    layers: list[int] = []  # states after these numbers of layers come first, as of `Computed`
    rows_per_shard: PositiveInt

    @property
    def shards(self) -> list[range]:
        """Rows of each shard."""
        first = range(0, self.num_rows, self.rows_per_shard)
        return [range(row, min(row + self.rows_per_shard, self.num_rows)) for row in first]

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of the shards."""
        return {"format": "pt", "data": self.data_fingerprint, "target": self.target_fingerprint}

    @property
    def row_bytes(self) -> int:
        return self.seq_len * self.hidden_size * DTYPES[self.dtype].itemsize


class Computed:
    """States that the target computes at every call.

    Args:
        target: The target.
        rows: Packed rows, [N, S].
        dtype: Of the states; None: the target's.
        layer: Return the input of this decoder layer (0 is the first) in place of the states after the final norm.
        layers: Return the states after these numbers of layers in front of the final ones: [B, S, (m + 1) D].
    """

    def __init__(
        self,
        target: Target,
        rows: Rows,
        dtype: torch.dtype | None = None,
        layer: int | None = None,
        layers: Sequence[int] = (),
    ) -> None:
        self.target, self.rows, self.dtype = target, rows, dtype or target.dtype
        self.layer, self.layers = layer, list(layers)
        self.hidden_size = (len(self.layers) + 1) * target.hidden_size

    def hidden(self, row_indices: Tensor) -> Tensor:
        """Return the states, [B, S, D], of rows[row_indices [B]] on the target's device; state t predicts t + 1."""
        shape = len(row_indices), self.rows.tokens.shape[1], self.hidden_size
        states = torch.empty(shape, dtype=self.dtype, device=self.target.device)
        with Bar(total=shape[0], desc="hidden states", unit="row", leave=False, disable=shape[0] < SLOW_ROWS) as bar:
            for first in range(0, shape[0], BATCH_ROWS):
                part = self._batch(row_indices[first : first + BATCH_ROWS].cpu())
                states[first : first + BATCH_ROWS] = part
                bar.update(len(part))
        return states

    def _batch(self, row_indices: Tensor) -> Tensor:
        tokens, document = self.rows.tokens[row_indices], self.rows.document[row_indices]
        layers = self.layers if self.layer is None else [self.layer]
        states = self.target.hidden_with(layers, tokens, document)
        if self.layer is not None:
            states = states[..., : self.hidden_size]
        padding = (document < 0).to(states.device)
        return states.masked_fill(padding[..., None], 0).to(self.dtype)


class HiddenCache:
    """States of a cache folder; only the requested rows are read."""

    def __init__(self, index: Index, rows: Rows, shards: Sequence[Tensor], device: torch.device) -> None:
        self.index, self.rows, self.device = index, rows, device
        self._shards = shards  # memory maps: pages are read on access

    def hidden(self, row_indices: Tensor) -> Tensor:
        """Return the states, [B, S, D], of rows[row_indices [B]] on `device`; hidden[b, t] predicts token t + 1."""
        index = self.index
        states = torch.empty(len(row_indices), index.seq_len, index.hidden_size, dtype=DTYPES[index.dtype])
        for place, row in enumerate(row_indices.tolist()):
            states[place] = self._shards[row // index.rows_per_shard][row % index.rows_per_shard]
        return states.to(self.device)


def write_cache(
    folder: Path, target: Target, rows: Rows, dtype: torch.dtype | None = None, layers: Sequence[int] = ()
) -> HiddenCache:
    """Write the states of `rows` into `folder`, or the missing ones, and return the cache. Call it in one process.

    Args:
        folder: Folder of the cache.
        target: The target without adapters: it is compared by config and a sample of its weights.
        rows: Packed rows.
        dtype: Of the states on disk. Default: that of the folder, else the target's.
        layers: As of `Computed`.

    Raises:
        UsageError: The folder holds other states, a shard is damaged, states are not finite in `dtype`, or the disk is
            full. Finished shards are kept.
    """
    file = folder / INDEX_FILE
    given = read_index(file) if file.is_file() else None
    source = Computed(target, rows, dtype or (DTYPES[given.dtype] if given else None), layers=layers)
    index = _index(source, given)
    if given is None and (stray := sorted(path.name for path in folder.glob("shard-*.safetensors"))):
        raise UsageError(f"{folder} has no {INDEX_FILE} but holds {stray[0]}; name another folder, or delete this one")
    try:
        shards = [_read_shard(folder, index, shard) for shard in range(len(index.shards))]
        missing = [shard for shard, states in enumerate(shards) if states is None]
        left = sum(len(index.shards[shard]) for shard in missing)
        _check_room(folder, left * index.row_bytes)
        folder.mkdir(parents=True, exist_ok=True)
        if given is None:
            replace_file(file, (index.model_dump_json(indent=2) + "\n").encode())
        with Bar(total=index.num_rows, initial=index.num_rows - left, desc="hidden states", unit="row") as bar:
            for shard in missing:
                states = _finite_states(source, torch.tensor(index.shards[shard]), bar)
                with replacing(folder / shard_name(shard)) as (partial,):
                    save_file({"hidden": states}, partial, index.metadata)
                    partial.chmod(0o644)  # safetensors gives access to the owner only
                shards[shard] = _read_shard(folder, index, shard)
    except (OSError, SafetensorError) as error:  # safetensors wraps the system's errors
        full = getattr(error, "errno", None) == errno.ENOSPC or f"os error {errno.ENOSPC}" in str(error)
        raise UsageError(
            f"{folder}: hidden states cannot be written ({'the disk is full' if full else error}); finished shards "
            "are intact: free space and run again to continue"
        ) from None
    return HiddenCache(index, rows, cast(list[Tensor], shards), target.device)


def read_index(file: Path) -> Index:
    """Return the index of a cache; raises UsageError."""
    try:
        return Index.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise UsageError(f"{file}: {one_line(error, Index)}; delete the folder and make the cache again") from None


def shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.safetensors"


def _index(source: Computed, given: Index | None) -> Index:
    """Return the index of a folder of these states; raises UsageError if its index is `given` and of other states."""
    num_rows, seq_len = source.rows.tokens.shape
    row_bytes = seq_len * source.hidden_size * source.dtype.itemsize
    index = Index(
        format_version=1,
        target=source.target.name,
        target_fingerprint=target_fingerprint(source.target),
        data_fingerprint=data_fingerprint(source.rows),
        num_rows=num_rows,
        seq_len=seq_len,
        hidden_size=source.hidden_size,
        dtype=cast(Any, str(source.dtype).removeprefix("torch.")),
        layer=None,
        layers=source.layers,
        rows_per_shard=given.rows_per_shard if given else max(1, SHARD_BYTES // row_bytes),
    )
    theirs = given.model_dump(exclude={"target"}) if given else {}  # the target's name may differ
    differing = [
        f"{key.removesuffix('_fingerprint')} {value!s:.16} (requested: {getattr(index, key)!s:.16})"
        for key, value in theirs.items()
        if value != getattr(index, key)
    ]
    if differing:
        raise UsageError(
            f"the cache holds other hidden states: {', '.join(differing)}; name another folder, or delete this one"
        )
    return index


def _finite_states(source: Computed, rows: Tensor, bar: Bar) -> Tensor:
    """Compute the states of some rows; raises UsageError if one is not finite."""
    parts = []
    for some in rows.split(BATCH_ROWS):
        parts.append(source.hidden(some).cpu())
        if not bool(torch.isfinite(parts[-1]).all()):
            raise UsageError(
                f"the target's states of rows {some[0]} to {some[-1]} hold NaN or infinity as "
                f"{str(source.dtype).removeprefix('torch.')}; allowed: finite values; give dtype bfloat16 or float32"
            )
        bar.update(len(some))
    return torch.cat(parts)


def _check_room(folder: Path, needed: int) -> None:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UsageError(
            f"{folder}: hidden states need {needed / 1e9:.3f} GB more, {free / 1e9:.3f} GB are free; "
            "free space, name a folder elsewhere, use dtype bfloat16 or fewer rows, or train without a cache"
        )


def _read_shard(folder: Path, index: Index, shard: int) -> Tensor | None:
    """Return the memory-mapped states of a shard, None if it is absent; raises UsageError if it is damaged."""
    path, shape = folder / shard_name(shard), (len(index.shards[shard]), index.seq_len, index.hidden_size)
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as handle:
            states, metadata = handle.get_tensor("hidden"), handle.metadata()
        if (states.dtype, tuple(states.shape), metadata) != (DTYPES[index.dtype], shape, index.metadata):
            raise OSError(f"it holds {states.dtype} {tuple(states.shape)} of {metadata}, not those of {INDEX_FILE}")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is not usable ({error}); delete it and run the command that made it again") from None
    return states

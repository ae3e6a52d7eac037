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
from typing import TYPE_CHECKING, Any, Literal, Protocol

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

SHARD_BYTES = 1 << 29  # default size of a shard: the work that an interruption may lose
SLOW_BATCHES = 8  # number of batches from which on progress is shown
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
    def identity(self) -> dict[str, str]:
        return {"data": self.data_fingerprint, "target": self.target_fingerprint}

    @property
    def row_bytes(self) -> int:
        return self.seq_len * self.hidden_size * DTYPES[self.dtype].itemsize


class Computed:
    """States that the target computes at every call.

    Args:
        target: The target.
        rows: Packed rows, [N, S].
        batch_rows: Rows of one forward pass.
        dtype: Of the states; None: the target's.
        layer: Return the input of this decoder layer (0 is the first) in place of the states after the final norm.
        layers: Return the states after these numbers of layers in front of the final ones: [B, S, (m + 1) D].
    """

    def __init__(
        self,
        target: Target,
        rows: Rows,
        batch_rows: int = 8,
        dtype: torch.dtype | None = None,
        layer: int | None = None,
        layers: Sequence[int] = (),
    ) -> None:
        shapes = {tuple(tensor.shape) for tensor in rows}
        if len(shapes) != 1 or rows.tokens.ndim != 2 or not rows.tokens.numel():
            raise UsageError(f"rows have shapes {sorted(shapes)}; allowed: one shape [N, S] with N, S >= 1")
        if layer is not None and not 0 <= layer < len(target.backbone.layers):
            last = len(target.backbone.layers) - 1
            raise UsageError(f"layer {layer}: target {target.name} has layers 0 to {last}; name one of them")
        self.target, self.rows, self.batch_rows = target, rows, max(1, batch_rows)
        self.dtype, self.layer, self.layers = dtype or target.dtype, layer, list(layers)
        self.num_rows, self.seq_len = rows.tokens.shape
        self.hidden_size = (len(self.layers) + 1) * target.hidden_size

    def hidden(self, row_indices: Tensor) -> Tensor:
        """Return the states, [B, S, D], of rows[row_indices [B]] on the target's device; state t predicts t + 1."""
        parts = [part for part in row_indices.cpu().split(self.batch_rows) if len(part)]
        quick = len(parts) < SLOW_BATCHES
        batches = [self._batch(part) for part in Bar(parts, "hidden states", leave=False, unit="batch", disable=quick)]
        empty = torch.empty(0, self.seq_len, self.hidden_size, dtype=self.dtype, device=self.target.device)
        return torch.cat(batches) if batches else empty

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

    def __init__(self, index: Index, rows: Rows, shards: list[Tensor], device: torch.device) -> None:
        self.index, self.rows, self.device = index, rows, device
        self.dtype = DTYPES[index.dtype]
        self.num_rows, self.seq_len, self.hidden_size = index.num_rows, index.seq_len, index.hidden_size
        self._shards = shards  # memory maps: pages are read on access

    def hidden(self, row_indices: Tensor) -> Tensor:
        """Return the states, [B, S, D], of rows[row_indices [B]] on `device`; hidden[b, t] predicts token t + 1."""
        row_indices = row_indices.cpu().long()
        states = torch.empty(len(row_indices), self.seq_len, self.hidden_size, dtype=self.dtype)
        shards = row_indices // self.index.rows_per_shard
        for shard in shards.unique().tolist():
            chosen = shards == shard
            states[chosen] = self._shards[shard][row_indices[chosen] - shard * self.index.rows_per_shard]
        return states.to(self.device)


def write_cache(
    folder: Path | str,
    target: Target,
    rows: Rows,
    rows_per_shard: int | None = None,
    dtype: torch.dtype | None = None,
    batch_rows: int = 8,
    layers: Sequence[int] = (),
) -> HiddenCache:
    """Write the states of `rows` into `folder`, or the missing ones, and return the cache. Call it in one process.

    Args:
        folder: Folder of the cache.
        target: The target without adapters: it is compared by config and a sample of its weights.
        rows: Packed rows.
        rows_per_shard: Default: that of the folder, else about 0.5 GiB.
        dtype: Of the states on disk. Default: that of the folder, else the target's.
        batch_rows: Rows of one forward pass.
        layers: As of `Computed`.

    Raises:
        UsageError: The folder holds other states, a shard is damaged, states are not finite in `dtype`, or the disk is
            full. Finished shards are kept.
    """
    folder = Path(folder)
    given = read_index(folder) if (folder / INDEX_FILE).is_file() else None
    if given is not None:
        rows_per_shard, dtype = rows_per_shard or given.rows_per_shard, dtype or DTYPES[given.dtype]
    source = Computed(target, rows, batch_rows, dtype, layers=layers)
    index = _index(source, rows_per_shard)
    if given is not None:
        _check_same(folder, given, index)
    elif stray := sorted(path.name for path in folder.glob("shard-*.safetensors")):
        raise UsageError(f"{folder} has no {INDEX_FILE} but holds {stray[0]}; name another folder, or delete this one")
    try:
        shards = [_shard(folder, index, shard) for shard in range(len(index.shards))]
        missing = [shard for shard, states in enumerate(shards) if states is None]
        left = sum(len(index.shards[shard]) for shard in missing)
        _check_room(folder, left * index.row_bytes)
        if given is None:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / INDEX_FILE, (index.model_dump_json(indent=2) + "\n").encode())
        with Bar(total=index.num_rows, initial=index.num_rows - left, desc="hidden states", unit="row") as bar:
            for shard in missing:
                states = _finite_states(source, torch.tensor(index.shards[shard]), bar)
                save_tensors(folder / shard_name(shard), {"hidden": states}, index.identity)
                shards[shard] = _shard(folder, index, shard)
    except (OSError, SafetensorError) as error:  # safetensors wraps the system's errors
        full = getattr(error, "errno", None) == errno.ENOSPC or f"os error {errno.ENOSPC}" in str(error)
        raise UsageError(
            f"{folder}: hidden states cannot be written ({'the disk is full' if full else error}); finished shards "
            "are intact: free space and run again to continue"
        ) from None
    return HiddenCache(index, rows, shards, target.device)


def read_index(folder: Path) -> Index:
    """Return the index of a cache; raises UsageError."""
    path = folder / INDEX_FILE
    try:
        return Index.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UsageError(f"{path}: {one_line(error, Index)}; delete the folder and make the cache again") from None


def shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.safetensors"


def _index(source: Computed, rows_per_shard: int | None) -> Index:
    """Return the index of a folder of these states."""
    dtype: Any = str(source.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UsageError(f"hidden states as {source.dtype}; allowed: {', '.join(DTYPES)}; give one of them as dtype")
    row_bytes = source.seq_len * source.hidden_size * source.dtype.itemsize
    return Index(
        format_version=1,
        target=source.target.name,
        target_fingerprint=target_fingerprint(source.target),
        data_fingerprint=data_fingerprint(source.rows),
        num_rows=source.num_rows,
        seq_len=source.seq_len,
        hidden_size=source.hidden_size,
        dtype=dtype,
        layer=None,
        layers=source.layers,
        rows_per_shard=max(1, SHARD_BYTES // row_bytes if rows_per_shard is None else rows_per_shard),
    )


def _check_same(folder: Path, given: Index, wanted: Index) -> None:
    """Raise UsageError if the folder's index is of other states; the target's name is not compared."""

    def shown(value: object) -> str:
        return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else repr(value)  # sha256

    differing = [
        f"{key.removesuffix('_fingerprint')} {shown(value)} (requested: {shown(getattr(wanted, key))})"
        for key, value in given.model_dump(exclude={"target"}).items()
        if value != getattr(wanted, key)
    ]
    if differing:
        raise UsageError(
            f"{folder} holds other hidden states: {', '.join(differing)}; name another folder, or delete this one"
        )


def _finite_states(source: Computed, rows: Tensor, bar: Bar) -> Tensor:
    """Compute the states of some rows; raises UsageError if one is not finite."""
    states = torch.empty(len(rows), source.seq_len, source.hidden_size, dtype=source.dtype)
    for batch in torch.arange(len(rows)).split(source.batch_rows):
        part = source.hidden(rows[batch])
        if not bool(torch.isfinite(part).all()):
            raise UsageError(
                f"the target's states of rows {rows[batch[0]]} to {rows[batch[-1]]} hold NaN or infinity as "
                f"{str(source.dtype).removeprefix('torch.')}; allowed: finite values; give dtype bfloat16 or float32"
            )
        states[batch] = part.cpu()
        bar.update(len(batch))
    return states


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file, complete or not at all."""
    with replacing(path) as (partial,):
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, partial, {"format": "pt", **metadata})
        partial.chmod(0o644)  # safetensors gives access to the owner only


def _check_room(folder: Path, needed: int) -> None:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UsageError(
            f"{folder}: hidden states need {needed / 1e9:.3f} GB more, {free / 1e9:.3f} GB are free; "
            "free space, name a folder elsewhere, use dtype bfloat16 or fewer rows, or train without a cache"
        )


def _shard(folder: Path, index: Index, shard: int) -> Tensor | None:
    """Return the memory-mapped states of a shard, None if it is absent; raises UsageError if it is damaged."""
    path, shape = folder / shard_name(shard), (len(index.shards[shard]), index.seq_len, index.hidden_size)
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
            found = handle.metadata() or {}
        given = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        expected = {"hidden": (DTYPES[index.dtype], shape)}
        if given != expected:
            raise OSError(f"it holds {given}, {expected} is expected")
        if not index.identity.items() <= found.items():
            raise OSError(f"it belongs to other rows or another target than {INDEX_FILE} names")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is not usable ({error}); delete it and run the command that made it again") from None
    return tensors["hidden"]

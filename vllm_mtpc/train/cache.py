"""Hidden states of packed rows: computed on the spot, or kept on disk and memory-mapped.

`Computed` and `HiddenCache` answer the same calls with the same numbers, so a trainer takes either. A cache is
a folder:

    index.json                 what was computed: target, data, sizes
    shard-00000.safetensors    hidden [R, S, D] of rows 0..R-1, and so on; the last shard may be shorter

Shards are written one after the other, each complete or absent, and an interrupted run continues with the first one
that is absent. States of padding are zero.
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

SHARD_BYTES = 1 << 29  # of one shard where rows_per_shard is not given: the work an interruption may lose
SLOW_BATCHES = 8  # from so many on, computing them is shown
SAMPLED_WEIGHTS = 64  # of each parameter, in a target's fingerprint
INDEX_FILE = "index.json"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


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


class HiddenSource(Protocol):
    """What a trainer needs: rows, and the states of some of them."""

    rows: Rows

    def hidden(self, row_indices: Tensor) -> Any: ...


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
    layer: None  # states after the final norm
    layers: list[int] = []  # and in front of them, behind so many layers of the target, as of `Computed`
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
    """States computed by the target each time they are asked for, `batch_rows` rows at a time.

    `dtype` None: the target's own. `layer` None: states after the final norm, what a head reads; i: states that enter
    decoder layer i (0 is the first), what a copy of the layers from i on reads. `layers`: in front of the states after
    the final norm those behind so many layers each, what draft layers of their own read: [B, S, (m + 1) D].
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
            raise UsageError(
                f"rows have shapes {sorted(shapes)}; allowed: one shape [N, S] with at least one row and token"
            )
        if layer is not None and not 0 <= layer < len(target.backbone.layers):
            last = len(target.backbone.layers) - 1
            raise UsageError(f"layer {layer}: target {target.name} has layers 0 to {last}; name one of them")
        self.target, self.rows, self.batch_rows = target, rows, max(1, batch_rows)
        self.dtype, self.layer, self.layers = dtype or target.dtype, layer, list(layers)
        self.num_rows, self.seq_len = rows.tokens.shape
        self.hidden_size = (len(self.layers) + 1) * target.hidden_size

    def hidden(self, row_indices: Tensor) -> Tensor:
        """States [B, S, D] of rows[row_indices[B]] on the target's device; hidden[b, t] predicts token t + 1."""
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
    """States of a folder, as `write_cache` returns them; reads only the rows that are asked for."""

    def __init__(self, index: Index, rows: Rows, shards: list[Tensor], device: torch.device) -> None:
        self.index, self.rows, self.device = index, rows, device
        self.dtype = DTYPES[index.dtype]
        self.num_rows, self.seq_len, self.hidden_size = index.num_rows, index.seq_len, index.hidden_size
        self._shards = shards  # memory maps: pages are read when rows are taken from them

    def hidden(self, row_indices: Tensor) -> Tensor:
        """States [B, S, D] of rows[row_indices[B]] on `device`; hidden[b, t] predicts token t + 1."""
        row_indices = row_indices.cpu().long()
        states = torch.empty(len(row_indices), self.seq_len, self.hidden_size, dtype=self.dtype)
        shards = row_indices // self.index.rows_per_shard
        for shard in shards.unique().tolist():
            places = (shards == shard).nonzero().squeeze(1)
            states[places] = self._shards[shard][row_indices[places] - shard * self.index.rows_per_shard]
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
    """Computes the states of `rows` into `folder`, or what is left of them there; shows progress and the time left.

    `rows_per_shard`, `dtype` None: as in a folder that is there, else about 0.5 GiB a shard and the target's dtype;
    `layers`: as of `Computed`. Call it on one process. Targets are compared by config and a sample of their weights:
    attach adapters afterwards. Raises UsageError for a folder made otherwise, a damaged shard, states that are not
    finite in `dtype`, and a file system without room; finished shards stay as they are.
    """
    folder = Path(folder)
    given = read_index(folder) if (folder / INDEX_FILE).is_file() else None
    if given is not None:
        rows_per_shard, dtype = rows_per_shard or given.rows_per_shard, dtype or DTYPES[given.dtype]
    source = Computed(target, rows, batch_rows, dtype, layers=layers)
    index = _index(source, rows_per_shard)
    try:
        if given is None:
            _start(folder, index)
        else:
            _check_same(folder, given, index)
        shards = [_shard(folder, index, shard) for shard in range(len(index.shards))]
        missing = [shard for shard, states in enumerate(shards) if states is None]
        left = sum(len(index.shards[shard]) for shard in missing)
        _check_room(folder, left * index.row_bytes)
        with Bar(total=index.num_rows, initial=index.num_rows - left, desc="hidden states", unit="row") as bar:
            for shard in missing:
                states = _finite_states(source, torch.tensor(index.shards[shard]), bar)
                save_tensors(folder / shard_name(shard), {"hidden": states}, index.identity)
                shards[shard] = _shard(folder, index, shard)
    except (OSError, SafetensorError) as error:  # safetensors reports those of the system under its own name
        full = getattr(error, "errno", None) == errno.ENOSPC or f"os error {errno.ENOSPC}" in str(error)
        raise UsageError(
            f"{folder}: hidden states could not be written ({'the disk is full' if full else error}); finished shards "
            "are intact: make room and run again, it continues there"
        ) from None
    return HiddenCache(index, rows, shards, target.device)


def read_index(folder: Path) -> Index:
    """What a cache holds; raises UsageError."""
    path = folder / INDEX_FILE
    try:
        return Index.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UsageError(f"{path}: {one_line(error, Index)}; delete the folder and make the cache again") from None


def shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.safetensors"


def _index(source: Computed, rows_per_shard: int | None) -> Index:
    """The index of a folder that holds these states."""
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
    """Raises UsageError where the folder's index is of another run; a target's name is no identity."""

    def shown(value: object) -> str:
        return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else repr(value)  # sha256

    differing = [
        f"{key.removesuffix('_fingerprint')} {shown(value)} (asked for: {shown(getattr(wanted, key))})"
        for key, value in given.model_dump(exclude={"target"}).items()
        if value != getattr(wanted, key)
    ]
    if differing:
        raise UsageError(
            f"{folder} holds other hidden states: {', '.join(differing)}; name another folder, or delete this one"
        )


def _start(folder: Path, index: Index) -> None:
    if stray := sorted(path.name for path in folder.glob("shard-*.safetensors")):
        raise UsageError(f"{folder} has no {INDEX_FILE} but holds {stray[0]}; name another folder, or delete this one")
    _check_room(folder, index.num_rows * index.row_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / INDEX_FILE, (index.model_dump_json(indent=2) + "\n").encode())


def _finite_states(source: Computed, rows: Tensor, bar: Bar) -> Tensor:
    """States of some rows on the host; raises UsageError where one is not finite."""
    states = torch.empty(len(rows), source.seq_len, source.hidden_size, dtype=source.dtype)
    for places in torch.arange(len(rows)).split(source.batch_rows):
        part = source.hidden(rows[places])
        if not bool(torch.isfinite(part).all()):
            raise UsageError(
                f"the target's states of rows {rows[places[0]]} to {rows[places[-1]]} hold NaN or infinity as "
                f"{str(source.dtype).removeprefix('torch.')}; allowed: finite values; give dtype bfloat16 or float32"
            )
        states[places] = part.cpu()
        bar.update(len(places))
    return states


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file next to `path` and moves it there once it is on the disk."""
    with replacing(path) as (partial,):
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, partial, {"format": "pt", **metadata})
        partial.chmod(0o644)  # safetensors writes for the owner alone


def _check_room(folder: Path, needed: int) -> None:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UsageError(
            f"{folder}: hidden states need {needed / 1e9:.3f} GB more, {free / 1e9:.3f} GB are free there; "
            "make room, name a folder elsewhere, use dtype bfloat16 or fewer rows, or train without a cache"
        )


def _shard(folder: Path, index: Index, shard: int) -> Tensor | None:
    """The states of a shard, memory-mapped; None where it is not there. Raises UsageError where it cannot be used."""
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

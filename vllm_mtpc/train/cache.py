"""Hidden states of packed rows: computed on the spot, or kept on disk and memory-mapped.

`Computed` and `HiddenCache` answer the same calls with the same numbers, so a trainer takes either. A cache is
a folder:

    index.json                 what was computed: target, data, sizes
    rows.safetensors           the rows themselves: tokens, document [N, S] int32, trained [N, S] bool
    shard-00000.safetensors    hidden [R, S, D] of rows 0..R-1, and so on; the last shard may be shorter

Shards are written one after the other, each complete or absent, and an interrupted run continues with the first one
that is absent. States of padding are zero.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_mtpc.data.rows import Rows
from vllm_mtpc.errors import UsageError, one_line
from vllm_mtpc.files import replace_file, replacing
from vllm_mtpc.progress import Bar
from vllm_mtpc.train.fingerprints import data_fingerprint, target_fingerprint

if TYPE_CHECKING:
    from vllm_mtpc.hf import Target

SHARD_BYTES = 1 << 29  # of one shard where rows_per_shard is not given: the work an interruption may lose
SLOW_BATCHES = 8  # from so many on, computing them is shown
INDEX_FILE, ROWS_FILE = "index.json", "rows.safetensors"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
STORED = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}  # as safetensors names them


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
    layer: NonNegativeInt | None
    rows_per_shard: PositiveInt

    @property
    def num_shards(self) -> int:
        return -(-self.num_rows // self.rows_per_shard)

    @property
    def row_bytes(self) -> int:
        return self.seq_len * self.hidden_size * DTYPES[self.dtype].itemsize

    @property
    def identity(self) -> dict[str, str]:
        return {"data": self.data_fingerprint, "target": self.target_fingerprint}

    def rows_of(self, shard: int) -> range:
        return range(shard * self.rows_per_shard, min(self.num_rows, (shard + 1) * self.rows_per_shard))


class Computed:
    """States computed by the target each time they are asked for, `batch_rows` rows at a time.

    `dtype` None: the target's own. `layer` None: states after the final norm, what a head reads; i: states that enter
    decoder layer i (0 is the first), what a copy of the layers from i on reads.
    """

    def __init__(
        self,
        target: Target,
        rows: Rows,
        batch_rows: int = 8,
        dtype: torch.dtype | None = None,
        layer: int | None = None,
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
        self.dtype, self.layer = dtype or target.dtype, layer
        (self.num_rows, self.seq_len), self.hidden_size = rows.tokens.shape, target.hidden_size

    def hidden(self, row_indices: Tensor) -> Tensor:
        """States [B, S, D] of rows[row_indices[B]] on the target's device; hidden[b, t] predicts token t + 1."""
        parts = [part for part in row_indices.cpu().split(self.batch_rows) if len(part)]
        quick = len(parts) < SLOW_BATCHES
        batches = [self._batch(part) for part in Bar(parts, "hidden states", leave=False, unit="batch", disable=quick)]
        empty = torch.empty(0, self.seq_len, self.hidden_size, dtype=self.dtype, device=self.target.device)
        return torch.cat(batches) if batches else empty

    def _batch(self, row_indices: Tensor) -> Tensor:
        tokens, document = self.rows.tokens[row_indices], self.rows.document[row_indices]
        if self.layer is None:
            states = self.target.hidden(tokens, document)
        else:
            states = _entering(self.target, self.layer, tokens, document)
        padding = (document < 0).to(states.device)
        return states.masked_fill(padding[..., None], 0).to(self.dtype)


class HiddenCache:
    """States read from a folder. Made by `write_cache` or `open_cache`; reads only the rows that are asked for."""

    def __init__(self, folder: Path, index: Index, rows: Rows, device: torch.device) -> None:
        self.folder, self.index, self.rows, self.device = folder, index, rows, device
        self.dtype, self.layer = DTYPES[index.dtype], index.layer
        self.num_rows, self.seq_len, self.hidden_size = index.num_rows, index.seq_len, index.hidden_size
        self._shards: dict[int, Tensor] = {}

    def hidden(self, row_indices: Tensor) -> Tensor:
        """States [B, S, D] of rows[row_indices[B]] on `device`; hidden[b, t] predicts token t + 1."""
        row_indices = row_indices.cpu().long()
        states = torch.empty(len(row_indices), self.seq_len, self.hidden_size, dtype=self.dtype)
        shards = row_indices // self.index.rows_per_shard
        for shard in shards.unique().tolist():
            places = (shards == shard).nonzero().squeeze(1)
            states[places] = self._shard(shard)[row_indices[places] - shard * self.index.rows_per_shard]
        return states.to(self.device)

    def _shard(self, shard: int) -> Tensor:
        if shard not in self._shards:  # a memory map: pages are read when rows are taken from it
            self._shards[shard] = _read(self.folder / shard_name(shard), ["hidden"])["hidden"]
        return self._shards[shard]


def write_cache(
    folder: Path | str,
    target: Target,
    rows: Rows,
    rows_per_shard: int | None = None,
    dtype: torch.dtype | None = None,
    batch_rows: int = 8,
    layer: int | None = None,
) -> HiddenCache:
    """Computes the states of `rows` into `folder`, or what is left of them there; shows progress and the time left.

    `rows_per_shard` None: about 0.5 GiB a shard. For `dtype`, `batch_rows` and `layer` see `Computed`. Call it on one
    process. Raises UsageError for a folder made otherwise, a damaged shard, states that are not finite in `dtype`, and
    a file system without room; finished shards stay as they are.
    """
    folder = Path(folder)
    source = Computed(target, rows, batch_rows, dtype, layer)
    index = _prepare(folder, source, rows_per_shard)
    missing = [shard for shard in range(index.num_shards) if not _has_shard(folder, index, shard)]
    left = sum(len(index.rows_of(shard)) for shard in missing)
    _check_room(folder, left * index.row_bytes)
    with Bar(total=index.num_rows, initial=index.num_rows - left, desc="hidden states", unit="row") as bar:
        for shard in missing:
            _write_shard(folder, index, shard, source, bar)
    return open_cache(folder, target)


def open_cache(folder: Path | str, target: Target | None = None) -> HiddenCache:
    """The complete cache in `folder`, its rows memory-mapped; with `target`, states are given on its device.

    Raises UsageError for a folder without a cache, a missing or damaged shard, and states of another target than
    `target` (compared by config and a sample of its weights: attach adapters after opening).
    """
    folder = Path(folder)
    index = read_index(folder)
    if target is not None and index.target_fingerprint != target_fingerprint(target):
        raise UsageError(
            f"{folder} holds states of target {index.target}, whose config or weights differ from {target.name}; "
            "name the target it was made from, or another folder"
        )
    for shard in range(index.num_shards):
        if not _has_shard(folder, index, shard):
            raise UsageError(
                f"{folder / shard_name(shard)} is missing ({index.num_shards} shards are needed); "
                "run the command that made the folder again: it computes what is missing"
            )
    shape = [index.num_rows, index.seq_len]
    expected = {"tokens": ("I32", shape), "document": ("I32", shape), "trained": ("BOOL", shape)}
    _check_file(folder / ROWS_FILE, expected, {"data": index.data_fingerprint})
    device = torch.device("cpu") if target is None else target.device
    return HiddenCache(folder, index, Rows(**_read(folder / ROWS_FILE, list(expected))), device)


def read_index(folder: Path) -> Index:
    """What a cache holds; raises UsageError."""
    path = folder / INDEX_FILE
    try:
        return Index.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{folder} has no {INDEX_FILE}; name a folder that `vllm-mtpc cache` has written") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); name a readable folder") from None
    except ValidationError as error:
        raise UsageError(f"{path}: {one_line(error, Index)}; delete the folder and make the cache again") from None


def shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.safetensors"


def _entering(target: Target, layer: int, tokens: Tensor, document: Tensor) -> Tensor:
    """States [B, S, D] that enter decoder layer `layer`, taken on the way of a forward pass."""
    taken: list[Tensor] = []

    def take(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken.append(args[0] if args else kwargs["hidden_states"])

    handle = target.backbone.layers[layer].register_forward_pre_hook(take, with_kwargs=True)
    try:
        target.hidden(tokens, document)
    finally:
        handle.remove()
    return taken[0]


def _prepare(folder: Path, source: Computed, rows_per_shard: int | None) -> Index:
    """The folder's index: the one that is there, after a check that it is of the same run, or a new one."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    if source.dtype not in names:
        raise UsageError(f"hidden states as {source.dtype}; allowed: {', '.join(DTYPES)}; give one of them as dtype")
    row_bytes = source.seq_len * source.hidden_size * source.dtype.itemsize
    wanted = Index(
        format_version=1,
        target=source.target.name,
        target_fingerprint=target_fingerprint(source.target),
        data_fingerprint=data_fingerprint(source.rows),
        num_rows=source.num_rows,
        seq_len=source.seq_len,
        hidden_size=source.hidden_size,
        dtype=names[source.dtype],
        layer=source.layer,
        rows_per_shard=max(1, SHARD_BYTES // row_bytes) if rows_per_shard is None else max(1, rows_per_shard),
    )
    if not (folder / INDEX_FILE).is_file():
        return _start(folder, wanted, source.rows)
    given = read_index(folder)
    ignored = {"target"} | ({"rows_per_shard"} if rows_per_shard is None else set())  # a name is no identity
    differing = [
        f"{key.removesuffix('_fingerprint')} {_shown(value)} (asked for: {_shown(getattr(wanted, key))})"
        for key, value in given.model_dump(exclude=ignored).items()
        if value != getattr(wanted, key)
    ]
    if differing:
        raise UsageError(
            f"{folder} holds other hidden states: {', '.join(differing)}; name another folder, or delete this one"
        )
    return given


def _shown(value: object) -> str:
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else repr(value)  # sha256


def _start(folder: Path, index: Index, rows: Rows) -> Index:
    if stray := sorted(path.name for path in folder.glob("shard-*.safetensors")):
        raise UsageError(f"{folder} has no {INDEX_FILE} but holds {stray[0]}; name another folder, or delete this one")
    rows_bytes = 9 * rows.tokens.numel()  # int32, int32, bool
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    _check_room(existing, index.num_rows * index.row_bytes + rows_bytes)
    tensors = {"tokens": rows.tokens.int(), "document": rows.document.int(), "trained": rows.trained.bool()}
    with _disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(folder / ROWS_FILE, tensors, {"data": index.data_fingerprint})
        replace_file(folder / INDEX_FILE, (index.model_dump_json(indent=2) + "\n").encode())  # last: rows are complete
    return index


def _write_shard(folder: Path, index: Index, shard: int, source: Computed, bar: Bar) -> None:
    rows = torch.tensor(index.rows_of(shard))
    states = torch.empty(len(rows), index.seq_len, index.hidden_size, dtype=source.dtype)
    for places in torch.arange(len(rows)).split(source.batch_rows):
        part = source.hidden(rows[places])
        if not bool(torch.isfinite(part).all()):
            raise UsageError(
                f"the target's states of rows {rows[places[0]]} to {rows[places[-1]]} hold NaN or infinity as "
                f"{index.dtype}; allowed: finite values; give dtype bfloat16 or float32"
            )
        states[places] = part.cpu()
        bar.update(len(places))
    with _disk(folder):
        save_tensors(folder / shard_name(shard), {"hidden": states}, index.identity)


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file beside `path` and moves it there once it is on the disk."""
    with replacing(path) as (partial,):
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, partial, {"format": "pt", **metadata})
        partial.chmod(0o644)  # safetensors writes for the owner alone


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
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


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UsageError(
            f"{folder}: hidden states need {needed / 1e9:.3f} GB more, {free / 1e9:.3f} GB are free there; "
            "make room, name a folder elsewhere, use dtype bfloat16 or fewer rows, or train without a cache"
        )


def _has_shard(folder: Path, index: Index, shard: int) -> bool:
    """Whether the shard is there; raises UsageError where it is but cannot be used."""
    path = folder / shard_name(shard)
    if path.is_file():
        shape = [len(index.rows_of(shard)), index.seq_len, index.hidden_size]
        _check_file(path, {"hidden": (STORED[index.dtype], shape)}, index.identity)
    return path.is_file()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file; raises UsageError for a damaged one."""
    try:
        with safe_open(path, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from None


def _read(path: Path, names: list[str]) -> dict[str, Tensor]:
    with _opened(path) as handle:
        return {name: handle.get_tensor(name) for name in names}


def _check_file(path: Path, expected: dict[str, tuple[str, list[int]]], metadata: dict[str, str]) -> None:
    """Raises UsageError unless the file's header names these tensors (dtype, shape) and holds this metadata."""
    with _opened(path) as handle:
        parts = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        given = {name: (part.get_dtype(), list(part.get_shape())) for name, part in parts.items()}
        found = handle.metadata() or {}
    if given != expected:
        raise _damaged(path, f"it holds {given}, {expected} is expected")
    if any(found.get(key) != value for key, value in metadata.items()):
        raise _damaged(path, f"it belongs to other rows or another target than {INDEX_FILE} names")


def _damaged(path: Path, reason: str) -> UsageError:
    what = "the folder" if path.name == ROWS_FILE else "it"
    return UsageError(f"{path} is not usable ({reason}); delete {what} and run the command that made it again")

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_mtpc.data.rows import Rows
from vllm_mtpc.errors import UsageError
from vllm_mtpc.files import read_json, replace_file, replacing
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
    """States of a cache folder; only the requested rows are read.

    Args:
        rows: Packed rows, [N, S].
        shards: Memory-mapped states [R, S, D], all but the last of the same number of rows.
        device: Of the states that are returned.
    """

    def __init__(self, rows: Rows, shards: Sequence[Tensor], device: torch.device) -> None:
        self.rows, self.shards, self.device = rows, shards, device

    def hidden(self, row_indices: Tensor) -> Tensor:
        """Return the states, [B, S, D], of rows[row_indices [B]] on `device`; hidden[b, t] predicts token t + 1."""
        per_shard, *shape = self.shards[0].shape
        states = self.shards[0].new_empty(len(row_indices), *shape)
        for place, row in enumerate(row_indices.tolist()):
            states[place] = self.shards[row // per_shard][row % per_shard]
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
        MtpcError: The folder holds other states, a file is damaged, states are not finite in `dtype`, or the disk is
            full. Finished shards are kept.
    """
    file = folder / INDEX_FILE
    given = {"layers": []} | read_json(file) if file.is_file() else {}
    source = Computed(target, rows, dtype or DTYPES.get(given.get("dtype", "")), layers=layers)
    index = _index(source, given)
    if differing := [key for key in sorted(given.keys() | index) if given and given.get(key) != index.get(key)]:
        values = (f"{key} {given.get(key)!s:.16} (requested: {index.get(key)!s:.16})" for key in differing)
        raise UsageError(
            f"{folder} holds other hidden states: {', '.join(values)}; name another folder, or delete this one"
        )
    metadata = {"format": "pt", "data": index["data_fingerprint"], "target": index["target_fingerprint"]}
    parts = torch.arange(len(rows.tokens)).split(index["rows_per_shard"])
    files = [folder / f"shard-{number:05d}.safetensors" for number in range(len(parts))]
    shape, states = (index["seq_len"], source.hidden_size), {}
    try:
        states = {path: _read_shard(path, source.dtype, (len(part), *shape), metadata)
                  for path, part in zip(files, parts, strict=True) if path.is_file()}  # fmt: skip
        left = sum(len(part) for path, part in zip(files, parts, strict=True) if path not in states)
        _check_room(folder, left * _row_bytes(source))
        folder.mkdir(parents=True, exist_ok=True)
        if not given:
            replace_file(file, (json.dumps(index, indent=2) + "\n").encode())
        with Bar(total=len(rows.tokens), initial=len(rows.tokens) - left, desc="hidden states", unit="row") as bar:
            for path, part in zip(files, parts, strict=True):
                if path in states:
                    continue
                new = _finite_states(source, part, bar)
                with replacing(path) as (partial,):
                    save_file({"hidden": new}, partial, metadata)
                    partial.chmod(0o644)  # safetensors gives access to the owner only
                states[path] = _read_shard(path, source.dtype, (len(part), *shape), metadata)
    except (OSError, SafetensorError) as error:  # safetensors wraps the system's errors
        full = getattr(error, "errno", None) == errno.ENOSPC or f"os error {errno.ENOSPC}" in str(error)
        raise UsageError(
            f"{folder}: hidden states cannot be written ({'the disk is full' if full else error}); finished shards "
            "are intact: free space and run again to continue"
        ) from None
    return HiddenCache(rows, [states[path] for path in files], target.device)


def _row_bytes(source: Computed) -> int:
    return source.rows.tokens.shape[1] * source.hidden_size * source.dtype.itemsize


def _index(source: Computed, given: Mapping[str, Any]) -> dict[str, Any]:
    num_rows, seq_len = source.rows.tokens.shape
    per_shard = given.get("rows_per_shard")
    if not isinstance(per_shard, int) or per_shard < 1:
        per_shard = max(1, SHARD_BYTES // _row_bytes(source))
    return {
        "format_version": 1,
        "target": given.get("target", source.target.name),  # the target's name may differ
        "target_fingerprint": target_fingerprint(source.target),
        "data_fingerprint": data_fingerprint(source.rows),
        "num_rows": num_rows,
        "seq_len": seq_len,
        "hidden_size": source.hidden_size,
        "dtype": str(source.dtype).removeprefix("torch."),
        "layer": None,  # states after the final norm
        "layers": source.layers,
        "rows_per_shard": per_shard,
    }


def _finite_states(source: Computed, rows: Tensor, bar: Bar) -> Tensor:
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


def _read_shard(path: Path, dtype: torch.dtype, shape: tuple[int, ...], metadata: dict[str, str]) -> Tensor:
    """Return the memory-mapped states of a shard; raises UsageError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as handle:
            states, found = handle.get_tensor("hidden"), handle.metadata()
        if (states.dtype, tuple(states.shape), found) != (dtype, shape, metadata):
            raise OSError(f"it holds {states.dtype} {tuple(states.shape)} of {found}, not those of {INDEX_FILE}")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is not usable ({error}); delete it and run the command that made it again") from None
    return states

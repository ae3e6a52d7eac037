"""Hidden states of packed rows: computed on the fly, or kept on disk and memory-mapped.

`Computed` and `HiddenCache` have the same methods and return the same numbers. A cache is a folder of
`shard-00000.safetensors`: hidden [R, S, D] of rows 0..R-1, and so on; the last shard may be shorter. The metadata of
each shard describes the states. A shard is complete or absent; an interrupted run continues with the absent ones.
States of padding are zero.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_mtpc.data.rows import Rows
from vllm_mtpc.errors import UsageError, first_line
from vllm_mtpc.files import replacing
from vllm_mtpc.hf import Target
from vllm_mtpc.report import Bar

SHARD_BYTES = 1 << 29  # of a shard: the work that an interruption may lose
SLOW_ROWS = 64  # number of rows from which on progress is shown
SAMPLED_WEIGHTS = 64  # of each parameter, in a target's fingerprint


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
    rows: Rows

    def hidden(self, row_indices: Tensor) -> Any:
        """Return the states of rows[row_indices [B]]: [B, S, D], or a block of a PTP head."""


@dataclass
class Computed:
    """States that the target computes at every call."""

    target: Target
    rows: Rows  # [N, S]
    layer: int | None = None  # return the input of this decoder layer (0 is the first), not the final states
    layers: Sequence[int] = ()  # the states after these layers come before the final ones, [B, S, (m + 1) D]

    def __post_init__(self) -> None:
        self.hidden_size = (len(self.layers) + 1) * self.target.hidden_size

    def hidden(self, row_indices: Tensor) -> Tensor:
        """Return the states, [B, S, D], of rows[row_indices [B]] on the target's device; state t predicts t + 1."""
        shape = len(row_indices), self.rows.tokens.shape[1], self.hidden_size
        states = torch.empty(shape, dtype=self.target.dtype, device=self.target.device)
        layers, at_once = self.layers if self.layer is None else [self.layer], self.target.rows_at_once
        is_quick = shape[0] < SLOW_ROWS or shape[0] <= at_once
        with Bar(total=shape[0], desc="hidden states", unit="row", leave=False, disable=is_quick) as bar:
            for first in range(0, shape[0], at_once):
                some = row_indices[first : first + at_once].cpu()
                document = self.rows.document[some]
                part = self.target.hidden_with(layers, self.rows.tokens[some], document)[..., : self.hidden_size]
                states[first : first + len(some)] = part.masked_fill((document < 0)[..., None].to(part.device), 0)
                bar.update(len(some))
        return states


@dataclass
class HiddenCache:
    """States of a cache folder."""

    rows: Rows  # [N, S]
    shards: Sequence[Tensor]  # memory-mapped states [R, S, D], all but the last of the same number of rows
    device: torch.device  # of the states that are returned

    def hidden(self, row_indices: Tensor) -> Tensor:
        """As of `Computed`; only the requested rows are read."""
        per_shard, *shape = self.shards[0].shape
        states = self.shards[0].new_empty(len(row_indices), *shape)
        for place, row in enumerate(row_indices.tolist()):
            states[place] = self.shards[row // per_shard][row % per_shard]
        return states.to(self.device)


def write_cache(folder: Path, target: Target, rows: Rows, layers: Sequence[int] = ()) -> HiddenCache:
    """Write the states of `rows` into `folder`, or the missing ones, and return the cache. Call it in one process.

    The target has no adapters: it is compared by config and a sample of its weights. `layers`: as of `Computed`. Raises
    MtpcError if the folder holds other states, a file is damaged, states are not finite, or the disk is full. Finished
    shards are kept.
    """
    source, (num_rows, seq_len) = Computed(target, rows, layers=layers), rows.tokens.shape
    row_bytes = seq_len * source.hidden_size * target.dtype.itemsize
    per_shard = max(1, SHARD_BYTES // row_bytes)
    description = {
        "format": "pt",
        "target_fingerprint": target_fingerprint(target),
        "data_fingerprint": data_fingerprint(rows),
        "dtype": str(target.dtype).removeprefix("torch."),
        "states": target.states + (f" {target.drafter}" if target.drafter else ""),
        "layers": str(list(layers)),
        "rows_per_shard": str(per_shard),
    }
    parts = enumerate(torch.arange(num_rows).split(per_shard))
    shards = {folder / f"shard-{number:05d}.safetensors": part for number, part in parts}
    try:
        there = set(folder.glob("shard-*"))  # a client of NFS that asks for an absent file misses it for a while
        states = {path: _read_shard(path, description) for path in shards if path in there}
        missing = {path: part for path, part in shards.items() if path not in there}
        left = sum(map(len, missing.values()))
        folder.mkdir(parents=True, exist_ok=True)
        if left * row_bytes > (free := shutil.disk_usage(folder).free):
            raise UsageError(
                f"{folder}: hidden states need {left * row_bytes / 1e9:.3f} GB more, {free / 1e9:.3f} GB are free; "
                "free space, name a folder elsewhere, use fewer rows, or train without a cache"
            )
        with Bar(total=num_rows, initial=num_rows - left, desc="hidden states", unit="row") as bar:
            for path, part in missing.items():
                _write_shard(path, source, part, description, bar)
                states[path] = _read_shard(path, description)
    except (OSError, SafetensorError) as error:  # safetensors wraps the system's errors
        raise UsageError(
            f"{folder}: hidden states cannot be written ({first_line(error)}); finished shards are intact: correct "
            "this (a full disk: free space), and run again to continue"
        ) from None
    return HiddenCache(rows, [states[path] for path in shards], target.device)


def _write_shard(path: Path, source: Computed, row_indices: Tensor, metadata: dict[str, str], bar: Bar) -> None:
    parts = []
    for some in row_indices.split(source.target.rows_at_once):
        parts.append(source.hidden(some).cpu())
        if not bool(torch.isfinite(parts[-1]).all()):
            raise UsageError(
                f"{path}: states of rows {some[0]} to {some[-1]} hold NaN or infinity; allowed: finite values; type "
                "--target-dtype bfloat16 or float32"
            )
        bar.update(len(some))
    with replacing(path) as (partial,):
        save_file({"hidden": torch.cat(parts)}, partial, metadata)
        partial.chmod(0o644)  # safetensors gives access to the owner only


def _read_shard(path: Path, description: dict[str, str]) -> Tensor:
    try:
        with safe_open(path, framework="pt") as handle:
            states, stored = handle.get_tensor("hidden"), handle.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is not usable ({error}); delete it and run the command that made it again") from None
    if differing := [key for key in sorted(stored.keys() | description) if stored.get(key) != description.get(key)]:
        values = (f"{key} {stored.get(key)!s:.16} (requested: {description.get(key)!s:.16})" for key in differing)
        raise UsageError(
            f"{path.parent} holds other hidden states: {', '.join(values)}; name another folder, or delete this one"
        )
    return states

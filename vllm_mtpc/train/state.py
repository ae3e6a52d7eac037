"""The trainer's state on disk: one file, replaced in one step, so that a killed run goes on where it was saved.

A state holds the full weights and moments on the host, whatever they were sharded over, and nothing that depends on
the number of processes: the order of the windows follows from the seed and the step.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from vllm_mtpc.data.names import resolved
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import replacing
from vllm_mtpc.train.options import STATE_FILE as FILE
from vllm_mtpc.train.options import TrainOptions

# What may change between a run and its continuation: how long, how fast, where; not what is learnt.
FREE = {
    "out", "max_steps", "epochs", "resume", "save_minutes", "log_every", "track", "device", "parallel", "ray_workers",
    "chunk_windows", "checkpoint_circuit", "cache", "grad_accumulation", "evaluation_sequences", "evaluation_tokens",
    "evaluation_prompt_tokens",
    "dtype", "num_speculative_tokens", "verifier", "attention", "dry_run",
}  # fmt: skip
NAMES = ("target", "data", "validation_data", "init_from")  # may be paths: the same ones, however they are written
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)


def identity(options: TrainOptions) -> dict[str, Any]:
    """The options that two parts of one run must share."""
    return {key: value for key, value in options.model_dump(mode="json").items() if key not in FREE}


def paths(values: dict[str, Any]) -> dict[str, Any]:
    """Those of an identity's values that may be paths, in full."""
    full = {}
    for key in NAMES:
        value = values.get(key)
        full[key] = [resolved(name) for name in value] if isinstance(value, list) else value and resolved(value)
    return full


def save_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, options: TrainOptions, is_main: bool
) -> None:
    """Write the state after `step` steps. Every process calls it; `is_main` writes.

    Raises CheckpointError when the disk is full; the state written before, if any, stays as it was.
    """
    weights, moments = get_state_dict(model, optimizer, options=FULL)
    if not is_main:
        return
    folder.mkdir(parents=True, exist_ok=True)
    learnt = identity(options)
    values = {"step": step, "options": learnt, "paths": paths(learnt), "weights": weights, "moments": moments}
    try:
        with replacing(folder / FILE) as (partial,), open(partial, "wb") as file:
            torch.save(values, file)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as a RuntimeError
        if isinstance(error, RuntimeError) and "write" not in str(error).lower():
            raise
        is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, None)
        before = (
            "the state saved before is intact: free space and run the same command with --resume"
            if (folder / FILE).is_file()
            else "none was saved before: free space and run the same command again"
        )
        raise CheckpointError(
            f"{folder}: the trainer's state cannot be written ({'no space left' if is_full else error}); {before}"
        ) from None
    finally:
        partial.unlink(missing_ok=True)


def load_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, options: TrainOptions) -> int:
    """Restore a state and return its step. Raises CheckpointError for none, a damaged one, or another run's."""
    values = read_state(folder)
    if key := changed_option(values, options):
        theirs, ours = values["options"].get(key), identity(options)[key]
        raise CheckpointError(
            f"{folder / FILE} is of a run with {key}={theirs!r}, not {ours!r}; resume with the options it was started "
            "with, or name another out folder"
        )
    set_state_dict(
        model, optimizer, model_state_dict=values["weights"], optim_state_dict=values["moments"], options=FULL
    )
    return values["step"]


def changed_option(values: dict[str, Any], options: TrainOptions) -> str | None:
    """The first option of a state's run that these options have otherwise, of those that decide what is learnt."""
    ours, theirs = identity(options), values["options"]
    ours_in_full, theirs_in_full = paths(ours), values["paths"]
    changed = (
        key
        for key in ours
        if ours[key] != theirs.get(key) and not (key in NAMES and ours_in_full[key] == theirs_in_full[key])
    )
    return min(changed, default=None)


def read_state(folder: Path) -> dict[str, Any]:
    """The values of a state file; raises CheckpointError."""
    file = folder / FILE
    if not file.is_file():
        raise CheckpointError(f"{folder} holds no trainer state ({FILE}); run without --resume to start one")
    try:
        values = torch.load(file, map_location="cpu", weights_only=True)
        values.setdefault("paths", paths(values["options"]))  # states had none at first: paths from this folder
        return {key: values[key] for key in ("step", "options", "paths", "weights", "moments")}
    except Exception as error:  # torch.load raises many kinds on a damaged file
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{file} is damaged ({reason}); delete it and train again without --resume") from None

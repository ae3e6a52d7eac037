"""The trainer's state on disk: one file, replaced in one step, so that a killed run goes on where it was saved.

A state holds the full weights and moments on the host, whatever they were sharded over, and nothing that depends on
the number of processes: the order of the windows follows from the seed and the step. It is saved every so many minutes,
and when the run is told to end (`Stopping`).
"""

from __future__ import annotations

import errno
import math
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from vllm_mtpc.data.sources import resolve_path
from vllm_mtpc.errors import CheckpointError, first_line
from vllm_mtpc.files import replacing
from vllm_mtpc.train.options import STATE_FILE as FILE
from vllm_mtpc.train.options import TrainOptions

if TYPE_CHECKING:
    from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_SECONDS = 2.0  # a signal to all processes reaches those of torchrun twice, the second time from its agent
# What may change between a run and its continuation: how long, how fast, where; not what is learnt.
FREE = {
    "out", "max_steps", "epochs", "resume", "save_minutes", "log_every", "track", "device", "parallel", "ray_workers",
    "chunk_windows", "checkpoint_circuit", "cache", "grad_accumulation", "evaluation_sequences", "evaluation_tokens",
    "evaluation_prompt_tokens", "dtype", "num_speculative_tokens", "verifier", "attention", "dry_run", "minutes",
}  # fmt: skip
NAMES = ("target", "data", "validation_data", "init_from")  # may be paths: the same ones, however they are written
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)


def identity(options: TrainOptions) -> dict[str, Any]:
    """The options that two parts of one run must share."""
    return {key: value for key, value in options.model_dump(mode="json").items() if key not in FREE}


def paths(values: dict[str, Any]) -> dict[str, Any]:
    """Those of an identity's values that may be paths, in full."""
    given = {key: values.get(key) for key in NAMES}
    return {
        key: [resolve_path(name) for name in value] if isinstance(value, list) else value and resolve_path(value)
        for key, value in given.items()
    }


def save_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    options: TrainOptions,
    is_main: bool,
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


def load_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, options: TrainOptions) -> int:
    """Restore a state; returns its step.

    Raises CheckpointError for none, a damaged one, or another run's.
    """
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
    full, before = {**ours, **paths(ours)}, {**theirs, **values["paths"]}
    return min((key for key in ours if ours[key] != theirs.get(key) and full[key] != before.get(key)), default=None)


def read_state(folder: Path) -> dict[str, Any]:
    """The values of a state file; raises CheckpointError."""
    file = folder / FILE
    if not file.is_file():
        raise CheckpointError(f"{folder} holds no trainer state ({FILE}); run without --resume to start one")
    try:
        values = torch.load(file, map_location="cpu", weights_only=True)
        values.setdefault("paths", paths(values["options"]))  # states had none at first: paths from this folder
        fields = TrainOptions.model_fields.items()  # one that came later had its default
        values["options"] = {name: field.default for name, field in fields} | values["options"]
        return {key: values[key] for key in ("step", "options", "paths", "weights", "moments")}
    except Exception as error:  # torch.load raises many kinds on a damaged file
        raise CheckpointError(
            f"{file} is damaged ({first_line(error)}); delete it and train again without --resume"
        ) from None


class Stopping:
    """A context for a training loop: `due` is asked after each step, `saved` told of each state.

    `limit` is the time that training may take, in minutes; `share` the part of it that is over, 0 without a limit.

    SIGTERM and SIGINT let the step at hand end; another one ends the process at once. All processes of a run save and
    end after the same step, whichever of them was told. Ray Train runs the loop of its workers in a thread, which gets
    no signals, and ends workers itself: there the minutes alone decide.
    """

    def __init__(self, minutes: float, processes: int, limit: float | None = None) -> None:
        self.signal, self.share = 0, 0.0  # the same in all processes
        self.limit, self._began = 60 * limit if limit else math.inf, time.monotonic()
        self._told, self._told_at = 0, 0.0  # of this process
        self._seconds, self._saved_at = 60 * minutes, time.monotonic()
        # On the host whatever the device: asking it does not wait for the device.
        self._group = dist.new_group(backend="gloo") if processes > 1 else None

    def __enter__(self) -> Self:
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._tell) for number in SIGNALS}
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _tell(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._told:
            self._told, self._told_at = number, now
            text = f"\n{signal.Signals(number).name}: ending after this step; again: at once, without saving\n"
            os.write(2, text.encode())  # a print may be under way
        elif now - self._told_at > SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def due(self) -> bool:
        """Whether the state is to be saved after this step; the same in all processes, as is `signal` then."""
        now = time.monotonic()
        wanted = [now - self._saved_at >= self._seconds, self._told, (now - self._began) / self.limit]
        if self._group is not None:
            most = torch.tensor(wanted, dtype=torch.float64)
            dist.all_reduce(most, dist.ReduceOp.MAX, self._group)
            wanted = most.tolist()
        self.signal, self.share = int(wanted[1]), wanted[2]
        return any(wanted[:2])

    def saved(self) -> None:
        """The minutes start again."""
        self._saved_at = time.monotonic()

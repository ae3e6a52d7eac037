"""The trainer's state on disk, saved and loaded by accelerate, and the end of a run by a signal or by its minutes.

A state is a folder `step-N` that takes its name when it is complete; the one before it is then deleted. The order of
the windows follows from the seed and the step, so a run may continue with another number of processes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from vllm_mtpc.data.sources import is_path
from vllm_mtpc.errors import CheckpointError, first_line
from vllm_mtpc.files import read_json
from vllm_mtpc.train.options import TrainOptions

RUN_FILE = "run.json"  # step and options of a state
SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_SECONDS = 2.0  # torchrun's agent sends a signal to its processes a second time
# Options that may change between a run and its continuation: duration, speed and place, not the trained weights.
FREE = {
    "out", "max_steps", "epochs", "resume", "save_minutes", "log_every", "device", "chunk_windows", "cache",
    "evaluation_sequences", "evaluation_tokens", "dtype", "num_speculative_tokens", "verifier", "attention",
    "dry_run", "minutes",
}  # fmt: skip
NAMES = ("target", "data", "validation_data", "init_from")  # may be paths


def identity(options: TrainOptions) -> dict[str, Any]:
    """Return the options that a run and its continuation share, with absolute paths."""

    def resolve(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(resolve, value))
        return str(Path(value).expanduser().resolve()) if is_path(value) else value

    values = options.model_dump(mode="json")
    paths = {key: resolve(values[key]) for key in NAMES if values[key]}
    return {key: value for key, value in values.items() if key not in FREE} | paths


def latest_state(folder: Path) -> Path | None:
    """Return the last complete state in the trainer's state folder."""
    states = [path for path in folder.glob("step-*") if (path / RUN_FILE).is_file()]
    return max(states, key=lambda path: int(path.name.partition("-")[2]), default=None)


def save_state(folder: Path, accelerator: Any, step: int, options: TrainOptions) -> None:
    """Save model and optimiser after `step` steps, in every process of the run.

    Raises CheckpointError if the folder cannot be written (a full disk); an earlier state is intact then.
    """
    partial, before = folder / "partial", latest_state(folder)
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)  # of a killed run
    accelerator.wait_for_everyone()
    try:
        accelerator.save_state(str(partial))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (partial / RUN_FILE).write_text(json.dumps({"step": step, "options": identity(options)}), encoding="utf-8")
            new = folder / f"step-{step}"
            shutil.rmtree(new, ignore_errors=True)
            partial.rename(new)
            for old in set(folder.glob("step-*")) - {new}:
                shutil.rmtree(old)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own for a full disk
        shutil.rmtree(partial, ignore_errors=True)
        kept = "the state saved before is intact" if before else "none was saved before"
        raise CheckpointError(
            f"{folder}: the trainer's state cannot be written ({first_line(error)}); {kept}: free space and run the "
            f"same command {'with --resume' if before else 'again'}"
        ) from error


def load_state(folder: Path, accelerator: Any, options: TrainOptions) -> int:
    """Load the last state into the prepared model and optimiser and return its step.

    Raises CheckpointError if there is no state, it is damaged, or it is of a run with other options.
    """
    if (path := latest_state(folder)) is None:
        raise CheckpointError(f"{folder} holds no trainer state; run without --resume to start one")
    values, shared = read_json(path / RUN_FILE), identity(options)
    stored = {name: field.default for name, field in TrainOptions.model_fields.items()} | values["options"]
    if key := min((key for key in shared if shared[key] != stored.get(key)), default=None):
        theirs, ours = stored.get(key), shared[key]
        raise CheckpointError(
            f"{path} is of a run with {key}={theirs!r}, not {ours!r}; resume with the options it was started with, or "
            "name another out folder"
        )
    try:
        accelerator.load_state(str(path))
    except Exception as error:  # torch and safetensors raise many kinds for a damaged file
        raise CheckpointError(
            f"{path} is damaged ({first_line(error)}); delete it and train again without --resume"
        ) from None
    return values["step"]


def use_plain_names(accelerator: Any) -> None:
    """Save and load states with the names of the plain model: a state of several processes then continues in one."""

    def remove_prefix(models: list[Any], weights: list[dict[str, Any]], folder: str) -> None:
        weights[:] = [{name.removeprefix("module."): value for name, value in part.items()} for part in weights]

    def unwrap(models: list[Any], folder: str) -> None:
        models[:] = map(accelerator.unwrap_model, models)

    accelerator.register_save_state_pre_hook(remove_prefix)
    accelerator.register_load_state_pre_hook(unwrap)


class Stopping:
    """Context of the training loop that decides when to save and when to end, alike in all processes.

    SIGTERM and SIGINT let the current step end; a second one ends the process at once. Workers of Ray Train run the
    loop in a thread, which gets no signals: there only the minutes end a run. States are saved every `minutes`;
    training takes at most `limit` minutes.
    """

    def __init__(self, minutes: float, processes: int, limit: float | None = None) -> None:
        self.signal, self.share = 0, 0.0  # that ends the run, 0 for none; of the limit that is over
        self.limit, self._began = 60 * limit if limit else math.inf, time.monotonic()
        self._received, self._received_at = 0, 0.0  # by this process
        self._seconds, self._saved_at = 60 * minutes, time.monotonic()
        # gloo runs on the host: it does not wait for the device
        self._group = dist.new_group(backend="gloo") if processes > 1 else None

    def __enter__(self) -> Stopping:
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._received:
            self._received, self._received_at = number, now
            text = f"\n{signal.Signals(number).name}: ending after this step; again: at once, without saving\n"
            os.write(2, text.encode())  # a print may be in progress
        elif now - self._received_at > SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def due(self) -> bool:
        """Return whether to save the state after this step; update `signal` and `share`."""
        now = time.monotonic()
        wanted = [now - self._saved_at >= self._seconds, self._received, (now - self._began) / self.limit]
        if self._group is not None:
            largest = torch.tensor(wanted, dtype=torch.float64)
            dist.all_reduce(largest, dist.ReduceOp.MAX, self._group)
            wanted = largest.tolist()
        self.signal, self.share = int(wanted[1]), wanted[2]
        if any(wanted[:2]):
            self._saved_at = now
        return any(wanted[:2])

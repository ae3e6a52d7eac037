"""The training loop: the same on one process and on many (torchrun, Ray Train), resumed or not.

A step is the same set of windows whatever the number of processes: each takes those in its own rows, and every term is
divided by the number of windows of the whole step. Gradients are averaged by DDP and FSDP, so the loss is multiplied
by the number of processes.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from vllm_mtpc.progress import Bar
from vllm_mtpc.train import state
from vllm_mtpc.train.options import STATE_FOLDER, TrainOptions
from vllm_mtpc.train.windows import Windows, WindowSource

if TYPE_CHECKING:
    from accelerate import Accelerator

METRICS_FILE = "metrics.jsonl"
UNLIMITED = sys.maxsize  # steps of a run that its minutes end
BETAS = (0.9, 0.95)  # as the authors' code has them; their paper names Adam alone


def learning_rate(options: TrainOptions, step: int, steps: int, share: float = 0.0) -> float:
    """Rate of step `step` of `steps`, or at this `share` of the minutes: linear warm-up, then constant or a cosine."""
    assert options.learning_rate is not None  # `settled`
    warmup = min(options.warmup_steps, max(1, steps // 4))
    rise = min(1.0, max((step + 1) / warmup, 4 * share)) if warmup else 1.0
    if options.schedule == "constant":
        return options.learning_rate * rise
    fall = 0.55 + 0.45 * math.cos(math.pi * min(1.0, max(step / max(1, steps), share)))
    return options.learning_rate * rise * fall


def peak_memory_bytes(device: torch.device) -> int:
    """The most this process has held: on CUDA what torch allocated there; elsewhere its largest resident set. Bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


class Trainer:
    """Trains a drafter on a source of windows, from step 0 or from the state in the out folder."""

    def __init__(
        self, options: TrainOptions, accelerator: Accelerator, drafter: nn.Module, source: WindowSource, steps: int
    ) -> None:
        self.options, self.accelerator, self.source, self.steps = options, accelerator, source, steps
        learnt = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(learnt, betas=BETAS, weight_decay=options.weight_decay, fused=True)
        self.drafter, self.optimizer = accelerator.prepare(drafter, optimizer)
        self.folder = options.out / STATE_FOLDER
        self.step = 0
        self.saved: int | None = None  # the step of the state on disk that this run wrote or started from
        self.stopping = state.Stopping(options.save_minutes, accelerator.num_processes, options.minutes)
        self.tokens_per_second = 0.0

    def run(self) -> None:
        """All steps, or those up to a signal (`stopping.signal`) or in `minutes`, the state saved in every case.

        What ends it in another way leaves the last saved state and every line of metrics up to it.
        """
        if self.options.resume:
            self.step = state.load_state(self.folder, self.drafter, self.optimizer.optimizer, self.options)
            self.saved = self.step
        self._start_metrics()
        kind, quiet = self.options.job.kind(self.options), not self.accelerator.is_main_process
        total = math.inf if self.steps == UNLIMITED else self.steps
        with self.stopping, Bar(total=total, initial=self.step, desc=kind, unit="step", disable=quiet) as bar:
            self._steps(bar)

    def _steps(self, bar: Bar) -> None:
        started, reading, seen, done = time.monotonic(), 0.0, 0, 0
        batches, is_last = self.source.batches(self.step), self.step >= self.steps
        while not is_last and not self.stopping.signal:
            asked = time.monotonic()
            batch = next(batches)
            reading, done = reading + time.monotonic() - asked, done + 1
            rate = learning_rate(self.options, self.step, self.steps, self.stopping.share)
            is_last = self.step + 1 == self.steps
            logs = (self.step + 1) % self.options.log_every == 0 or is_last
            share, watched = self._update(batch, rate, watch=logs)
            self.step += 1
            is_due = self.stopping.due()
            is_last = is_last or self.stopping.share >= 1
            saves = is_due or is_last
            seen += int(batch.counts.sum())
            if logs or saves:  # at no other step is the device waited for
                loss = self._finite_loss(share)
            if logs:
                self.tokens_per_second = seen / (time.monotonic() - started)
                line = self._log(loss, watched, rate)
                shown = {"loss": f"{line['loss']:.4f}", "tokens/step": f"{line['tokens_per_step']:.2f}"}
                bar.set_postfix(shown, refresh=False)
            bar.total, bar.seconds_left = self._left(done, time.monotonic() - started, reading)
            bar.update()
            if saves:
                self.save()

    def _left(self, done: int, elapsed: float, reading: float) -> tuple[int, float]:
        """Steps of the whole run, and the seconds left, after `done` steps in `elapsed` seconds.

        `reading` of them were spent on hidden states, which are computed block by block ahead of the steps.
        """
        left, ahead = self.steps - self.step, max(0, self.source.steps_read - done)
        step, states = (elapsed - reading) / done, reading / (done + ahead)
        seconds = left * step + max(0, left - ahead) * states
        if seconds > (limit := max(0.0, self.stopping.limit * (1 - self.stopping.share))):
            left, seconds = int((limit + ahead * states) / (step + states)), limit
        return self.step + left, seconds

    def save(self) -> None:
        """The trainer's state after the steps so far. Raises CheckpointError for weights that are not finite."""
        self._check_weights()
        what = self.folder, self.drafter, self.optimizer.optimizer, self.step, self.options
        state.save_state(*what, is_main=self.accelerator.is_main_process)
        self.saved = self.step
        self.stopping.saved()

    def weights(self) -> dict[str, Tensor]:
        """The head's weights on the host, frozen ones too, put together from all processes."""
        weights = get_model_state_dict(self.drafter, options=replace(state.FULL, ignore_frozen_params=False))
        return {name.removeprefix("head."): value for name, value in weights.items() if name.startswith("head.")}

    def _update(self, batch: Windows, rate: float, watch: bool) -> tuple[Tensor, Tensor | None]:
        """One optimiser step. Returns this process's share of the loss and what was watched."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        parts, total, watched = self.options.grad_accumulation, torch.zeros((), device=self.accelerator.device), None
        for number in range(parts):  # every process takes the same number of them
            part, is_last = batch.each(itemgetter(slice(number, None, parts))), number == parts - 1
            with nullcontext() if is_last else self.accelerator.no_sync(self.drafter):
                loss, watched = self.drafter(part, watch=watch and is_last)
                self.accelerator.backward(loss * self.accelerator.num_processes)
            total += loss.detach()
        self.accelerator.clip_grad_norm_(self.drafter.parameters(), self.options.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, watched

    def _finite_loss(self, share: Tensor) -> float:
        """The loss of a step, of all processes; raises CheckpointError, in each of them, if it is not finite."""
        loss = self.accelerator.reduce(share, "sum").item()
        if not math.isfinite(loss):
            raise self._diverged(f"the loss is {loss}")
        return loss

    def _check_weights(self) -> None:
        """Raises CheckpointError, in every process, unless weights and moments are finite: a loss tells of those
        before its step alone."""
        held = [parameter for parameter in self.drafter.parameters() if parameter.requires_grad]
        held += [value for moments in self.optimizer.state.values() for value in moments.values()]
        unfit = torch.zeros((), dtype=torch.int64, device=self.accelerator.device)
        for value in held:
            shard = value.to_local() if isinstance(value, DTensor) else value
            unfit += (~shard.detach().isfinite().all()).to(unfit.device)
        if self.accelerator.reduce(unfit, "sum").item():
            raise self._diverged("weights or their moments are NaN or infinite")

    def _diverged(self, what: str) -> state.CheckpointError:
        """The error of a run that cannot go on."""
        kept = "; no state was saved before"
        if self.saved is not None:
            kept = f" into another out folder; the state of step {self.saved} is intact ({self.folder})"
        return state.CheckpointError(
            f"{what} at step {self.step}: lower learning_rate, or use precision float32, and train again{kept}"
        )

    def _log(self, loss: float, watched: Tensor, rate: float) -> dict[str, Any]:
        """One line of metrics.jsonl, and of the trackers; the same numbers whatever the number of processes."""
        watched = self.accelerator.reduce(watched, "sum")
        line = {
            "step": self.step,
            "loss": loss,
            "tokens_per_step": (watched[0] / watched[1]).item(),
            "learning_rate": rate,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "peak_memory_bytes": peak_memory_bytes(self.accelerator.device),
        }
        if self.accelerator.is_main_process:
            with open(self.options.out / METRICS_FILE, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self.accelerator.log({key: value for key, value in line.items() if key != "step"}, step=self.step)
        return line

    def _start_metrics(self) -> None:
        """Metrics of steps after the one that is resumed from are of a run that never happened: drop them."""
        if not self.accelerator.is_main_process:
            return
        self.options.out.mkdir(parents=True, exist_ok=True)
        file = self.options.out / METRICS_FILE
        kept = [line for line in read_metrics(file) if line["step"] <= self.step] if self.options.resume else []
        file.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Lines of a metrics file; a torn last line is left out."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines

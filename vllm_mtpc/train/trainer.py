"""The trainer: model, windows, optimiser, steps, saved states and the measured head, for every family of heads.

A step is the same set of windows for any number of processes: each process takes the windows of its rows, and every
term is divided by the number of windows of the whole step. DDP averages gradients, so the loss is multiplied by
the number of processes. A family is a subclass, named in `vllm_mtpc.families`.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from vllm_mtpc.checkpoint.locate import verifier_name
from vllm_mtpc.data.rows import Rows
from vllm_mtpc.data.sources import Documents
from vllm_mtpc.eval.evaluator import attach
from vllm_mtpc.eval.text import Samples, Sampling, generate, prompts
from vllm_mtpc.families import FAMILIES
from vllm_mtpc.hf import Target, check_length
from vllm_mtpc.plots.draw import plot_acceptance, plot_loss
from vllm_mtpc.report import Bar
from vllm_mtpc.train import state
from vllm_mtpc.train.cache import HiddenSource
from vllm_mtpc.train.options import STATE_FOLDER, TrainOptions
from vllm_mtpc.train.windows import Windows, WindowSource

METRICS_FILE = "metrics.jsonl"
UNLIMITED = sys.maxsize  # steps of a run that ends after its minutes
BETAS = (0.9, 0.95)  # of AdamW in the MtPC authors' code; their paper names Adam alone
WARMUP_STEPS, MAX_NORM = 30, 1.0  # steps of linear warm-up, and the largest norm of the gradient
BLOCK_BYTES = 1 << 30
SEQUENCES, MIN_SEQUENCES = 64, 8  # default number of held-out texts, and the number that is always measured
PROMPT_TOKENS = 32  # of a held-out prompt that is cut from text
SEEDS = {"t1": 101, "t0": 102}


def learning_rate(options: TrainOptions, step: int, steps: int, share: float = 0.0) -> float:
    """Return the rate of a step: linear warm-up over at most a quarter of the run, and a cosine to a tenth of the peak.

    `step`: steps before this one, of `steps`. `share`: of the run's minutes that is over, 0 without a limit.
    """
    assert options.learning_rate is not None  # `with_defaults`
    rise = min(1.0, max((step + 1) / min(WARMUP_STEPS, max(1, steps // 4)), 4 * share))
    fall = 0.55 + 0.45 * math.cos(math.pi * min(1.0, max(step / max(1, steps), share)))
    return options.learning_rate * rise * fall


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: allocated by torch on CUDA, else the resident set. Bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


class Trainer(ABC):
    """Trains and writes one head: `setup`, `train` and `finish`, in this order.

    `options` are those of `with_defaults`. The draft vocabulary is chosen by `rows`; None: all ids are drafted. Without
    an `Accelerator` of accelerate there is no `setup`.
    """

    family_options: ClassVar[tuple[str, ...]]  # options that other families do not have
    noun: ClassVar[str]  # name of the family in errors about its options
    kind_option: ClassVar[str]  # "circuit" or "variant"
    chosen_by: ClassVar[str]  # the option that selects this family
    defaults: ClassVar[Mapping[str, Any]] = {}  # defaults that differ from those of TrainOptions
    needs_modules: ClassVar[bool] = False  # more of the target is read than states, which vLLM may compute
    greedy_share: ClassVar[float] = 0.2  # of the responses of `regenerate`
    draw: Callable[[int, int], Tensor] | None = None  # random numbers of windows, see WindowSource
    loss_unit = "nats per token"
    earlier_minutes = 0.0  # of the starts before --resume
    ids: Tensor | None = None  # that are drafted, rising; None: all
    partial_start = ""  # weights of a new backbone that the target's layers do not have
    config: Any
    model: Any  # module (windows, watch) -> (loss, watched sums)

    def __init__(
        self, options: TrainOptions, target: Target, accelerator: Any = None, rows: Rows | None = None
    ) -> None:
        self.options, self.target, self.accelerator, self.rows = options, target, accelerator, rows
        self.verifier = options.verifier or verifier_name(options.target, options.out)  # the target's name in the head
        sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}
        self.config = self.head_config(options, target.model.config, self.verifier, sizes)
        self.folder, self.step, self.tokens_per_second = options.out / STATE_FOLDER, 0, 0.0
        torch.manual_seed(options.seed)
        self.setup_model()

    @classmethod
    @abstractmethod
    def check(cls, options: TrainOptions) -> None:
        """Raise ValueError for options that exclude each other."""

    @staticmethod
    @abstractmethod
    def head_config(options: TrainOptions, target: Any, verifier: str, sizes: dict[str, Any]) -> Any:
        """Return the config of a head for a target of this transformers config and these sizes."""

    @staticmethod
    @abstractmethod
    def check_start(options: TrainOptions, config: Any) -> None:
        """Raise an MtpcError if a head of this config cannot start from the named head."""

    @abstractmethod
    def setup_model(self) -> None:
        """Build the head and `model`, the module of a training step, from the seeded generator."""

    @abstractmethod
    def source(self, rows: Rows) -> HiddenSource:
        """Return the target's states of rows, which windows are read from."""

    @abstractmethod
    def state_size(self) -> int:
        """Return the numbers of the target's dtype that are held per token of a block."""

    def block_rows(self, source: HiddenSource, world: int) -> int:
        """Return the default number of rows whose windows are shuffled together: 1 GiB of states."""
        assert self.options.seq_len is not None  # `with_defaults`
        return max(1, BLOCK_BYTES // (self.options.seq_len * self.state_size() * self.target.dtype.itemsize))

    def setup(self, rows: Rows) -> None:
        """Create windows and AdamW, and prepare model and optimiser for the processes of the run."""
        options, accelerator = self.options, self.accelerator
        rank, world = accelerator.process_index, accelerator.num_processes
        with accelerator.main_process_first():  # the first one writes the cache
            source = self.source(rows)
        block_rows = options.block_rows or self.block_rows(source, world)
        sizes = self.config.window, options.windows_per_step, block_rows, options.seed
        self.windows = WindowSource(source, *sizes, rank, world, self.draw)
        epochs = options.epochs or (0 if options.minutes else 1)
        of_epochs = max(1, int(self.windows.steps_per_epoch() * epochs)) if epochs else UNLIMITED
        self.steps = options.max_steps or of_epochs
        self.windows.ahead = self.steps if self.target.states == "vllm" else 0
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, betas=BETAS, weight_decay=0.0, fused=True)
        self.model, self.optimizer = accelerator.prepare(self.model, optimizer)
        state.use_plain_names(accelerator)
        self.stopping = state.Stopping(options.save_minutes, world, options.minutes)

    def train(self) -> None:
        """Run all steps, or those before a signal (`stopping.signal`) or the end of the minutes, and save the state."""
        if self.options.resume:
            self.step = state.load_state(self.folder, self.accelerator, self.options)
        self._start_metrics()
        batches, self.started, tokens = self.windows.batches(self.step), time.monotonic(), 0
        total = None if self.steps == UNLIMITED else self.steps
        quiet, kind = not self.accelerator.is_main_process, getattr(self.options, self.kind_option)
        with self.stopping, Bar(total=total, initial=self.step, desc=kind, unit="step", disable=quiet) as bar:
            while not self.is_finished:
                batch = next(batches)
                rate = learning_rate(self.options, self.step, self.steps, self.stopping.share)
                logs = (self.step + 1) % self.options.log_every == 0 or self.step + 1 == self.steps
                share, watched = self.train_step(batch, rate, watch=logs)
                self.step += 1
                tokens += int(batch.counts.sum())
                saves = self.stopping.due() or self.is_finished
                if logs or saves:  # other steps do not wait for the device
                    loss = self.accelerator.reduce(share, "sum").item()
                    if not math.isfinite(loss):
                        raise self._diverged(f"the loss is {loss}")
                if logs:
                    self.tokens_per_second = tokens / (time.monotonic() - self.started)
                    line = self._log(loss, watched, rate)
                    shown = {"loss": f"{loss:.4f}", "tokens/step": f"{line['tokens_per_step']:.2f}"}
                    bar.set_postfix(shown, refresh=False)
                bar.update()
                if saves:
                    self.save_state()
        self.windows.close()

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done, a signal came or the minutes are over."""
        return self.step >= self.steps or bool(self.stopping.signal) or self.stopping.share >= 1

    def train_step(self, batch: Windows, rate: float, watch: bool) -> tuple[Tensor, Tensor | None]:
        """Take one optimiser step; return this process's share of the loss and, if asked, the watched sums."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, watched = self.model(batch, watch=watch)
        self.accelerator.backward(loss * self.accelerator.num_processes)
        self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), watched

    def save_state(self) -> None:
        """Save the trainer's state; raises CheckpointError for weights that are not finite and for a full disk."""
        values: list[Tensor] = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        values += [value for moments in self.optimizer.state.values() for value in moments.values()]
        device = self.accelerator.device
        invalid = sum((~value.detach().isfinite().all()).to(device, torch.int64) for value in values)
        if self.accelerator.reduce(invalid, "sum").item():  # in every process
            raise self._diverged("weights or their moments are NaN or infinite")
        state.save_state(self.folder, self.accelerator, self.step, self.options)

    def _diverged(self, what: str) -> state.CheckpointError:
        before = state.latest_state(self.folder)
        kept = f" into another out folder; {before} is intact" if before else "; no state was saved before"
        return state.CheckpointError(
            f"{what} at step {self.step}: lower learning_rate, or use precision float32, and train again{kept}"
        )

    def _log(self, loss: float, watched: Tensor, rate: float) -> dict[str, Any]:
        tokens, windows = self.accelerator.reduce(watched, "sum")
        line = {
            "step": self.step,
            "loss": loss,
            "tokens_per_step": (tokens / windows).item(),
            "learning_rate": rate,
            "minutes": self.earlier_minutes + (time.monotonic() - self.started) / 60,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "peak_memory_bytes": peak_memory_bytes(self.accelerator.device),
        }
        if self.accelerator.is_main_process:
            with open(self.options.out / METRICS_FILE, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return line

    def _start_metrics(self) -> None:
        if not self.accelerator.is_main_process:
            return
        self.options.out.mkdir(parents=True, exist_ok=True)
        file = self.options.out / METRICS_FILE
        kept = [line for line in read_metrics(file) if line["step"] <= self.step] if self.options.resume else []
        file.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self.earlier_minutes = kept[-1].get("minutes", 0.0) if kept else 0.0

    @abstractmethod
    def save(self, results: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        """Write the head's folder with the results known so far, their provenance and the card made from it."""

    def samplings(self) -> dict[str, Sampling]:
        """Return the sampling of the texts that the head is measured on, by name of the result."""
        evaluator = FAMILIES[self.config.speculators_model_type].evaluator
        temperature, top_k, top_p = evaluator.default_sampling(self.config)
        return {"t1": Sampling(temperature, top_p, top_k=top_k), "t0": Sampling(0.0)}

    def measure(self, samples: dict[str, Samples]) -> dict[str, Any]:
        """Return the expected tokens/step of the head in the out folder, by temperature, for provenance.json."""
        evaluator, results = attach(self.options.out, self.target), {}
        for name, some in samples.items():
            found = evaluator.evaluate(some, self.samplings()[name], self.config.window - 1, self.options.seed)
            results[name] = asdict(found.figures)
        return results

    def comments(self, results: Mapping[str, Any]) -> list[str]:
        """Return lines to print about the results."""
        return []

    def finish(self, texts: list[Tensor], run: Mapping[str, Any]) -> None:
        """Write the head, validate the written head, and write it again with its results and plots."""
        options, out = self.options, self.options.out
        self.save({}, run)  # a failure below does not lose the head
        print(f"head written: {out} ({run['minutes']} minutes, {run['tokens_per_second']:,.0f} tokens/s)")
        results = self.validate(texts, 60 * run["minutes"] / 4) if texts else {}
        plot_loss(read_metrics(out / METRICS_FILE), out, self.loss_unit)
        plot_acceptance({getattr(options, self.kind_option): results}, out)
        self.save(results, run)
        lines = [
            f"expected tokens/step at T={self.samplings()[name].temperature:g}: {values['tokens_per_step']:.3f} "
            f"(s.e. {values['standard_error']:.3f}, {values['sequences']} held-out continuations)"
            for name, values in results.items()
        ]
        last = f"compare it with what vLLM serves: vllm-mtpc doctor {out}", f"serve it: vllm serve {out}"
        print(*lines, *self.comments(results), *last, sep="\n")

    def validate(self, texts: list[Tensor], seconds: float) -> dict[str, Any]:
        """Measure the head on the texts; without `evaluation_sequences` on a number that takes these seconds."""
        count, started = len(texts), time.monotonic()
        if self.options.evaluation_sequences is None:
            results = self.measure(self.continuations(texts[:MIN_SEQUENCES]))
            count = min(count, int(MIN_SEQUENCES * seconds / (time.monotonic() - started)) - MIN_SEQUENCES)
            if count <= MIN_SEQUENCES:
                print(f"measured on {MIN_SEQUENCES} texts, to save time; for more: --evaluation-sequences {len(texts)}")
                return results
        return self.measure(self.continuations(texts[:count]))

    def continuations(self, texts: list[Tensor]) -> dict[str, Samples]:
        """Return continuations of prompts by the target, by name of the result."""
        samples, ways, count = {}, self.samplings(), self.options.evaluation_tokens
        with Bar(total=len(texts) * len(ways), desc="held-out continuations", unit="text") as bar:
            more = {"overhang": self.config.window, "progress": bar.update}
            for name, sampling in ways.items():
                generator = torch.Generator(self.target.device).manual_seed(SEEDS[name])
                samples[name] = generate(self.target, texts, count, sampling, generator, **more)
        return samples


def held_out_prompts(options: TrainOptions, target: Target, documents: Documents) -> list[Tensor]:
    """Return prompts, [length] each, of held-out documents; none for `evaluation_sequences` 0. Raises UsageError."""
    count = SEQUENCES if options.evaluation_sequences is None else options.evaluation_sequences
    if not count:
        return []
    assert options.window is not None  # `with_defaults`
    texts = prompts(documents, count, PROMPT_TOKENS, options.seed)
    check_length(target.name, target.config, texts, options.evaluation_tokens + options.window, "--evaluation-tokens")
    return texts


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, without an incomplete last line."""
    lines: list[dict[str, Any]] = []
    with suppress(FileNotFoundError, ValueError):
        lines.extend(map(json.loads, file.read_text(encoding="utf-8").splitlines()))
    return lines

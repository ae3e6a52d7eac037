"""One training run, from options to a served folder: what every process of it executes."""

from __future__ import annotations

import errno
import os
import shlex
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from signal import SIGINT, Signals
from typing import TYPE_CHECKING, Any

import torch

from vllm_mtpc.checkpoint.locate import check_out
from vllm_mtpc.data.rows import PackingReport, Rows, pack, split_validation
from vllm_mtpc.data.sources import Documents, check_first_records, load_documents, size_of
from vllm_mtpc.engine.provenance import public
from vllm_mtpc.errors import MtpcError, UsageError, install
from vllm_mtpc.hf import Target, check_length, choose_device, load_target
from vllm_mtpc.hf.model import target_config, tokenizer_if_any
from vllm_mtpc.train.cache import data_fingerprint
from vllm_mtpc.train.card import typed
from vllm_mtpc.train.job import held_out_prompts
from vllm_mtpc.train.loop import METRICS_FILE, UNLIMITED, Trainer, peak_memory_bytes, read_metrics
from vllm_mtpc.train.options import STATE_FOLDER, TrainOptions, parse
from vllm_mtpc.train.state import paths

if TYPE_CHECKING:
    from accelerate import Accelerator

AGAIN = "the same command with --resume"
SEQ_LEN = 1024  # tokens of a row where none are named
RATE_BY_WIDTH, DEEP_RATE = 1.2, 0.6  # the default learning rate is this by the hidden size: docs/training.md
WINDOW_BYTES = 16  # of data for each window of a run: a window starts at a token, and few tokens have more bytes
LEAST_BYTES = 16 << 20  # read in any case, so that what is held out is varied


def _quiet(*args: Any, **kwargs: Any) -> None:
    """What processes other than the first one print."""


def train(options: TrainOptions, command: str | None = None, again: str = AGAIN) -> Path:
    """Trains a head by `settled` options and returns its folder; the same call in every process of the run.

    `command` is what was typed, where another process started this one; `again` what to type after an interruption.
    Raises an MtpcError for anything a user can mend, and SystemExit where a signal ended the steps; what was written
    before stays valid.
    """
    accelerator = make_accelerator(options)
    say = print if accelerator.is_main_process else _quiet
    target = read_target(options, accelerator.device)
    job = options.job(options, target)
    say(f"target {options.target}: vocabulary {target.vocab_size}, hidden size {target.hidden_size}, {target.dtype}")
    if job.partial_start:
        say(f"warning: the backbone starts in part at the target's layers; {job.partial_start}", file=sys.stderr)
    if options.dry_run:
        if accelerator.is_main_process:
            job.write({}, {"steps": 0})
            say(f"untrained head written: {options.out}")
        return options.out
    started = time.monotonic()
    rows, report, held_out = read_data(options, target, say)
    prompts = held_out_prompts(options, target, held_out)
    with accelerator.main_process_first():  # one process writes the cache, the others find it
        source = job.source(rows)
    windows = job.windows(source, accelerator.process_index, accelerator.num_processes)
    epochs = options.epochs or (0 if options.minutes else 1)
    steps = options.max_steps or (max(1, int(windows.steps_per_epoch() * epochs)) if epochs else UNLIMITED)
    trainer = Trainer(options, accelerator, job.drafter(), windows, steps)
    trainer.run()
    if trainer.stopping.signal:
        say(f"{Signals(trainer.stopping.signal).name}: ended after step {trainer.step:,}, its state is in "
            f"{trainer.folder}; to go on, type {again}; for a head now, with --max-steps {trainer.step}",
            file=sys.stderr)  # fmt: skip
        accelerator.wait_for_everyone()  # a starter that sees one process end would end the others at once
        accelerator.end_training()
        raise SystemExit(128 + trainer.stopping.signal)
    trained = trainer.weights()
    accelerator.end_training()  # the other processes need not wait for what follows
    if accelerator.is_main_process:
        peak = peak_memory_bytes(accelerator.device)
        now = {"tokens_per_second": trainer.tokens_per_second, "peak_memory_bytes": peak}
        lines = read_metrics(options.out / METRICS_FILE) or [now]  # of a finished run that is resumed they may be gone
        run = {
            "minutes": round((time.monotonic() - started) / 60, 1),
            "steps": trainer.step,
            "tokens": report.tokens,
            "documents": report.documents,
            "data_sha256": data_fingerprint(rows),
            "tokens_per_second": lines[-1]["tokens_per_second"],
            "peak_memory_bytes": max(line["peak_memory_bytes"] for line in lines),
            "processes": accelerator.num_processes,
        }
        job.finish(trained, prompts, run | ({"command": command} if command else {}))
    return options.out


def make_accelerator(options: TrainOptions) -> Accelerator:
    """Devices and processes, from what started this one (torchrun, Ray, or nothing)."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    device = choose_device(options.device)
    if options.device.startswith("cuda:"):
        torch.cuda.set_device(device)
    plugin = None
    if options.parallel == "fsdp":
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(
        cpu=options.device.startswith("cpu"),
        mixed_precision="no",  # the head's products alone are cast (train/losses.py): the circuit stays in float32
        log_with=None if options.track == "none" else options.track,
        project_dir=str(options.out),
        fsdp_plugin=plugin,
    )
    if options.track != "none":
        values = {key: str(value) for key, value in options.model_dump(mode="json").items()}
        accelerator.init_trackers("vllm_mtpc", config=values)
    return accelerator


def read_target(options: TrainOptions, device: torch.device) -> Target:
    """The target, its packing checked. Raises UsageError."""
    from vllm_mtpc.hf.attention import check_packing

    dtype = options.target_dtype if options.target_dtype == "auto" else getattr(torch, options.target_dtype)
    target = load_target(options.target, dtype, device, options.attention)
    check_packing(target.backbone, target.attention, device)
    return target


def read_data(
    options: TrainOptions, target: Target, say: Callable[..., None] = _quiet
) -> tuple[Rows, PackingReport, Documents]:
    """The documents to train on, packed, what became of them, and those held out. Raises UsageError without any.

    Of more data than the steps need, so much is read; but a folder of states is of all data, whatever the run that made
    it needed.
    """
    most, size = None, size_of(options.data)
    if options.max_steps is not None and not options.cache:
        most = max(LEAST_BYTES, WINDOW_BYTES * options.max_steps * options.windows_per_step)
    if most and most < size:
        say(f"data: about {most / 1e6:,.0f} of {size / 1e6:,.0f} MB are read, spread over all of it: what "
            f"{options.max_steps:,} steps need")  # fmt: skip

    def load(data: list[str], most_bytes: int | None) -> Documents:
        more: dict[str, Any] = {"split": options.split, "most_bytes": most_bytes, "vocab_size": target.vocab_size}
        return load_documents(data, target.tokenizer, **more)

    documents = load(options.data, most)
    if options.validation_data:
        held_out = load(options.validation_data, LEAST_BYTES)
    else:
        documents, held_out = split_validation(documents, options.validation_share, options.seed)
    assert options.seq_len is not None  # `settled`
    rows, report = pack(documents, options.seq_len, options.window, options.seed)
    say(f"data: {report.tokens:,} tokens of {report.documents:,} documents in {report.rows:,} rows, "
        f"{report.padding:.1%} padding, {report.dropped:,} documents too short")  # fmt: skip
    if report.warning:
        say(f"warning: {report.warning}", file=sys.stderr)
    return rows, report, held_out


def settled(options: TrainOptions) -> TrainOptions:
    """The options with the defaults that depend on the target, by its config alone.

    Raises UsageError or HeadConfigError for what can be refused before weights are loaded.
    """
    check_out(options.out)
    for key, folder in (("out", options.out), ("cache", options.cache)):
        if folder:  # nothing is made yet
            there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
            if not there.is_dir():
                raise UsageError(f"{key}={folder}: {there} is a file; name another folder")
            if not os.access(there, os.W_OK | os.X_OK):
                raise UsageError(f"{key}={folder}: no right to write to {there}; name another folder")
    names = [*options.data, *options.validation_data]
    size_of(names)
    if options.track != "none" and find_spec(options.track) is None:
        raise UsageError(f"track {options.track!r} is not installed; type: pip install {options.track}")
    choose_device(options.device)
    config = target_config(options.target)
    options.job.check_target(options, config)
    text = config.get_text_config()
    if options.evaluation_sequences != 0:
        check_length(options.target, text, [[0]], options.evaluation_tokens + options.window, "--evaluation-tokens")
    if not options.regenerate:
        check_first_records(names, options.split, tokenizer_if_any(options.target))
    longest = getattr(text, "max_position_embeddings", None) or sys.maxsize
    if options.seq_len is not None and options.seq_len > longest:
        raise UsageError(
            f"seq_len={options.seq_len}, but the target reads at most {longest} tokens; set seq_len to that or less, "
            "or leave it out"
        )
    rate = (DEEP_RATE if options.head == "backbone" else RATE_BY_WIDTH) / text.hidden_size
    rate = options.learning_rate or float(f"{rate:.2g}")
    return options.model_copy(update={"seq_len": options.seq_len or min(SEQ_LEN, longest), "learning_rate": rate})


def on_ray(options: TrainOptions) -> Path:
    """The same run on Ray Train, `ray_workers` of them. Paths must be seen by every node.

    Raises what a worker raised if a user can mend it, else an MtpcError in one line: Ray has logged the rest.
    """
    if find_spec("ray") is None:
        raise UsageError(f"ray_workers: Ray is not installed; type: {install('ray')}")
    import ray
    from ray.train import RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    # Paths in full: a worker starts in a folder of its own.
    folders = {"out": options.out.resolve(), "cache": options.cache and options.cache.resolve()}
    whole = options.model_copy(update={**paths(options.model_dump()), **folders, "ray_workers": 0})
    values = whole.model_dump(mode="json")
    command = shlex.join(map(public, typed()))
    has_gpu = torch.cuda.is_available() and options.device != "cpu"
    trainer = TorchTrainer(
        _ray_worker,
        train_loop_config={"options": values, "command": command},
        scaling_config=ScalingConfig(num_workers=options.ray_workers, use_gpu=has_gpu),
        run_config=RunConfig(name="vllm_mtpc", storage_path=str(Path(values["out"]) / "ray")),
    )
    is_ours = not ray.is_initialized()
    try:
        trainer.fit()
    except TrainingFailedError as error:
        if is_ours:
            ray.shutdown()  # prints what Ray still has to say: the error's line comes last
        raise cause(error) from None
    except (KeyboardInterrupt, SystemExit):  # Ray ends its workers on SIGINT, and this process with exit code 0
        state = options.out / STATE_FOLDER
        print(f"SIGINT: ended; a state saved before is in {state}; to go on, type {AGAIN}; for a head now, with "
              "--max-steps 1", file=sys.stderr)  # fmt: skip
        raise SystemExit(128 + SIGINT) from None
    return options.out


def cause(error: Exception) -> Exception:
    """Why a run on Ray failed: the error of a worker whose user can mend it, rather than those of its peers."""
    failures = getattr(error, "worker_failures", None) or {0: getattr(error, "controller_failure", error)}
    found = [getattr(failure, "_base_exc", failure) for _, failure in sorted(failures.items())]
    for one in found:
        if isinstance(one, MtpcError) or getattr(one, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            return one
    reason = next(reversed(str(found[0]).strip().splitlines()), "no reason given")
    return MtpcError(f"training on Ray failed ({type(found[0]).__name__}: {reason}); Ray's log above says where")


def _ray_worker(values: dict[str, Any]) -> None:
    train(parse(values["options"]), values["command"])

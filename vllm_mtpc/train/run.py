"""One training run, from options to a served folder: what every process of it executes."""

from __future__ import annotations

import errno
import shlex
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from signal import SIGINT, Signals
from typing import TYPE_CHECKING, Any

import torch

from vllm_mtpc.data.names import resolved
from vllm_mtpc.data.sources import size_of
from vllm_mtpc.engine.provenance import public
from vllm_mtpc.errors import MtpcError, UsageError, install
from vllm_mtpc.train import prepare
from vllm_mtpc.train.card import program
from vllm_mtpc.train.fingerprints import data_fingerprint
from vllm_mtpc.train.job import held_out_prompts
from vllm_mtpc.train.loop import METRICS_FILE, Trainer, read_metrics
from vllm_mtpc.train.memory import peak_memory_bytes
from vllm_mtpc.train.options import STATE_FOLDER, TrainOptions, parse

if TYPE_CHECKING:
    from accelerate import Accelerator


AGAIN = "the same command with --resume"


def train(options: TrainOptions, command: str | None = None, again: str = AGAIN) -> Path:
    """Trains a head and writes its folder; the same call in every process of the run. Returns the folder.

    `command` is what was typed, where another process started this one; `again` what to type after an interruption.
    Raises an MtpcError for anything a user can mend, and SystemExit where a signal ended the steps; what was written
    before stays valid.
    """
    prepare.check_before_work(options)
    options = prepare.settled(options)
    accelerator = make_accelerator(options)
    say = print if accelerator.is_main_process else _quiet
    target = prepare.read_target(options, accelerator.device)
    job = options.job(options, target)
    say(f"target {options.target}: vocabulary {target.vocab_size}, hidden size {target.hidden_size}, {target.dtype}")
    if options.dry_run:
        if accelerator.is_main_process:
            job.write({}, {"steps": 0})
            say(f"untrained head written: {options.out}")
        return options.out
    started = time.monotonic()
    most, size = prepare.most_bytes(options), size_of(options.data)
    if most and most < size:
        say(f"data: about {most / 1e6:,.0f} of {size / 1e6:,.0f} MB are read, spread over all of it: what "
            f"{options.max_steps:,} steps need")  # fmt: skip
    data = prepare.read_data(options, target)
    say(f"data: {data.report.tokens:,} tokens of {data.report.documents:,} documents in {data.report.rows:,} rows, "
        f"{data.report.padding:.1%} padding, {data.report.dropped:,} documents too short")  # fmt: skip
    if data.report.warning:
        say(f"warning: {data.report.warning}", file=sys.stderr)
    prompts = held_out_prompts(options, target, data.held_out)
    with accelerator.main_process_first():  # one process writes the cache, the others find it
        source = job.source(data.rows)
    windows = job.windows(source, accelerator.process_index, accelerator.num_processes)
    steps = (
        options.max_steps if options.max_steps is not None else max(1, int(windows.steps_per_epoch() * options.epochs))
    )
    trainer = Trainer(options, accelerator, job.drafter(), windows, steps)
    trainer.run()
    if trainer.stopping.signal:
        say(f"{Signals(trainer.stopping.signal).name}: ended after step {trainer.step:,} of {steps:,}, its state is in "
            f"{trainer.folder}; to go on, type {again}", file=sys.stderr)  # fmt: skip
        accelerator.wait_for_everyone()  # a starter that sees one process end would end the others at once
        accelerator.end_training()
        raise SystemExit(128 + trainer.stopping.signal)
    trained = trainer.weights()
    accelerator.end_training()  # the other processes need not wait for what follows
    if accelerator.is_main_process:
        metrics = read_metrics(options.out / METRICS_FILE)
        run = {
            "steps": trainer.step,
            "minutes": round((time.monotonic() - started) / 60, 1),
            "tokens": data.report.tokens,
            "documents": data.report.documents,
            "data_sha256": data_fingerprint(data.rows),
            # a finished run that is resumed logs nothing, and its metrics may be gone
            "tokens_per_second": metrics[-1]["tokens_per_second"] if metrics else trainer.tokens_per_second,
            "peak_memory_bytes": max(
                (line["peak_memory_bytes"] for line in metrics), default=peak_memory_bytes(accelerator.device)
            ),
            "processes": accelerator.num_processes,
            **({"command": command} if command else {}),
        }
        job.finish(trained, prompts, run)
    return options.out


def make_accelerator(options: TrainOptions) -> Accelerator:
    """Devices and processes, from what started this one (torchrun, Ray, or nothing)."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    if options.device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise UsageError(f"device {options.device!r}: torch sees no CUDA device; set device to auto")
        if ":" in options.device:
            torch.cuda.set_device(options.device)
    elif options.device not in ("auto", "cpu"):
        raise UsageError(f"device {options.device!r}: allowed are auto, cpu, cuda and cuda:N")
    if options.track != "none" and find_spec(options.track) is None:
        raise UsageError(f"track {options.track!r} is not installed; type: pip install {options.track}")
    plugin = None
    if options.parallel == "fsdp":
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(
        cpu=options.device == "cpu",
        mixed_precision="no",  # the head's products alone are cast (train/losses.py): the circuit stays in float32
        log_with=None if options.track == "none" else options.track,
        project_dir=str(options.out),
        fsdp_plugin=plugin,
    )
    if options.track != "none":
        values = {key: str(value) for key, value in options.model_dump(mode="json").items()}
        accelerator.init_trackers("vllm_mtpc", config=values)
    return accelerator


def _quiet(*args: Any, **kwargs: Any) -> None:
    """What processes other than the first one print."""


def on_ray(options: TrainOptions) -> Path:
    """The same run on Ray Train, `ray_workers` of them. Paths must be seen by every node.

    Raises what a worker raised if a user can mend it, else an MtpcError in one line: Ray has logged the rest.
    """
    if find_spec("ray") is None:
        raise UsageError(f"ray_workers: Ray is not installed; type: {install('ray')}")
    import ray
    from ray.train import RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    values = absolute(options).model_dump(mode="json") | {"ray_workers": 0}
    command = shlex.join([*program(sys.argv[0]), *map(str, map(public, sys.argv[1:]))])
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
        print(f"SIGINT: ended; a state saved before is in {state}; to go on, type {AGAIN}", file=sys.stderr)
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


def absolute(options: TrainOptions) -> TrainOptions:
    """The options with paths that do not depend on the folder a worker starts in."""
    return options.model_copy(
        update={
            "target": resolved(options.target),
            "data": [resolved(name) for name in options.data],
            "validation_data": [resolved(name) for name in options.validation_data],
            "init_from": resolved(options.init_from) if options.init_from else None,
            "out": options.out.resolve(),
            "cache": options.cache.resolve() if options.cache else None,
        }
    )

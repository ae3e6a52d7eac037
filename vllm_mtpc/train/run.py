"""One training run, from options to a folder that can be served, as every process of it executes it."""

from __future__ import annotations

import errno
import os
import pickle
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from signal import SIGINT, Signals
from typing import TYPE_CHECKING, Any

import torch

from vllm_mtpc.batch.command import map_on_ray
from vllm_mtpc.checkpoint.locate import check_out
from vllm_mtpc.data.rows import PackingReport, Rows, pack, split_validation
from vllm_mtpc.data.sources import Documents, check_first_records, load_documents, size_of
from vllm_mtpc.engine.options import EngineOptions
from vllm_mtpc.engine.provenance import public
from vllm_mtpc.engine.served_target import load_served_target
from vllm_mtpc.errors import MtpcError, UsageError, install
from vllm_mtpc.hf import Target, check_length, choose_device, load_target
from vllm_mtpc.hf.attention import check_packing
from vllm_mtpc.hf.model import target_config, tokenizer_if_any
from vllm_mtpc.report import check_folder
from vllm_mtpc.train.cache import SafetensorError, Shard, data_fingerprint, write_shard
from vllm_mtpc.train.card import command_line
from vllm_mtpc.train.options import STATE_FOLDER, TrainOptions, parse
from vllm_mtpc.train.state import absolute_paths
from vllm_mtpc.train.trainer import METRICS_FILE, Trainer, held_out_prompts, peak_memory_bytes, read_metrics

if TYPE_CHECKING:
    from accelerate import Accelerator

AGAIN = "the same command with --resume"
SEQ_LEN = 1024  # default tokens of a row
RATE_BY_WIDTH, BACKBONE_RATE = 1.2, 0.6  # the default learning rate is this by the hidden size: docs/training.md
WINDOW_BYTES = 16  # of data for each window of a run: a window starts at a token, and few tokens have more bytes
MIN_BYTES = 16 << 20  # read in any case, so that the held-out text is varied


def train(options: TrainOptions, command: str | None = None, again: str = AGAIN, target: Target | None = None) -> Path:
    """Train a head and return its folder; every process of the run calls it.

    Args:
        options: Options, `settled`.
        command: The user's command, if another process started this one.
        again: Text that tells the user how to continue after an interruption.
        target: The target, if it is loaded.

    Raises:
        MtpcError: The input is wrong; the message is one line.
        SystemExit: A signal ended the steps. The state saved before is valid.
    """
    accelerator = make_accelerator(options)
    log = accelerator.print
    target = target or read_target(options, accelerator.device)
    trainer: Trainer = options.trainer(options, target, accelerator)
    log(f"target {options.target}: vocabulary {target.vocab_size}, hidden size {target.hidden_size}, {target.dtype}")
    if trainer.partial_start:
        log(f"warning: the backbone starts in part at the target's layers; {trainer.partial_start}", file=sys.stderr)
    if options.dry_run:
        if accelerator.is_main_process:
            trainer.save({}, {"steps": 0})
            log(f"untrained head written: {options.out}")
        return options.out
    started = time.monotonic()
    rows, report, held_out = read_data(options, target, log)
    prompts = held_out_prompts(options, target, held_out)  # before training: they may be refused
    trainer.setup(rows)
    trainer.train()
    if trainer.stopping.signal:
        log(f"{Signals(trainer.stopping.signal).name}: ended after step {trainer.step:,}, its state is in "
            f"{trainer.folder}; to go on, type {again}; for a head now, with --max-steps {trainer.step}",
            file=sys.stderr)  # fmt: skip
        accelerator.wait_for_everyone()  # torchrun ends the other processes when one ends
        accelerator.end_training()
        raise SystemExit(128 + trainer.stopping.signal)
    weights = trainer.weights()
    accelerator.end_training()  # the other processes do not wait for the evaluation
    if accelerator.is_main_process:
        peak = peak_memory_bytes(accelerator.device)
        now = {"tokens_per_second": trainer.tokens_per_second, "peak_memory_bytes": peak}
        lines = read_metrics(options.out / METRICS_FILE) or [now]  # a finished run that is resumed may have none
        run = {
            "minutes": round(trainer.earlier_minutes + (time.monotonic() - started) / 60, 1),
            "steps": trainer.step,
            "tokens": report.tokens,
            "documents": report.documents,
            "data_sha256": data_fingerprint(rows),
            "tokens_per_second": lines[-1]["tokens_per_second"],
            "peak_memory_bytes": max(line["peak_memory_bytes"] for line in lines),
            "processes": accelerator.num_processes,
            "states": f"{target.states} {version(target.states)}",
        }
        trainer.finish(weights, prompts, run | ({"command": command} if command else {}))
    return options.out


def make_accelerator(options: TrainOptions) -> Accelerator:
    """Return the devices and processes of the run, started by torchrun, Ray or alone."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    device = choose_device(options.device)
    if options.device.startswith("cuda:"):
        torch.cuda.set_device(device)
    is_fsdp = options.parallel == "fsdp"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap") if is_fsdp else None
    # losses.py casts the head's products: the circuit stays in float32
    return Accelerator(cpu=options.device.startswith("cpu"), mixed_precision="no", fsdp_plugin=plugin)


def read_target(options: TrainOptions, device: torch.device) -> Target:
    """Load the target, or what is needed of one that vLLM runs, and check attention over packed rows."""
    if options.states_of(target_config(options.target)) == "vllm":
        drafter = options.hosted.serving(Path()) if options.hosted else None
        served = load_served_target(options.target, options.target_dtype, device, options.engine, drafter)
        served.kept_bytes = 0 if drafter else options.cache_bytes  # responses are generated without the drafter
        return served
    target = load_target(options.target, options.target_dtype, device, options.attention)
    check_packing(target.backbone, target.attention, device)
    return target


def read_data(
    options: TrainOptions, target: Target, log: Callable[..., None] = print
) -> tuple[Rows, PackingReport, Documents]:
    """Return the packed training rows, their report, and the held-out documents.

    Of more data than `max_steps` needs a part is read; a cache of states holds all data.

    Raises:
        UsageError: The data cannot be read or holds nothing to train on.
    """
    most, size = None, size_of(options.data)
    if options.max_steps is not None and not options.cache:
        most = max(MIN_BYTES, WINDOW_BYTES * options.max_steps * options.windows_per_step)
    if most and most < size:
        log(f"data: about {most / 1e6:,.0f} of {size / 1e6:,.0f} MB are read, which {options.max_steps:,} "
            "steps need")  # fmt: skip

    load = partial(load_documents, tokenizer=target.tokenizer, split=options.split, vocab_size=target.vocab_size)
    documents = load(options.data, most_bytes=most)
    if options.validation_data:
        held_out = load(options.validation_data, most_bytes=MIN_BYTES)
    else:
        documents, held_out = split_validation(documents, options.seed)
    assert options.seq_len is not None  # `settled`
    rows, report = pack(documents, options.seq_len, options.window, options.seed)
    log(f"data: {report.tokens:,} tokens of {report.documents:,} documents in {report.rows:,} rows, "
        f"{report.padding:.1%} padding, {report.dropped:,} documents too short")  # fmt: skip
    if report.warning:
        log(f"warning: {report.warning}", file=sys.stderr)
    return rows, report, held_out


def settled(options: TrainOptions) -> TrainOptions:
    """Return the options with the defaults that depend on the target's config.

    Raises:
        MtpcError: Options, paths or data are wrong. No weights are loaded before.
    """
    check_out(options.out)
    names = [*options.data, *options.validation_data]
    size_of(names)
    choose_device(options.device)
    config = target_config(options.target)
    options.trainer.check_target(options, config)
    text = config.get_text_config()
    if options.evaluation_sequences != 0:
        check_length(options.target, text, [[0]], options.evaluation_tokens + options.window, "--evaluation-tokens")
    if not options.regenerate:
        check_first_records(names, options.split, tokenizer_if_any(options.target))
    is_divided = int(os.environ.get("WORLD_SIZE", "1")) > 1 or options.ray_workers
    if options.states_of(config) == "vllm" and is_divided and not options.cache:
        raise UsageError(
            "states of vLLM with several processes: an engine would start in each; type vllm-mtpc cache --states vllm "
            "first and train with --cache"
        )
    longest = getattr(text, "max_position_embeddings", None) or sys.maxsize
    if options.seq_len is not None and options.seq_len > longest:
        raise UsageError(
            f"seq_len={options.seq_len}, but the target reads at most {longest} tokens; set seq_len to that or less, "
            "or leave it out"
        )
    check_folder(options.cache, "--cache")
    check_folder(options.out)
    rate = (BACKBONE_RATE if options.head == "backbone" else RATE_BY_WIDTH) / text.hidden_size
    rate = options.learning_rate or float(f"{rate:.2g}")
    return options.model_copy(update={"seq_len": options.seq_len or min(SEQ_LEN, longest), "learning_rate": rate})


def on_ray(options: TrainOptions) -> Path:
    """Train on Ray Train with `ray_workers` workers; every node needs access to the paths.

    Raises:
        MtpcError: The error of a worker, or one line about Ray's failure.
    """
    if find_spec("ray") is None:
        raise UsageError(f"ray_workers: Ray is not installed; type: {install('ray')}")
    import ray
    from ray.train import RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    # absolute paths: every worker has its own working directory
    values = options.model_dump(mode="json") | absolute_paths(options.model_dump()) | {"ray_workers": 0}
    values |= {"out": str(options.out.resolve()), "cache": options.cache and str(options.cache.resolve())}
    has_gpu = torch.cuda.is_available() and options.device != "cpu"
    trainer = TorchTrainer(
        _ray_worker,
        train_loop_config={"options": values, "command": shlex.join(map(public, command_line()))},
        scaling_config=ScalingConfig(num_workers=options.ray_workers, use_gpu=has_gpu),
        run_config=RunConfig(name="vllm_mtpc", storage_path=str(Path(values["out"]) / "ray")),
    )
    is_ours = not ray.is_initialized()
    try:
        trainer.fit()
    except TrainingFailedError as error:
        if is_ours:
            ray.shutdown()  # flushes Ray's output: the error is the last line
        raise cause(error) from None
    except (KeyboardInterrupt, SystemExit):  # Ray ends its workers on SIGINT, and this process with exit code 0
        state = options.out / STATE_FOLDER
        print(f"SIGINT: ended; a state saved before is in {state}; to go on, type {AGAIN}; for a head now, with "
              "--max-steps 1", file=sys.stderr)  # fmt: skip
        raise SystemExit(128 + SIGINT) from None
    return options.out


def cause(error: Exception) -> Exception:
    """Return the error of a run on Ray: one that the user can fix rather than those of the other workers."""
    failures = getattr(error, "worker_failures", None) or {0: getattr(error, "controller_failure", error)}
    found = [getattr(failure, "_base_exc", failure) for _, failure in sorted(failures.items())]
    for one in found:
        if isinstance(one, MtpcError) or getattr(one, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            return one
    reason = next(reversed(str(found[0]).strip().splitlines()), "no reason given")
    return MtpcError(f"training on Ray failed ({type(found[0]).__name__}: {reason}); see Ray's log above")


def _ray_worker(values: dict[str, Any]) -> None:
    train(parse(values["options"]), values["command"])


class ShardWriter:
    """An actor of Ray Data with a target of its own, whose engine starts with the first shard."""

    target: Target | None = None

    def __init__(self, options: TrainOptions) -> None:
        self.options = options

    def __call__(self, item: dict[str, bytes]) -> dict[str, Any]:
        """Write item["shard"] and return the number of its rows, or an error of one line."""
        try:
            self.target = self.target or read_target(self.options, choose_device(self.options.device))
            return {"rows": sum(write_shard(pickle.loads(item["shard"]), self.target)), "error": ""}
        except (MtpcError, OSError, SafetensorError) as error:
            return {"rows": 0, "error": str(error)}


def write_on_ray(options: TrainOptions, engines: int, shards: list[Shard]) -> Iterator[int]:
    """Write shards by `engines` engines on Ray; yields the number of rows of each that is complete; raises OSError."""
    options = options.model_copy(update=absolute_paths(options.model_dump()))  # actors have other working directories
    engine = {"model": options.target, "replicas": engines, "engine": options.engine}
    resources = EngineOptions.model_validate(engine | ({"gpus": 0} if options.device == "cpu" else {}))
    items = [{"shard": pickle.dumps(shard.copy())} for shard in shards]
    for done in map_on_ray(ShardWriter, (options,), resources, items) if items else ():
        if done["error"]:
            raise OSError(done["error"])
        yield done["rows"]

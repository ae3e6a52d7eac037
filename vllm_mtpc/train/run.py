"""One training run, from options to a folder that can be served, as every process of it executes it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from signal import Signals

import torch

from vllm_mtpc.checkpoint.locate import check_out
from vllm_mtpc.data.rows import PackingReport, Rows, coverage, pack, split_validation
from vllm_mtpc.data.sources import Documents, check_first_records, load_documents, size_of
from vllm_mtpc.engine.served_target import load_served_target
from vllm_mtpc.errors import UsageError
from vllm_mtpc.heads import default_window
from vllm_mtpc.heads.trunk.drafter import DrafterOptions
from vllm_mtpc.hf import Target, check_length, choose_device, load_target
from vllm_mtpc.hf.attention import check_packing
from vllm_mtpc.hf.model import target_config, tokenizer_if_any
from vllm_mtpc.report import check_folder
from vllm_mtpc.train.cache import data_fingerprint
from vllm_mtpc.train.memory import keep_freed_memory
from vllm_mtpc.train.options import TrainOptions
from vllm_mtpc.train.trainer import METRICS_FILE, Trainer, held_out_prompts, peak_memory_bytes, read_metrics

SEQ_LEN = 1024  # default tokens of a row
RATE_BY_WIDTH, BACKBONE_RATE = 1.2, 0.6  # the default learning rate is this by the hidden size: docs/training.md
KEPT_BYTES = 1 << 33  # of states of responses, on disk until they are trained on
WINDOW_BYTES = 16  # of data for each window of a run: a window starts at a token, and few tokens have more bytes
MIN_BYTES = 16 << 20  # read in any case, so that the held-out text is varied


def train(options: TrainOptions, target: Target | None = None) -> Path:
    """Train a head and return its folder; every process of the run calls it with the options of `with_defaults`.

    Raises SystemExit after a signal ended the steps; the state is saved then.
    """
    from accelerate import Accelerator

    device = choose_device(options.device)
    if device.type == "cpu":
        keep_freed_memory()
    if options.device.startswith("cuda:"):
        torch.cuda.set_device(device)
    # losses.py casts the head's products: the circuit stays in float32
    accelerator = Accelerator(cpu=options.device.startswith("cpu"), mixed_precision="no")
    log = accelerator.print
    target = target or read_target(options, accelerator.device)
    log(f"target {options.target}: vocabulary {target.vocab_size}, hidden size {target.hidden_size}, {target.dtype}")
    rows, report, held_out = read_data(options, target, log)
    trainer: Trainer = options.trainer(options, target, accelerator, rows)
    if trainer.ids is not None:
        held = torch.cat([torch.from_numpy(tokens[trained]) for tokens, trained in held_out])
        shares = coverage(trainer.ids, rows.tokens[rows.trained]), coverage(trainer.ids, held)
        log("draft vocabulary: {:,} of {:,} ids, {:.2%} of the text, {:.2%} of held-out text".format(
            len(trainer.ids), target.vocab_size, *shares))  # fmt: skip
    if trainer.partial_start:
        log(f"warning: the backbone starts in part at the target's layers; {trainer.partial_start}", file=sys.stderr)
    if options.dry_run:
        if accelerator.is_main_process:
            trainer.save({}, {"steps": 0})
            log(f"untrained head written: {options.out}")
        return options.out
    started = time.monotonic()
    prompts = held_out_prompts(options, target, held_out)  # before training: they may be refused
    trainer.setup(rows)
    trainer.train()
    if trainer.stopping.signal:
        log(f"{Signals(trainer.stopping.signal).name}: ended after step {trainer.step:,}, its state is in "
            f"{trainer.folder}; to go on, type the same command with --resume; for a head now, with "
            f"--max-steps {trainer.step}",
            file=sys.stderr)  # fmt: skip
        accelerator.wait_for_everyone()  # torchrun ends the other processes when one ends
        accelerator.end_training()
        raise SystemExit(128 + trainer.stopping.signal)
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
        trainer.finish(prompts, run)
    return options.out


def read_target(options: TrainOptions, device: torch.device) -> Target:
    """Load the target, or what is needed of one that vLLM runs, and check attention over packed rows."""
    if options.states_of(target_config(options.target)) == "vllm":
        drafter = None
        if options.trunk.get("kind") == "drafter":
            section = {**DrafterOptions.defaults({}), **options.trunk}
            drafter = DrafterOptions.model_validate(section).serving(Path())
        served = load_served_target(options.target, options.target_dtype, device, options.engine, drafter)
        served.kept_bytes = 0 if drafter else KEPT_BYTES  # responses are generated without the drafter
        return served
    target = load_target(options.target, options.target_dtype, device, options.attention)
    check_packing(target.backbone, target.attention, device)
    return target


def read_data(
    options: TrainOptions, target: Target, log: Callable[..., None] = print
) -> tuple[Rows, PackingReport, Documents]:
    """Return the packed training rows, their report, and the held-out documents. Raises UsageError.

    Of more data than `max_steps` needs a part is read; a cache of states holds all data.
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
    assert options.seq_len is not None and options.window is not None  # `with_defaults`
    rows, report = pack(documents, options.seq_len, options.window, options.seed)
    log(f"data: {report.tokens:,} tokens of {report.documents:,} documents in {report.rows:,} rows, "
        f"{report.padding:.1%} padding, {report.dropped:,} documents too short")  # fmt: skip
    if report.warning:
        log(f"warning: {report.warning}", file=sys.stderr)
    return rows, report, held_out


def with_defaults(options: TrainOptions) -> TrainOptions:
    """Return the options with the defaults that depend on the target's config.

    Raises MtpcError for wrong options, paths and data, before weights are loaded.
    """
    check_out(options.out)
    names = [*options.data, *options.validation_data]
    size_of(names)
    choose_device(options.device)
    config, trainer = target_config(options.target), options.trainer
    text = config.get_text_config()
    sizes = {"vocab_size": text.vocab_size, "hidden_size": text.hidden_size}
    trainer.check_start(options, trainer.head_config(options, config, options.target, sizes))
    window = options.window or default_window(text.vocab_size)
    if options.evaluation_sequences != 0:
        check_length(options.target, text, [[0]], options.evaluation_tokens + window, "--evaluation-tokens")
    if not options.regenerate:
        check_first_records(names, options.split, tokenizer_if_any(options.target))
    is_divided = int(os.environ.get("WORLD_SIZE", "1")) > 1
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
    rate = (BACKBONE_RATE if options.trunk.get("kind") == "backbone" else RATE_BY_WIDTH) / text.hidden_size
    rate = options.learning_rate or float(f"{rate:.2g}")
    seq_len = options.seq_len or min(SEQ_LEN, longest)
    return options.model_copy(update={"window": window, "seq_len": seq_len, "learning_rate": rate})

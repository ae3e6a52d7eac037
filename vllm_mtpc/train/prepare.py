"""What a run starts from: the target and the packed rows of its data; what is refused before either is loaded."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm_mtpc.checkpoint import read_config, resolve_head
from vllm_mtpc.checkpoint.locate import is_head
from vllm_mtpc.data.rows import PackingReport, Rows, pack, split_validation
from vllm_mtpc.data.sources import load_documents, size_of
from vllm_mtpc.errors import UsageError
from vllm_mtpc.hf import load_target
from vllm_mtpc.hf.model import target_config
from vllm_mtpc.train.options import TrainOptions

if TYPE_CHECKING:
    from vllm_mtpc.data.documents import Documents
    from vllm_mtpc.hf import Target

SEQ_LEN = 1024  # tokens of a row where none are named
WINDOW_BYTES = 16  # of data for each window of a run: a window starts at a token, and few tokens have more bytes
LEAST_BYTES = 16 << 20  # read in any case, so that what is held out is varied


@dataclass(frozen=True)
class Data:
    """The documents of a run: packed to train on, and held out."""

    rows: Rows
    report: PackingReport
    held_out: Documents


def read_target(options: TrainOptions, device: torch.device) -> Target:
    """The target, its packing checked. Raises UsageError."""
    from vllm_mtpc.hf.attention import check_packing

    dtype = options.target_dtype if options.target_dtype == "auto" else getattr(torch, options.target_dtype, None)
    if not isinstance(dtype, (str, torch.dtype)):
        raise UsageError(f"target_dtype {options.target_dtype!r}: allowed are auto, float32, bfloat16, float16")
    target = load_target(options.target, dtype, device, options.attention)
    check_packing(target.backbone, target.attention, device)
    return target


def read_data(options: TrainOptions, target: Target) -> Data:
    """Documents of the data, packed. Raises UsageError where there is nothing to train on."""

    def load(data: list[str], most_bytes: int | None) -> Documents:
        return load_documents(
            data,
            target.tokenizer,
            split=options.split,
            seed=options.seed,
            most_bytes=most_bytes,
            vocab_size=target.vocab_size,
        )

    documents = load(options.data, most_bytes(options))
    if options.validation_data:
        held_out = load(options.validation_data, LEAST_BYTES)
    else:
        documents, held_out = split_validation(documents, options.validation_share, options.seed)
    rows, report = pack(documents, options.seq_len, options.window, options.seed)
    return Data(rows, report, held_out)


def most_bytes(options: TrainOptions) -> int | None:
    """How much of the data is read where there is more: what the steps need; None: all.

    A folder of states is of all data, whatever the run that made it needed.
    """
    if options.max_steps is None or options.cache:
        return None
    return max(LEAST_BYTES, WINDOW_BYTES * options.max_steps * options.windows_per_step)


def check_before_work(options: TrainOptions) -> None:
    """What can be refused before anything is loaded."""
    if options.init_from:
        read_config(resolve_head(options.init_from))
    if options.out.exists() and not options.out.is_dir():
        raise UsageError(f"out={options.out} is a file; name a folder")
    if options.out.joinpath("config.json").is_file() and not is_head(options.out):
        raise UsageError(f"out={options.out} holds another model's config.json; name another folder")
    _check_place("out", options.out)
    if options.cache:
        _check_place("cache", options.cache)
    size_of([*options.data, *options.validation_data])


def _check_place(key: str, folder: Path) -> None:
    """Raises UsageError where a folder cannot be made or written to; makes nothing."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise UsageError(f"{key}={folder}: {there} is a file; name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{key}={folder}: no right to write to {there}; name another folder")


def settled(options: TrainOptions) -> TrainOptions:
    """The options with a seq_len that the target reads, by its config alone. Raises UsageError."""
    longest = getattr(target_config(options.target).get_text_config(), "max_position_embeddings", None) or sys.maxsize
    if options.seq_len is None:
        return options.model_copy(update={"seq_len": min(SEQ_LEN, longest)})
    if options.seq_len > longest:
        raise UsageError(
            f"seq_len={options.seq_len}, but the target reads at most {longest} tokens; set seq_len to that or less, "
            "or leave it out"
        )
    return options

"""What a run starts from: the target, the packed rows of its data, their hidden states, and an initial head."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm_mtpc.checkpoint import load_head, read_config, resolve_head
from vllm_mtpc.checkpoint.locate import verifier_name
from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.data.rows import PackingReport, Rows, pack, split_validation
from vllm_mtpc.data.sources import load_documents, size_of
from vllm_mtpc.errors import UsageError
from vllm_mtpc.heads import build_head, head_options
from vllm_mtpc.heads.init import init_from_head, init_from_lm_head
from vllm_mtpc.hf import load_target
from vllm_mtpc.hf.names import target_config
from vllm_mtpc.train.cache import Computed, HiddenSource, write_cache
from vllm_mtpc.train.cache_files import DTYPES, INDEX_FILE, data_fingerprint, read_index
from vllm_mtpc.train.options import TrainOptions
from vllm_mtpc.train.windows import WindowSource, default_block_rows

if TYPE_CHECKING:
    from vllm_mtpc.data.documents import Documents
    from vllm_mtpc.heads.adapters import DraftLayers
    from vllm_mtpc.heads.base import Head
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


def pick_device(name: str) -> torch.device:
    """The device of a single process: `auto` is CUDA where there is one."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def read_target(options: TrainOptions, device: torch.device) -> Target:
    """The target, its packing checked. Raises UsageError or UsageError."""
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


def hidden_source(options: TrainOptions, target: Target, rows: Rows) -> HiddenSource:
    """Hidden states of the rows: from the cache folder (written if need be), or computed when they are needed."""
    if options.lora_layers:
        return Computed(target, rows, layer=target.config.num_hidden_layers - options.lora_layers)
    if options.cache is None:
        return Computed(target, rows)
    if not (options.cache / INDEX_FILE).is_file():
        return write_cache(options.cache, target, rows)
    made = read_index(options.cache)  # by `vllm-mtpc cache`, in the dtype and shards that were asked for there
    return write_cache(options.cache, target, rows, made.rows_per_shard, DTYPES[made.dtype])


def window_source(
    options: TrainOptions, target: Target, source: HiddenSource, rank: int = 0, world: int = 1
) -> WindowSource:
    """The steps of the run. Draft layers run over whole rows, so a block then holds about one step's windows."""
    block_rows = options.block_rows or default_block_rows(options.seq_len, target.hidden_size, target.dtype)
    if options.lora_layers and not options.block_rows:
        per_row = max(1, int(source.rows.trained.sum()) // len(source.rows.trained))
        block_rows = max(world, options.windows_per_step // per_row)
    return WindowSource(source, options.window, options.windows_per_step, block_rows, options.seed, rank, world)


def head_config(options: TrainOptions, target: Target) -> HeadConfig:
    """The config of the head that the run writes."""
    return HeadConfig.create(
        circuit=options.circuit,
        window=options.window,
        num_components=options.num_components,
        target={**target.model.config.to_dict(), **_sizes(target)},
        verifier=options.verifier or verifier_name(options.target, options.out),
        head=options.head,
        num_speculative_tokens=options.num_speculative_tokens,
        lora_layers=options.lora_layers,
        **{name: getattr(options, name) for name in head_options()},
    )


def initial_head(options: TrainOptions, config: HeadConfig, target: Target) -> Head:
    """A head as the run starts it: another head's weights, the target's lm_head, or small random ones; float32."""
    torch.manual_seed(options.seed)
    head = build_head(config)
    if options.init_from:
        init_from_head(head, load_head(resolve_head(options.init_from))[1], options.seed)
    elif options.init == "lm-head":
        init_from_lm_head(head, target.lm_head.weight.float().cpu(), options.seed)
    if head.needs_lm_head:
        head.bind_lm_head(target.logits)
    return head


def draft_layers(options: TrainOptions, target: Target) -> DraftLayers | None:
    """The target's last layers with adapters, where the run has some."""
    if not options.lora_layers:
        return None
    from vllm_mtpc.heads.adapters import DraftLayers

    return DraftLayers(target, layers=options.lora_layers, rank=options.lora_rank, alpha=options.lora_alpha)


def serve_line(out: Path, needs_v2: bool) -> str:
    """What to type for a head. Without a GPU vLLM's Model Runner V2 runs in Triton's interpreter, by a script."""
    if not needs_v2 or torch.cuda.is_available():
        return f"serve it: vllm serve {out}"
    return (
        f"serve it: scripts/v2_on_cpu.sh vllm serve {out} (in the checkout of vllm_mtpc: it needs vLLM's Model Runner "
        f"V2, which has no other way without a GPU; with one: vllm serve {out})"
    )


def check_before_work(options: TrainOptions) -> None:
    """What can be refused before anything is loaded."""
    if options.init_from:
        read_config(resolve_head(options.init_from))
    if options.out.exists() and not options.out.is_dir():
        raise UsageError(f"out={options.out} is a file; name a folder")
    if options.out.joinpath("config.json").is_file():
        from vllm_mtpc.checkpoint.locate import is_head

        if not is_head(options.out):
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
    """The options with a seq_len that the target reads, by its config alone. Raises UsageError, UsageError."""
    longest = getattr(target_config(options.target).get_text_config(), "max_position_embeddings", None) or sys.maxsize
    if options.seq_len is None:
        return options.model_copy(update={"seq_len": min(SEQ_LEN, longest)})
    if options.seq_len > longest:
        raise UsageError(
            f"seq_len={options.seq_len}, but the target reads at most {longest} tokens; set seq_len to that or less, "
            "or leave it out"
        )
    return options


def fingerprint(rows: Rows) -> str:
    """SHA-256 of the packed rows: the same data, tokenised and packed the same way."""
    return data_fingerprint(rows)


def _sizes(target: Target) -> dict[str, int]:
    """Sizes of the language model itself, where the config is of a composite model."""
    return {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}

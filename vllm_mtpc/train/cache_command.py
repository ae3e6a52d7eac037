"""`vllm-mtpc cache`: the target's hidden states of packed data on disk, for `vllm-mtpc train --cache`."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_mtpc.flags import add_flags, typed
from vllm_mtpc.train.options import TrainOptions, parse

SHARED = (
    "target", "data", "split", "validation_data", "seq_len", "seed", "target_dtype", "device", "attention",
    "states", "engine",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="continued if it exists")
    add_flags(parser, TrainOptions, only=SHARED)


def run(args: argparse.Namespace) -> int:
    from vllm_mtpc.hf import choose_device
    from vllm_mtpc.train.cache import write_cache
    from vllm_mtpc.train.run import read_data, read_target, with_defaults

    options = with_defaults(parse({**typed(args, TrainOptions), "evaluation_sequences": 0}, "cache"))
    target = read_target(options, choose_device(options.device))
    rows, report, _ = read_data(options, target)
    shards = write_cache(args.out.resolve(), target, rows).shards
    size, dtype = sum(shard.nbytes for shard in shards), str(shards[0].dtype).removeprefix("torch.")
    print(f"{args.out}: {report.rows:,} rows, {report.tokens:,} tokens, {size / 1e9:.3f} GB, {dtype}")
    return 0

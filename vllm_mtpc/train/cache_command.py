"""`vllm-mtpc cache`: the target's hidden states of packed data on disk, for `vllm-mtpc train --cache`."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from vllm_mtpc.errors import UsageError
from vllm_mtpc.flags import add_flags, typed
from vllm_mtpc.train.options import TrainOptions, parse

SHARED = (
    "target", "data", "split", "validation_data", "seq_len", "seed", "target_dtype", "device", "attention",
    "states", "engine",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vllm-mtpc cache`."""
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="continued if it exists")
    add_flags(parser, TrainOptions, only=SHARED)
    parser.add_argument("--ray", type=int, default=0, metavar="N", help="write by N engines on Ray; 0: in this process")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="on disk")


def run(args: argparse.Namespace) -> int:
    """Write the cache and return the exit code."""
    from vllm_mtpc.hf import choose_device
    from vllm_mtpc.hf.model import target_config
    from vllm_mtpc.train.cache import DTYPES, write_cache
    from vllm_mtpc.train.run import read_data, read_target, settled, write_on_ray

    shared = {name: value for name, value in typed(args, TrainOptions).items() if name in SHARED}
    options = settled(parse({**shared, "out": args.out, "evaluation_sequences": 0}, "cache"))
    if args.ray and (args.ray < 0 or options.states_of(target_config(options.target)) != "vllm"):
        raise UsageError(f"--ray {args.ray}: allowed are 0 and more engines of vLLM; type --states vllm --ray 2")
    target = read_target(options, choose_device("cpu" if args.ray else options.device))
    rows, report, _ = read_data(options, target, print)
    write = partial(write_on_ray, options, args.ray) if args.ray else None
    shards = write_cache(args.out.resolve(), target, rows, DTYPES.get(args.dtype), write=write).shards
    size, dtype = sum(shard.nbytes for shard in shards), str(shards[0].dtype).removeprefix("torch.")
    print(f"{args.out}: {report.rows:,} rows, {report.tokens:,} tokens, {size / 1e9:.3f} GB, {dtype}")
    return 0

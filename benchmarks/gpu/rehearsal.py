"""A rehearsal of training at a published size: random weights of Qwen3-0.6B's shape, states from vLLM.

python -m benchmarks.gpu.rehearsal target --out FOLDER          writes the target, and texts of random tokens
python -m benchmarks.gpu.rehearsal states --target FOLDER ...   tokens/s of hidden states, vLLM and transformers

The text is noise: tokens/s, memory and equality are measured, acceptance is not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm_mtpc.cli import guard
from vllm_mtpc.engine import provenance
from vllm_mtpc.errors import UsageError
from vllm_mtpc.report import write_json

PROG = "python -m benchmarks.gpu.rehearsal"
VOCAB = 151_936
QWEN3_06B = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
}
TOY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 128,
}  # the vocabulary is the real one
MAX_LENGTH = 4096
COMMON_IDS = 20_000  # text has few of the vocabulary's ids
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # of ||vLLM - transformers|| / ||transformers||, median over tokens
APART = 0.5  # least value of that ratio for the states of another row


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    add = actions.add_parser("target").add_argument
    add("--out", type=Path, required=True, metavar="FOLDER")
    add("--toy", action="store_true")
    add("--texts", type=int, required=True, metavar="N")
    add("--length", type=int, required=True, metavar="T", help="tokens of a text")
    add = actions.add_parser("states").add_argument
    add("--target", type=Path, required=True, metavar="FOLDER")
    add("--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of every engine")
    add("--json", type=Path, required=True, metavar="FILE")
    add("--rows", type=int, required=True, metavar="N")
    add("--rounds", type=int, default=3, metavar="N")
    add("--dtype", choices=TOLERANCE, required=True)
    args = parser.parse_args(words)
    run = {"target": make_target, "states": measure_states}[args.action]
    return guard(PROG, lambda: run(args))


def make_target(args: argparse.Namespace) -> int:
    """Write weights, a tokenizer of bytes, and OUT/texts.jsonl: prompts and responses of ids as frequent as words."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from benchmarks.demo.byte_target import build_tokenizer

    config = Qwen3Config(
        **(TOY if args.toy else QWEN3_06B),
        vocab_size=VOCAB,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        eos_token_id=VOCAB - 1,
        dtype="float32" if args.toy else "bfloat16",
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(args.out)
    build_tokenizer().save_pretrained(args.out)
    frequency = 1 / torch.arange(1, COMMON_IDS + 1, dtype=torch.float64)  # Zipf's law
    texts = torch.multinomial(frequency, args.texts * args.length, replacement=True).view(args.texts, -1).tolist()
    records = ({"prompt_ids": text[:16], "response_ids": text[16:]} for text in texts)
    (args.out / "texts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    print(f"{args.out}: {sum(one.numel() for one in model.parameters()):,} random parameters, {args.texts:,} texts")
    return 0


def read_texts(target: Path) -> list[list[int]]:
    lines = (target / "texts.jsonl").read_text(encoding="utf-8").splitlines()
    return [[*record["prompt_ids"], *record["response_ids"]] for record in map(json.loads, lines)]


def measure_states(args: argparse.Namespace) -> int:
    """Compute the states of the same rows by vLLM and by transformers: seconds of each round, and their difference.

    Raises:
        UsageError: The states differ, or do not depend on the text.
    """
    import torch

    from vllm_mtpc.data.rows import Rows
    from vllm_mtpc.engine.served_target import load_served_target
    from vllm_mtpc.hf import choose_device, load_target
    from vllm_mtpc.train.cache import Computed

    tokens = torch.tensor(read_texts(args.target)[: args.rows], dtype=torch.int32)
    rows = Rows(tokens, torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool))
    every, device, dtype = torch.arange(len(tokens)), choose_device("auto"), getattr(torch, args.dtype)
    found, states = {}, {}
    for name in ("vllm", "transformers"):
        served = name == "vllm"
        target: Any = (
            load_served_target(args.target, dtype, device, args.engine)
            if served
            else load_target(args.target, dtype, device)
        )
        try:
            seconds = []
            for _ in range(1 + args.rounds):  # the first starts the engine and compiles
                begun = time.perf_counter()
                states[name] = Computed(target, rows).hidden(every)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - begun)
        finally:
            if served:
                target.recorder.close()
        states[name] = states[name][:, :-1].float().cpu()  # the last state of a text is not computed by vLLM
        rate = tokens.numel() / min(seconds[1:])
        found[name] = {"seconds": [round(value, 3) for value in seconds[1:]], "tokens_per_second": round(rate, 1)}
        found[name] |= {"first_seconds": round(seconds[0], 3)}
        print(f"{name}: {rate:,.0f} tokens/s of states", flush=True)
        del target
    difference = median_difference(states["vllm"], states["transformers"])
    apart = median_difference(states["vllm"].roll(1, 0), states["transformers"])
    same, values = difference <= TOLERANCE[args.dtype] and apart >= APART, provenance.collect()
    values |= {"dtype": args.dtype, "rows": list(tokens.shape), "states": found}
    write_json(args.json, values | {"difference": difference, "difference_of_another_row": apart})
    print(f"difference of the states of {len(tokens):,} rows: {difference:.2g} (of another row: {apart:.2g})")
    if not same:
        raise UsageError(
            f"the states differ: allowed are {TOLERANCE[args.dtype]} and, of another row, at least {APART}"
        )
    print(f"{len(tokens)} rows of states are equal")
    return 0


def median_difference(one: Any, other: Any) -> float:
    return ((one - other).norm(dim=-1) / other.norm(dim=-1)).median().item()


if __name__ == "__main__":
    sys.exit(main())

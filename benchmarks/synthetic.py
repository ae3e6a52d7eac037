"""SYNTHETIC targets: a model of a real size without trained weights, and a random head for it.

The cost of a draft relative to a step of a large target does not depend on trained weights: products of random numbers
take as long. vLLM's rejection_sample_method "synthetic" then accepts drafts at prescribed rates, so that steps have the
length that a trained head would give them. The text is noise. Speeds of such a run are those of the sizes and the
rates, of no model: folders, cards and output are marked SYNTHETIC, and results must be as well.

    python -m benchmarks.synthetic --shape evabyte-6.5b --window 16 --components 32 --out build/synthetic

writes OUT/SYNTHETIC-target (a config, no weights: vLLM makes them up with --load-format dummy) and OUT/SYNTHETIC-head.
vLLM prescribes acceptance on GPUs and on Model Runner V2, not with its CPU kernels.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.draft import BYTES
from vllm_mtpc.circuits import CIRCUITS, circuit_class
from vllm_mtpc.cli import guard
from vllm_mtpc.errors import UsageError

LABEL = "SYNTHETIC: random weights and prescribed acceptance; speeds are of these sizes, of no trained model"


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama: the models' own, EvaByte's attention replaced by full attention."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = False


SHAPES = {
    "evabyte-6.5b": Shape(32, 4096, 11008, 32, 32, BYTES),
    "llama-3b": Shape(28, 3072, 8192, 24, 8, 128256, tied=True),
    "llama-8b": Shape(32, 4096, 14336, 32, 8, 128256),
}


def parse_shape(text: str) -> Shape:
    """One of SHAPES, or LAYERSxWIDTH (a byte-level Llama with heads of 64). Raises UsageError."""
    if text in SHAPES:
        return SHAPES[text]
    found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{1,5})", text)
    if not found or int(found[2]) % 64:
        raise UsageError(
            f"--shape {text}: allowed are {', '.join(SHAPES)}, or LAYERSxWIDTH with a width divisible by 64, as 24x2048"
        )
    layers, hidden = int(found[1]), int(found[2])
    return Shape(layers, hidden, 4 * hidden, hidden // 64, hidden // 64, BYTES)


def parse_rates(values: Sequence[float], num_drafts: int) -> list[float]:
    """P(drafts 1..k accepted), k = 1 .. num_drafts: as given, or powers of one chance. Raises UsageError."""
    rates = [values[0] ** k for k in range(1, num_drafts + 1)] if len(values) == 1 else list(values)
    falling = all(later <= earlier for earlier, later in itertools.pairwise(rates))
    if len(rates) != num_drafts or not falling or not all(0 <= rate <= 1 for rate in rates):
        raise UsageError(
            f"--acceptance {' '.join(map(str, values))}: allowed are one chance for each further draft, or "
            f"{num_drafts} falling chances from 0 to 1, of the first k drafts being accepted"
        )
    return [round(rate, 6) for rate in rates]


def write_target(folder: Path, shape: Shape, name: str, max_model_len: int) -> Any:
    """A Llama's config and, where the vocabulary holds bytes, a tokenizer of bytes; no weights. Returns the config."""
    from transformers import LlamaConfig

    from benchmarks.demo.byte_target import build_tokenizer

    tokenizer = build_tokenizer() if shape.vocab > 256 else None
    end = tokenizer.eos_token_id if tokenizer else None
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=max_model_len,
        tie_word_embeddings=shape.tied,
        bos_token_id=end,
        eos_token_id=end,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
        synthetic=LABEL,
    )
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    if tokenizer:
        tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(f"# SYNTHETIC target, {name}\n\n{LABEL}.\n", encoding="utf-8")
    return config


def write_head(folder: Path, target: Any, args: argparse.Namespace) -> None:
    """A head of random weights, in bfloat16, with the default trunk and leaves."""
    import torch

    from vllm_mtpc.checkpoint import save_head
    from vllm_mtpc.config.mtpc_config import HeadConfig
    from vllm_mtpc.heads.head import build_head

    config = HeadConfig.create(
        circuit=args.circuit,
        window=args.window,
        num_components=min(args.components, circuit_class(args.circuit).max_components),
        target=target,
        verifier="../SYNTHETIC-target",
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # in float32 the largest heads would need twice the memory
    try:
        head = build_head(config)
    finally:
        torch.set_default_dtype(default)
    provenance = {"command": " ".join(["python -m benchmarks.synthetic", *sys.argv[1:]]), "synthetic": LABEL}
    save_head(folder, config, head, provenance, f"# SYNTHETIC head\n\n{LABEL}.\n", torch.bfloat16)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.synthetic", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shape", required=True, metavar="SHAPE", help=f"{', '.join(SHAPES)}, or LAYERSxWIDTH")
    add("--out", type=Path, required=True, metavar="DIR", help="where both folders are written")
    add("--circuit", default="btree", help=f"one of {', '.join(CIRCUITS)} (default: btree)")
    add("--window", type=int, default=8, metavar="N", help="tokens of the head's window (default: 8)")
    add("--components", type=int, default=8, metavar="R", help="components (default: 8, or the most a circuit has)")
    add(
        "--acceptance", type=float, nargs="+", default=[0.7], metavar="P", help="chance of each further draft, or all K"
    )
    add("--max-model-len", type=int, default=4096, metavar="N", help="longest text (default: 4096)")
    return parser


def main(words: list[str] | None = None) -> int:
    """Write both folders and print how to serve them."""
    args = parser().parse_args(words)
    return guard(parser().prog, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    shape, rates = parse_shape(args.shape), parse_rates(args.acceptance, args.window - 1)
    target = write_target(args.out / "SYNTHETIC-target", shape, args.shape, args.max_model_len)
    write_head(args.out / "SYNTHETIC-head", target, args)
    drafts = {"method": "mtpc", "model": str(args.out / "SYNTHETIC-head")}
    drafts |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    print(f"{LABEL}.\nprescribed tokens/step: {1 + sum(rates):.3f} (SYNTHETIC)")
    serve = f"vllm serve {args.out}/SYNTHETIC-target --load-format dummy --served-model-name SYNTHETIC"
    print(f"{serve} --speculative-config '{json.dumps(drafts)}'")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Public DFlash and DSpark drafters for the programme: a folder MODELS/NAME with `drafter` and its `target` for each.

python -m benchmarks.gpu.drafters --models MODELS             lists the models; an empty list is no failure
python -m benchmarks.gpu.drafters --models MODELS --toy TARGET     makes a random one of a small target first
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from vllm_mtpc.checkpoint.convert.drafter import read_drafter
from vllm_mtpc.cli import guard
from vllm_mtpc.files import read_json

PROG = "python -m benchmarks.gpu.drafters"
TOY, BLOCK, PARTS = "toy", 4, ("drafter", "target")


def drafters_in(models: Path) -> dict[str, Path]:
    """By name the folders that hold a drafter and its target."""
    both = [place for place in models.glob("*") if all((place / part / "config.json").is_file() for part in PARTS)]
    return {place.name: place for place in sorted(both)}


def window_of(place: Path) -> int:
    """n of the head that the drafter becomes; raises CheckpointError where it becomes none."""
    return read_drafter(place / "drafter" / "config.json").window


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--toy", type=Path, metavar="TARGET", help="make a random drafter of this target")
    args = parser.parse_args(words)
    return guard(PROG, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    if args.toy:
        make_toy(args.models / TOY, args.toy)
    for name, place in drafters_in(args.models).items():
        print(f"{name}: window {window_of(place)}")
    if not drafters_in(args.models):
        print(f"{args.models}: no NAME/drafter next to its NAME/target: nothing to convert")
    return 0


def make_toy(place: Path, target: Path) -> None:
    """A DFlash drafter of one small layer, in its authors' layout, random."""
    import torch
    from safetensors.torch import save_file

    sizes = read_json(target / "config.json")
    D, heads, head_dim, width = sizes["hidden_size"], 2, 32, 64
    layer: dict[str, tuple[int, ...]] = {
        **{f"self_attn.{name}_proj": (heads * head_dim, D) for name in "qkv"},
        **{f"mlp.{name}_proj": (width, D) for name in ("gate", "up")},
        **{f"self_attn.{name}_norm": (head_dim,) for name in "qk"},
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (D,)),
        **{"self_attn.o_proj": (D, heads * head_dim), "mlp.down_proj": (D, width)},
    }
    shapes = {f"layers.0.{name}": shape for name, shape in layer.items()}
    shapes |= {"fc": (D, D), "norm": (D,), "hidden_norm": (D,)}
    torch.manual_seed(0)
    tensors = {
        f"{name}.weight": torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0]},
        "hidden_size": D,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rope_theta": 10000.0,
        "vocab_size": sizes["vocab_size"],
    }
    (place / "drafter").mkdir(parents=True, exist_ok=True)
    (place / "drafter" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, place / "drafter" / "model.safetensors")
    if not (place / "target").exists():
        (place / "target").symlink_to(target.resolve())


if __name__ == "__main__":
    sys.exit(main())

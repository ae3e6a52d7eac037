"""Convert the prediction heads that a target already has into a head of its own.

EvaByte predicts eight bytes at once: rows [V i, V (i + 1)) of its lm_head are for token i + 1 after the last. They form
a fully factorised circuit of one component. Serving takes x_1 from the first, the target, and drafts from the others.
"""

from __future__ import annotations

from typing import Any

from vllm_mtpc.checkpoint.convert.source import ConvertOptions
from vllm_mtpc.checkpoint.convert.write import save_converted
from vllm_mtpc.checkpoint.load import Shards
from vllm_mtpc.checkpoint.locate import CONFIG_FILE
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import read_json

LM_HEAD = "lm_head.weight"


def convert_token_heads(options: ConvertOptions, label: str) -> str:
    """Convert the target in `options.ckpt` as `convert`; raises CheckpointError unless it has several heads."""
    target: Any = read_json(options.ckpt / CONFIG_FILE)
    weight = Shards(options.ckpt).read(LM_HEAD)
    hidden_size, vocab_size = target.get("hidden_size"), target.get("vocab_size")
    is_matrix = weight.dim() == 2 and type(vocab_size) is int and vocab_size > 0
    heads = len(weight) // vocab_size if is_matrix else 0
    if heads < 2 or tuple(weight.shape) != (heads * vocab_size, hidden_size):
        found = f"{'x'.join(map(str, weight.shape))} with vocab_size={vocab_size}, hidden_size={hidden_size}"
        raise CheckpointError(
            f"{options.target}: {LM_HEAD} is {found}; allowed: 2 or more times vocab_size rows; train a head"
        )
    parts: dict[str, Any] = {"circuit": "ff", "trunk": {"kind": "none"}, "leaves": {"kind": "own"}}
    config = HeadConfig.create(window=heads, target=target, verifier=options.verifier, **parts)
    title = f"ff head of {heads} prediction heads"
    leaf = {"leaves.leaf_weight": weight.view(heads, 1, vocab_size, hidden_size)}
    save_converted(options.out, config, leaf, title, {"from": f"{LM_HEAD} of {label}"})
    return f"ff, window {config.window}"

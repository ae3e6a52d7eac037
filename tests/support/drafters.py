"""Tiny DFlash and DSpark checkpoints in speculators' layout and in the authors', and the states of a window.

Names, shapes and config keys are those of speculators (c05b95b), z-lab/dflash (44947fb) and DeepSpec (afdfa7c), which
are not requirements of the tests. Their model classes once loaded the output of `make` without missing (except
speculators' copies of the target) or unknown keys, and gave the states of `draft_states` to 2e-6. It follows
vLLM's qwen3_dflash.py and shares no code with the package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen3Config

LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, EPS, THETA, RANK, BLOCK = 2, 4, 2, 32, 96, 1e-5, 5000.0, 6, 4
AUX, MASK = (1, 2, 3), 7  # the states that enter these layers of the target; the mask's row of its embeddings


def draft_tensors(target: LlamaForCausalLM, seed: int = 1, markov: bool = False) -> dict[str, Tensor]:
    """The tensors of all layouts, large enough for each to change the drafts."""
    D, V = target.config.hidden_size, target.config.vocab_size
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    tensors = {"fc.weight": normal(D, len(AUX) * D), "hidden_norm.weight": norm(D), "norm.weight": norm(D)}
    for layer in range(LAYERS):
        tensors |= {
            f"layers.{layer}.{name}.weight": value
            for name, value in {
                "self_attn.q_proj": 2 * normal(HEADS * HEAD_DIM, D),
                "self_attn.k_proj": 2 * normal(KV_HEADS * HEAD_DIM, D),
                "self_attn.v_proj": 2 * normal(KV_HEADS * HEAD_DIM, D),
                "self_attn.o_proj": 2 * normal(D, HEADS * HEAD_DIM),
                "self_attn.q_norm": norm(HEAD_DIM),
                "self_attn.k_norm": norm(HEAD_DIM),
                "input_layernorm": norm(D),
                "post_attention_layernorm": norm(D),
                "mlp.gate_proj": 2 * normal(WIDTH, D),
                "mlp.up_proj": 2 * normal(WIDTH, D),
                "mlp.down_proj": 2 * normal(D, WIDTH),
            }.items()
        }
    if markov:
        tensors["markov_head.markov_w1.weight"] = 3 * normal(V, RANK)
        tensors["markov_head.markov_w2.weight"] = 3 * normal(V, RANK)
        tensors["confidence_head.proj.weight"] = normal(1, D + RANK)
        tensors["confidence_head.proj.bias"] = normal(1)
    return tensors


def own(target: LlamaForCausalLM) -> dict[str, Tensor]:
    """The target's embeddings and lm_head, which some layouts contain."""
    return {
        "embed_tokens.weight": target.model.embed_tokens.weight.detach().clone(),
        "lm_head.weight": target.lm_head.weight.detach().clone(),
    }


def layer_config(target: LlamaForCausalLM) -> dict[str, Any]:
    """The config of the draft layers."""
    sizes = {"hidden_size": target.config.hidden_size, "vocab_size": target.config.vocab_size}
    sizes |= {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    sizes |= {"head_dim": HEAD_DIM, "intermediate_size": WIDTH, "max_position_embeddings": 256}
    rope = {"rope_theta": THETA, "rope_type": "default"}
    return Qwen3Config(**sizes, rms_norm_eps=EPS, rope_parameters=rope).to_dict()


def speculators(kind: str, target: LlamaForCausalLM, **settings: Any) -> dict[str, Any]:
    """config.json of `speculators`; kind "dflash" or "dspark"."""
    anchor = settings.get("sample_from_anchor", kind == "dspark")
    values = {
        "architectures": ["DFlashDraftModel" if kind == "dflash" else "DSparkDraftModel"],
        "aux_hidden_state_layer_ids": list(AUX),
        "block_size": BLOCK,
        "draft_vocab_size": target.config.vocab_size,
        "dtype": "float32",
        "mask_token_id": MASK,
        "sample_from_anchor": anchor,
        "sliding_window_non_causal": kind == "dflash",  # False: vLLM 0.32 takes full attention for causal as well
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": BLOCK if anchor else BLOCK - 1,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "../target"},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_config(target),
        "transformers_version": "5.19.0",
    }
    if kind == "dspark":
        values |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
        values |= {"markov_head_type": "vanilla", "markov_rank": RANK}
    return values | settings


def original(kind: str, target: LlamaForCausalLM, **settings: Any) -> dict[str, Any]:
    """config.json of the authors' code: transformers' own, with their keys in it, at its top or in `dflash_config`."""
    layers = {"target_layer_ids": [layer - 1 for layer in AUX], "mask_token_id": MASK}
    common = {"block_size": BLOCK, "num_target_layers": target.config.num_hidden_layers, "dtype": "float32"}
    if kind == "dflash":
        mine = {"architectures": ["DFlashDraftModel"], "dflash_config": layers, "auto_map": {"AutoModel": "dflash.X"}}
    else:
        mine = {"architectures": ["Qwen3DSparkModel"], "num_anchors": 8, **layers, "enable_confidence_head": True}
        mine |= {"confidence_head_with_markov": True, "markov_head_type": "vanilla", "markov_rank": RANK}
    return {**layer_config(target), **common, **mine, **settings}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make(folder: Path, layout: str, target: LlamaForCausalLM, seed: int = 1, **settings: Any) -> Path:
    """A checkpoint of LAYOUTS."""
    made, kind = LAYOUTS[layout]
    tensors = draft_tensors(target, seed, markov=kind == "dspark")
    if layout != "original dflash":  # the only one that saves neither
        tensors |= own(target)
    return write(folder, made(kind, target, **settings), tensors)


LAYOUTS = {
    "speculators dflash": (speculators, "dflash"),
    "speculators dspark": (speculators, "dspark"),
    "original dflash": (original, "dflash"),
    "original dspark": (original, "dspark"),
}


def draft_states(
    weights: dict[str, Tensor], aux: Tensor, queries: Tensor, places: Tensor, theta: float, eps: float
) -> Tensor:
    """States [Q, D] of one window: queries [Q, D] after a context with aux [S, m D], at positions places [S + Q]."""

    def norm(rows: Tensor, name: str) -> Tensor:
        return rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt() * weights[f"{name}.weight"]

    def heads(rows: Tensor, name: str) -> Tensor:
        return (rows @ weights[f"{name}.weight"].T).unflatten(-1, (-1, size))

    size = len(weights["layers.0.self_attn.q_norm.weight"])
    context, states = norm(aux @ weights["fc.weight"].T, "hidden_norm"), queries
    for name in sorted({name.rpartition(".self_attn.")[0] for name in weights if ".self_attn." in name}):
        x, attention = norm(states, f"{name}.input_layernorm"), f"{name}.self_attn"
        rows = torch.cat([context, x])
        k = _rotated(norm(heads(rows, f"{attention}.k_proj"), f"{attention}.k_norm"), places, theta)
        q = _rotated(norm(heads(x, f"{attention}.q_proj"), f"{attention}.q_norm"), places[-len(x) :], theta)
        v, group = heads(rows, f"{attention}.v_proj"), q.shape[1] // k.shape[1]
        each = range(q.shape[1])
        seen = [(q[:, i] @ k[:, i // group].T * size**-0.5).softmax(-1) @ v[:, i // group] for i in each]
        states = states + torch.cat(seen, dim=-1) @ weights[f"{attention}.o_proj.weight"].T
        x = norm(states, f"{name}.post_attention_layernorm")
        gate, up, down = (weights[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        states = states + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    return norm(states, "norm")


def _rotated(x: Tensor, at: Tensor, theta: float) -> Tensor:
    """Rotary embedding of x[rows, heads, size] at positions at[rows], by float32 angles; halves are pairs (NeoX)."""
    one, two = x.chunk(2, -1)
    angles = at[:, None, None].float() * theta ** (-torch.arange(0, x.shape[-1], 2).float() / x.shape[-1])
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)

"""EvaByte written down once more, without caches: every position from the whole context, in the obvious way.

    out_t = softmax over { s q_t.k_j : window(t) W <= j <= t } and { s q_t.kbar_c : c before window(t) }

Also makes tiny random checkpoints in the published layout.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

SIZES: dict[str, Any] = {
    "architectures": ["EvaByteForCausalLM"], "model_type": "evabyte", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_pred_heads": 8, "window_size": 32, "chunk_size": 4, "attention_class": "eva", "norm_add_unit_offset": True,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "rope_scaling": None,
    "hidden_act": "silu", "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 11,
    "torch_dtype": "float32",
}  # fmt: skip


def make_evabyte(folder: Path, seed: int = 0, **changes: Any) -> dict[str, Tensor]:
    """A random EvaByte in `folder`, published names and shapes; returns its weights."""
    config = SIZES | changes
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    # Scales large enough that attention looks far back: a summary that is wrong must change tokens.
    weights = {
        "model.embed_tokens.weight": normal(config["vocab_size"], width, scale=1.0),
        "model.norm.weight": normal(width, scale=0.1),
        "lm_head.weight": normal(config["num_pred_heads"] * config["vocab_size"], width, scale=0.3),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name in "qkvo":
            weights[f"{prefix}.self_attn.{name}_proj.weight"] = normal(width, width, scale=width**-0.5 * 1.5)
        for name in ("adaptive_phi", "adaptive_mu_k"):
            weights[f"{prefix}.self_attn.{name}"] = normal(1, heads, 1, 1, width // heads, scale=0.5)
        weights[f"{prefix}.mlp.gate_proj.weight"] = normal(inner, width, scale=width**-0.5)
        weights[f"{prefix}.mlp.up_proj.weight"] = normal(inner, width, scale=width**-0.5)
        weights[f"{prefix}.mlp.down_proj.weight"] = normal(width, inner, scale=inner**-0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = normal(width, scale=0.1)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return weights


class GreedyReference(ABC):
    @abstractmethod
    def logits(self, tokens: list[int]) -> Tensor:
        """Logits [L, V] after each token."""

    def is_greedy(self, prompt: list[int], answer: list[int]) -> bool:
        """Whether every token of `answer` is the most probable one."""
        return self.logits(prompt + answer)[len(prompt) - 1 : -1].argmax(-1).tolist() == answer

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


class Reference(GreedyReference):
    """The closed form; `hide_summaries` is the fault that a test must be able to see."""

    def __init__(self, weights: dict[str, Tensor], hide_summaries: bool = False, **changes: Any) -> None:
        self.weights, self.config = weights, SIZES | changes
        self.hide_summaries = hide_summaries

    @torch.no_grad()
    def hidden(self, tokens: list[int]) -> Tensor:
        x = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            x = x + self._attention(self._norm(x, f"{prefix}.input_layernorm"), f"{prefix}.self_attn")
            y = self._norm(x, f"{prefix}.post_attention_layernorm")
            gate, up, down = (self.weights[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            x = x + (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
        return self._norm(x, "model.norm")

    @torch.no_grad()
    def logits(self, tokens: list[int], head: int = 0) -> Tensor:
        """Logits [L, V] of one of the prediction heads; 0 is the next byte."""
        rows = self.config["vocab_size"]
        return self.hidden(tokens) @ self.weights["lm_head.weight"][rows * head : rows * (head + 1)].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * (1 + self.weights[f"{name}.weight"])

    def _attention(self, x: Tensor, prefix: str) -> Tensor:
        heads, window, chunk = (self.config[key] for key in ("num_attention_heads", "window_size", "chunk_size"))
        length, size = len(x), x.shape[1] // heads
        query, key, value = (
            (x @ self.weights[f"{prefix}.{name}_proj.weight"].T).view(length, heads, size).transpose(0, 1)
            for name in "qkv"
        )
        query, key = self._rotate(query), self._rotate(key)
        mu = self.weights[f"{prefix}.adaptive_mu_k"].view(heads, 1, 1, size)
        phi = self.weights[f"{prefix}.adaptive_phi"].view(heads, 1, 1, size)
        whole = length // chunk * chunk
        keys = key[:, :whole].unflatten(1, (-1, chunk))  # [H, chunks, C, D]
        values = value[:, :whole].unflatten(1, (-1, chunk))
        alpha = (mu * keys).sum(-1, keepdim=True).softmax(2)
        beta = (((phi * keys).sum(-1, keepdim=True) - keys.square().sum(-1, keepdim=True) / 2) * size**-0.5).softmax(2)
        mean_key, mean_value = (alpha * keys).sum(2), (beta * values).sum(2)
        position = torch.arange(length)
        first = position // window * window  # of each row's window
        is_near = (position >= first[:, None]) & (position <= position[:, None])
        chunks = torch.arange(whole // chunk)
        is_summarised = torch.zeros(length, 0, dtype=torch.bool)
        if not self.hide_summaries:
            is_summarised = (chunks + 1) * chunk <= first[:, None]
        mean_key, mean_value = (mean[:, : is_summarised.shape[1]] for mean in (mean_key, mean_value))
        scores = query @ torch.cat([mean_key, key], 1).transpose(1, 2) * size**-0.5
        scores = scores.masked_fill(~torch.cat([is_summarised, is_near], 1), float("-inf"))
        attended = scores.softmax(-1) @ torch.cat([mean_value, value], 1)
        return attended.transpose(0, 1).flatten(1) @ self.weights[f"{prefix}.o_proj.weight"].T

    def _rotate(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        frequency = self.config["rope_theta"] ** -(torch.arange(0, size, 2) / size)
        angle = torch.arange(x.shape[1])[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        low, high = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

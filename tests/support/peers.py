"""Peers made on the spot: a target with an MTP layer, and an EAGLE layer for the demo target."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel, Qwen2Config, Qwen2ForCausalLM

from vllm_mtpc import demo
from vllm_mtpc.hf import load_target


def make_mimo(folder: Path) -> None:
    """A random MiMo: Qwen2's layers, and an MTP layer that is a copy of the last one."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = Qwen2Config(
        **sizes, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.15,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    weights, last, own = load_file(folder / "model.safetensors"), "model.layers.1.", "model.mtp_layers.0."
    weights |= {own + name.removeprefix(last): value.clone() for name, value in weights.items() if last in name}
    size = config.hidden_size
    weights |= {f"{own}{name}_layernorm.weight": torch.ones(size) for name in ("token", "hidden", "final")}
    weights[f"{own}input_proj.weight"] = torch.cat([torch.eye(size), torch.eye(size)], 1) / 2
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    change(folder, architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)


def change(folder: Path, **more: object) -> None:
    """More of a config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))


def train_eagle(folder: Path, steps: int = 150) -> None:
    """An EAGLE layer for the demo target, trained on library text: from h_t and x_(t + 1) to h_(t + 1), and x_(t + 2).

    vLLM's: no norm before or after the layer, the target's embedding and lm_head.
    """
    target = load_target(demo.path("target"), torch.float32)
    texts = [text[:129] for text in demo.held_out(demo.texts()) if len(text) > 128]
    tokens = torch.tensor([list(text) for text in texts])
    with torch.inference_mode():
        hidden = target.hidden(tokens)
    tokens, hidden = tokens.clone(), hidden.clone()
    config = LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": 1})
    torch.manual_seed(0)
    size, body = config.hidden_size, LlamaModel(config)
    body.norm = body.layers[0].input_layernorm = nn.Identity()
    fc = nn.Linear(2 * size, size, bias=False)
    optimizer = torch.optim.Adam([*fc.parameters(), *body.layers.parameters()], 2e-3)
    embed, lm_head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    for _ in range(steps):
        some = torch.randint(len(tokens), (8,))
        given = torch.cat([embed(tokens[some, 1:-1]), hidden[some, :-2]], -1)
        out = body(inputs_embeds=fc(given)).last_hidden_state
        loss = F.cross_entropy(lm_head(out).flatten(0, 1), tokens[some, 2:].flatten())
        loss = loss + F.smooth_l1_loss(out, hidden[some, 1:-1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    layer = {f"layers.0.{name}": value for name, value in body.layers[0].state_dict().items()}
    save_file({"fc.weight": fc.weight.data, **layer}, folder / "model.safetensors", {"format": "pt"})

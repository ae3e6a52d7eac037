"""Tiny random targets with native MTP layers and EAGLE-3 drafters, as vLLM loads them, and heads on their states."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from vllm_mtpc.checkpoint import save_head
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads.head import build_head

D, WIDTH, HEAD_DIM, VOCAB = 64, 96, 32, 48
SIZES = {
    **{"hidden_size": D, "intermediate_size": WIDTH, "num_hidden_layers": 2, "vocab_size": VOCAB, "head_dim": HEAD_DIM},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256},
    **{"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
}
MIMO = 'from transformers import Qwen2Config\n\n\nclass MiMoConfig(Qwen2Config):\n    model_type = "mimo"\n'


class Weights:
    """Random tensors of one seed, large enough for each to change the drafts."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def fill(self, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, Tensor]:
        drawn = ((name, 0.3 * torch.randn(shape, generator=self.generator)) for name, shape in shapes)
        return {name: value + ("norm" in name) for name, value in drawn}


def layer_shapes(size: int = D, inputs: int = D) -> dict[str, tuple[int, ...]]:
    """The shapes of a decoder layer of Llama for states [.., size], whose attention reads `inputs` numbers."""
    rows = {"q": 2 * HEAD_DIM, "k": HEAD_DIM, "v": HEAD_DIM}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj.weight": (rows[name], inputs) for name in rows}
    shapes |= {"self_attn.o_proj.weight": (size, 2 * HEAD_DIM), "mlp.down_proj.weight": (size, WIDTH)}
    shapes |= {f"mlp.{name}_proj.weight": (WIDTH, size) for name in ("gate", "up")}
    return shapes | {"input_layernorm.weight": (size,), "post_attention_layernorm.weight": (size,)}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return config


def make_mimo(folder: Path) -> dict[str, Any]:
    """A target with one MTP layer, whose states are normalised in the layer; transformers does not know its type."""
    weights, config = Weights(1), Qwen2Config(**SIZES)
    own = {name: tuple(value.shape) for name, value in Qwen2ForCausalLM(config).state_dict().items()}
    layer = layer_shapes() | {
        f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", 64), ("k", 32), ("v", 32))
    }
    layer |= {f"{name}_layernorm.weight": (D,) for name in ("token", "hidden", "final")}
    layer["input_proj.weight"] = D, 2 * D
    tensors = weights.fill([*own.items(), *((f"model.mtp_layers.0.{name}", shape) for name, shape in layer.items())])
    mine = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    mine |= {"auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}, "dtype": "float32"}
    made = write(folder, config.to_dict() | mine, tensors)
    (folder / "configuration_mimo.py").write_text(MIMO)
    return made


def make_glm(folder: Path) -> dict[str, Any]:
    """A target with one MTP layer, a mixture of experts, whose states are normalised by the lm_head's own norm."""
    sizes = {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "n_routed_experts": 4, "attention_bias": False}
    config = Glm4MoeConfig(**SIZES, **sizes, num_experts_per_tok=2, moe_intermediate_size=32)
    Glm4MoeForCausalLM(config).save_pretrained(folder)
    shapes = {name: tuple(value.shape) for name, value in load_file(folder / "model.safetensors").items()}
    last, mtp = "model.layers.1.", "model.layers.2."
    shapes |= {mtp + name.removeprefix(last): shape for name, shape in shapes.items() if name.startswith(last)}
    shapes |= {f"{mtp}{name}.weight": (D,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{mtp}eh_proj.weight"] = D, 2 * D
    tensors = Weights(1).fill(shapes.items())
    tensors[f"{mtp}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors[f"{mtp}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    return write(folder, json.loads((folder / "config.json").read_text()), tensors)


def make_eagle3(folder: Path, target: LlamaForCausalLM) -> None:
    """A drafter of one layer that reads the inputs of the target's first two layers and its last states."""
    sizes = {name: getattr(target.config, name) for name in SIZES}
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "dtype": "float32", **sizes}
    config |= {"num_hidden_layers": 1, "eagle_aux_hidden_state_layer_ids": [0, 1, 2], "rms_norm_eps": 1e-6}
    config |= {"draft_vocab_size": sizes["vocab_size"], "intermediate_size": WIDTH, "num_key_value_heads": 1}
    size = sizes["hidden_size"]
    shapes = {f"midlayer.{name}": shape for name, shape in layer_shapes(size, 2 * size).items()}
    shapes |= {"midlayer.hidden_norm.weight": (size,), "norm.weight": (size,), "fc.weight": (size, 3 * size)}
    tensors = Weights(2).fill(shapes.items()) | {"lm_head.weight": target.lm_head.weight.detach().clone()}
    write(folder, config, tensors)


def make_hosted(
    folder: Path, target: dict[str, Any], drafter: dict[str, Any], seed: int = 2, noise: float = 0.0, **given: Any
) -> None:
    """An untrained head, ff with one draft unless `given`; with noise on every weight its components differ."""
    torch.manual_seed(seed)
    given = {"circuit": "ff", "window": 2, "num_components": 1, **given}
    leaves = {"kind": "lm_head", "expander_rank": 8, **given.pop("leaves", {})}
    trunk = {"kind": "drafter", **drafter}
    config = HeadConfig.create(target=target, verifier="../target", trunk=trunk, leaves=leaves, **given)
    head = build_head(config)
    for weight in head.parameters():
        weight.data += noise * torch.randn_like(weight)
    save_head(folder, config, head, {"command": "tests"}, "made by a test", torch.float32)

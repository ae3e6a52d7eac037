"""Tiny targets and heads made on the spot: small enough that their distribution can be written down."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vllm_mtpc.checkpoint import save_head
from vllm_mtpc.checkpoint.ptp_head import save_ptp
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.heads.adapters import MODULES, Adapters
from vllm_mtpc.heads.head import build_head
from vllm_mtpc.heads.ptp.layers import PtpHead, PtpLayers
from vllm_mtpc.heads.trunk.lora import LoraDraftLayers
from vllm_mtpc.hf import load_target


def make_target(folder: Path, vocab_size: int, seed: int, hidden_size: int = 64, layers: int = 2) -> LlamaForCausalLM:
    """A random Llama with a varied distribution, saved to `folder` in float32."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    sizes |= {"max_position_embeddings": 512, "initializer_range": 0.15, "tie_word_embeddings": False}
    config = LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def make_tokenizer(folder: Path, vocab_size: int) -> None:
    """One letter for each token: a, b, ..."""
    vocabulary = {chr(ord("a") + token): token for token in range(vocab_size)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@torch.no_grad()
def sample_target(model: LlamaForCausalLM, count: int, length: int, seed: int) -> torch.Tensor:
    """Draws [count, length] from the target at temperature 1, first token uniform."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab_size, (count, 1), generator=generator)
    while tokens.shape[1] < length:
        probs = model(tokens).logits[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probs, 1, generator=generator)], dim=1)
    return tokens


def make_head(
    folder: Path,
    target: LlamaForCausalLM,
    circuit: str,
    window: int,
    components: int,
    steps: int = 60,
    is_bad: bool = False,
    token_scale: float = 1.0,
    ids: list[int] | None = None,
    **options: Any,
) -> None:
    """A head fitted a little to its target's own samples, so that drafts are accepted and rejected.

    is_bad: it learns the least probable tokens of the target. token_scale: times what the token before adds. ids: its
    draft vocabulary.
    """
    given = {"circuit": circuit, "window": window, "num_components": components, **options}
    sizes = {"target": target.config, "draft_vocab_size": len(ids) if ids else None}
    config = HeadConfig.create(**given, **sizes, verifier="../target")
    torch.manual_seed(0)
    head = build_head(config)
    if ids:
        head.set_vocabulary(torch.tensor(ids))
    target.requires_grad_(False)
    if head.leaves.needs_lm_head:
        head.leaves.bind_lm_head(lambda states: target.lm_head(states)[..., ids or slice(None)])
    if head.trunk.needs_embedding:
        head.trunk.bind_embedding(target.get_input_embeddings())
    tokens = sample_target(target, 64, 24, seed=0)
    with torch.no_grad():
        hidden = target.model(tokens).last_hidden_state
        if is_bad:
            tokens = torch.cat([tokens[:, :1], target.lm_head(hidden)[:, :-1].argmin(-1)], dim=1)
    windows = tokens[:, 1:].unfold(1, window, 1)  # [S, T, n]
    hidden, windows = hidden[:, : windows.shape[1]].flatten(0, 1), windows.flatten(0, 1)

    def loss() -> torch.Tensor:
        some = torch.randint(len(windows), (256,))
        found = head.circuit.conditional_log_probs(head(hidden[some], windows[some, 0]), windows[some])
        return -found[found.isfinite()].mean()  # -inf at tokens outside a draft vocabulary

    minimise(loss, head, steps, 1e-2)
    if head.leaves.token_rank:
        head.leaves.token_target.data *= token_scale
    save_head(folder, config, head, {"command": "tests"}, "made by a test", torch.float32)


def minimise(loss: Callable[[], torch.Tensor], head: torch.nn.Module, steps: int, learning_rate: float) -> None:
    optimiser = torch.optim.Adam(head.parameters(), lr=learning_rate)
    for _ in range(steps):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()


def random_layers(target: Path, layers: int, scale: float = 0.3) -> LoraDraftLayers:
    """Draft layers with random adapters on the target in a folder."""
    on = load_target(target, torch.float32)
    torch.manual_seed(7)
    split = LoraDraftLayers(on, layers, rank=4, alpha=8)
    with torch.no_grad():
        for value in split.parameters():
            value.normal_().mul_(scale)
    return split


def lora_section(adapters: Adapters) -> dict[str, Any]:
    """The section `trunk` of a head with these draft layers."""
    return {"kind": "lora", "layers": adapters.num_layers, "rank": adapters.rank, "alpha": float(adapters.alpha)}


def random_lora(target: torch.nn.Module, rank: int, scale_a: float, scale_b: float) -> dict[str, torch.Tensor]:
    """Weights of an adapter on every projection, in the layout of peft."""
    generator = torch.Generator().manual_seed(5)
    lora = {}
    for name, module in target.named_modules():
        if name.rpartition(".")[2] in MODULES:
            a, b = (rank, module.in_features), (module.out_features, rank)
            for part, shape, scale in (("A", a, scale_a), ("B", b, scale_b)):
                lora[f"base_model.model.{name}.lora_{part}.weight"] = torch.randn(shape, generator=generator) * scale
    return lora


def make_ptp_head(
    folder: Path, target: LlamaForCausalLM, variant: str, window: int, scale: float = 0.05, **options: Any
) -> None:
    """A PTP head of random adapters (none of effect with scale 0): its drafts are anything, its passes are real."""
    given = {"variant": variant, "window": window, "lora_rank": 4, **options}
    config = PtpConfig.create(**given, target=target.config, verifier="../target")
    torch.manual_seed(5)
    layers = PtpLayers(config)
    if layers.late is not None:  # not as it starts: large enough to turn most drafts into others
        layers.late.outer.weight.data.normal_()
    head = PtpHead(config, random_lora(target, 4, 1.0, scale), layers)
    save_ptp(folder, head, {"command": "tests"}, "made by a test", torch.float32)

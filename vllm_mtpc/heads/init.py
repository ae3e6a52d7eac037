"""Initialise a head from the target's own lm_head, or from a trained head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllm_mtpc.circuits import CIRCUITS, circuit_class
from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads.backbone import Backbone
from vllm_mtpc.heads.base import INIT_STD, Head, stay_bias

# Probability s that one of F inner sums keeps its latent when a circuit starts from a CP: log q is nowhere more than
# -F log s (0.001 F nats) below the CP's, and the total variation is at most 1 - s**F.
INHERITED_STAY = 0.999


@torch.no_grad()
def init_from_lm_head(head: Head, weight: Tensor, seed: int) -> None:
    """Start the leaves of a linear head at the target's lm_head; a head that reads that lm_head is not changed.

    Args:
        head: its leaves are written.
        weight: [V, D] or [blocks * V, D]: position i starts from block i, or the last (EvaByte predicts 8 tokens).
        seed: of the noise that makes components differ.
    """
    if head.needs_lm_head:
        return
    blocks = weight.view(-1, head.vocab_size, head.hidden_size)
    if len(blocks) > 1:
        position = torch.arange(head.circuit.window, device=weight.device)
        blocks = blocks[position.clamp(max=len(blocks) - 1), None]
    noise = weight.new_zeros(())
    if head.circuit.num_components > 1:
        noise = torch.randn(head.leaf_weight.shape, generator=torch.Generator().manual_seed(seed))
    head.leaf_weight.copy_(blocks + noise.to(weight) * (INIT_STD * head.hidden_size**-0.5))


@torch.no_grad()
def init_backbone(backbone: Backbone, target: Any) -> str:
    """Start a backbone at the final norm and last layers of a `vllm_mtpc.hf.Target`, where names and shapes agree.

    Returns:
        A line that names the weights that were not copied; empty if all were.
    """
    theirs, missing = target.backbone, list[str]()
    layers = [*reversed(getattr(theirs, "layers", ())), *(nn.Module() for _ in backbone.layers)]
    modules = [("norm.", backbone.norm, getattr(theirs, "norm", nn.Module()))]
    modules += [("", *pair) for pair in zip(reversed(backbone.layers), layers, strict=False)]
    for prefix, ours, part in modules:
        wanted, weights = dict(ours.named_parameters()), _split_fused(dict(part.named_parameters()))
        # norms of EvaByte scale by 1 + weight, a backbone's by its weight
        less = {f"{name}.weight".lstrip(".") for name, norm in part.named_modules() if hasattr(norm, "unit_offset")}
        for name in wanted | weights:
            if name in wanted and name in weights and weights[name].shape == wanted[name].shape:
                wanted[name].copy_(weights[name] + float(name in less))
            else:
                missing.append(f"{prefix}{name}".removesuffix(".weight"))
    return f"not copied: {', '.join(dict.fromkeys(missing))}" if missing else ""


def _split_fused(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a layer by name; fused projections (Phi-3's) are split into q, k and v, and into gate and up."""
    if (fused := weights.pop("self_attn.qkv_proj.weight", None)) is not None:
        rows = weights["self_attn.o_proj.weight"].shape[1]
        queries, keys_values = fused[:rows], fused[rows:].chunk(2)
        for part, weight in zip("qkv", (queries, *keys_values), strict=True):
            weights[f"self_attn.{part}_proj.weight"] = weight
    if (fused := weights.pop("mlp.gate_up_proj.weight", None)) is not None:
        weights["mlp.gate_proj.weight"], weights["mlp.up_proj.weight"] = fused.chunk(2)
    return weights


@torch.no_grad()
def init_from_head(head: Head, source: Head, seed: int = 0) -> None:
    """Start `head` at the distribution of a trained head `source` of the same kind, window and target.

    A source without inner sums (ff, cp) becomes any circuit with a root, whose sums keep the latent with probability
    INHERITED_STAY. A multiple of the source's components repeats them, with noise from `seed` in the leaves. A bigram
    that the source lacks adds 0; components that it lacks are equal and diverge by component_in.

    Raises:
        HeadConfigError: `head` cannot start from `source`.
    """
    check_source(head, source)
    repeats = head.circuit.num_components // source.circuit.num_components
    generator = torch.Generator().manual_seed(seed)
    trained, wanted = dict(source.named_parameters()), dict(head.named_parameters())
    for name, value in trained.items():
        dims = head.component_dims.get(name, ())
        value = value.repeat([repeats if dim in dims else 1 for dim in range(value.dim())])
        if repeats > 1 and name == head.noise_in:
            noise = torch.randn(value.shape, generator=generator) * INIT_STD * value.shape[-1] ** -0.5
            value = value + noise.to(value)
        wanted[name].copy_(value)
    if "component_out" in wanted and "component_out" not in trained:
        head.component_out.zero_()
    if head.inner_weight is not None and head.inner_bias is not None and "inner_bias" not in trained:
        head.inner_weight.zero_()
        head.inner_bias.copy_(stay_bias(head.circuit.num_components, INHERITED_STAY))


def check_source(head: Head, source: Head) -> None:
    """Raise HeadConfigError unless `head` can start from `source`."""
    ours, theirs = head.circuit, source.circuit
    mixtures = [] if theirs.num_inner else [name for name in CIRCUITS if circuit_class(name).max_components > 1]
    circuits, multiples = list(dict.fromkeys((theirs.name, *mixtures))), f"multiples of {theirs.num_components}"
    may_lack = {  # options that the source need not have
        "token_rank": source.token_source is None,
        "component_rank": theirs.num_components == 1 and not source.component_rank,
    }
    found, needed = ({**_sizes(h), **h.options, "token_rank": h.token_rank} for h in (head, source))
    rows = [(name, found.get(name) or 0, needed.get(name) or 0, "the same") for name in found | needed]
    rows = [row for row in rows if row[1] != row[2] and not may_lack.get(row[0])]
    if ours.name not in circuits:
        rows.append(("circuit", ours.name, theirs.name, ", ".join(circuits)))
    if ours.num_components % theirs.num_components:
        rows.append(("num_components", ours.num_components, theirs.num_components, multiples))
    for name, value, same, allowed in rows:
        raise HeadConfigError(
            f"{name}={value} cannot start from a head of {name}={same}; allowed: {allowed}; set that, or train without "
            "a source head"
        )


def _sizes(head: Head) -> dict[str, object]:
    sizes = head.circuit.window, head.vocab_size, head.hidden_size
    return {"class": type(head).__name__, "window, vocab_size, hidden_size": sizes}

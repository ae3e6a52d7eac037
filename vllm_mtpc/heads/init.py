"""Initialise a head from the target's own lm_head, or from a trained head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllm_mtpc.circuits import CIRCUITS, circuit_class
from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads.head import Head, stay_bias
from vllm_mtpc.heads.leaves.base import INIT_STD
from vllm_mtpc.heads.leaves.own import OwnLeaves
from vllm_mtpc.heads.trunk.backbone import Backbone

# Probability s that one of F inner sums keeps its latent when a circuit starts from a CP: log q is nowhere more than
# -F log s (0.001 F nats) below the CP's, and the total variation is at most 1 - s**F.
INHERITED_STAY = 0.999


@torch.no_grad()
def init_from_lm_head(head: Head, weight: Tensor, seed: int) -> None:
    """Start leaves of their own at the target's lm_head; others are not changed. Noise makes components differ.

    weight [blocks * V, D]: position i starts from block i, or the last (EvaByte predicts 8 tokens; others have one).
    """
    if not isinstance(head.leaves, OwnLeaves):
        return
    blocks, skip = weight.view(-1, head.vocab_size, head.hidden_size), head.leaves.skip
    if head.vocabulary:
        blocks = blocks[:, head.vocabulary.ids.to(blocks.device)]
    if len(blocks) > 1:
        position = torch.arange(skip, head.circuit.window, device=weight.device)
        blocks = blocks[position.clamp(max=len(blocks) - 1), None]
    noise = weight.new_zeros(())
    if head.circuit.num_components > 1:
        noise = torch.randn(head.leaves.leaf_weight.shape, generator=torch.Generator().manual_seed(seed))
    head.leaves.leaf_weight.copy_(blocks + noise.to(weight) * (INIT_STD * head.hidden_size**-0.5))


@torch.no_grad()
def init_backbone(backbone: Backbone, target: Any) -> str:
    """Start a backbone at the final norm and last layers of a `vllm_mtpc.hf.Target`, where names and shapes agree.

    Returns a line that names the weights that were not copied; empty if all were.
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
    """Start `head` at the distribution of a trained head `source` of the same trunk, leaves and target.

    A source without inner sums (ff, cp) becomes any circuit with a root, whose sums keep the latent with probability
    INHERITED_STAY. A multiple of the source's components repeats them, with noise from `seed` in the leaves. A bigram
    that the source lacks adds 0; components that it lacks are equal and diverge by component_in. A source without inner
    sums may have a smaller window: further positions start as its last one. Raises as `check_source`.
    """
    check_source(head, source)
    repeats = head.circuit.num_components // source.circuit.num_components
    generator = torch.Generator().manual_seed(seed)
    trained, wanted = source.state_dict(), head.state_dict()
    component_dims = {f"leaves.{name}": dims for name, dims in head.leaves.component_dims.items()} | head.component_dims
    for name, value in trained.items():
        if dims := [dim for dim in component_dims.get(name, ()) if value.shape[dim] != wanted[name].shape[dim]]:
            value = value.repeat([repeats if dim in dims else 1 for dim in range(value.dim())])
        if repeats > 1 and name == f"leaves.{head.leaves.noise_in}":
            noise = torch.randn(value.shape, generator=generator) * INIT_STD * value.shape[-1] ** -0.5
            value = value + noise.to(value)
        if name.startswith("leaves.") and (further := len(wanted[name]) - len(value)):
            value = torch.cat([value, value[-1:].expand(further, *value.shape[1:])])
        wanted[name].copy_(value)
    head.forget_vocabulary()
    if "leaves.component_out" in wanted and "leaves.component_out" not in trained:
        head.leaves.component_out.zero_()
    if head.inner_weight is not None and head.inner_bias is not None and "inner_bias" not in trained:
        head.inner_weight.zero_()
        head.inner_bias.copy_(stay_bias(head.circuit.num_components, INHERITED_STAY))


def check_source(head: Head, source: Head) -> None:
    """Raise HeadConfigError unless `head` can start from `source`."""
    ours, theirs = head.circuit, source.circuit
    mixtures = [] if theirs.num_inner else [name for name in CIRCUITS if circuit_class(name).max_components > 1]
    circuits, multiples = list(dict.fromkeys((theirs.name, *mixtures))), f"multiples of {theirs.num_components}"
    is_longer = not theirs.num_inner and not source.trunk.is_per_position and ours.window > theirs.window
    may_lack = {  # options that the source need not have
        "window": is_longer,
        "leaves.token_rank": not source.leaves.token_rank,
        "leaves.component_rank": theirs.num_components == 1,
    }
    if head.trunk.options.kind == "lora" and source.trunk.options.kind == "none":  # adapters start without effect
        may_lack |= {"trunk": True} | {f"trunk.{name}": True for name, _ in head.trunk.options}
    found, needed = _sizes(head), _sizes(source)
    rows = [(name, found.get(name), needed.get(name), "the same") for name in found | needed]
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
    sizes: dict[str, object] = {
        "window": head.circuit.window, "vocab_size": head.vocab_size, "hidden_size": head.hidden_size,
        "draft_vocab_size": head.columns,
    }  # fmt: skip
    for part in ("trunk", "leaves"):
        sizes |= {f"{part}.{name}": value for name, value in getattr(head, part).options}
    return {name.removesuffix(".kind"): value for name, value in sizes.items()}

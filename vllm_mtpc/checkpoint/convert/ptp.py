"""A PTP checkpoint of the paper's authors as a head folder.

Their code writes Lightning checkpoints, in two layouts of `state_dict`:

    official   model.model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight, model.u_embed.*
    fork       student.model.base_model..., student.u_adapter.* (the older one; a teacher may lie next to)

Weights of the target in such a file are left out: a head uses its target's own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_mtpc.checkpoint.convert.source import ConvertOptions, adapters_of, load, target_config
from vllm_mtpc.checkpoint.locate import verifier_name
from vllm_mtpc.checkpoint.metadata import converted_card
from vllm_mtpc.checkpoint.ptp import save_ptp
from vllm_mtpc.config.ptp import PtpConfig
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import check_lengths
from vllm_mtpc.heads.ptp.embedding import AuxEmbedding, build_embedding

DEFAULT_WINDOW = 16  # auxiliary rows the authors train with
# prefixes of the model that drafts and of its u-embedding
LAYOUTS = {"official": ("model.", "model.u_embed."), "fork": ("student.", "student.u_adapter.")}


class _Theirs(NamedTuple):
    fitting: tuple[str, ...]  # embeddings of these tensors, by our names
    names: dict[str, str]  # of tensors: theirs -> ours
    counted: int | None  # dimension of `embedding.weight` that counts features or rows


_EMBEDDINGS = (
    _Theirs(("ieee",), {"u_adapter.weight": "outer.weight", "u_adapter.bias": "outer.bias"}, None),
    _Theirs(("sawtooth", "quarter-cos"), {"embedding.weight": "outer.weight", "embedding.bias": "outer.bias"}, 1),
    _Theirs(("interpolation", "round"), {"embedding.weight": "rows"}, 0),
)
ROUND_ROWS = 32  # as many as they round to; they interpolate between few


def convert_ptp(options: ConvertOptions, file: Mapping[str, Any]) -> PtpConfig:
    """Write the head folder `options.out` of what `options.ckpt` holds; returns its config.

    Raises CheckpointError or HeadConfigError.
    """
    path, target = options.ckpt, target_config(options.target)
    state = file["state_dict"]
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: its 'state_dict' is none; name a checkpoint that Lightning wrote (.ckpt)")
    state = {name: value for name, value in state.items() if isinstance(name, str) and isinstance(value, Tensor)}
    check_lengths(path, state)
    layout = _layout(path, state, options.layout)
    lora = _adapters(path, state, LAYOUTS[layout][0])
    u_embedding, features, tensors = _embedding(options, state, LAYOUTS[layout][1])
    counts = None if options.histogram is None else _histogram(options.histogram)
    window = options.window or (len(counts) - 1 if counts else DEFAULT_WINDOW)
    config = PtpConfig.create(
        variant=options.variant,
        window=window,
        target=target,
        verifier=verifier_name(options.target, options.out),
        u_embedding=u_embedding,
        u_features=features,
        lora_rank=next((*value.shape, 0)[0] for name, value in sorted(lora.items()) if ".lora_A." in name),
        lora_alpha=options.lora_alpha,
        accepted=counts and accepted_drafts(counts, window),
        **options.trained_sampling,
    )
    if counts and config.accepted is None:
        print(
            f"warning: {options.histogram} counts up to {len(counts) - 1} tokens, window is {window}: left out",
            file=sys.stderr,
        )
    is_half = all(value.dtype is torch.float16 for value in [*lora.values(), *tensors.values()])
    dtype = torch.float16 if is_half else torch.float32
    progress = {key: file[key] for key in ("epoch", "global_step") if isinstance(file.get(key), int)}
    settings = options.model_dump(mode="json", include={"variant", "lora_alpha", "temperature", "top_k", "top_p"})
    record = {"from": path.name, "layout": layout, **progress, "settings": settings}
    save_ptp(
        options.out, config, lora, _fill(path, config, tensors), {"converted": record}, _card(options, config), dtype
    )
    return config


def accepted_drafts(counts: list[float], window: int) -> list[float] | None:
    """P(exactly g of the n - 1 drafts are accepted) from shares of windows with 0, 1, ... leading tokens right.

    The authors count the window's first token, which serving takes from the target. Windows that have it right stand
    for all: P(g drafts) = P(1 + g right) / P(at least 1 right). A count over more tokens than `window` is cut there,
    which is exact, since rows see only rows before them; one over fewer says nothing of the last drafts: None.
    """
    later = counts[1:]
    total = sum(later)
    if len(later) < window or total <= 0:
        return None
    kept = [share / total for share in later]
    return [*kept[: window - 1], sum(kept[window - 1 :])]


def _layout(path: Path, state: Mapping[str, Tensor], asked: str) -> str:
    """The layout whose u-embedding the file has."""
    found = [name for name, (_, prefix) in LAYOUTS.items() if any(key.startswith(prefix) for key in state)]
    if asked in found or (asked == "auto" and len(found) == 1):
        return found[0] if asked == "auto" else asked
    shown = " or ".join(f"{prefix}* ({name})" for name, (_, prefix) in LAYOUTS.items())
    if asked == "auto" and found:
        raise CheckpointError(f"{path}: has tensors of both layouts; name one: --layout {' or --layout '.join(found)}")
    has = f"has a u-embedding of layout {found[0]}" if found else f"has no u-embedding, {shown}"
    raise CheckpointError(f"{path}: {has}; given: layout {asked}; name a PTP checkpoint and its layout")


def _adapters(path: Path, state: Mapping[str, Tensor], student: str) -> dict[str, Tensor]:
    """The student's adapters by PEFT's names on disk."""
    lora = {name: value for name, value in state.items() if name.startswith(student) and ".lora_" in name}
    lora = adapters_of(path, lora)
    if not any(".lora_A." in name for name in lora):
        raise CheckpointError(
            f"{path}: has no adapters (lora_A, lora_B): it trained the model's own weights, and a PTP head shares its "
            "target's; convert a checkpoint trained with LoRA"
        )
    return lora


def _embedding(
    options: ConvertOptions, state: Mapping[str, Tensor], prefix: str
) -> tuple[str, int | None, dict[str, Tensor]]:
    """Name of the u-embedding, its features, and its tensors by the names here."""
    given = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    theirs = next((known for known in _EMBEDDINGS if known.names.keys() == given.keys()), None)
    if theirs is None or any(value.dim() != (1 if name.endswith("bias") else 2) for name, value in given.items()):
        known = " or ".join(" and ".join(known.names) for known in _EMBEDDINGS)
        raise CheckpointError(
            f"{options.ckpt}: u-embedding of {', '.join(sorted(given))} below {prefix}; known: {known}"
        )
    count = None if theirs.counted is None else given["embedding.weight"].shape[theirs.counted]
    fitting = theirs.fitting
    if fitting == ("interpolation", "round") and count != ROUND_ROWS:
        fitting = ("interpolation",)
    name = options.u_embedding or fitting[0]
    if name not in fitting or (len(fitting) > 1 and options.u_embedding is None):
        asked = f"not {name}" if options.u_embedding else "which the file does not say"
        raise CheckpointError(
            f"{options.ckpt}: the u-embedding's tensors are those of {' or '.join(fitting)}, {asked}; "
            f"type --u-embedding {' or --u-embedding '.join(fitting)}"
        )
    return name, count, {ours: given[name] for name, ours in theirs.names.items()}


def _fill(path: Path, config: PtpConfig, tensors: dict[str, Tensor]) -> AuxEmbedding:
    """The u-embedding of the file; raises CheckpointError where it is not one of the target's width."""
    with torch.device("meta"):
        embedding = build_embedding(config.u_embedding, config.hidden_size, config.u_features, config.u_hidden)
    for name, value in embedding.state_dict().items():
        if value.shape != tensors[name].shape:
            raise CheckpointError(
                f"{path}: u-embedding of shape {tuple(tensors[name].shape)}; {config.u_embedding} of this target has "
                f"{tuple(value.shape)}; name the target it was trained on"
            )
    embedding.load_state_dict(tensors, assign=True)
    return embedding


def _histogram(path: Path) -> list[float]:
    """Shares of windows with 0, 1, ... leading tokens right."""
    counts = load(path)
    fits = isinstance(counts, torch.Tensor) and counts.dim() == 1 and counts.numel() >= 3
    if not fits or not bool(torch.isfinite(counts).all()) or bool((counts < 0).any()) or counts.sum() <= 0:
        raise CheckpointError(
            f"{path}: not a histogram; a list of shares from 0 is expected, one for each number of tokens"
        )
    return (counts.double() / counts.double().sum()).tolist()


def _card(options: ConvertOptions, config: PtpConfig) -> str:
    top_k, top_p = config.trained_top_k or "off", "off" if config.trained_top_p == 1 else config.trained_top_p
    about = (
        f"Converted from `{options.ckpt.name}` by `vllm-mtpc convert`; target "
        f"`{config.speculators_config.verifier.name_or_path}`, adapters of rank {config.lora_rank} on every layer, "
        f"u-embedding `{config.u_embedding}`, drafts for temperature {config.trained_temperature}, top-k {top_k}, "
        f"top-p {top_p}."
    )
    card = converted_card(config, f"PTP head: {config.variant}, n={config.window}", about)
    return f"{card}\n```bash\nvllm serve {options.out.name}\n```\n"

"""Make heads of what other models have: drafters that vLLM runs, and the prediction heads of a target.

`convert_drafter` names a DFlash, DSpark or EAGLE-3 checkpoint, which vLLM loads, validates and runs. The head is ff,
untrained: it drafts what vLLM's own speculator of the checkpoint drafts. DSpark's Markov head becomes its token_source
[V, R] and token_target [n - 1, R, V], equal at all positions.

A block of b queries drafts b tokens if sampling starts at the anchor (the default of DSpark's own layout), else b - 1,
because the first query is x_1. EAGLE-3 drafts one token.

`convert_token_heads`: EvaByte predicts eight bytes at once: rows [V i, V (i + 1)) of its lm_head are for token i + 1
after the last. They form a fully factorised circuit of one component. Serving takes x_1 from the first, the target, and
drafts from the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import AliasPath, BaseModel, Field

from vllm_mtpc.checkpoint.convert.source import ConvertOptions, target_config
from vllm_mtpc.checkpoint.load import Shards
from vllm_mtpc.checkpoint.locate import CONFIG_FILE, verifier_name
from vllm_mtpc.checkpoint.save import save_converted
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import CheckpointError, validate
from vllm_mtpc.files import read_json
from vllm_mtpc.heads.head import build_head

LM_HEAD = "lm_head.weight"
MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
METHODS = ("eagle3", "dflash", "dspark")  # vLLM's, which are parts of class names


class DrafterConfig(BaseModel):
    """The keys of a drafter's config.json that decide the head: of speculators and of the authors."""

    speculators_model_type: str | None = None
    architectures: list[str] = []
    proposed: int | None = Field(
        None, ge=1, validation_alias=AliasPath("speculators_config", "proposal_methods", 0, "speculative_tokens")
    )
    block_size: int = Field(1, ge=1)
    markov_rank: int = Field(0, ge=0)
    sample_from_anchor: bool | None = None

    @property
    def method(self) -> str | None:
        """VLLM's method of the drafter."""
        name = (self.speculators_model_type or " ".join(self.architectures)).lower()
        return next((method for method in METHODS if method in name), None)

    @property
    def window(self) -> int:
        """The head's n: x_1 and the drafts of a block."""
        if self.method == "eagle3":
            return 2
        default = self.method == "dspark" and self.speculators_model_type is None
        return self.block_size + (default if self.sample_from_anchor is None else self.sample_from_anchor)


def read_drafter(file: Path) -> DrafterConfig:
    """Read a drafter's config.json; raises CheckpointError for one of another kind."""
    values = {key: value for key, value in read_json(file).items() if value is not None}
    config = validate(DrafterConfig, values, CheckpointError, f"{file}: ", "; name another drafter")
    if config.method is None or config.window < 2:
        raise CheckpointError(
            f"{file}: architectures = {config.architectures}, block_size = {config.block_size}; allowed: DFlash and "
            "DSpark with a block of two or more, EAGLE-3; name another drafter"
        )
    return config


def convert_drafter(options: ConvertOptions, label: str, given: str) -> str:
    """Write the head of the drafter in the folder `options.ckpt`, `given` by the user; `label` is for provenance."""
    target, drafter = target_config(options.target), read_drafter(options.ckpt / CONFIG_FILE)
    rank = drafter.markov_rank if drafter.method == "dspark" else 0
    config = HeadConfig.create(
        circuit="ff",
        window=drafter.window,
        num_components=1,
        num_speculative_tokens=min(drafter.window - 1, drafter.proposed or drafter.window),
        trunk={"kind": "drafter", "method": drafter.method, "model": verifier_name(given, options.out)},
        leaves={"kind": "lm_head", "expander_rank": 0, "token_rank": rank},
        target=target,
        verifier=options.verifier,
    )
    tensors: dict[str, Any] = dict(build_head(config).state_dict())
    if rank:
        source = Shards(options.ckpt)
        w1, w2 = (source.read(name) for name in MARKOV)
        tensors["leaves.token_source"] = w1[: config.vocab_size]  # it may have more rows than the target has ids
        tensors["leaves.token_target"] = w2.T[None].repeat(config.window - 1, 1, 1)
    title = f"{drafter.method} drafter of vLLM, window {config.window}"
    save_converted(options.out, config, tensors, title, {"from": label, "drafter": drafter.method})
    return f"{config.circuit.kind}, hosted on {drafter.method}, window {config.window}"


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

"""`vllm-mtpc token-heads`: the prediction heads that a target brings itself, as a head folder.

A target trained to predict several tokens at once (EvaByte: eight bytes) has rows [V i, V (i + 1)) of its lm_head for
the token i + 1 ahead. That is a fully factorised circuit of one component. The first of them is the target; a served
step takes its token from there and drafts from the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_mtpc.checkpoint.card import front_matter
from vllm_mtpc.checkpoint.locate import CONFIG_FILE, hub_name, is_head, verifier_name
from vllm_mtpc.errors import CheckpointError, first_line, one_line
from vllm_mtpc.files import MAX_INDEX, MAX_NAME, open_tensors, read_json
from vllm_mtpc.flags import add_flags, typed

if TYPE_CHECKING:
    import argparse

    from torch import Tensor

    from vllm_mtpc.config.mtpc import HeadConfig

LM_HEAD = "lm_head.weight"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class TokenHeadsOptions(BaseModel):
    """Which target. A field is a flag of `vllm-mtpc token-heads`, target its argument."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str = Field(min_length=1, description="model with several prediction heads: folder or hub name")
    out: Path = Field(description="folder of the head")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help=TokenHeadsOptions.model_fields["target"].description)
    add_flags(parser, TokenHeadsOptions, only=("out",))


def run(args: argparse.Namespace) -> int:
    try:
        options = TokenHeadsOptions.model_validate(typed(args, TokenHeadsOptions))
    except ValidationError as error:
        raise CheckpointError(one_line(error, TokenHeadsOptions)) from None
    config = write_token_heads(options)
    print(f"head: {options.out} ({config.circuit}, window {config.window})")
    return 0


def write_token_heads(options: TokenHeadsOptions) -> HeadConfig:
    """Write the head folder; returns its config. Raises CheckpointError where the target has one head or none."""
    import torch

    from vllm_mtpc.checkpoint.save import save_head
    from vllm_mtpc.config.mtpc import HeadConfig
    from vllm_mtpc.heads import build_head

    if options.out.joinpath(CONFIG_FILE).is_file() and not is_head(options.out):
        raise CheckpointError(f"out={options.out} holds another model's {CONFIG_FILE}; name another folder")
    folder = _folder(options.target)
    target, weight = read_json(folder / CONFIG_FILE), _read_lm_head(folder)
    vocab_size, hidden_size = target.get("vocab_size"), target.get("hidden_size")
    heads = len(weight) // vocab_size if weight.dim() == 2 and type(vocab_size) is int and vocab_size > 0 else 0
    if heads < 2 or tuple(weight.shape) != (heads * vocab_size, hidden_size):
        raise CheckpointError(
            f"{options.target}: {LM_HEAD} is {'x'.join(map(str, weight.shape))} with vocab_size={vocab_size}, "
            f"hidden_size={hidden_size}; allowed: two or more times vocab_size rows; train a head for this target"
        )
    verifier = verifier_name(options.target, options.out)
    config = HeadConfig.create(circuit="ff", window=heads, num_components=1, target=target, verifier=verifier)
    head = build_head(config)
    head.load_state_dict({"leaf_weight": weight.view(heads, 1, vocab_size, hidden_size)})
    provenance = {"command": f"vllm-mtpc token-heads {options.target} --out {options.out}"}
    card = (
        f"{front_matter(['mtpc', 'speculative-decoding'], hub_name(verifier))}\n\n"
        f"# {config.circuit} head of {heads} prediction heads\n\nThe prediction heads that `{verifier}` was trained "
        "with, unchanged. The output is the target's own, whatever the head drafts.\n"
    )
    dtype = weight.dtype if weight.dtype in (torch.float16, torch.bfloat16) else torch.float32
    save_head(options.out, config, head, provenance, card, dtype)
    return config


def _folder(target: str) -> Path:
    """The target's folder, downloaded where it is a hub name: all its weights, which serving it needs anyway."""
    if Path(target).is_dir():
        return Path(target)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(target, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        reason = first_line(error)
        raise CheckpointError(
            f"no target at {target!r}: not a local folder, and not to be had from the hub ({reason}); correct the name "
            "or download it first"
        ) from None


def _read_lm_head(folder: Path) -> Tensor:
    """The lm_head, out of the one file that holds it."""
    from vllm_mtpc.checkpoint.tensors import checked, stored_shapes

    file = folder / SINGLE
    if folder.joinpath(INDEX).exists():
        shards = read_json(folder / INDEX, MAX_INDEX).get("weight_map")
        shard = shards.get(LM_HEAD, SINGLE) if isinstance(shards, dict) else None
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.isprintable() or len(shard) > MAX_NAME:
            raise CheckpointError(
                f"{folder / INDEX}: weight_map has {shard!r} for {LM_HEAD}; allowed: the name of a file beside it; "
                "copy the target again"
            )
        file = folder / shard
    with open_tensors(file) as handle:
        if LM_HEAD not in stored_shapes(handle):
            raise CheckpointError(f"{file}: has no {LM_HEAD}; name a model with several prediction heads")
        return checked(file, LM_HEAD, handle.get_tensor(LM_HEAD))

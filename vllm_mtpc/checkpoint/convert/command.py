"""`vllm-mtpc convert`: make a head folder of a checkpoint that was trained elsewhere.

The content decides the kind: PTP checkpoints hold `state_dict` (ptp_checkpoint.py), MtPC checkpoints `model_state_dict`
and a config.yaml next to them (mtpc_checkpoint.py), DFlash, DSpark and EAGLE-3 drafters are folders whose
weights vLLM reads (drafter.py). The target itself as the checkpoint gives its own prediction heads (token_heads.py).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm_mtpc.checkpoint.convert.source import ConvertOptions, find_checkpoint, load_tensors
from vllm_mtpc.checkpoint.locate import check_out
from vllm_mtpc.errors import CheckpointError, validate
from vllm_mtpc.flags import add_flags, typed

if TYPE_CHECKING:
    import argparse

PTP_ONLY = {"variant", "window", "lora_alpha"}  # options that other checkpoints record themselves


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("ckpt", metavar="CKPT", help=ConvertOptions.model_fields["ckpt"].description)
    add_flags(parser, ConvertOptions, only=ConvertOptions.model_fields.keys() - {"ckpt"})


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    options = validate(ConvertOptions, typed(args, ConvertOptions), CheckpointError)
    print(f"head: {options.out} ({convert(options)})")
    return 0


def convert(options: ConvertOptions) -> str:
    """Write the head folder `options.out`; returns a short description of it.

    Raises CheckpointError or HeadConfigError for a checkpoint that is not known, or that a head cannot have.
    """
    from vllm_mtpc.checkpoint.convert.drafter import convert_drafter
    from vllm_mtpc.checkpoint.convert.mtpc_checkpoint import convert_mtpc
    from vllm_mtpc.checkpoint.convert.ptp_checkpoint import convert_ptp
    from vllm_mtpc.checkpoint.convert.token_heads import convert_token_heads

    check_out(options.out)
    is_target = os.path.realpath(options.ckpt) == os.path.realpath(options.target)
    given, (path, label) = str(options.ckpt), find_checkpoint(options.ckpt)
    options = options.model_copy(update={"ckpt": path})
    content: Any = None if path.is_dir() else load_tensors(path)
    kinds = [key for key in ("state_dict", "model_state_dict") if isinstance(content, dict) and key in content]
    if kinds == ["state_dict"]:
        return convert_ptp(options, content)
    if content is not None and kinds != ["model_state_dict"]:
        raise CheckpointError(
            f"{path}: has {' and '.join(map(repr, kinds)) or 'no state_dict'}; allowed: one of 'state_dict' "
            "(PTP, Lightning) and 'model_state_dict' (MtPC); name a checkpoint of their authors' code"
        )
    if foreign := sorted(options.model_fields_set & PTP_ONLY):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
        raise CheckpointError(f"{options.ckpt}: {flags}: for PTP checkpoints only; remove it")
    if content is not None:
        return convert_mtpc(options, content, label)
    return convert_token_heads(options, label) if is_target else convert_drafter(options, label, given)

"""`vllm-mtpc convert`: make a head folder of a checkpoint that was trained elsewhere.

A file is an MtPC checkpoint, with a config.yaml next to it (mtpc_checkpoint.py). DFlash, DSpark and EAGLE-3 drafters
are folders whose weights vLLM reads; the target itself as the checkpoint gives its own prediction heads (drafter.py).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm_mtpc.checkpoint.convert.source import ConvertOptions, find_checkpoint
from vllm_mtpc.checkpoint.locate import check_out
from vllm_mtpc.errors import CheckpointError, validate
from vllm_mtpc.flags import add_flags, typed

if TYPE_CHECKING:
    import argparse


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
    from vllm_mtpc.checkpoint.convert.drafter import convert_drafter, convert_token_heads
    from vllm_mtpc.checkpoint.convert.mtpc_checkpoint import convert_mtpc

    check_out(options.out)
    is_target = os.path.realpath(options.ckpt) == os.path.realpath(options.target)
    given, (path, label) = str(options.ckpt), find_checkpoint(options.ckpt)
    options = options.model_copy(update={"ckpt": path})
    if not path.is_dir():
        return convert_mtpc(options, label)
    return convert_token_heads(options, label) if is_target else convert_drafter(options, label, given)

"""`vllm-mtpc convert`: a checkpoint that was not trained here as a head folder.

Kinds are known by what the files hold: PTP checkpoints (`state_dict`, see convert/ptp.py), MtPC heads
(`model_state_dict` with a config.yaml next to, see convert/mtpc.py), and DFlash and DSpark drafters (folders with a
config.json and safetensors, see convert/drafter.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from vllm_mtpc.checkpoint.convert.source import SHARED, ConvertOptions, load, locate
from vllm_mtpc.checkpoint.locate import check_out
from vllm_mtpc.errors import CheckpointError, one_line
from vllm_mtpc.flags import add_flags, typed

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ckpt", metavar="CKPT", help=ConvertOptions.model_fields["ckpt"].description)
    add_flags(parser, ConvertOptions, only=ConvertOptions.model_fields.keys() - {"ckpt"})


def run(args: argparse.Namespace) -> int:
    try:
        options = ConvertOptions.model_validate(typed(args, ConvertOptions))
    except ValidationError as error:
        raise CheckpointError(one_line(error, ConvertOptions)) from None
    print(f"head: {options.out} ({convert(options)})")
    return 0


def convert(options: ConvertOptions) -> str:
    """Write the head folder `options.out`; returns what it is, in words. Raises CheckpointError or HeadConfigError."""
    from vllm_mtpc.checkpoint.convert.drafter import convert_drafter
    from vllm_mtpc.checkpoint.convert.mtpc import convert_mtpc
    from vllm_mtpc.checkpoint.convert.ptp import convert_ptp

    check_out(options.out)
    path, label = locate(options.ckpt)
    options = options.model_copy(update={"ckpt": path})
    if path.is_dir():
        _refuse_foreign(options, "a drafter")
        return convert_drafter(options, label)[1]
    file: Any = load(path)
    kinds = [key for key in ("state_dict", "model_state_dict") if isinstance(file, dict) and key in file]
    if len(kinds) != 1:
        raise CheckpointError(
            f"{path}: has {' and '.join(map(repr, kinds)) or 'no state_dict'}; allowed: one of 'state_dict' "
            "(PTP, Lightning) and 'model_state_dict' (MtPC); name a checkpoint of their authors' code"
        )
    if kinds == ["state_dict"]:
        config = convert_ptp(options, file)
        measured = "" if config.accepted else ", acceptance not measured"
        return f"{config.variant}, {config.u_embedding}, window {config.window}{measured}"
    _refuse_foreign(options, "an MtPC head")
    config = convert_mtpc(options, file, label)
    lora = f", {config.lora_layers} draft layers" if config.lora_layers else ""
    return f"{config.circuit}, window {config.window}, {config.num_components} components{lora}"


def _refuse_foreign(options: ConvertOptions, kind: str) -> None:
    """Raise CheckpointError for flags that say what PTP checkpoints do not say themselves."""
    if foreign := sorted(options.model_fields_set - set(SHARED)):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
        raise CheckpointError(f"{options.ckpt}: is {kind}; {flags}: of PTP checkpoints only; leave it out")

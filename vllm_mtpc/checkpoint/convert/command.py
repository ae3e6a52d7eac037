"""`vllm-mtpc convert`: a checkpoint of the papers' authors as a head folder.

Two kinds are known by what the file holds: PTP checkpoints (`state_dict`, see convert_ptp) and MtPC heads
(`model_state_dict` with a config.yaml beside, see convert_mtpc).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_mtpc.checkpoint.locate import CONFIG_FILE, is_head
from vllm_mtpc.errors import CheckpointError, one_line
from vllm_mtpc.flags import add_flags, typed

if TYPE_CHECKING:
    import argparse

    from vllm_mtpc.config.mtpc import HeadConfig
    from vllm_mtpc.config.ptp import PtpConfig


class ConvertOptions(BaseModel):
    """What is to be converted. A field is a flag of `vllm-mtpc convert`, ckpt its argument."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ckpt: Path = Field(
        description="PTP: Lightning checkpoint (.ckpt); MtPC: model@STEP.pt with config.yaml beside it, the folder of "
        "both (the last step is taken) or a hub repository"
    )
    target: str = Field(min_length=1, description="the model it was trained on: folder or hub name")
    out: Path = Field(description="folder of the head")
    temperature: float = Field(1.0, gt=0, description="temperature of the text (PTP: of u's law) it was trained on")
    top_k: int = Field(0, ge=0, description="top-k of that law; 0: off")
    top_p: float = Field(1.0, gt=0, le=1, description="top-p of that law; 1: off")
    layout: Literal["auto", "official", "fork"] = Field("auto", description="PTP: names in the file")
    variant: Literal["o-ptp", "c-ptp"] = Field("o-ptp", description="PTP: what the rows were trained to give")
    window: int | None = Field(
        None, ge=2, description="PTP: n, auxiliary rows (default: as the histogram's, or 16, what the authors train)"
    )
    u_embedding: str | None = Field(None, description="PTP: name of the u-embedding, where its tensors fit several")
    lora_alpha: float = Field(8.0, gt=0, description="PTP: of the adapters; PEFT's default, which the authors leave")
    histogram: Path | None = Field(None, description="PTP: correct_count_hist.pt, shares of 0, 1, ... correct tokens")


SHARED = ("ckpt", "target", "out", "temperature", "top_k", "top_p")  # what an MtPC head does not say itself


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ckpt", metavar="CKPT", help=ConvertOptions.model_fields["ckpt"].description)
    add_flags(parser, ConvertOptions, only=ConvertOptions.model_fields.keys() - {"ckpt"})


def run(args: argparse.Namespace) -> int:
    try:
        options = ConvertOptions.model_validate(typed(args, ConvertOptions))
    except ValidationError as error:
        raise CheckpointError(one_line(error, ConvertOptions)) from None
    print(f"head: {options.out} ({_summary(convert(options))})")
    return 0


def convert(options: ConvertOptions) -> HeadConfig | PtpConfig:
    """Write the head folder `options.out`; returns its config. Raises CheckpointError or HeadConfigError."""
    from vllm_mtpc.checkpoint.convert.mtpc import convert_mtpc
    from vllm_mtpc.checkpoint.convert.ptp import convert_ptp
    from vllm_mtpc.checkpoint.convert.source import load, locate

    if options.out.joinpath(CONFIG_FILE).is_file() and not is_head(options.out):
        raise CheckpointError(f"out={options.out} holds another model's {CONFIG_FILE}; name another folder")
    source = locate(options.ckpt)
    options = options.model_copy(update={"ckpt": source.file})
    file: Any = load(source.file)
    kinds = [key for key in ("state_dict", "model_state_dict") if isinstance(file, dict) and key in file]
    if len(kinds) != 1:
        raise CheckpointError(
            f"{source.file}: has {' and '.join(map(repr, kinds)) or 'no state_dict'}; allowed: one of 'state_dict' "
            "(PTP, Lightning) and 'model_state_dict' (MtPC); name a checkpoint of their authors' code"
        )
    if kinds == ["state_dict"]:
        return convert_ptp(options, file)
    if foreign := sorted(options.model_fields_set - set(SHARED)):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
        raise CheckpointError(f"{source.file}: is an MtPC head; {flags}: of PTP checkpoints only; leave it out")
    return convert_mtpc(options, file, source.label)


def _summary(config: HeadConfig | PtpConfig) -> str:
    if config.speculators_model_type == "ptp":
        measured = "" if config.accepted else ", acceptance not measured"
        return f"{config.variant}, {config.u_embedding}, window {config.window}{measured}"
    lora = f", {config.lora_layers} draft layers" if config.lora_layers else ""
    return f"{config.circuit}, window {config.window}, {config.num_components} components{lora}"

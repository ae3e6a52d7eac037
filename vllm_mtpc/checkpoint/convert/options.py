"""What `vllm-mtpc convert` is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SHARED = ("ckpt", "target", "out", "temperature", "top_k", "top_p")  # what an MtPC head does not say itself


class ConvertOptions(BaseModel):
    """What is to be converted. A field is a flag of `vllm-mtpc convert`, ckpt its argument."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ckpt: Path = Field(
        description="PTP: Lightning checkpoint (.ckpt); MtPC: model@STEP.pt with config.yaml beside it, the folder of "
        "both (the last step is taken) or a hub repository"
    )
    target: str = Field(min_length=1, description="the model it was trained on: folder or hub name")
    out: Path = Field(description="folder of the head")
    temperature: float = Field(1.0, gt=0, description="temperature of the text (PTP: of u's picks) it was trained on")
    top_k: int = Field(0, ge=0, description="top-k of that text; 0: off")
    top_p: float = Field(1.0, gt=0, le=1, description="top-p of that text; 1: off")
    layout: Literal["auto", "official", "fork"] = Field("auto", description="PTP: names in the file")
    variant: Literal["o-ptp", "c-ptp"] = Field("o-ptp", description="PTP: what the rows were trained to give")
    window: int | None = Field(
        None, ge=2, description="PTP: n, auxiliary rows (default: as the histogram's, or 16, what the authors train)"
    )
    u_embedding: str | None = Field(None, description="PTP: name of the u-embedding, where its tensors fit several")
    lora_alpha: float = Field(8.0, gt=0, description="PTP: of the adapters; PEFT's default, which the authors leave")
    histogram: Path | None = Field(None, description="PTP: correct_count_hist.pt, shares of 0, 1, ... correct tokens")

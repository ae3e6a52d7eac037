"""Students without a head folder, which the ingredients table compares with LoRA on every layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from vllm_mtpc.heads.ptp.student import Student
from vllm_mtpc.train.ptp.ptp_trainer import PtpTrainer

INIT_STD = 0.02  # as transformers starts a Llama


def on_layers(choose: Callable[[int], list[int]]) -> type[PtpTrainer]:
    """A job whose student has adapters on `choose(number of layers)` alone."""

    class Some(Student):
        def adapt(self, view: nn.Module, rank: int, alpha: float, layers: Any = None) -> None:
            super().adapt(view, rank, alpha, choose(len(view.layers)))

    return _job(Some)


def own_weights(scratch: bool) -> type[PtpTrainer]:
    """A trainer whose rows have their own layers with all weights trained, from the target's or from scratch.

    They still read the keys and values that the plain target left of the text, and its norm and lm_head.
    """

    class Own(Student):
        def adapt(self, view: nn.Module, rank: int, alpha: float, layers: Any = None) -> None:
            self.own = nn.ModuleList(_learning(layer, scratch) for layer in view.layers)
            view.layers = self.own

    return _job(Own)


def _learning(layer: nn.Module, scratch: bool) -> nn.Module:
    """Return a copy with its own weights and the attention function of Student."""
    made = copy.deepcopy(layer).requires_grad_(True)
    for old, new in zip(layer.modules(), made.modules(), strict=True):
        if hasattr(old, "config"):
            new.config = old.config
        if scratch and isinstance(new, nn.Linear):
            nn.init.normal_(new.weight, std=INIT_STD)
    return made


def _job(student: type[Student]) -> type[PtpTrainer]:
    class Job(PtpTrainer):
        student_class = student

    return Job

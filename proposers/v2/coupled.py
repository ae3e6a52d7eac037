"""Sampling and verification by Pick, for drafts that know the verifier's random numbers (Parallel Token Prediction).

Algorithm: every output token is Pick(u, Q), the smallest token whose cumulative probability under the target's
processed distribution Q exceeds u, a hash of the request's seed and the position of the row that gives Q. Drafts are
accepted while they equal what is picked. So the tokens are those of decoding without drafts, whatever the drafts say,
the batch holds, or steps divide; the drafter who computes the same u can be right always. At temperature 0 the token
is the argmax, and u, which drafters read all the same, is 0.5.

Fused samplers are never used: they draw numbers of their own. `verification.Verifier` says what else differs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import SpeculativeConfig
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates

from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.kernels.pick import pick
from vllm_mtpc.kernels.uniform import uniform
from vllm_mtpc.proposers.v2.verification import Verifier, with_verifier

GREEDY_U = 0.5  # inside the argmax's interval wherever the argmax has more than half of the mass


def u_of(seeds: Tensor, temperature: Tensor, slots: Tensor, pos: Tensor) -> Tensor:
    """u [T] of the tokens that follow positions pos[T], in the requests at slots[T] of seeds and temperature.

    Drafter and verifier both take it from here.
    """
    return torch.where(temperature[slots] == 0, GREEDY_U, uniform(seeds[slots], pos))


def choose(processed_logits: Tensor, states: SamplingStates, slots: Tensor, pos: Tensor) -> Tensor:
    """Tokens [T] int64: Pick from processed_logits [T, V], argmax at temperature 0."""
    logits = processed_logits.float()  # vLLM hands back the model's own dtype where nothing is to be processed
    temperature = states.temperature.gpu
    picked = pick(logits, u_of(states.seeds.gpu, temperature, slots, pos))
    return torch.where(temperature[slots] == 0, logits.argmax(dim=-1), picked)


class CoupledSampler(Sampler):
    """vLLM's sampler, with Pick in the place of its random draw."""

    def _sample_random(
        self,
        processed_logits: Tensor,  # [T, V], before top-k and top-p
        expanded_idx_mapping: Tensor,  # [T] request slots
        idx_mapping_np: np.ndarray,
        pos: Tensor,  # [T]
        top_k: Tensor | None,
        top_p: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        processed_logits = apply_top_k_top_p(processed_logits, top_k, top_p)
        return choose(processed_logits, self.sampling_states, expanded_idx_mapping, pos), processed_logits


class CoupledRejectionSampler(Verifier):
    """Accepts drafts while they are the tokens that `sampler` picks."""

    def __init__(self, sampler: CoupledSampler, spec_config: SpeculativeConfig, device: torch.device) -> None:
        if not isinstance(sampler, CoupledSampler):
            self.refuse(type(sampler).__name__, spec_config)
        super().__init__(sampler, spec_config, device)

    @staticmethod
    def prepared(sampler: Sampler, spec_config: SpeculativeConfig) -> CoupledSampler:
        sampler.__class__ = CoupledSampler
        return sampler

    @staticmethod
    def refuse(name: str, spec_config: SpeculativeConfig) -> None:
        remedy = "remove --watermark-config" if "Watermark" in name else "use a target without a sampler of its own"
        raise ServeConfigError(
            f"method ptp with {name}: only vLLM's plain Sampler can be coupled to the drafts; {remedy}, or another "
            "method"
        )

    def is_coupled(self, slots: np.ndarray) -> np.ndarray:
        return np.ones(len(slots), dtype=bool)

    def tokens_of(self, processed_logits: Tensor, slots: Tensor, pos: Tensor) -> Tensor:
        return choose(processed_logits, self.sampler.sampling_states, slots, pos)


with_coupled_sampler = partial(with_verifier, CoupledRejectionSampler)

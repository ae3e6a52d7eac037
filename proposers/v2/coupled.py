"""Sampling and verification by Pick, for drafts that know the verifier's random numbers (Parallel Token Prediction).

Algorithm: every output token is Pick(u, Q), the smallest token whose cumulative probability under the target's
processed law Q exceeds u, where u is a hash of the request's seed and the position of the row that gives Q. Drafts are
accepted while they equal what is picked. So the tokens are those of decoding without drafts, whatever the drafts say,
the batch holds, or steps divide; the drafter who computes the same u can be right always. At temperature 0 the token
is the argmax, and u, which drafters read all the same, is 0.5.

Differences from vLLM's Sampler and RejectionSampler:
  * One draw per row, made in the same way with and without drafts: no recovered token, no bonus token.
  * No law of the drafts: `draft_logits` are ignored, and a draft of -1 equals nothing.
  * Fused samplers are never used: they draw numbers of their own.

They come in through the runner's offered seam, `ModelState.custom_sampler` (`with_coupled_sampler`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import SpeculativeConfig
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.kernels.couple import accept, warm_up
from vllm_mtpc.kernels.pick import pick
from vllm_mtpc.kernels.uniform import uniform

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


class CoupledRejectionSampler(RejectionSampler):
    """Accepts drafts while they are the tokens that `sampler` picks."""

    def __init__(self, sampler: CoupledSampler, spec_config: SpeculativeConfig, device: torch.device) -> None:
        if not isinstance(sampler, CoupledSampler):
            raise ServeConfigError(_refusal(sampler))
        super().__init__(sampler, spec_config, device)

    def _verify(
        self,
        logits: Tensor,  # [T, V]
        draft_logits: Tensor | None,
        draft_sampled: Tensor,  # [T] input token of each row: behind a request's first, its drafts
        pos: Tensor,  # [T]
        cu_num_logits: Tensor,  # [R + 1] rows of request r are cu_num_logits[r] .. cu_num_logits[r + 1] - 1
        idx_mapping: Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: Tensor,  # [T] request slots
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: Tensor | None = None,  # [T] with -1 where a grammar forbids the draft
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Processed logits [T, V], tokens [R, K + 1] int64 (-1 behind the last), number of tokens [R] int32."""
        processed_logits = self.sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        tokens = choose(processed_logits, self.sampler.sampling_states, expanded_idx_mapping, pos)  # [T]
        drafts = draft_sampled if verify_draft_sampled is None else verify_draft_sampled
        sampled, num_sampled = accept(tokens, drafts, cu_num_logits, self.num_speculative_steps + 1)
        return processed_logits, sampled, num_sampled


def with_coupled_sampler(
    base: type,
    spec_config: SpeculativeConfig,
    device: torch.device,
    on_sampler: Callable[[CoupledSampler], None] | None = None,
) -> type:
    """`base`, a ModelState class, with `custom_sampler` made to couple the runner's sampler.

    on_sampler is called with it; it is kept as the state's attribute `coupled_sampler` too. Raises ServeConfigError
    where another sampler is in use.
    """

    class CoupledModelState(base):
        coupled_sampler: CoupledSampler | None = None

        def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
            own = super().custom_sampler(sampler)
            if own is not None or type(sampler) is not Sampler:
                raise ServeConfigError(_refusal(sampler if own is None else own[0]))
            sampler.__class__ = CoupledSampler
            self.coupled_sampler = sampler
            warm_up(spec_config.num_speculative_tokens + 1, device)
            if on_sampler is not None:
                on_sampler(sampler)
            return sampler, CoupledRejectionSampler(sampler, spec_config, device)

    return CoupledModelState


def _refusal(sampler: Any) -> str:
    name = type(sampler).__name__
    remedy = "remove --watermark-config" if "Watermark" in name else "use a target without a sampler of its own"
    return (
        f"method ptp with {name}: only vLLM's plain Sampler can be coupled to the drafts; {remedy}, or another method"
    )

"""Noise that no earlier step has looked at, where what is verified depends on more than the next token.

vLLM 0.32 keys the noise of a token by the request's seed and the token's position; a draft that is thrown away is drawn
again from the same noise. The standard rule may do so: it has not looked at anything behind the first rejection. Block
verification has (how much of a block is kept depends on its last draft), and adaptive verification has (a budget
follows from the last step's confidences); what is kept then no longer has the target's distribution.

Here the seed of a step is seed XOR (position of the step's first row << 32), for drafting, acceptance and resampling. A
request's steps start at different positions, so no noise is used twice. vLLM 0.33 does the same where it verifies
blocks: it XORs the draft's number << 32, and position and number give the step. There only our drafts, in which vLLM
has no part, take a step's seeds: with both, position 4 as draft 1 and 5 as draft 0 would meet (5 XOR 0 = 4 XOR 1).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import SpeculativeConfig
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_mtpc.proposers.v2.grammar import ResidualRejectionSampler


def needs_fresh_noise(spec_config: SpeculativeConfig) -> bool:
    return spec_config.rejection_sample_method == "block" or spec_config.enable_adaptive_verification


def step_seeds(seeds: Tensor, anchor: Tensor) -> Tensor:
    """Seeds [R] int64 of the steps whose first rows are at positions anchor[R] (at least 1: a prompt comes before)."""
    return seeds ^ (anchor.long() << 32)


class SteppedRejectionSampler(ResidualRejectionSampler):
    """vLLM's verification with the noise of this step alone."""

    def __init__(self, sampler: Sampler, spec_config: SpeculativeConfig, device: torch.device) -> None:
        super().__init__(sampler, spec_config, device)
        self.seeds = torch.zeros(sampler.sampling_states.max_num_reqs, dtype=torch.int64, device=device)

    def _verify(
        self,
        logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        pos: Tensor,  # [T]
        cu_num_logits: Tensor,  # [R + 1]
        idx_mapping: Tensor,  # [R] slots
        idx_mapping_np: np.ndarray,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As its parent, which reads the seeds from the sampler's states: for this call they are the step's."""
        given = self.sampler.sampling_states.seeds
        own = given.gpu
        self.seeds[idx_mapping] = step_seeds(own[idx_mapping], pos[cu_num_logits[:-1]])
        given.gpu = self.seeds
        try:
            return super()._verify(
                logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping, idx_mapping_np, *args, **kwargs
            )
        finally:
            given.gpu = own

"""Verification of drafts that a request's grammar forbids, so that the output keeps the target's law.

Drafts on Model Runner V2 are drawn without the grammar: its state lives on the host, which sees drafts when a step is
over. vLLM 0.32 marks the first forbidden draft and all behind it as -1, and takes the token in the first one's place
from the target's law p. That is biased: the draft came from q, it is rejected because p is 0 there, so the token must
come from the residual law, max(p - q, 0). (PTP's drafts and argmax drafts are not concerned: they have no q.)

Here the first forbidden draft is verified like any other: its row is masked with the grammar, so it is never accepted.
What is behind it, whose rows are not masked, stays -1 and is not reached.

With synchronous scheduling vLLM does not schedule forbidden drafts at all, which comes to the same bias; the seam
(`seam/scheduler.py`) keeps the first one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler


def behind_the_first(invalid: Tensor) -> Tensor:
    """`invalid` [T] without the first row of each run: a request's rows begin with one that is valid."""
    kept = invalid.clone()
    kept[1:] &= invalid[:-1]
    return kept


class ResidualRejectionSampler(RejectionSampler):
    """vLLM's verification, in which a forbidden draft is replaced from the residual law."""

    def __call__(
        self, logits: Tensor, input_batch: Any, draft_logits: Tensor | None = None, invalid_drafts: Tensor | None = None
    ) -> Any:
        if draft_logits is not None and invalid_drafts is not None:
            invalid_drafts = behind_the_first(invalid_drafts)
        return super().__call__(logits, input_batch, draft_logits, invalid_drafts)

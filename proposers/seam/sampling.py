"""A bug of V1 sampling on a CPU, mended for every engine: the one replacement that runs where no head is served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_mtpc.proposers.seam.patch import Patch


class ExpandBatchToTokens(Patch):
    module = "vllm.v1.sample.rejection_sampler"
    attribute = "expand_batch_to_tokens"
    reason = "vLLM's CPU kernel fills a copy of a float output, so V1 samples with uninitialised temperatures"
    parameters = ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to")

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        from vllm_mtpc.proposers.v1.expand import choose

        return choose(original)


PATCHES: tuple[type[Patch], ...] = (ExpandBatchToTokens,)

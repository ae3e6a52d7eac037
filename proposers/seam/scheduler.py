"""The scheduler of an engine that serves a head: vLLM's, asynchronous or not, plus what it does not know of a head.

Engines reach it through their configuration's `scheduler_config` (config.py: HeadSchedulerConfig); others never import
this file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.v1.core.kv_cache_utils import update_kv_cache_capacity
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_mtpc.proposers.config.ptp import reserved_blocks
from vllm_mtpc.proposers.seam.patch import refuse_problems
from vllm_mtpc.proposers.seam.watch import COST, IDLE, DraftFigures


class HeadScheduler(Scheduler):
    """What is added to any scheduler of vLLM's.

    PTP: the KV blocks of its auxiliary rows are kept from requests. Model Runner V2: a draft that a grammar forbids is
    verified. Both: the counts of a step's drafts go to the front end.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        refuse_problems()
        if vllm_config.speculative_config.method == "ptp":
            kv_cache_config = _without_reserved(vllm_config, kv_cache_config)
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        self.is_mtpc_on_v2 = vllm_config.speculative_config.method == "mtpc" and self.use_v2_model_runner

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """With synchronous scheduling: the first draft that a grammar forbids is verified; vLLM drops it, and the token
        there has another law."""
        super().update_draft_token_ids(draft_token_ids)
        if not self.is_mtpc_on_v2:  # V1's drafts are never cut in a way that matters (grammar.py), PTP's have no law
            return
        for name, drafts in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(name)
            if request is None or request.is_finished() or not request.use_structured_output:
                continue
            if not request.is_prefill_chunk and len(request.spec_token_ids) < len(drafts):
                request.spec_token_ids = [*request.spec_token_ids, -1]  # the runner knows the token, and rejects it

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Adds what drafts have cost, and the target's steps, to the figures that the front end gets."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if getattr(model_runner_output, IDLE, False):  # a head that the target ships, and that has failed
            self.dynamic_sd_lookup, self.is_mtpc_on_v2 = [0] * (1 + self.max_num_running_reqs), False
        cost = getattr(model_runner_output, COST, None)
        if cost is None or not self.log_stats:
            return outputs
        figures = DraftFigures(**cost, steps=sum(len(tokens) > 0 for tokens in model_runner_output.sampled_token_ids))
        for sent in outputs.values():
            if sent.scheduler_stats is not None:
                if sent.scheduler_stats.spec_decoding_stats is None:  # a step that verified nothing
                    sent.scheduler_stats.spec_decoding_stats = SpecDecodingStats.new(self.num_spec_tokens)
                figures.put_into(sent.scheduler_stats.spec_decoding_stats)
                break
        return outputs


def _without_reserved(vllm_config: Any, kv_cache_config: Any) -> Any:
    """The KV cache as the scheduler may use it: all blocks but the last ones, which auxiliary rows own."""
    blocks = kv_cache_config.num_blocks - reserved_blocks(vllm_config, kv_cache_config)
    kept = replace(kv_cache_config, num_blocks=blocks)
    vllm_config.cache_config.num_gpu_blocks = blocks
    if kept.kv_cache_groups:
        update_kv_cache_capacity(vllm_config, kept)
    return kept

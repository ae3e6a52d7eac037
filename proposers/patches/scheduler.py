"""The scheduler of an engine that serves a head: vLLM's, asynchronous or not, plus what it does not know of a head.

Engines reach it through their configuration's `scheduler_config`; others never import this file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.v1.core.kv_cache_utils import update_kv_cache_capacity
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_mtpc.proposers.config.request import drafts_of, excludes_drafts
from vllm_mtpc.proposers.heads.counts import CUT, IDLE, by_class, put_into
from vllm_mtpc.proposers.heads.grammar import HeadStructuredOutputManager
from vllm_mtpc.proposers.patches.patch import refuse_moved


class HeadScheduler(Scheduler):
    """What is added to any scheduler of vLLM's.

    PTP: the KV blocks of its auxiliary rows are kept from requests. Model Runner V2: a draft that a grammar forbids is
    verified; a request has no more drafts than it asked for (on V1 the proposer sees to that). Both: no drafts are
    verified next to a request for `logprob_token_ids`; the counts of a step's drafts go to the front end.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        refuse_moved()
        spec = vllm_config.speculative_config
        if reserved := spec.reserved_blocks(vllm_config, kv_cache_config):  # the last blocks, which auxiliary rows own
            kv_cache_config = replace(kv_cache_config, num_blocks=kv_cache_config.num_blocks - reserved)
            vllm_config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
            if kv_cache_config.kv_cache_groups:
                update_kv_cache_capacity(vllm_config, kv_cache_config)
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        self.structured_output_manager.__class__ = HeadStructuredOutputManager
        self.asked: dict[str, int] = {}  # by request that asked for fewer drafts than there are: how many
        self.alone: set[str] = set()  # requests next to which nothing is verified
        # V1's drafts are never cut in a way that matters (v1/proposer.py: as_point), PTP's have no distribution
        self.verifies_forbidden = spec.has_distribution and self.use_v2_model_runner

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        asked = drafts_of(request.sampling_params, self.num_spec_tokens)
        if self.use_v2_model_runner and asked < self.num_spec_tokens:
            self.asked[request.request_id] = asked
        if excludes_drafts(request.sampling_params):
            self.alone.add(request.request_id)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Requests that asked for fewer drafts have those first ones verified."""
        if self.asked:
            self.asked = {name: asked for name, asked in self.asked.items() if name in self.requests}
        for name, asked in self.asked.items():
            request = self.requests[name]
            if len(request.spec_token_ids) > asked:
                request.spec_token_ids = request.spec_token_ids[:asked]
        self.alone &= self.requests.keys()
        for request in self.running if self.alone else ():
            request.spec_token_ids = []
        return super().schedule(*args, **kwargs)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """Nothing is drafted in a step of which no request wants drafts."""
        scheduled = scheduler_output.num_scheduled_tokens
        if self.asked and scheduled and not any(self.asked.get(name, 1) for name in scheduled):
            scheduler_output.num_spec_tokens_to_schedule = 0
        super()._update_after_schedule(scheduler_output)

    def _of_request(self, scheduler_output: Any, cut: dict[str, int]) -> dict[str, int]:
        """What a step's worker has counted as cut, with what requests did not ask for taken out of the schedule's."""
        most, made = self.num_spec_tokens, scheduler_output.num_spec_tokens_to_schedule
        asked = [self.asked[name] for name in scheduler_output.num_scheduled_tokens if name in self.asked]
        counted = sum(max(0, one - made) - (most - made) for one in asked)
        return cut | {"schedule": cut.get("schedule", 0) + counted, "request": sum(most - one for one in asked)}

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """With synchronous scheduling: the first draft that a grammar forbids is verified; vLLM drops it, and the token
        there has another distribution."""
        super().update_draft_token_ids(draft_token_ids)
        if not self.verifies_forbidden:
            return
        for name, drafts in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(name)
            if request is None or request.is_finished() or not request.use_structured_output:
                continue
            if not request.is_prefill_chunk and len(request.spec_token_ids) < len(drafts):
                request.spec_token_ids = [*request.spec_token_ids, -1]  # the runner knows the token, and rejects it

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Adds the target's steps and what was cut to the counts that the front end gets."""
        cut = getattr(model_runner_output, CUT, None)
        counts: dict[str, int] = {}
        if cut is not None and self.log_stats:  # before requests that end are forgotten
            counts = by_class(self.requests, scheduler_output.scheduled_spec_decode_tokens, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if getattr(model_runner_output, IDLE, False):  # a head that the target bundles, and that has failed
            self.dynamic_sd_lookup, self.verifies_forbidden = [0] * (1 + self.max_num_running_reqs), False
        if cut is None or not self.log_stats:
            return outputs
        steps = sum(len(tokens) > 0 for tokens in model_runner_output.sampled_token_ids)
        cut = self._of_request(scheduler_output, cut) if self.asked else cut
        if stats := next((sent.scheduler_stats for sent in outputs.values() if sent.scheduler_stats), None):
            if stats.spec_decoding_stats is None:  # a step that verified nothing
                stats.spec_decoding_stats = SpecDecodingStats.new(self.num_spec_tokens)
            put_into(stats.spec_decoding_stats, {"steps": steps, **cut, **counts})
        return outputs

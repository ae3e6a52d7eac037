"""The scheduler of an engine that serves a head, and the configuration that names it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.config.scheduler import SchedulerConfig
from vllm.v1.core.kv_cache_utils import update_kv_cache_capacity
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_mtpc.proposers.config.request_options import excludes_drafts, max_drafts
from vllm_mtpc.proposers.heads.counts import IDLE, PRUNED, append_counts, count_by_class
from vllm_mtpc.proposers.heads.grammar_masks import HeadStructuredOutputManager
from vllm_mtpc.proposers.patches.patch import derived, refuse_moved


class HeadSchedulerConfig(SchedulerConfig):
    """vLLM's; its field `scheduler_cls` names one class for synchronous and asynchronous scheduling, and warns."""

    def get_scheduler_cls(self) -> type:
        return derived(HeadScheduler, super().get_scheduler_cls())


class HeadScheduler(Scheduler):
    """Additions to any scheduler of vLLM.

    PTP: the KV blocks of auxiliary rows are kept from requests. Model Runner V2: a draft that a grammar forbids is
    verified; a request has no more drafts than it asked for (on V1 the proposer limits them). Both: no drafts are
    verified in a batch with a request for `logprob_token_ids`; the front end receives the counts of drafts.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        refuse_moved()
        spec = vllm_config.speculative_config
        if reserved := spec.reserved_blocks(vllm_config, kv_cache_config):  # the last blocks
            kv_cache_config = replace(kv_cache_config, num_blocks=kv_cache_config.num_blocks - reserved)
            vllm_config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
            if kv_cache_config.kv_cache_groups:
                update_kv_cache_capacity(vllm_config, kv_cache_config)
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        self.structured_output_manager.__class__ = HeadStructuredOutputManager
        self.drafts_asked: dict[str, int] = {}  # by request that asked for fewer drafts than the engine makes
        self.without_drafts: set[str] = set()  # requests whose batch has no drafts
        # on V1 pruning depends on no sampled token (v1/proposer.py: set_one_hot); PTP's drafts have no distribution
        self.verifies_forbidden = spec.has_distribution and self.use_v2_model_runner

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        asked = max_drafts(request.sampling_params, self.num_spec_tokens)
        if self.use_v2_model_runner and asked < self.num_spec_tokens:
            self.drafts_asked[request.request_id] = asked
        if excludes_drafts(request.sampling_params):
            self.without_drafts.add(request.request_id)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.drafts_asked:
            self.drafts_asked = {name: asked for name, asked in self.drafts_asked.items() if name in self.requests}
        for name, asked in self.drafts_asked.items():
            request = self.requests[name]
            if len(request.spec_token_ids) > asked:
                request.spec_token_ids = request.spec_token_ids[:asked]
        self.without_drafts &= self.requests.keys()
        for request in self.running if self.without_drafts else ():
            request.spec_token_ids = []
        return super().schedule(*args, **kwargs)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        scheduled = scheduler_output.num_scheduled_tokens
        if self.drafts_asked and scheduled and not any(self.drafts_asked.get(name, 1) for name in scheduled):
            scheduler_output.num_spec_tokens_to_schedule = 0
        super()._update_after_schedule(scheduler_output)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Verify the first draft that a grammar forbids, which vLLM drops with synchronous scheduling: a bias."""
        super().update_draft_token_ids(draft_token_ids)
        if not self.verifies_forbidden:
            return
        for name, drafts in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(name)
            if request is None or request.is_finished() or not request.use_structured_output:
                continue
            if not request.is_prefill_chunk and len(request.spec_token_ids) < len(drafts):
                request.spec_token_ids = [*request.spec_token_ids, -1]  # the runner has the token, and rejects it

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        pruned, is_idle = getattr(model_runner_output, PRUNED, None), getattr(model_runner_output, IDLE, False)
        if self.use_v2_model_runner and not is_idle and model_runner_output.req_ids:  # V1 plans drafts in the worker
            without = self.num_spec_tokens - scheduler_output.num_spec_tokens_to_schedule
            pruned = {"schedule": without * len(model_runner_output.req_ids)}
        counts: dict[str, int] = {}
        if pruned is not None and self.log_stats:  # before vLLM removes requests that end
            counts = count_by_class(self.requests, scheduler_output.scheduled_spec_decode_tokens, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if is_idle:
            self.dynamic_sd_lookup, self.verifies_forbidden = [0] * (1 + self.max_num_running_reqs), False
        if pruned is None or not self.log_stats:
            return outputs
        if self.drafts_asked:
            most, made = self.num_spec_tokens, scheduler_output.num_spec_tokens_to_schedule
            names = scheduler_output.num_scheduled_tokens
            asked = [self.drafts_asked[name] for name in names if name in self.drafts_asked]
            unmade = pruned.get("schedule", 0) + sum(max(0, one - made) - (most - made) for one in asked)
            pruned = pruned | {"schedule": unmade, "request": sum(most - one for one in asked)}
        steps = sum(len(tokens) > 0 for tokens in model_runner_output.sampled_token_ids)
        if stats := next((sent.scheduler_stats for sent in outputs.values() if sent.scheduler_stats), None):
            if stats.spec_decoding_stats is None:  # a step that verified nothing
                stats.spec_decoding_stats = SpecDecodingStats.new(self.num_spec_tokens)
            append_counts(stats.spec_decoding_stats, {"steps": steps, **pruned, **counts})
        return outputs

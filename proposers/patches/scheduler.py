"""The scheduler of an engine that serves a head, and the configuration that names it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from vllm.config.scheduler import SchedulerConfig
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import update_kv_cache_capacity
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_mtpc.checkpoint.metadata import read_figures
from vllm_mtpc.plan.draft_schedule import card_rates, expand_schedule, prior_costs, target_products
from vllm_mtpc.plan.online_plan import CLASSES, OnlinePlan, request_class
from vllm_mtpc.proposers.options.request_options import excludes_drafts, max_drafts
from vllm_mtpc.proposers.options.switches import logger
from vllm_mtpc.proposers.patches.patch import apply, patch, refuse_moved
from vllm_mtpc.proposers.worker import counts
from vllm_mtpc.proposers.worker.derive import derived, extend_object
from vllm_mtpc.proposers.worker.grammar_masks import HeadStructuredOutputManager

SENT_STEPS = 16  # steps without drafts whose counts the front end receives together


@patch("vllm.v1.engine.core", "EngineCore.post_step", needs=("self", "model_executed"))
def post_step(original: Callable[..., None], self: Any, model_executed: bool) -> None:
    """Ask a V1 worker of a head for no drafts, which come with its output. Applied in the engine core of a head."""
    if not getattr(self.scheduler, "has_drafts_in_output", False):  # other engines of the process ask
        original(self, model_executed)


class HeadSchedulerConfig(SchedulerConfig):
    """vLLM's; its field `scheduler_cls` names one class for synchronous and asynchronous scheduling, and warns."""

    def get_scheduler_cls(self) -> type:
        return derived(HeadScheduler, super().get_scheduler_cls())


def make_plan(vllm_config: Any) -> OnlinePlan:
    """Return the online plan of an engine."""
    spec, max_num_seqs = vllm_config.speculative_config, vllm_config.scheduler_config.max_num_seqs
    most, products = spec.num_speculative_tokens, products_of(vllm_config) if current_platform.is_cpu() else None
    ranges = spec.num_speculative_tokens_per_batch_size
    arms = spec.arms or sorted({0, *expand_schedule(ranges, max_num_seqs, most)[1:]})
    costs = prior_costs(arms, ranges, max_num_seqs, spec.load, products, is_exact=not spec.has_distribution)
    measured = {key: found.per_position for key, found in read_figures(Path(spec.model_folder)).items()}
    return OnlinePlan(arms, costs, card_rates(measured, most))


def products_of(vllm_config: Any) -> int:
    """Return the multiplications of the target for one row."""
    head = vllm_config.speculative_config.head
    return target_products(vllm_config.model_config.hf_text_config, head.hidden_size, head.vocab_size)


def kv_cost(vllm_config: Any, kv_cache_config: Any) -> float:
    """Return the bytes of a token's keys and values, divided by those of the weights; 0 on a CPU."""
    if current_platform.is_cpu() or not kv_cache_config.kv_cache_groups:
        return 0.0
    tokens = kv_cache_config.num_blocks * kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    weights = products_of(vllm_config) * vllm_config.model_config.dtype.itemsize
    ranks = vllm_config.parallel_config.tensor_parallel_size
    return sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors) / tokens / (weights / ranks)


class HeadScheduler(Scheduler):
    """Additions to any scheduler of vLLM.

    PTP: the KV blocks of auxiliary rows are kept from requests. Model Runner V2: a draft that a grammar forbids is
    verified; drafts beyond those that a request asked for are rejected on the device (v2/verification.py; on V1 the
    proposer makes fewer) and not counted. V1: drafts come with the output of a step. Both: the online plan chooses K;
    drafts are not verified in a batch with a request for `logprob_token_ids`; the front end receives counts of drafts.
    """

    plan: OnlinePlan | None = None

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        apply(post_step)
        refuse_moved()
        spec = vllm_config.speculative_config
        if reserved := spec.reserved_blocks(vllm_config, kv_cache_config):  # the last blocks
            kv_cache_config = replace(kv_cache_config, num_blocks=kv_cache_config.num_blocks - reserved)
            vllm_config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
            if kv_cache_config.kv_cache_groups:
                update_kv_cache_capacity(vllm_config, kv_cache_config)
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        extend_object(self.structured_output_manager, HeadStructuredOutputManager)
        self.drafts_asked: dict[str, int] = {}  # by request that asked for fewer drafts than the engine makes
        self.without_drafts: set[str] = set()  # requests whose batch has no drafts
        self.sampled: set[str] = set()  # requests with a temperature
        self.kinds: dict[str, str] = {}  # class of each request, for counters
        self.counts, self.counted_steps = Counter[str](), 0  # not sent to the front end yet
        self.warned = False  # that no draft is accepted
        self.has_drafts_in_output = not self.use_v2_model_runner  # read by post_step
        # on V1 pruning depends on no sampled token (v1/proposer.py: set_one_hot); PTP's drafts have no distribution
        self.verifies_forbidden = spec.has_distribution and self.use_v2_model_runner
        self.last_step = (0.0, 0, False)  # its end in seconds, drafted K, whether it read no prompt
        if spec.is_planned:
            self.plan, self.kv_cost = make_plan(vllm_config), kv_cost(vllm_config, kv_cache_config)
            self.dynamic_sd_lookup = self.plan.lookup  # vLLM reads K here by batch size; the plan changes the list

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        name, asked = request.request_id, max_drafts(request.sampling_params, self.num_spec_tokens)
        self.kinds[name] = counts.class_name(request)
        if self.use_v2_model_runner and asked < self.num_spec_tokens:
            self.drafts_asked[name] = asked
        if excludes_drafts(request.sampling_params):
            self.without_drafts.add(name)
        if counts.is_sampled(request):
            self.sampled.add(name)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        name = request.request_id
        self.kinds.pop(name, None)
        self.drafts_asked.pop(name, None)
        self.without_drafts.discard(name)
        self.sampled.discard(name)
        return super()._free_request(request, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
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
        pruned = getattr(model_runner_output, counts.PRUNED, None)
        verified = self._subtract_surplus(scheduler_output)
        if self.use_v2_model_runner and model_runner_output.req_ids:  # on V1 the worker counts them
            pruned = self._count_pruned(scheduler_output)
        if self.plan is not None and (costs := getattr(model_runner_output, counts.COSTS, None)) is not None:
            self.plan.set_costs(costs)
            self.kv_cost *= costs[1, 0]  # a step of one row takes as long as its weights take to read
        if self.plan is not None and model_runner_output.req_ids:
            self._learn(self.plan, scheduler_output, model_runner_output, verified)
        if pruned is not None and self.log_stats:  # before vLLM removes requests that end
            for part in (pruned, counts.count_by_class(self.kinds, verified, model_runner_output)):
                for name, count in part.items():
                    self.counts[name] += count
            self.counted_steps += 1
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if (drafts := getattr(model_runner_output, counts.DRAFTS, None)) is not None:
            self.update_draft_token_ids(drafts)
        if self.counted_steps and (verified or not self.requests or self.counted_steps >= SENT_STEPS):
            self._send_counts(outputs)
        return outputs

    def _subtract_surplus(self, scheduler_output: Any) -> dict[str, list[int]]:
        """Return the verified drafts of each request; others become invalid in vLLM's statistics."""
        verified = scheduler_output.scheduled_spec_decode_tokens
        if not self.drafts_asked or not verified:
            return verified
        invalid = scheduler_output.num_invalid_spec_tokens = dict(scheduler_output.num_invalid_spec_tokens or {})
        for name in verified.keys() & self.drafts_asked.keys():
            surplus = len(verified[name]) - self.drafts_asked[name]
            invalid[name] = max(surplus, invalid.get(name, 0))
        return {name: tokens[: self.drafts_asked.get(name)] for name, tokens in verified.items()}

    def _count_pruned(self, scheduler_output: Any) -> dict[str, int]:
        """Return the drafts by reason that a step on Model Runner V2 did not make."""
        most, made = self.num_spec_tokens, scheduler_output.num_spec_tokens_to_schedule
        names = scheduler_output.num_scheduled_tokens
        asked = [self.drafts_asked[name] for name in names if name in self.drafts_asked] if self.drafts_asked else []
        unmade = (most - made) * (len(names) - len(asked)) + sum(max(0, one - made) for one in asked)
        return {"schedule": unmade, "request": sum(most - one for one in asked)}

    def _send_counts(self, outputs: Any) -> None:
        """Send the counts to the front end in vLLM's statistics of this step."""
        stats = next((sent.scheduler_stats for sent in outputs.values() if sent.scheduler_stats), None)
        if stats is None:
            return
        if self.plan is not None:
            self.counts.update(self.plan.take_times())
        if stats.spec_decoding_stats is None:  # a step that verified nothing
            stats.spec_decoding_stats = SpecDecodingStats.new(self.num_spec_tokens)
        counts.append_counts(stats.spec_decoding_stats, self.counts)
        self.counts, self.counted_steps = Counter[str](), 0

    def _learn(self, plan: OnlinePlan, scheduler_output: Any, output: Any, drafts: dict[str, list[int]]) -> None:
        """Count a step that verified these drafts in the plan, and update the plan where it is due."""
        now, batch = time.perf_counter(), len(scheduler_output.num_scheduled_tokens)
        drafted = scheduler_output.num_spec_tokens_to_schedule
        rows = batch + sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        is_decoding = not scheduler_output.scheduled_new_reqs and scheduler_output.total_num_scheduled_tokens == rows
        ended, verified, was_decoding = self.last_step
        self.last_step = now, drafted, is_decoding
        outcomes = []
        if drafts:
            for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=False):
                if (count := len(drafts.get(name, ()))) and len(tokens) and (request := self.requests.get(name)):
                    outcomes.append((class_of(request), count, len(tokens) - 1))
        decoding = is_decoding and was_decoding
        if plan.finish_step(now - ended, batch, verified, drafted, decoding, outcomes, bool(self.sampled)):
            kinds = np.bincount(list(map(class_of, self.running)), minlength=CLASSES)
            context = sum(request.num_computed_tokens for request in self.running) if self.kv_cost else 0
            plan.update(kinds.astype(float), batch, self.kv_cost * context)
            if not self.warned and (share := plan.acceptance.rejected_share()) is not None:
                self.warned = True
                text = "%.0f %% of the first drafts are rejected, so drafts are made in trials only; "
                text += "vllm-mtpc doctor compares served with expected acceptance"
                logger.warning(text, 100 * share)


def class_of(request: Any) -> int:
    """Return the class of acceptance of one of vLLM's requests."""
    return request_class(counts.is_sampled(request), request.num_computed_tokens)

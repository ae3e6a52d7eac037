"""Patches that run in the engine's core: KV blocks of PTP's auxiliary rows, drafts under a seed or a grammar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_mtpc import METHODS
from vllm_mtpc.proposers.seam.patch import Patch, refuse_problems

RESERVED = "vllm_mtpc_reserved_blocks"  # attribute of a KVCacheConfig, from the one patch to the other


class GetKvCacheConfigs(Patch):
    module = "vllm.v1.engine.core"
    attribute = "get_kv_cache_configs"
    reason = "say how many of the KV cache's blocks auxiliary rows need"
    parameters = ("vllm_config",)

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_kv_cache_configs(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
            configs = original(vllm_config, *args, **kwargs)
            if getattr(vllm_config.speculative_config, "method", None) == "ptp":
                for config in configs:
                    setattr(config, RESERVED, reserved_blocks(vllm_config, config))
            return configs

        return get_kv_cache_configs


class GenerateSchedulerKvCacheConfig(Patch):
    module = "vllm.v1.engine.core"
    attribute = "generate_scheduler_kv_cache_config"
    reason = "hand the scheduler all blocks but the last ones, which auxiliary rows own"
    parameters = ("kv_cache_configs",)

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        def generate_scheduler_kv_cache_config(kv_cache_configs: Any, *args: Any, **kwargs: Any) -> Any:
            config = original(kv_cache_configs, *args, **kwargs)
            config.num_blocks -= getattr(kv_cache_configs[0], RESERVED, 0)
            return config

        return generate_scheduler_kv_cache_config


class SchedulerInit(Patch):
    module = "vllm.v1.core.sched.scheduler"
    attribute = "Scheduler.__init__"
    reason = "draft in full while a request with a seed runs: what it says must not depend on the size of its batch"
    parameters = ("self", "vllm_config")

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            original(self, vllm_config, *args, **kwargs)
            method = getattr(vllm_config.speculative_config, "method", None)
            if method in METHODS:
                refuse_problems()
            if method != "mtpc" or not self.use_v2_model_runner:
                return  # V1's proposer gives such requests their drafts one by one, PTP's text does not depend on them
            if self.dynamic_sd_lookup is not None:
                self.dynamic_sd_lookup = SeededLookup(self.dynamic_sd_lookup, self)

        return __init__


class Schedule(Patch):
    module = "vllm.v1.core.sched.scheduler"
    attribute = "Scheduler.schedule"
    reason = "where all is drafted for one request with a seed, verify for the others what their batch size allows"
    parameters = ("self",)

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self.dynamic_sd_lookup, SeededLookup):
                self.dynamic_sd_lookup.cut(self.running)
            return original(self, *args, **kwargs)

        return schedule


class SeededLookup(list):
    """The scheduler's table, drafts by batch size, that answers with all drafts while a request with a seed runs.

    V2 drafts one number for a whole batch, so what others get too many is cut before they are verified.
    """

    def __init__(self, table: list[int], scheduler: Any) -> None:
        super().__init__(table)
        self.scheduler = scheduler

    def __getitem__(self, batch: Any) -> Any:
        scheduler = self.scheduler
        return scheduler.num_spec_tokens if any(map(is_seeded, scheduler.running)) else super().__getitem__(batch)

    def cut(self, running: list[Any]) -> None:
        """Leaves each request without a seed the first drafts, as many as the table has for this batch."""
        if not any(map(is_seeded, running)):
            return
        most = super().__getitem__(len(running))
        for request in running:
            if len(request.spec_token_ids) > most and not is_seeded(request):
                request.spec_token_ids = request.spec_token_ids[:most]


def is_seeded(request: Any) -> bool:
    """Whether a request asked for text that can be had again."""
    params = request.sampling_params
    return params is not None and params.seed is not None and params.temperature > 0


class UpdateDraftTokenIds(Patch):
    module = "vllm.v1.core.sched.scheduler"
    attribute = "Scheduler.update_draft_token_ids"
    reason = "verify the first draft that a grammar forbids: vLLM drops it, and the token there has another law"
    parameters = ("self", "draft_token_ids")

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        def update_draft_token_ids(self: Any, draft_token_ids: Any) -> None:
            original(self, draft_token_ids)
            if getattr(self.vllm_config.speculative_config, "method", None) != "mtpc" or not self.use_v2_model_runner:
                return  # V1's drafts are never cut in a way that matters (v1/grammar.py), PTP's have no law
            for name, drafts in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
                request = self.requests.get(name)
                if request is None or request.is_finished() or not request.use_structured_output:
                    continue
                if not request.is_prefill_chunk and len(request.spec_token_ids) < len(drafts):
                    request.spec_token_ids = [*request.spec_token_ids, -1]  # the runner knows the token, and rejects it

        return update_draft_token_ids


PATCHES: tuple[type[Patch], ...] = (
    GetKvCacheConfigs,
    GenerateSchedulerKvCacheConfig,
    SchedulerInit,
    Schedule,
    UpdateDraftTokenIds,
)


def reserved_blocks(vllm_config: Any, kv_cache_config: Any) -> int:
    """Blocks of auxiliary rows; raises ServeConfigError where too few are left for one request."""
    from vllm_mtpc.errors import ServeConfigError

    if not kv_cache_config.kv_cache_groups:
        return 0
    spec, longest = vllm_config.speculative_config, vllm_config.model_config.max_model_len
    block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    blocks = spec.plan(vllm_config.scheduler_config.max_num_seqs).num_blocks(block_size)
    needed = -(-longest // block_size) + 1  # vLLM keeps one block for itself
    if kv_cache_config.num_blocks - blocks < needed:
        raise ServeConfigError(
            f"the KV cache holds {kv_cache_config.num_blocks} blocks of {block_size} tokens; {blocks} of them are for "
            f"auxiliary rows and {needed} for one request of {longest} tokens; raise --gpu-memory-utilization (or "
            f"--kv-cache-memory-bytes), or lower max_aux_rows={spec.max_aux_rows} or --max-num-seqs"
        )
    return blocks

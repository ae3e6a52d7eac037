"""The worker of an engine that serves a head; the engine's `parallel_config.worker_cls` names it."""

from __future__ import annotations

from typing import Any

from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker.gpu_worker import Worker

from vllm_mtpc.proposers.patches.patch import apply, refuse_moved
from vllm_mtpc.proposers.patches.vllm_patches import init_speculator
from vllm_mtpc.proposers.worker.derive import derived, extend_object


def __getattr__(name: str) -> Any:
    """Return the worker derived from "module:Class" of vLLM, which looks that name up here."""
    if ":" not in name:
        raise AttributeError(name)
    return derived(HeadWorker, resolve_obj_by_qualname(name.replace(":", ".")))


class HeadWorker(Worker):
    """Additions to any worker of vLLM, for either model runner."""

    def init_device(self) -> None:
        refuse_moved()
        if self.use_v2_model_runner:
            from vllm_mtpc.proposers.v2.model_runner_v2 import HeadModelRunner

            apply(init_speculator)
            refuse_moved()
            super().init_device()
        else:
            from vllm_mtpc.proposers.v1.model_runner_v1 import HeadModelRunner

            spec = self.vllm_config.speculative_config
            method, model = spec.method, spec.model
            # V1 makes our proposer as one of its method "custom_class"; assigned past the validation of assignments
            vars(spec).update(method="custom_class", model="vllm_mtpc.proposers.v1.proposer.MtpcProposer")
            try:
                super().init_device()
            finally:
                vars(spec).update(method=method, model=model)
        extend_object(self.model_runner, derived(HeadModelRunner, self.model_runner.__class__)).begin()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        # raises if too few KV blocks are left: before graphs are captured, and before there is a scheduler
        self.vllm_config.speculative_config.reserved_blocks(self.vllm_config, kv_cache_config)
        super().initialize_from_config(kv_cache_config)

"""Our worker and scheduler, named in the configuration of an engine with a head."""

from __future__ import annotations

from typing import Any

from vllm.config.scheduler import SchedulerConfig

from vllm_mtpc.proposers.patches.patch import derived


def name_our_classes(vllm_config: Any) -> None:
    """Name our worker and scheduler in an engine's configuration."""
    parallel = vllm_config.parallel_config  # worker.py derives a worker from each of vLLM's, by its name with ":"
    parallel.worker_cls = f"vllm_mtpc.proposers.patches.worker.{parallel.worker_cls.replace('.', ':')}"
    vllm_config.scheduler_config.__class__ = HeadSchedulerConfig


class HeadSchedulerConfig(SchedulerConfig):
    """vLLM's, which derives HeadScheduler from the scheduler that it chooses.

    Its field `scheduler_cls` logs a warning, and names one class for synchronous and asynchronous scheduling.
    """

    def get_scheduler_cls(self) -> type:
        from vllm_mtpc.proposers.patches.scheduler import HeadScheduler

        return derived(HeadScheduler, super().get_scheduler_cls())

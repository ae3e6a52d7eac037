"""The worker of an engine that serves a head: vLLM's, whichever it is, with our model runner.

Engines name it in `parallel_config.worker_cls`; other engines never import this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_mtpc.proposers.patches.patch import derived, named, refuse_moved


def __getattr__(name: str) -> Any:
    """The worker that is derived from another one: vLLM looks its name up here."""
    return named(HeadWorker, name)


class HeadWorker(Worker):
    """What is added to any worker of vLLM's, on either model runner."""

    def init_device(self) -> None:
        refuse_moved()
        if self.use_v2_model_runner:
            from vllm_mtpc.proposers.v2.model_runner_v2 import HeadModelRunner, our_speculator

            with our_speculator():
                super().init_device()
        else:
            from vllm_mtpc.proposers.v1.runner import HeadModelRunner

            with _custom_class(self.vllm_config.speculative_config):
                super().init_device()
        runner = self.model_runner  # made by vLLM, which knows the device's class
        runner.__class__ = derived(HeadModelRunner, runner.__class__)
        runner.begin()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self.vllm_config.speculative_config.reserved_blocks(self.vllm_config, kv_cache_config)  # raises: too few left
        super().initialize_from_config(kv_cache_config)

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        self.model_runner.ready()
        return times

    def swap_head(self, path: str) -> dict[str, Any]:
        """By `collective_rpc`: serve another head from the next step on. Raises ServeConfigError, nothing changed."""
        from vllm_mtpc.proposers.heads.swap import swap

        return swap(self.model_runner, path)

    def try_swap_head(self, path: str) -> dict[str, Any]:
        """The same; what would be raised is under "error": who calls from another process gets it as it was said."""
        from vllm_mtpc.errors import MtpcError

        try:
            return self.swap_head(path)
        except MtpcError as error:
            return {"error": str(error)}


@contextmanager
def _custom_class(spec: Any) -> Iterator[None]:
    """V1 builds our proposer through its offered `custom_class`, which it only looks at while it starts."""
    proposer = "BundledProposer" if spec.is_bundled else "MtpcProposer"
    ours = {"method": spec.method, "model": spec.model}
    try:
        # object.__setattr__: the config validates assignments, and "custom_class" is none of our methods
        object.__setattr__(spec, "method", "custom_class")
        object.__setattr__(spec, "model", f"vllm_mtpc.proposers.v1.proposer.{proposer}")
        yield
    finally:
        for name, value in ours.items():
            object.__setattr__(spec, name, value)

"""A fault of tensor-parallel workers: a class that a worker imports as its `worker_extension_cls`."""

from __future__ import annotations

from vllm_mtpc.proposers.worker import load


def __getattr__(name: str) -> type:
    """Divide toy vocabularies over the ranks like large ones; vLLM looks the class up in every worker process."""
    if name != "Divides":
        raise AttributeError(name)
    assert load.is_small(1, 1)
    load.is_small = lambda *sizes: False
    return type(name, (), {})

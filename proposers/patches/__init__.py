"""The vLLM patches: how vLLM comes to know two more speculative methods.

`frontend.py` holds what runs where a configuration is made. What runs elsewhere are subclasses of vLLM's classes, which
the configuration of an engine with a head names: `scheduler.py`, `worker.py`, `proposers/v1/runner.py`,
`proposers/v2/model_runner_v2.py`. docs/internals.md lists them, and every attribute that is replaced.
"""

from __future__ import annotations


def install() -> None:
    """Declare the patches of every process; each takes effect when its module is imported, at once if it already is."""
    from vllm_mtpc.proposers.config.switches import SWAP, is_on
    from vllm_mtpc.proposers.patches import frontend, patch, sampling

    patch.apply(*patch.declared(frontend, sampling))
    if is_on(SWAP, "0"):
        patch.when_imported("vllm.entrypoints.launchers.app", _with_endpoint)


def _with_endpoint() -> None:
    """In an API server, whose libraries the endpoint needs."""
    from vllm_mtpc.proposers.patches import endpoint, patch

    patch.apply(*patch.declared(endpoint))

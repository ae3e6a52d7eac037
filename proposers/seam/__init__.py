"""The seam: how vLLM comes to know two more speculative methods.

`frontend.py` holds what runs where a configuration is made. What runs elsewhere are subclasses of vLLM's classes, which
the configuration of an engine with a head names: `scheduler.py`, `worker.py`, `proposers/v1/runner.py`,
`proposers/v2/runner.py`. docs/internals.md lists them, and every attribute that is replaced.
"""

from __future__ import annotations


def install() -> None:
    """Declare the patches of every process; each takes effect when its module is imported, at once if it already is."""
    from vllm_mtpc.proposers.seam import frontend, patch, sampling

    patch.apply(*patch.declared(frontend, sampling))

"""The seam: how vLLM comes to know two more speculative methods.

`frontend.py` holds what runs where a configuration is made. What runs elsewhere are subclasses of vLLM's classes, which
the configuration of an engine with a head names: `scheduler.py`, `worker.py`, `proposers/v1/runner.py`,
`proposers/v2/runner.py`. docs/internals.md lists them, and every attribute that is replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_mtpc.proposers.seam.patch import Patch


def install() -> None:
    """Declare the patches of every process; each takes effect when its module is imported, at once if it already is."""
    from vllm_mtpc.proposers.seam import frontend, sampling, versions
    from vllm_mtpc.proposers.seam.patch import apply

    minor = versions.vllm_minor()
    for patch in (*frontend.PATCHES, *sampling.PATCHES):
        if versions.is_replaced(patch.key(), minor):
            apply(patch)


def install_for_a_head() -> None:
    """And those of a front end that has configured a head."""
    from vllm_mtpc.proposers.seam import watch
    from vllm_mtpc.proposers.seam.patch import apply

    for patch in watch.PATCHES:
        apply(patch)


def patches(minor: tuple[int, int]) -> list[type[Patch]]:
    """All patches of a minor release of vLLM."""
    from vllm_mtpc.proposers.seam import frontend, sampling, versions, watch

    every = (*frontend.PATCHES, *sampling.PATCHES, *watch.PATCHES)
    return [patch for patch in every if versions.is_replaced(patch.key(), minor)]

"""The seam: the few vLLM attributes this package wraps so that vLLM knows two more speculative methods.

`frontend.py` holds what runs where a configuration is made, `engine_core.py` what runs where the KV cache is divided,
`worker.py` and `lora.py` what runs where a model is.
docs/internals.md lists every attribute and why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_mtpc.proposers.seam.patch import Patch


def install() -> None:
    """Declare all patches; each takes effect when its module is imported, at once if it already is."""
    from vllm_mtpc.proposers.seam import versions
    from vllm_mtpc.proposers.seam.patch import apply

    for patch in patches(versions.vllm_minor()):
        apply(patch)


def patches(minor: tuple[int, int]) -> list[type[Patch]]:
    """The patches of a minor release of vLLM."""
    from vllm_mtpc.proposers.seam import engine_core, frontend, versions, worker

    every = (*frontend.PATCHES, *engine_core.PATCHES, *worker.PATCHES)
    return [patch for patch in every if versions.is_replaced(patch.key(), minor)]

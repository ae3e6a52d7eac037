"""vllm_mtpc: exact speculative decoding for vLLM with probabilistic-circuit heads.

Importing this package is cheap: neither torch nor vLLM is loaded until a head is.
"""

from __future__ import annotations

from pathlib import Path

from vllm_mtpc.families import FAMILIES

__version__ = "0.4.0"
__all__ = ["METHODS", "__version__", "has_heads"]

METHODS = tuple(FAMILIES)  # names in vLLM's speculative_config


def has_heads(path: str | Path) -> bool:
    """Return whether `path` is a head, or a target folder that bundles one in `mtpc/`; reads no weights."""
    from vllm_mtpc.checkpoint.locate import find_head

    return find_head(path) is not None

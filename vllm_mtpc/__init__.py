"""vllm_mtpc: exact speculative decoding for vLLM with probabilistic-circuit heads.

Importing this package is cheap: neither torch nor vLLM is loaded until a head is.
"""

from __future__ import annotations

from pathlib import Path

from vllm_mtpc.families import FAMILIES

__version__ = "0.2.0"
__all__ = ["METHODS", "__version__", "has_heads"]

METHODS = tuple(FAMILIES)  # names in vLLM's speculative_config


def has_heads(path: str | Path) -> bool:
    """Whether `path` is a head checkpoint or a target folder that bundles one in `mtpc/`.

    Reads small JSON files and no weights. A folder that does not exist, or whose
    `config.json` is not readable JSON, has no heads.
    """
    from vllm_mtpc.checkpoint.locate import find_head

    return find_head(path) is not None

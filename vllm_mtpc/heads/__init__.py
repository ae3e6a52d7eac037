"""Heads: hidden states to circuit parameters, in three parts.

trunk/: what the target computed, and x_1, to states; leaves/: states to log-probabilities; `vllm_mtpc.circuits`: the
structure over the window. A choice of a part is one file with its `Options`, and one line in the part's table.
"""

from __future__ import annotations

from vllm_mtpc.heads.sections import FEW_IDS


def default_trunk(vocab_size: int) -> str:
    """Return the trunk that is trained where none is named."""
    return "mlp" if vocab_size > FEW_IDS else "none"


def default_leaves(vocab_size: int) -> str:
    """Return the leaves that are trained where none are named: for many ids the target's lm_head costs less."""
    return "lm_head" if vocab_size > FEW_IDS else "own"


def default_window(vocab_size: int) -> int:
    """Return n of new heads: subwords are harder to predict than bytes."""
    return 8 if vocab_size > FEW_IDS else 16


def default_components(vocab_size: int) -> int:
    """Return the most latent states that are trained by default: each costs a pass over the ids."""
    return 4 if vocab_size > FEW_IDS else 32

"""Drafts of a circuit, from the head's logits and x_1; see README.md here."""

from __future__ import annotations

MAX_ROWS = 64  # components whose r x r sums one program instance has next to a leaf
TILE = 4096  # elements of a leaf in the registers of one program instance: 32 per thread of 4 warps; 64 spill
SMALL_LEAF, SMALL_VOCAB = 8 * TILE, 2 * TILE  # largest sizes for one program instance per request


def is_small(num_components: int, vocab_size: int) -> bool:
    """Return whether one program instance drafts all tokens of a request, for components padded to a power of two."""
    return num_components <= MAX_ROWS and vocab_size <= min(
        SMALL_VOCAB, SMALL_LEAF >> (num_components - 1).bit_length()
    )

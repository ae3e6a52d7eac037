"""Drafts of a circuit, from the head's logits and the verifier's token; see README.md here."""

from __future__ import annotations

TILE = 8192  # elements of a leaf that one program instance has in registers: 32 per thread of 8 warps; 64 spill
SMALL_LEAF, SMALL_VOCAB = 4 * TILE, TILE  # up to these one instance drafts for a request


def is_small(num_components: int, vocab_size: int) -> bool:
    """Whether one program instance goes through the leaves of a request, of components filled up to a power of two."""
    return vocab_size <= min(SMALL_VOCAB, SMALL_LEAF >> (num_components - 1).bit_length())

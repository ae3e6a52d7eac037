"""Fewer drafts while a request has less than its `min_tokens`, on Model Runner V1.

vLLM forbids a text to end before it has `min_tokens`. At drafted positions it counts the drafts before them, but at the
token behind the last draft it counts only what was there before the step: a step that passes `min_tokens` could not end
the text where plain vLLM could. With so few drafts that no step passes it, both counts agree. How many are verified
does not depend on what was drawn.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor


def most_drafts(processors: Any) -> dict[int, int]:
    """By row of the batch, the most drafts of a request that may not end yet; processors: the batch's, of vLLM."""
    return {
        row: max(min_tokens - len(said) - 1, 0)
        for processor in processors.non_argmax_invariant
        if isinstance(processor, MinTokensLogitsProcessor)
        for row, (min_tokens, said, stops, *_) in processor.min_toks.items()
        if stops and len(said) < min_tokens
    }

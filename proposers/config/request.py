"""What one request may ask of its drafts: `extra_args` of SamplingParams, `vllm_xargs` over HTTP.

A limit that is the request's own says nothing about the tokens that are drafted, so its output keeps its distribution.
"""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_mtpc.errors import did_you_mean

DRAFTS = "mtpc_drafts"  # most drafts per step of this request; 0: none
_OURS = "mtpc_"


def drafts_of(params: Any, most: int) -> int:
    """The most drafts per step of a request with these SamplingParams (None: of a pooling one), at most `most`."""
    given = getattr(params, "extra_args", None)
    return most if given is None else min(given.get(DRAFTS, most), most)


def check(extra_args: dict[str, Any] | None, most: int) -> None:
    """Raises VLLMValidationError, over HTTP a 400, for what a request may not ask; most: drafts of the engine."""
    for name, value in (extra_args or {}).items():
        if not str(name).startswith(_OURS):  # another plugin's, or vLLM's own
            continue
        if name != DRAFTS:
            raise VLLMValidationError(
                f"vllm_xargs: {name!r} is not known; allowed: {DRAFTS!r}{did_you_mean(str(name), [DRAFTS])}; remove it",
                parameter="vllm_xargs",
            )
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            raise VLLMValidationError(
                f"vllm_xargs: {DRAFTS}={value!r}; allowed are whole numbers from 0 (no drafts) to {most} (the engine's "
                "num_speculative_tokens); leave it out for the engine's own number",
                parameter="vllm_xargs",
            )

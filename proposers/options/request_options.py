"""Options of one request: `extra_args` of SamplingParams, `vllm_xargs` over HTTP.

Requests with `min_p`, `logit_bias` or `logprob_token_ids`, which vLLM does not serve with drafts, are served without.
"""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_mtpc.proposers.options.switches import REQUEST_DRAFTS, is_on

DRAFTS = "mtpc_drafts"  # the most drafts per step of this request; 0: none
_LARGEST_SEED = 2**63 - 1


def max_drafts(params: Any, limit: int) -> int:
    """Return the most drafts per step of a request, at most `limit`; params: None for a pooling request."""
    if getattr(params, "min_p", 0) or getattr(params, "logit_bias", None):  # vLLM verifies no drafts with these
        return 0
    extra = getattr(params, "extra_args", None) or {}
    return min(extra.get(DRAFTS, limit), limit)


def excludes_drafts(params: Any) -> bool:
    """Return whether the whole batch of a request has no drafts: vLLM's verification has no `logprob_token_ids`."""
    return bool(getattr(params, "logprob_token_ids", None))


def check_request(params: Any, limit: int) -> None:
    """Raise VLLMValidationError (HTTP 400) for SamplingParams that cannot be served with `limit` drafts."""
    if (params.seed or 0) + params.n - 1 > _LARGEST_SEED:
        most = _LARGEST_SEED + 1 - params.n
        text = f"with n={params.n}: sample i has seed + i; allowed are seeds up to {most}; lower the seed"
        raise VLLMValidationError(f"seed={params.seed} {text}", parameter="seed")
    for name, value in (params.extra_args or {}).items():
        text = ""
        if str(name).startswith("mtpc_") and name != DRAFTS:  # others are another plugin's, or vLLM's own
            text = f"{name!r} is not known; allowed: {DRAFTS!r}; remove it"
        elif name == DRAFTS and (type(value) is not int or not 0 <= value <= limit):
            text = (
                f"{DRAFTS}={value!r}; allowed are whole numbers from 0 (no drafts) to {limit} (the engine's "
                "num_speculative_tokens); leave it out for the engine's own number"
            )
        if text:
            raise VLLMValidationError(f"vllm_xargs: {text}", parameter="vllm_xargs")
    if not is_on(REQUEST_DRAFTS, "1") and (max_drafts(params, limit) < limit or excludes_drafts(params)):
        reason = f"this server ({REQUEST_DRAFTS}=0) drafts alike for all requests; remove it"
        raise VLLMValidationError(f"a request with {DRAFTS}, min_p, logit_bias or logprob_token_ids: {reason}")

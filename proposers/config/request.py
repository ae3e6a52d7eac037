"""What one request may ask of its drafts: `extra_args` of SamplingParams, `vllm_xargs` over HTTP.

A limit that is the request's own says nothing about the tokens that are drafted, so its output keeps its distribution.
What vLLM does not serve with drafts is served without: `min_p`, `logit_bias`, `logprob_token_ids`.
"""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_mtpc.errors import did_you_mean
from vllm_mtpc.proposers.config.switches import REQUEST_DRAFTS, is_on

DRAFTS = "mtpc_drafts"  # most drafts per step of this request; 0: none
_OURS = "mtpc_"
_LARGEST_SEED = 2**63 - 1


def drafts_of(params: Any, most: int) -> int:
    """The most drafts per step of a request with these SamplingParams (None: of a pooling one), at most `most`.

    None where vLLM verifies no drafts: of requests with `min_p` or `logit_bias`.
    """
    if getattr(params, "min_p", 0) or getattr(params, "logit_bias", None):
        return 0
    given = getattr(params, "extra_args", None)
    return most if given is None else min(given.get(DRAFTS, most), most)


def excludes_drafts(params: Any) -> bool:
    """Whether no drafts are verified next to a request: vLLM's verification returns no `logprob_token_ids`."""
    return bool(getattr(params, "logprob_token_ids", None))


def check(params: Any, most: int) -> None:
    """Raises VLLMValidationError, over HTTP a 400, for what SamplingParams may not ask; most: drafts of the engine."""
    last_seed = (params.seed or 0) + params.n - 1
    if last_seed > _LARGEST_SEED:
        raise VLLMValidationError(
            f"seed={params.seed} with n={params.n}: sample i has seed + i; allowed are seeds up to "
            f"{_LARGEST_SEED + 1 - params.n}; lower the seed",
            parameter="seed",
        )
    for name, value in (params.extra_args or {}).items():
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
    if not is_on(REQUEST_DRAFTS, "1") and (drafts_of(params, most) < most or excludes_drafts(params)):
        raise VLLMValidationError(
            f"a request with {DRAFTS}, min_p, logit_bias or logprob_token_ids: this server ({REQUEST_DRAFTS}=0) "
            "drafts alike for all requests; remove it"
        )

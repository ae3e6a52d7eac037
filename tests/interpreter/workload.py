"""Engines and requests that launch the kernels of Model Runner V2: with a btree head, with PTP, and without drafts."""

from __future__ import annotations

from typing import Any

from tests.e2e.engine import Call, Engine
from vllm_mtpc import demo

CODE = list(b"import os\n\n\ndef walk(path):\n    ")
PROMPTS = [CODE, CODE[:9], list(b"class Reader:\n"), list(b"x = ")]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}

SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 4, "logprobs": 2},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "seed": 5},
]
RESTRICTED: list[dict[str, Any]] = [
    {"temperature": 0.0, "bad_words": ["import os"], "prompt_logprobs": 1},
    {"temperature": 1.0, "allowed_token_ids": list(range(97, 123)), "seed": 6},
    {"temperature": 0.7, "min_tokens": 6, "stop_token_ids": [10], "logprobs": 0},
    {"temperature": 1.0, "structured_outputs": {"json": SCHEMA}, "seed": 7, "max_tokens": 24},
]
UNDRAFTED: list[dict[str, Any]] = [
    {"temperature": 1.0, "min_p": 0.1, "seed": 8},
    {"temperature": 1.0, "logit_bias": {"65": 3.0, "66": -5.0}, "seed": 9},
    {"temperature": 0.9, "top_p": 0.5},
    {"temperature": 0.0, "logprobs": 5},
]


def _calls(max_tokens: int, *samplings: list[dict[str, Any]]) -> list[Call]:
    return [Call(PROMPTS, [{"max_tokens": max_tokens, **one} for one in sampling]) for sampling in samplings]


def _engine(calls: list[Call], head: str | None = None, method: str = "mtpc", **speculative: Any) -> Engine:
    config = {"method": method, "model": str(demo.path(head)), **speculative} if head else None
    grammar = {"backend": "xgrammar", "disable_any_whitespace": True}
    arguments = {"speculative_config": config, "max_model_len": 128, "structured_outputs_config": grammar}
    return Engine(str(demo.path("target")), calls, arguments)


def mixed(max_tokens: int = 12) -> dict[str, Engine]:
    """A btree head and a PTP one, sampling of all kinds."""
    return {
        "btree": _engine(_calls(max_tokens, SAMPLING, RESTRICTED), "btree"),
        "o-ptp": _engine(_calls(max_tokens, SAMPLING), "o-ptp", "ptp", num_speculative_tokens=3, max_aux_rows=24),
    }


def everything(max_tokens: int = 24) -> dict[str, Engine]:
    """`mixed` at length, and what else has kernels of its own."""
    block = {"rejection_sample_method": "block", "num_speculative_tokens_per_batch_size": "off"}
    two_passes = {"num_speculative_tokens": 3, "draft_pass": "two-pass"}
    return {
        **mixed(max_tokens),
        "plain": _engine(_calls(max_tokens, SAMPLING, RESTRICTED, UNDRAFTED)),
        "block": _engine(_calls(max_tokens, SAMPLING), "btree", **block),
        "hmm": _engine(_calls(max_tokens, SAMPLING), "hmm"),
        "c-ptp": _engine(_calls(max_tokens, SAMPLING), "c-ptp", "ptp", **two_passes),
    }

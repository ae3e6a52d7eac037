"""Requests that launch the kernels of Model Runner V2: `python -m tests.support.workload MAX_TOKENS ENGINE ...`.

Prints JSON: the tokens of each engine and, with MTPC_INTERPRETER=check or check-once, what comparing launches found.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

CODE = list(b"import os\n\n\ndef walk(path):\n    ")
PROMPTS = [CODE, CODE[:9], list(b"class Reader:\n"), list(b"x = ")]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}

SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 4, "logprobs": 2},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "seed": 5},
]
RESTRICTED: list[dict[str, Any]] = [
    {"temperature": 0.0, "bad_words": ["import os"], "prompt_logprobs": 1},
    {"temperature": 1.0, "allowed_token_ids": list(range(97, 123)), "seed": 6},
    {"temperature": 0.7, "min_tokens": 6, "stop_token_ids": [10], "logprobs": 0, "seed": 10},
    {"temperature": 1.0, "structured_outputs": {"json": SCHEMA}, "seed": 7},
]
UNDRAFTED: list[dict[str, Any]] = [
    {"temperature": 1.0, "min_p": 0.1, "seed": 8},
    {"temperature": 1.0, "logit_bias": {65: 3.0, 66: -5.0}, "seed": 9},
    {"temperature": 0.9, "top_p": 0.5, "seed": 11},
    {"temperature": 0.0, "logprobs": 5},
]
BLOCK = {"rejection_sample_method": "block", "num_speculative_tokens_per_batch_size": "off"}
PTP = {"method": "ptp", "num_speculative_tokens": 3}

# engine: its speculative_config (the model is a packaged head), what it is asked
ENGINES: dict[str, tuple[dict[str, Any] | None, tuple[list[dict[str, Any]], ...]]] = {
    "plain": (None, (SAMPLED, RESTRICTED, UNDRAFTED)),
    "btree": ({"method": "mtpc", "model": "btree"}, (SAMPLED, RESTRICTED)),
    "block": ({"method": "mtpc", "model": "btree", **BLOCK}, (SAMPLED,)),
    "hmm": ({"method": "mtpc", "model": "hmm"}, (SAMPLED,)),
    "o-ptp": ({**PTP, "model": "o-ptp", "max_aux_rows": 24, "draft_pass": "merged"}, (SAMPLED,)),
    "c-ptp": ({**PTP, "model": "c-ptp", "draft_pass": "two-pass"}, (SAMPLED,)),
}


def answers(name: str, max_tokens: int) -> list[list[int]]:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_mtpc import demo

    config, asked = ENGINES[name]
    llm = LLM(
        str(demo.path("target")),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        max_num_seqs=8,
        max_model_len=128,
        seed=0,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        speculative_config=config and {**config, "model": str(demo.path(config["model"]))},
    )
    prompts, params = [], []
    for prompt, options in [pair for part in asked for pair in zip(PROMPTS, part, strict=True)]:
        options = {"max_tokens": max_tokens, **options}
        if "structured_outputs" in options:
            options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
        prompts.append({"prompt_token_ids": prompt})
        params.append(SamplingParams(**options))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def main(max_tokens: str, *names: str) -> None:
    result: dict[str, Any] = {"tokens": {name: answers(name, int(max_tokens)) for name in names}}
    if os.environ.get("MTPC_INTERPRETER", "").startswith("check"):
        from numpy_interpreter.check import REPORT

        result["report"] = REPORT
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])

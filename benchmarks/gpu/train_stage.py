"""The stage `train` of the GPU programme."""

from __future__ import annotations

import json
import sys

from benchmarks.gpu.commands import ALL_DRAFTS, IEEE, MTPC, windowed, words
from benchmarks.gpu.parts import Part, Programme


def train(programme: Programme) -> list[Part]:
    """A rehearsal of training at a published size: random weights of Qwen3-0.6B's shape, states from vLLM.

    The toy has two small layers and the real vocabulary.
    """
    folder, tool = programme.cache / "train", [sys.executable, "-m", "benchmarks.gpu.rehearsal"]
    target, head = folder / "target", folder / "head"
    dtype, is_toy = programme.size(("bfloat16", []), ("float32", ["--toy"]))
    texts = programme.size({"texts": 8192, "length": 1024}, {"texts": 32, "length": 40})
    common = {"target": target, "engine": json.dumps({"max_model_len": 2048, **programme.engine})}
    rows = programme.size({"rows": 512, "rounds": 3}, {"rows": 8, "rounds": 1})
    greedy = {"target": target, "data": target / "texts.jsonl", "dtype": "float32", "temperature": 0, "prompts": 8}
    greedy |= programme.size({"concurrency": 8, "max_tokens": 32}, {"concurrency": 1, "max_tokens": 8})
    drafting = {"method": "mtpc", "model": str(head), "num_speculative_tokens": programme.size(7, 3), **ALL_DRAFTS}
    greedy |= {"peer": f"head={json.dumps(drafting)}", "environment": IEEE}
    options = {"states": "vllm", "head": "shared", "component_rank": 16, "token_rank": 32, "target_dtype": dtype}
    options |= programme.size(
        {"window": 8, "components": 8, "minutes": 4, "seq_len": 1024, "precision": "bf16", "evaluation_sequences": 8},
        {"window": 4, "components": 2, "max_steps": 2, "seq_len": 40, "windows_per_step": 8, "evaluation_sequences": 2},
    )
    options |= {"data": target / "texts.jsonl", "evaluation_tokens": programme.size(32, 8), "out": head}
    weights, head_weights, states = target / "model.safetensors", head / "model.safetensors", folder / "states.json"
    resume = ["--resume"] if any((head / "state").glob("step-*")) else []
    compare_states = words(*tool, "states", dtype=dtype, **rows, **common, json=states)
    are_equal = r"\b[1-9]\d* rows of states are equal"
    return [
        Part("target", 120, words(*tool, "target", *is_toy, out=target, **texts), makes=weights),
        Part("states", 240, compare_states, states, [weights], proof=are_equal),
        Part("train", 460, words(*MTPC, "train", *resume, **common, **options), head / "provenance.json", [weights]),
        windowed(programme, "greedy", 240, needs=[head_weights], **greedy),
    ]

"""Answer the prompts of a file on two engines with drafts, by Ray Data; the same command continues a stopped job.

    python examples/ray_batch.py prompts.jsonl answers/

A line of the input is {"id": "a", "prompt": "..."}. The engines are those of the demo on CPUs; for your own model name
folders that every node sees, and on GPUs remove dtype, enforce_eager, kv_cache_memory_bytes, placement_group_config and
runtime_env. Both paths may be remote (s3://) where Ray runs on several nodes.
"""

import sys
from pathlib import Path
from typing import Any

import ray
from ray.data.checkpoint import CheckpointConfig
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

ASSETS = Path(__file__).resolve().parents[1] / "vllm_mtpc" / "demo" / "assets"
ENGINES = vLLMEngineProcessorConfig(
    model_source=str(ASSETS / "target"),
    engine_kwargs={
        "speculative_config": {"method": "mtpc", "model": str(ASSETS / "btree")},
        "max_model_len": 320,
        "max_num_seqs": 8,
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 27,
    },
    concurrency=2,
    batch_size=8,
    chat_template_stage=False,  # the input has prompts, not messages
    tokenize_stage=False,  # vLLM does both
    detokenize_stage=False,
    placement_group_config={"bundles": [{"CPU": 0.5}]},
    runtime_env={"env_vars": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}},
)


def request(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["prompt"], "sampling_params": {"max_tokens": 40, "temperature": 0, "ignore_eos": True}}


def answer(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "text": row["generated_text"]}


def main(source: str, out: str) -> None:
    checkpoint = CheckpointConfig("id", out.rstrip("/") + ".checkpoint", delete_checkpoint_on_success=False)
    ray.data.DataContext.get_current().checkpoint_config = checkpoint
    lines = ray.data.read_json(source, override_num_blocks=8)  # a block goes to one engine
    build_processor(ENGINES, preprocess=request, postprocess=answer)(lines).write_json(out)


if __name__ == "__main__":
    main(*sys.argv[1:])

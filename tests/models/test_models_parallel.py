"""The byte-level models with their weights over two processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import byte_llama_reference, evabyte_reference
from tests.support.engine import Call, Engine, run
from tests.support.heads import check_greedy, drafts, fit_head

COUNT = 24
GREEDY = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True}
TWO = {"tensor_parallel_size": 2, "max_model_len": 128}
FREED = {"block_size": 32}  # divides EvaByte's window: past ones are freed
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("name", ["evabyte", "byte_llama"])
def test_tensor_parallel(tmp_path: Path, name: str, runner: str) -> None:
    texts = byte_llama_reference.make_texts()
    if name == "evabyte":
        reference = evabyte_reference.Reference(evabyte_reference.make_evabyte(tmp_path / "target"))
        sizes, prompts = evabyte_reference.SIZES, [texts[0], texts[1][:31]]
    else:
        byte_llama_reference.make_byte_llama(tmp_path / "target", texts)
        reference = byte_llama_reference.Reference(tmp_path / "target")
        sizes, prompts = reference.llama.config.to_dict(), texts[:2]
    fit_head(tmp_path / "head", reference, sizes, prompts, COUNT // 2)
    arguments = TWO | {"speculative_config": {"method": "mtpc", "model": str(tmp_path / "head")}}
    arguments |= FREED if name == "evabyte" else {}
    engine = Engine(str(tmp_path / "target"), [Call(prompts, [GREEDY] * 2)], arguments)
    replies = run({"btree": engine}, runner, async_scheduling=runner == "v2", **ENVIRONMENT)["btree"]
    check_greedy(reference, prompts, replies, COUNT)
    assert min(drafts(replies[0])) > 0

"""A byte-level Llama served by vLLM against its definition: drafts, rejections, chunks, prefixes, preemption."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.byte_llama_reference import Reference, make_byte_llama, make_texts
from tests.support.engine import Call, Engine, run
from tests.support.heads import ask_twice, check_greedy, check_twice, fit_head

COUNT = 30
GREEDY = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True}
SMALL_BLOCKS = {"max_model_len": 128, "block_size": 32}  # as small as vLLM's attention on a CPU takes
CHUNKS = {"max_num_batched_tokens": 24, "enable_chunked_prefill": True}
# blocks x (layers x heads x 2D x tokens + ids) x bytes: 6 blocks, where the five prompts and answers need 12
BYTES_OF_6_BLOCKS = 6 * (2 * 2 * 64 * 32 + 2 * 32) * 4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("byte_llama")
    texts = make_texts()
    make_byte_llama(folder / "target", texts)
    reference = Reference(folder / "target")
    prompts = [text[:length] for text, length in zip(texts, (3, 20, 33, 48, 60), strict=False)]
    fit_head(folder / "head", reference, reference.llama.config.to_dict(), prompts, COUNT // 2)
    btree = {"speculative_config": {"method": "mtpc", "model": str(folder / "head")}}
    return SimpleNamespace(
        model=str(folder / "target"), folder=folder, btree=btree, reference=reference, prompts=prompts
    )


@pytest.mark.parametrize("context", [1, 4])
def test_reference_with_a_shorter_context_is_noticed(served: SimpleNamespace, context: int) -> None:
    shorter = Reference(served.folder / "target", context)
    answers = [served.reference.greedy(prompt, 12) for prompt in served.prompts]
    assert not all(shorter.is_greedy(*pair) for pair in zip(served.prompts, answers, strict=True))


def test_text_with_chunks_preemption_and_prefix_on_v1(served: SimpleNamespace) -> None:
    prompts, last = served.prompts, served.prompts[-1:]
    # min_tokens and the stale stop ids of generation_config.json would end the engine
    careful = {"temperature": 0, "min_tokens": COUNT, "max_tokens": COUNT}
    calls = [*ask_twice(prompts, GREEDY), Call(last, [careful])]
    arguments = SMALL_BLOCKS | CHUNKS | served.btree | {"kv_cache_memory_bytes": BYTES_OF_6_BLOCKS}
    *replies, third = run({"btree": Engine(served.model, calls, arguments)}, "v1")["btree"]
    check_twice(served.reference, prompts, replies, COUNT)
    check_greedy(served.reference, last, [third], COUNT)
    assert replies[0].metrics["vllm:num_preemptions"] > 0


def test_text_with_chunks_and_prefix_on_v2(served: SimpleNamespace) -> None:
    prompts = served.prompts[2:]
    engine = Engine(served.model, ask_twice(prompts, GREEDY), SMALL_BLOCKS | CHUNKS | served.btree)
    check_twice(served.reference, prompts, run({"btree": engine}, "v2")["btree"], COUNT)

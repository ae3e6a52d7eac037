"""LoRA draft layers on byte-level targets, Model Runner V2: what heads read is what the closed form says of a model
with the adapters merged into its last layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import byte_llama_reference as byte_llama
from tests.support import evabyte_reference as evabyte
from tests.support.engine import Call, Engine, run
from tests.support.heads import check_greedy, drafts, fit_head, random_adapters

COUNT = 24
GREEDY = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True}
CHUNKS = {"max_model_len": 128, "max_num_batched_tokens": 24, "enable_chunked_prefill": True}


def check(
    folder: Path, reference: Any, reads: Any, layers: Any, sizes: dict[str, Any], prompts: Any, block: int
) -> None:
    """Text is the reference's; states are those of `reads`, in chunks, behind rejected drafts and cached prefixes."""
    fit_head(folder / "head", reference, sizes, prompts, COUNT // 2, reads, layers)
    calls = [Call(prompts, [GREEDY] * len(prompts)), Call(prompts[-1:], [GREEDY])]
    given = {"speculative_config": {"method": "mtpc", "model": str(folder / "head")}, "block_size": block}
    replies = run({"layers": Engine(str(folder / "target"), calls, CHUNKS | given, "layers")}, "v2")["layers"]
    check_greedy(reference, prompts, replies[:1], COUNT)
    check_greedy(reference, prompts[-1:], replies[1:], COUNT)
    assert replies[1].metrics["vllm:prefix_cache_hits"] > 0
    assert min(drafts(replies[0])) > 0
    asked = [*prompts, prompts[-1]]
    texts = [prompt + answer[0] for prompt, answer in zip(asked, replies[0].tokens + replies[1].tokens, strict=True)]
    states = [reads.hidden(text) for text in texts]
    noted = [note for reply in replies for note in reply.recorded if note["prefix"] <= len(texts[note["request"]])]
    assert len(noted) > 20
    for note in noted:
        expected = states[note["request"]][note["prefix"] - 1]
        # other kernels, the same numbers in float32
        assert (note["hidden"] - expected).abs().max() < 5e-4 * expected.abs().max(), (note["request"], note["prefix"])
    own = [reference.hidden(texts[note["request"]])[note["prefix"] - 1] for note in noted[:5]]
    assert all(
        (note["hidden"] - state).abs().max() > 0.05 * state.abs().max() for note, state in zip(noted, own, strict=False)
    )


@pytest.mark.slow
def test_evabyte(tmp_path: Path) -> None:
    """Windows are 32 long: prompts and answers cross them, and summaries of the draft layers' own are read."""
    weights = evabyte.make_evabyte(tmp_path / "target")
    layers, merged = random_adapters(weights, [1])
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(64, 320, (length,), generator=generator).tolist() for length in (31, 70)]
    reference, reads = evabyte.Reference(weights), evabyte.Reference(merged)
    check(tmp_path, reference, reads, layers, evabyte.SIZES, prompts, 16)


@pytest.mark.slow
def test_byte_llama(tmp_path: Path) -> None:
    texts = byte_llama.make_texts()
    byte_llama.make_byte_llama(tmp_path / "target", texts)
    reference, reads = (byte_llama.Reference(tmp_path / "target") for _ in range(2))
    layers, merged = random_adapters(reference.llama.state_dict(), [1])
    reads.llama.load_state_dict(merged)
    prompts = [texts[0][:20], texts[1][:60]]
    check(tmp_path, reference, reads, layers, reference.llama.config.to_dict(), prompts, 32)

"""Heads for EvaByte and Byte-Llama from chats of Tülu 3's shape, by a user's commands: trained, measured, tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.byte_llama_reference import make_byte_target
from tests.support.training import record_of, refused, train
from vllm_mtpc.checkpoint import load_head
from vllm_mtpc.cli import main
from vllm_mtpc.data.sources import load_documents
from vllm_mtpc.hf import load_target

# As allenai/tulu-3-sft-mixture has them: an id, turns by role and content, where they are from.
CHATS = [
    {
        "id": f"ai2-adapt-dev/sample_{index}",
        "messages": [
            {"role": "user", "content": f"abc {index}?"},
            {"role": "assistant", "content": "cab" * (5 + index)},
            {"role": "user", "content": "And then?"},
            {"role": "assistant", "content": "bca" * 6},
        ],
        "source": "ai2-adapt-dev/sample",
    }
    for index in range(8)
]


@pytest.fixture(scope="module", params=["evabyte", "byte_llama"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_byte_target(request.param, folder / "target")
    (folder / "text.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    return folder


def changed(**more: Any) -> dict[str, Any]:
    return {"max_steps": 3, "seq_len": 192, "windows_per_step": 16, "gamma": 0.8, **more}


def test_a_head_is_trained_and_measured(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = train(place, "head", **changed())
    layers = train(
        place, "layers", **changed(init_from=head, trunk={"kind": "lora", "layers": 1})
    )  # on the trained head
    assert load_head(layers)[0].lora_layers == 1 and record_of(layers)["figures"]["t1"]["tokens_per_step"] >= 1
    adapters = load_file(layers / "adapter_model.safetensors")
    assert any(bool(value.any()) for name, value in adapters.items() if "lora_B" in name)  # they start at zero
    data = ["--data", str(place / "text.jsonl"), "--prompt-tokens", "8", "--new-tokens", "12"]
    for folder in (head, layers):
        capsys.readouterr()
        assert main(["eval", str(folder), *data, "--sequences", "2", "--device", "cpu"]) == 0
        assert "tokens/step, expected" in capsys.readouterr().out


def test_ptp_heads_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = "a PTP head needs a llama-like target; name another target, or another head"
    assert wanted in refused(capsys, place, "ptp", head="ptp")


def test_answers_alone_are_learnt(place: Path) -> None:
    target = load_target(place / "target")
    documents = load_documents([str(place / "text.jsonl")], target.tokenizer, vocab_size=target.vocab_size)
    for (tokens, is_learnt), chat in zip(documents, CHATS, strict=True):
        said = target.tokenizer.decode(tokens[is_learnt])
        for message in chat["messages"]:
            assert (message["content"] in said) == (message["role"] == "assistant")


def test_evabyte_starts_at_its_own_eight_heads(place: Path) -> None:
    """Position i of a new head is block i of lm_head; those beyond the blocks are the last."""
    target = load_target(place / "target", torch.float32)
    if target.model.get_output_embeddings().weight is target.lm_head.weight:
        pytest.skip("needs a target with several prediction heads; this one has a single head")
    more = changed(circuit="ff", components=1, window=10, max_steps=1, learning_rate=1e-9, evaluation_sequences=0)
    head, blocks = (
        load_head(train(place, "eight", **more))[1],
        target.model.get_output_embeddings().weight.view(-1, target.vocab_size, target.hidden_size),
    )
    hidden = target.hidden(torch.arange(64, 104)[None])[0]
    leaf = head(hidden).leaf[:, :, 0]  # [B, n, V]
    theirs = torch.stack([(hidden @ block.T).log_softmax(-1) for block in blocks], 1)  # [B, 8, V]
    for position in range(10):
        far = (leaf[:, position, None] - theirs).abs().amax((0, 2))  # of each block
        assert far.argmin() == min(position, 7) and far.min() < 0.5 < far.sort().values[1]  # noise, and float16


def test_a_backbone_starts_at_norms_that_scale_as_the_targets_do(place: Path) -> None:
    more = {"trunk": "backbone", "leaves": "lm_head", "circuit": "ff", "components": 1, "dry_run": True}
    norm = load_head(train(place, "backbone", **more))[1].trunk.backbone.norm.weight
    assert (norm - 1).abs().max() < 0.5

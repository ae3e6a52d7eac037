"""Training on a drafter's states: what vLLM returns, and what the loss reads."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoConfig, Glm4MoeForCausalLM

from tests.support.hosted import VOCAB, make_glm
from tests.support.models import make_tokenizer
from tests.support.training import make_trainer, options_for
from vllm_mtpc.checkpoint import load_head
from vllm_mtpc.cli import main
from vllm_mtpc.engine.served_target import load_served_target
from vllm_mtpc.heads.trunk.drafter import DRAFTER
from vllm_mtpc.train.windows import Windows

torch.set_num_threads(1)
ATOL = 1e-4  # float32: sums in another order
HOSTED = {"trunk": "drafter", "leaves": {"kind": "lm_head", "expander_rank": 4}, "train_first": False}


def test_loss_reads_the_drafters_states_and_the_targets_distribution(tiny_target, tmp_path):
    job = make_trainer(options_for(tiny_target, tmp_path, **HOSTED, circuit="cp", components=2), tiny_target)
    size = tiny_target.hidden_size
    hidden, document = torch.randn(3, 9, 2 * size), torch.zeros(3, 9, dtype=torch.int64)
    row, start = torch.tensor([0, 2, 1]), torch.tensor([4, 0, 3])
    tokens = torch.zeros(3, 4, dtype=torch.int64)
    batch = Windows(hidden=hidden, document=document, row=row, start=start, tokens=tokens, counts=torch.full((4,), 3))
    read, _, _, log_p = job.model.read(batch)
    assert torch.equal(read(slice(1, 3)), hidden[row[1:], start[1:], :size])
    for k in range(3):  # of x_2 to x_4
        wanted = tiny_target.logits(hidden[row, start + 1 + k, size:]).log_softmax(-1)
        torch.testing.assert_close(log_p(slice(0, 3))[:, k], wanted)


@torch.no_grad()
def reference(folder: Path, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The states of GLM's MTP layer that predict x_{t+2}, [T - 1, D], of a text [T] with the target's states [T, D]."""
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = 3
    model = Glm4MoeForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    stored = load_file(folder / "model.safetensors")
    weights = {name.removeprefix("model.layers.2."): value for name, value in stored.items()}

    def norm(rows: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(rows, rows.shape[-1:], weights[f"{name}.weight"], config.rms_norm_eps)

    embedded = model.model.embed_tokens(tokens[1:])
    embedded[0] = 0  # as vLLM does at position 0
    rows = torch.cat([norm(embedded, "enorm"), norm(states[:-1], "hnorm")], -1) @ weights["eh_proj.weight"].T
    at = torch.arange(len(rows))[None]
    mask = torch.full((len(rows), len(rows)), -torch.inf).triu(1)[None, None]
    rope = model.model.rotary_emb(rows[None], at)
    (layer,) = model.model.layers[2:]
    return norm(
        layer(rows[None], attention_mask=mask, position_ids=at, position_embeddings=rope)[0], "shared_head.norm"
    )


@pytest.mark.slow
def test_states_of_the_mtp_layer_equal_its_definition_and_a_head_trains_on_them(tmp_path):
    make_glm(tmp_path / "target")
    make_tokenizer(tmp_path / "target", VOCAB)
    mtp = {"method": "mtp", "num_speculative_tokens": 1}
    served = load_served_target(tmp_path / "target", torch.float32, "cpu", {"max_model_len": 96}, mtp)
    tokens = torch.randint(VOCAB, (3, 40), generator=torch.Generator().manual_seed(0))
    states = served.hidden_with([DRAFTER], tokens)
    served.recorder.close()
    for row in range(3):
        mine, target = states[row].split(64, -1)
        wanted = reference(tmp_path / "target", tokens[row], target)
        assert wanted.std() > 0.1
        torch.testing.assert_close(mine[:-1], wanted, rtol=0, atol=ATOL)

    generator = random.Random(0)
    lines = [{"prompt_ids": [1], "response_ids": [generator.randrange(VOCAB) for _ in range(60)]} for _ in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["--target", tmp_path / "target", "--data", tmp_path / "data.jsonl", "--out", tmp_path / "head"]
    words += ["--trunk", "drafter", "--leaves", "lm_head", "--circuit", "hmm", "--window", 4, "--components", 2]
    words += ["--max-steps", 4, "--windows-per-step", 64, "--seq-len", 64, "--evaluation-sequences", 8]
    words += ["--evaluation-tokens", 16, "--engine", '{"max_model_len": 96}', "--device", "cpu"]
    assert main(["train", *map(str, words)]) == 0
    config, head = load_head(tmp_path / "head")
    assert config.hosted.method == "mtp" and head.leaves.up_weight.any()
    assert 1 <= json.loads((tmp_path / "head" / "provenance.json").read_text())["figures"]["t1"]["tokens_per_step"] <= 4

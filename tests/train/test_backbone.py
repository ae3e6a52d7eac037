"""Training of a head with a backbone: inputs of windows, chunks, frozen parts, results."""

from __future__ import annotations

import re
import shutil

import torch
from transformers import Phi3Config, Phi3ForCausalLM

from tests.support.training import BACKBONE, make_trainer, options_for, record_of, refused, train
from vllm_mtpc.checkpoint import load_head
from vllm_mtpc.cli import main

torch.set_num_threads(1)


def test_window_reads_only_its_document(tiny_target, tmp_path):
    job = make_trainer(options_for(tiny_target, tmp_path, **BACKBONE), tiny_target)
    trunk, batch = job.head.trunk, next(job.windows.batches())
    first = batch.tokens[:, 0]
    found = trunk.windows(batch.hidden, batch.document, batch.row, batch.start, first)(slice(None))
    for b in range(0, len(first), 7):
        row, start = int(batch.row[b]), int(batch.start[b])
        inside = batch.document[row] == batch.document[row, start]
        inside[start + 1 :] = False
        aux = batch.hidden[row, inside][None, :, : -tiny_target.hidden_size]
        length = torch.arange(aux.shape[1])[None]
        context = trunk.context(aux, length, torch.zeros_like(length))
        alone = trunk.read(context, torch.tensor([0]), length[0, -1:], first[b : b + 1])[0]
        torch.testing.assert_close(found[b], alone, rtol=0, atol=1e-5)  # sums over other numbers of masked terms


def test_backbone_splits_fused_projections_and_reports_missing_weights(place, tmp_path, capsys):
    """Phi-3: one projection for queries, keys and values, one for gate and up; no norms of queries and keys."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    theirs = Phi3ForCausalLM(Phi3Config(vocab_size=257, num_hidden_layers=2, pad_token_id=0, **sizes))
    theirs.save_pretrained(tmp_path / "phi")
    for file in (place / "target").glob("*token*"):
        shutil.copy(file, tmp_path / "phi")
    changes = {"trunk": {"kind": "backbone", "layers": 2}, "leaves": BACKBONE["leaves"], "target": tmp_path / "phi"}
    out = train(place, "phi", **changes, dry_run=True, dtype="float32")
    for ours, layer in zip(load_head(out)[1].trunk.backbone.layers, theirs.model.layers, strict=True):
        attention, mlp = ours.self_attn, ours.mlp
        fused = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        assert torch.equal(torch.cat(fused), layer.self_attn.qkv_proj.weight)
        assert torch.equal(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]), layer.mlp.gate_up_proj.weight)
        assert torch.equal(mlp.down_proj.weight, layer.mlp.down_proj.weight)
    said = capsys.readouterr().err
    assert said.count("warning: the backbone starts in part") == 1
    assert re.search(r"; not copied: (.*)\n", said)[1] == "self_attn.q_norm, self_attn.k_norm"
    card = (train(place, "card", **changes, max_steps=1) / "README.md").read_text()
    assert "and last layers (not copied: self_attn.q_norm, self_attn.k_norm)" in card


def test_circuit_trains_on_frozen_or_trained_backbone(place, capsys):
    ff = BACKBONE | {
        "circuit": "ff",
        "components": 1,
        "leaves": {"kind": "lm_head", "component_rank": 0},
        "max_steps": 2,
    }
    drafter = train(place, "drafter", **ff)
    more = {"circuit": "hmm", "init_from": drafter, "freeze_trunk": True, "max_steps": 2}
    more |= {"leaves": {"token_rank": 2, "component_rank": 4}}  # other sizes are those of init_from
    error = refused(capsys, place, "none", **more | {"circuit": "ff", "components": 1, "leaves": {"token_rank": 0}})
    assert "nothing is left to learn; set components or leaves.token_rank" in error
    source = load_head(drafter)[1].trunk.state_dict()
    for freeze in (True, False):
        out = train(place, f"frozen {freeze}", **more | {"freeze_trunk": freeze})
        config, head = load_head(out)
        equal = [torch.equal(value, source[name]) for name, value in head.trunk.state_dict().items()]
        assert all(equal) if freeze else not any(equal)
        assert (config.trunk.kind, config.leaves.token_rank, config.leaves.component_rank) == ("backbone", 2, 4)
        assert head.leaves.token_target.any() and head.leaves.component_in.shape == (3, 2, 4, 32)
    assert 1 <= record_of(out)["figures"]["t1"]["tokens_per_step"] <= 4
    assert "Model Runner V2 alone" in (out / "README.md").read_text()
    data = ["--data", str(place / "text.jsonl"), "--sequences", "3", "--prompt-tokens", "8", "--new-tokens", "10"]
    assert main(["eval", str(out), *data, "--device", "cpu"]) == 0

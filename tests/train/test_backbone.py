"""Training of a head with a backbone: inputs of windows, chunks, frozen parts, results."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from tests.support.training import losses, make_trainer, options_for, random_documents, record_of, refused, train
from vllm_mtpc.checkpoint import load_head
from vllm_mtpc.cli import main
from vllm_mtpc.data.rows import Rows, pack
from vllm_mtpc.errors import MtpcError, UsageError
from vllm_mtpc.eval.text import Sampling, generate, with_backbone
from vllm_mtpc.hf.attention import document_positions
from vllm_mtpc.train.cache import Computed, write_cache
from vllm_mtpc.train.circuit_trainer import CircuitTrainer

torch.set_num_threads(1)
BACKBONE = {"head": "backbone", "backbone_layers": 1, "backbone_width": 32, "component_rank": 4}
LOSS = {"beta": 1.0, "acceptance": 0.9, "train_first": False}


def trainer_for(target, out, **changes) -> CircuitTrainer:
    return CircuitTrainer(options_for(target, out, **BACKBONE | LOSS | changes), target)


def rows_of(options) -> Rows:
    return pack(random_documents(), options.seq_len, options.window, options.seed)[0]


def test_layer_states_match_the_model(tiny_target):
    tokens = torch.randint(0, 12, (2, 9))
    given = tiny_target.model(input_ids=tokens, output_hidden_states=True)
    found = tiny_target.hidden_with([0, 1, 2], tokens).split(tiny_target.hidden_size, -1)
    for layer in (0, 1):
        torch.testing.assert_close(found[layer], given.hidden_states[layer])
    torch.testing.assert_close(tiny_target.backbone.norm(found[2]), found[3])
    torch.testing.assert_close(found[3], given.hidden_states[-1])
    assert torch.equal(tiny_target.hidden_with([], tokens), tiny_target.hidden(tokens))


def test_cached_layer_states_match_computed_ones(tiny_target, tmp_path):
    options = options_for(tiny_target, tmp_path, **BACKBONE | LOSS)
    rows = rows_of(options)
    computed = Computed(tiny_target, rows, layers=[1, 2])
    written = write_cache(tmp_path / "cache", tiny_target, rows, layers=[1, 2])
    some = torch.tensor([2, 0])
    assert written.shards[0].shape[-1] == computed.hidden_size == 3 * tiny_target.hidden_size
    torch.testing.assert_close(written.hidden(some), computed.hidden(some), rtol=0, atol=1e-5)
    with pytest.raises(UsageError, match=r"layers \[1, 2\] \(requested: \[2\]\)"):
        write_cache(tmp_path / "cache", tiny_target, rows, layers=[2])


def test_window_reads_only_its_document(tiny_target, tmp_path):
    """The input of every window equals that of its document alone, up to the start of the window."""
    job = trainer_for(tiny_target, tmp_path)
    rows = rows_of(job.options)
    job.setup_data(rows)
    drafter, batch = job.model, next(job.windows.batches())
    first = batch.tokens[:, 0]
    read, verified = drafter._reader(batch.hidden, batch.document, batch.row, batch.start, first)
    assert verified.shape[-1] == tiny_target.hidden_size
    found = read(slice(None))
    for b in range(0, len(first), 7):
        row, start = int(batch.row[b]), int(batch.start[b])
        own = batch.document[row] == batch.document[row, start]
        own[start + 1 :] = False
        aux = batch.hidden[row, own][None, :, : -tiny_target.hidden_size]
        length = torch.arange(aux.shape[1])[None]
        context = job.head.context(aux, length, torch.zeros_like(length))
        alone = job.head.read(context, torch.tensor([0]), length[0, -1:], first[b : b + 1])[0]
        torch.testing.assert_close(found[b], alone, rtol=0, atol=1e-5)  # sums over other numbers of masked terms


def test_chunks_give_the_same_loss_and_gradient(tiny_target, tmp_path):
    found = []
    for chunk in (None, 7, 1):
        job = trainer_for(tiny_target, tmp_path, chunk_windows=chunk)
        job.setup_data(rows_of(job.options))
        drafter, batch = job.model, next(job.windows.batches())
        loss, watched = drafter(batch, watch=True)
        loss.backward()
        assert watched[1] > 0
        found.append((loss.item(), {name: value.grad for name, value in job.head.named_parameters()}))
    for loss, gradients in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-6)  # float32 sums in another order
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, found[0][1][name], atol=1e-6, rtol=1e-3)


def test_backbone_learns_a_small_text(tiny_target, tmp_path):
    changes = BACKBONE | LOSS | {"max_steps": 60, "circuit": "ff", "components": 1, "component_rank": 0}
    options = options_for(tiny_target, tmp_path, **changes, windows_per_step=32, learning_rate=5e-3)
    trainer = make_trainer(options, tiny_target, random_documents(4))
    trainer.train()
    found = losses(tmp_path)
    # random text: the head can only learn it by heart
    assert sum(found[-5:]) / 5 < 0.6 * found[0]


def test_backbone_splits_fused_projections_and_reports_missing_weights(place, tmp_path, capsys):
    """Phi-3: one projection for queries, keys and values, one for gate and up; no norms of queries and keys."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    theirs = Phi3ForCausalLM(Phi3Config(vocab_size=257, num_hidden_layers=2, pad_token_id=0, **sizes))
    theirs.save_pretrained(tmp_path / "phi")
    for file in (place / "target").glob("*token*"):
        shutil.copy(file, tmp_path / "phi")
    given = {"head": "backbone", "backbone_layers": 2, "component_rank": 2, "target": tmp_path / "phi"}
    out = train(place, "phi", **given, dry_run=True, dtype="float32")
    for ours, layer in zip(load_head(out)[1].backbone.layers, theirs.model.layers, strict=True):
        attention, mlp = ours.self_attn, ours.mlp
        fused = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        assert torch.equal(torch.cat(fused), layer.self_attn.qkv_proj.weight)
        assert torch.equal(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]), layer.mlp.gate_up_proj.weight)
        assert torch.equal(mlp.down_proj.weight, layer.mlp.down_proj.weight)
    said = capsys.readouterr().err
    assert said.count("warning: the backbone starts in part") == 1
    copied, missing = re.search(r"copied: (.*); not copied: (.*)\n", said).groups()
    assert "self_attn.q_proj" in copied and "mlp.up_proj" in copied
    assert missing == "self_attn.q_norm, self_attn.k_norm"
    train(place, "narrow", **given, dry_run=True, backbone_width=16)
    missing = re.search(r"; not copied: (.*)\n", capsys.readouterr().err)[1]
    assert all(f"mlp.{name}_proj" in missing for name in ("gate", "up", "down"))
    card = (train(place, "card", **given, max_steps=1) / "README.md").read_text()
    assert "and last layers (copied: norm, self_attn.q_proj" in card


def test_measured_backbone_states_match_single_windows(tiny_target, tmp_path):
    head = trainer_for(tiny_target, tmp_path, circuit="ff", components=1).head
    prompts, sampling = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])], Sampling(1.0)
    samples = generate(tiny_target, prompts, 8, sampling, torch.Generator().manual_seed(0), overhang=4)
    found = with_backbone(samples, head, tiny_target).draft
    assert found.shape == (*samples.hidden.shape[:2], 4, tiny_target.hidden_size)
    for text in (0, 1):
        for t in range(int((samples.tokens[text] >= 0).sum()) - 1):
            tokens = samples.tokens[text, : t + 1][None]
            aux = tiny_target.hidden_with(head.aux_layers, tokens)[..., : -tiny_target.hidden_size]
            document = torch.zeros_like(tokens)
            context = head.context(aux, document_positions(document), document)
            alone = head.read(context, torch.tensor([0]), torch.tensor([t]), samples.tokens[text, t + 1][None])
            torch.testing.assert_close(found[text, t], alone[0], rtol=0, atol=1e-4)  # rounding of other shapes


def test_circuit_trains_on_frozen_backbone(place, capsys):
    """From text to a head, then another circuit with tokens on the same draft layers; measured, shown, and refused."""
    mine = BACKBONE | {"circuit": "ff", "components": 1, "component_rank": 0, "max_steps": 2}
    drafter = train(place, "drafter", **mine)
    more = {"circuit": "hmm", "init_from": drafter, "freeze_backbone": True, "token_rank": 2, "max_steps": 2}
    more |= {"head": "backbone", "component_rank": 4}  # its sizes are those of init_from
    out = train(place, "circuit", **more)
    error = refused(capsys, place, "none", **more | {"circuit": "ff", "components": 1, "token_rank": 0})
    assert "nothing is left to learn; set components or token_rank" in error
    config, head = load_head(out)
    source = load_head(drafter)[1].backbone.state_dict()
    assert all(torch.equal(value, source[name]) for name, value in head.backbone.state_dict().items())
    assert (config.head, config.token_rank, config.component_rank) == ("backbone", 2, 4)
    assert head.token_target.any() and head.component_in.shape == (4, 2, 4, 32)
    assert 1 <= record_of(out)["figures"]["t1"]["tokens_per_step"] <= 4
    assert "Model Runner V2 alone" in (out / "README.md").read_text()
    assert main(["inspect", str(out)]) == 0
    data = ["--data", str(place / "text.jsonl"), "--sequences", "3", "--prompt-tokens", "8", "--new-tokens", "10"]
    assert main(["eval", str(place / "circuit"), *data, "--device", "cpu"]) == 0


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"freeze_backbone": True}, "freeze_backbone needs a trained backbone"),
        ({"train_first": True}, "train_first with head backbone"),
        ({"component_rank": 0}, "components=3 needs component_rank"),
        ({"aux_hidden_state_layer_ids": [3]}, "rising numbers from 0 to 2"),
        ({"lora_layers": 1}, "lora_layers=1 with head 'backbone'"),
    ],
)
def test_invalid_backbone_options_are_refused(tiny_target, tmp_path, changes, words):
    with pytest.raises(MtpcError, match=words):
        trainer_for(tiny_target, tmp_path, **changes)

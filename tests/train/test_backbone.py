"""Training of a head with a backbone: inputs of windows, chunks, frozen parts, results."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from tests.support.training import BACKBONE, make_trainer, options_for, record_of, refused, train
from tests.train.conftest import write_place
from vllm_mtpc.checkpoint import check_tensors, load_head
from vllm_mtpc.cli import main
from vllm_mtpc.eval.text import Sampling, generate, with_backbone
from vllm_mtpc.hf import bind, load_target
from vllm_mtpc.hf.attention import document_positions
from vllm_mtpc.train.circuit_trainer import CircuitTrainer

torch.set_num_threads(1)


def test_window_reads_only_its_document(tiny_target, tmp_path):
    job = make_trainer(options_for(tiny_target, tmp_path, **BACKBONE), tiny_target)
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
    assert re.search(r"; not copied: (.*)\n", said)[1] == "self_attn.q_norm, self_attn.k_norm"
    train(place, "narrow", **given, dry_run=True, backbone_width=16)
    missing = re.search(r"; not copied: (.*)\n", capsys.readouterr().err)[1]
    assert all(f"mlp.{name}_proj" in missing for name in ("gate", "up", "down"))
    card = (train(place, "card", **given, max_steps=1) / "README.md").read_text()
    assert "and last layers (not copied: self_attn.q_norm, self_attn.k_norm)" in card


def test_measured_backbone_states_match_single_windows(tiny_target, tmp_path):
    options = options_for(tiny_target, tmp_path, **BACKBONE | {"circuit": "ff", "components": 1})
    head = CircuitTrainer(options, tiny_target).head
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
    check_tensors(out, config)
    data = ["--data", str(place / "text.jsonl"), "--sequences", "3", "--prompt-tokens", "8", "--new-tokens", "10"]
    assert main(["eval", str(place / "circuit"), *data, "--device", "cpu"]) == 0


# --- from a trained ff head

SOURCES = {"plain": {}, "tokens": {"token_rank": 6}}
# nats; the same numbers, summed over equal latents in float32
TOLERANCE = 1e-5
ONE = {"circuit": "ff", "components": 1, "component_rank": 0, "dtype": "float32", "max_steps": 2}


@pytest.fixture(scope="module", name="sources")
def fixture_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sources")
    write_place(place, layers=4)
    for name, more in SOURCES.items():
        train(place, name, **BACKBONE | ONE | more)
    return place


def options(place: Path, source: str, **changes: object) -> dict[str, object]:
    mine = {"head": "backbone", "init_from": place / source, "component_rank": 3, "dtype": "float32"}
    return mine | {"max_steps": 2, "evaluation_sequences": 0, "windows_per_step": 16} | changes


@torch.no_grad()
def log_probs(place: Path, head: str, windows: torch.Tensor) -> torch.Tensor:
    """log p of every token of windows[B, n - 1] but x_1, by the head in `place`, each after the same text."""
    target = load_target(place / "target", torch.float32)
    _, made = load_head(place / head)
    bind(made, target)
    tokens = torch.tensor([list(b"the cat sat on")])
    aux = target.hidden_with(made.aux_layers, tokens)[..., : -target.hidden_size]
    context = made.context(aux, torch.arange(tokens.shape[1])[None], torch.zeros_like(tokens))
    nowhere = torch.zeros(len(windows), dtype=torch.long)
    states = made.read(context, nowhere, nowhere + tokens.shape[1] - 1, windows[:, 0])
    return made.circuit.conditional_log_probs(made(states), windows)[:, 1:]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("circuit", ["cp", "hmm", "btree"])
def test_any_circuit_starts_at_the_distribution_of_ff(sources: Path, source: str, circuit: str) -> None:
    place, out = sources, f"{source} {circuit} start"
    config, head = load_head(train(place, out, **options(place, source, circuit=circuit, components=4, dry_run=True)))
    assert (config.circuit, config.num_components, config.component_rank) == (circuit, 4, 3)
    assert (config.token_rank or 0) == SOURCES[source].get("token_rank", 0)  # not typed: the source's
    assert head.component_in.std() > 0.1  # or components could never part
    windows = torch.randint(257, (64, config.window), generator=torch.Generator().manual_seed(0))
    wanted = log_probs(place, source, windows)
    assert wanted.std() > 0.05
    torch.testing.assert_close(log_probs(place, out, windows), wanted, rtol=0, atol=TOLERANCE)


def test_circuit_and_backbone_are_trained_from_ff(sources: Path) -> None:
    place, source = sources, "tokens"
    trained = train(place, "trained", **options(place, source, circuit="hmm"))
    (_, head), (_, drafter) = load_head(trained), load_head(place / source)
    assert head.component_out.any() and head.inner_bias is not None
    assert not torch.equal(head.token_target, drafter.token_target)
    for name, value in drafter.backbone.named_parameters():
        assert not torch.equal(head.backbone.get_parameter(name), value), name

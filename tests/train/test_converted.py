"""Training from a converted drafter: it starts at its distribution, as any circuit, its draft layers frozen or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.demo.byte_target import build_tokenizer
from tests.support import drafters
from tests.support.models import make_target
from tests.support.training import refused, train
from tests.train.conftest import WORDS
from vllm_mtpc.checkpoint import load_head
from vllm_mtpc.cli import main
from vllm_mtpc.hf import bind, load_target

torch.set_num_threads(1)
BYTES = 257
DRAFTERS = ("speculators dflash", "original dspark")
# nats; the same numbers, summed over equal latents in float32
TOLERANCE = 1e-5


@pytest.fixture(scope="module", name="drafters_place")
def fixture_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte target, text, and heads converted from drafters of it."""
    place = tmp_path_factory.mktemp("converted")
    target = make_target(place / "target", BYTES, seed=3, hidden_size=32, layers=4)
    build_tokenizer().save_pretrained(place / "target")
    (place / "text.jsonl").write_text("".join(json.dumps({"text": WORDS[i:]}) + "\n" for i in range(12)))
    for layout in DRAFTERS:
        source, out = drafters.make(place / f"{layout} source", layout, target), place / layout
        assert main(["convert", str(source), "--target", str(place / "target"), "--out", str(out)]) == 0
    return place


def options(place: Path, source: str, **changes: object) -> dict[str, object]:
    window = drafters.BLOCK + ("dspark" in source)
    mine = {"head": "backbone", "window": window, "init_from": place / source, "component_rank": 3, "dtype": "float32"}
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


@pytest.mark.parametrize("source", DRAFTERS)
@pytest.mark.parametrize("circuit", ["cp", "hmm", "btree"])
def test_any_circuit_starts_at_the_drafters_distribution(drafters_place: Path, source: str, circuit: str) -> None:
    place, out = drafters_place, f"{source} {circuit} start"
    config, head = load_head(train(place, out, **options(place, source, circuit=circuit, components=4, dry_run=True)))
    assert (config.circuit, config.num_components, config.component_rank) == (circuit, 4, 3)
    assert (config.token_rank or 0) == (drafters.RANK if "dspark" in source else 0)  # not typed: the source's
    assert head.component_in.std() > 0.1  # or components could never part
    windows = torch.randint(BYTES, (64, config.window), generator=torch.Generator().manual_seed(0))
    wanted = log_probs(place, source, windows)
    assert wanted.std() > 0.5
    torch.testing.assert_close(log_probs(place, out, windows), wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("freeze", [True, False])
def test_a_circuit_is_trained_on_a_drafter(drafters_place: Path, freeze: bool) -> None:
    """Components part, and the draft layers stay or go on."""
    place, source, out = drafters_place, "original dspark", f"trained {freeze}"
    trained = train(place, out, **options(place, source, circuit="hmm", freeze_backbone=freeze))
    (_, head), (_, drafter) = load_head(trained), load_head(place / source)
    assert head.component_out.any() and head.inner_bias is not None
    assert not torch.equal(head.token_target, drafter.token_target)
    same = [
        torch.equal(head.backbone.get_parameter(name), value) for name, value in drafter.backbone.named_parameters()
    ]
    assert all(same) if freeze else not any(same)


def test_a_drafter_of_another_window_is_refused(drafters_place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = options(drafters_place, "original dspark", window=8)
    assert "cannot start from a head of (5, 257, 32)" in refused(capsys, drafters_place, "no", circuit="hmm", **mine)

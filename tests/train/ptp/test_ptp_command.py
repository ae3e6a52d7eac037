"""`vllm-mtpc train --head ptp`: its files, its start and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.files import front_matter_of
from tests.support.training import record_of, refused, train
from vllm_mtpc.checkpoint.ptp_head import load_ptp, load_student
from vllm_mtpc.errors import MtpcError
from vllm_mtpc.hf import load_target
from vllm_mtpc.train import command, trainer
from vllm_mtpc.train.options import parse
from vllm_mtpc.train.ptp.ptp_drafter import loss_name
from vllm_mtpc.train.ptp.ptp_trainer import PtpTrainer

torch.set_num_threads(1)

REQUIRED = {"target": "t", "data": ["d"], "out": "o", "head": "ptp"}
PTP = {"head": "ptp", "lora_rank": 3}


def test_ptp_run_writes_head_with_results(place: Path, capsys: pytest.CaptureFixture) -> None:
    out = train(place, "ptp", **PTP, u_embedding="arithmetic", temperature=0.9, top_k=40)
    config, record, printed = load_ptp(out).config, record_of(out), capsys.readouterr().out
    assert (config.variant, config.window, config.lora_rank) == ("o-ptp", 4, 3)
    assert (config.trained_temperature, config.trained_top_k, config.trained_top_p) == (0.9, 40, 1.0)
    assert config.speculators_config.verifier.name_or_path == "../target"
    last = printed.splitlines()[-1]
    assert last.startswith("serve it: scripts/v2_on_cpu.sh vllm serve ") or torch.cuda.is_available()
    t1, t0 = (record["figures"][name] for name in ("t1", "t0"))
    assert config.accepted == pytest.approx(t1["histogram"]) and len(config.accepted) == 4
    for name, figure in (("0.9", t1), ("0", t0)):
        assert f"tokens/step at T={name}: {figure['tokens_per_step']:.3f}" in printed
    assert f"with the u of other windows: {t1['shuffled_accuracy']:.1%}" in printed
    assert {path.name for path in out.iterdir()} == {
        "config.json", "adapter_config.json", "adapter_model.safetensors", "u_embed.safetensors", "README.md",
        "provenance.json", "metrics.jsonl", "state", "loss.png", "loss.svg", "acceptance.png", "acceptance.svg",
    }  # fmt: skip
    card = (out / "README.md").read_text()
    assert {"library_name", "pipeline_tag", "tags"} <= front_matter_of(out).keys()
    assert "# PTP head: o-ptp, n=4, LoRA rank 3" in card and "temperature 0.9, top-k 40" in card
    assert f"**{t1['tokens_per_step']:.3f}**" in card and str(place) not in card + json.dumps(record)
    state = load_file(out / "state" / "step-4" / "model.safetensors")
    written = load_file(out / "u_embed.safetensors")["outer.weight"]
    assert torch.equal(written, state["head.embedding.outer.weight"].half())


def test_serve_command_depends_on_gpu(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(__file__).parents[3] / "scripts" / "v2_on_cpu.sh"
    for has_gpu, needs_v2, typed in (
        (False, True, f"scripts/{script.name} vllm serve head"),
        (True, True, "vllm serve head"),
        (False, False, "vllm serve head"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        line = trainer.serve_line(Path("head"), needs_v2)
        assert line.startswith(f"serve it: {typed}") and ("Model Runner V2" in line) == (typed != "vllm serve head")
    assert script.is_file()


def test_ptp_dry_run_can_be_loaded(place: Path) -> None:
    out = train(place, "dry", **PTP, variant="c-ptp", dry_run=True)
    student = load_student(out, load_target(place / "target"))
    assert student.config.variant == "c-ptp" and student.config.accepted is None
    assert all(not value.any() for name, value in student.lora().items() if "lora_B" in name)
    assert "This head is untrained" in (out / "README.md").read_text()
    assert not (out / "metrics.jsonl").exists()


def test_ptp_head_starts_from_another(place: Path, capsys: pytest.CaptureFixture) -> None:
    first = train(place, "one", **PTP, evaluation_sequences=0, learning_rate=3e-2)
    one, two = load_ptp(first), load_ptp(train(place, "two", **PTP, init_from=first, dry_run=True))
    assert one.lora.keys() == two.lora.keys() and any(value.any() for value in one.lora.values())
    assert all(torch.equal(one.lora[name], two.lora[name]) for name in one.lora)
    assert two.late is None
    more = PTP | {"init_from": first, "variant": "late", "late_width": 6, "evaluation_sequences": 0}
    new, late = (load_ptp(train(place, name, **more, dry_run=name == "new")) for name in ("new", "late"))
    assert new.late.state.out_features == 6 and not new.late.outer.weight.any()  # of no effect yet
    assert late.late.outer.weight.any()
    assert all(torch.equal(one.lora[name], new.lora[name]) for name in one.lora)
    circuit = train(place, "circuit", dry_run=True)
    for changes, message in (
        ({"init_from": place / "late"}, "has variant=late, this run o-ptp; set variant to late"),
        ({"lora_rank": 5}, "has lora_rank=3, this run 5"),
        ({"variant": "c-ptp"}, "has variant=o-ptp, this run c-ptp; set variant to o-ptp"),
        ({"init_from": circuit}, "a PTP head starts from a PTP head"),
    ):
        assert message in refused(capsys, place, "three", **PTP | {"init_from": first, "dry_run": True} | changes)


def test_card_compares_with_the_baseline(place: Path, capsys: pytest.CaptureFixture) -> None:
    """Measured on the same texts, from a head that was trained alike; another one is refused."""
    baseline = train(place, "baseline", **PTP, variant="independent")
    out = train(place, "next to", **PTP, baseline=baseline)
    theirs, ours = (record_of(folder)["figures"]["t1"] for folder in (baseline, out))
    wanted, gain = theirs["tokens_per_step"], ours["tokens_per_step"] / theirs["tokens_per_step"]
    assert ours["baseline_tokens_per_step"] == wanted
    assert f"{gain:.3f}x the tokens/step of the independent baseline, {wanted:.3f}" in capsys.readouterr().out
    card = (out / "README.md").read_text()
    assert "Tokens/step of the independent baseline, trained alike" in card and f"{wanted:.3f}" in card
    for changes, message in (
        ({"baseline": baseline, "max_steps": 3}, "has max_steps=4, this run 3; train both alike"),
        ({"baseline": out}, "not a trained and measured head of variant independent; name one"),
    ):
        assert message in refused(capsys, place, "another", **PTP, dry_run=True, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"circuit": "hmm"}, "circuit is an option of circuits: remove circuit, or set another head"),
        ({"components": 8}, "components is an option of circuits"),
        ({"acceptance": 0.5}, "acceptance is an option of circuits"),
        ({"lora_layers": 2}, "lora_layers is an option of circuits"),
        ({"cache": "c"}, "cache is an option of circuits"),
        ({"head": "linear", "variant": "c-ptp"}, "variant is an option of PTP heads: remove variant, or set head ptp"),
        ({"head": "mlp", "temperature": 0.5}, "temperature is an option of PTP heads"),
        ({"ptp_loss": "inverse"}, "ptp_loss 'inverse' with variant 'o-ptp': allowed are ce, bce; set"),
        ({"ptp_loss": "kl"}, "ptp_loss 'kl' with variant 'o-ptp': allowed are ce, bce; set"),
        ({"variant": "independent", "baseline": "b"}, "it is the baseline itself; remove baseline"),
        ({"variant": "c-ptp", "ptp_loss": "ce"}, "allowed are kl, reverse-kl, inverse"),
        ({"u_embedding": "bits"}, "unknown u_embedding 'bits'"),
        ({"u_features": 8}, "u_features=8 is not an option of u_embedding 'ieee'"),
        ({"temperature": 0}, "temperature"),
    ],
)
def test_conflicting_options_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(MtpcError, match=message) as caught:
        parse(REQUIRED | changes)
    assert "\n" not in str(caught.value)


def test_defaults_depend_on_the_family() -> None:
    ptp, circuit = parse(REQUIRED), parse(REQUIRED | {"head": "linear"})
    assert (ptp.windows_per_step, ptp.learning_rate, loss_name(ptp)) == (512, 1e-3, "ce")
    assert (circuit.windows_per_step, circuit.learning_rate) == (4096, None)  # None: by the width of the target
    assert (ptp.variant, circuit.circuit) == ("o-ptp", "btree")
    assert loss_name(parse(REQUIRED | {"windows_per_step": 4096, "variant": "c-ptp"})) == "kl"
    again = parse(ptp.model_dump(mode="json"))  # as options reach a Ray worker: every one of them is given
    assert again == ptp and parse(circuit.model_dump(mode="json")) == circuit


def test_responses_are_sampled_as_trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    monkeypatch.setattr(
        "vllm_mtpc.batch.regenerate.regenerate", lambda settings: asked.append(settings) or settings.out
    )
    distribution = {"temperature": 0.7, "top_k": 50, "top_p": 0.95}
    options = command.with_responses(parse(REQUIRED | distribution | {"out": tmp_path, "regenerate": 10}))
    assert options.data == [str(tmp_path / "data" / "sampled.jsonl")]
    assert [(one.temperature, one.top_k, one.top_p, one.limit) for one in asked] == [(0.7, 50, 0.95, 10)]


def test_unused_u_is_reported() -> None:
    options, baseline = parse(REQUIRED), parse(REQUIRED | {"variant": "independent"})
    figure = {"tokens_per_step": 2.0, "standard_error": 0.1, "sequences": 4, "accuracy": 0.5}
    used, unused = ({"t1": figure | {"shuffled_accuracy": value}} for value in (0.2, 0.49))

    def comments(of: Any, results: dict) -> list[str]:
        return PtpTrainer.comments(SimpleNamespace(options=of), results)

    assert not any("warning" in line for line in comments(options, used))
    assert "so u is not used" in comments(options, unused)[-1]
    assert not any("warning" in line for line in comments(baseline, unused))

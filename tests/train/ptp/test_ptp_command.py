"""`vllm-mtpc train --head ptp`: its files, its start and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.files import front_matter_of
from tests.support.training import flags
from vllm_mtpc.checkpoint.ptp_head import load_ptp, load_student
from vllm_mtpc.cli import main
from vllm_mtpc.errors import MtpcError
from vllm_mtpc.hf import load_target
from vllm_mtpc.train import command, trainer
from vllm_mtpc.train.options import parse
from vllm_mtpc.train.ptp.ptp_drafter import loss_name
from vllm_mtpc.train.ptp.ptp_trainer import u_lines

torch.set_num_threads(1)

REQUIRED = {"target": "t", "data": ["d"], "out": "o", "head": "ptp"}
SKIP = ("--circuit", "--components")


def ptp_flags(place: Path, out: str, **changes: object) -> list[str]:
    words = flags(place, out, head="ptp", lora_rank=3, **changes)
    dropped = {place for flag in SKIP for place in (words.index(flag), words.index(flag) + 1)}
    return [word for at, word in enumerate(words) if at not in dropped]


def test_ptp_run_writes_head_with_results(place: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["train", *ptp_flags(place, "ptp", u_embedding="arithmetic", temperature=0.9, top_k=40)]) == 0
    out, printed = place / "ptp", capsys.readouterr().out
    config = load_ptp(out).config
    assert (config.variant, config.window, config.lora_rank) == ("o-ptp", 4, 3)
    assert (config.trained_temperature, config.trained_top_k, config.trained_top_p) == (0.9, 40, 1.0)
    assert config.speculators_config.verifier.name_or_path == "../target"
    assert (
        printed.splitlines()[-1].startswith("serve it: scripts/v2_on_cpu.sh vllm serve ") or torch.cuda.is_available()
    )
    record = json.loads((out / "provenance.json").read_text())
    figures = record["figures"]
    assert config.accepted == pytest.approx(figures["t1"]["histogram"]) and len(config.accepted) == 4
    assert f"tokens/step at T=0.9: {figures['t1']['tokens_per_step']:.3f}" in printed
    assert f"tokens/step at T=0: {figures['t0']['tokens_per_step']:.3f}" in printed
    assert f"with the u of other windows: {figures['t1']['shuffled_accuracy']:.1%}" in printed
    assert {path.name for path in out.iterdir()} == {
        "config.json", "adapter_config.json", "adapter_model.safetensors", "u_embed.safetensors", "README.md",
        "provenance.json", "metrics.jsonl", "state", "loss.png", "loss.svg", "acceptance.png", "acceptance.svg",
    }  # fmt: skip
    card = (out / "README.md").read_text()
    assert {"library_name", "pipeline_tag", "tags"} <= front_matter_of(out).keys()
    assert "# PTP head: o-ptp, n=4, LoRA rank 3" in card and "temperature 0.9, top-k 40" in card
    assert f"**{figures['t1']['tokens_per_step']:.3f}**" in card
    assert str(place) not in card + json.dumps(record)
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
    assert main(["train", *ptp_flags(place, "dry", variant="c-ptp", dry_run=True)]) == 0
    student = load_student(place / "dry", load_target(place / "target"))
    assert student.config.variant == "c-ptp" and student.config.accepted is None
    assert all(not value.any() for name, value in student.lora().items() if "lora_B" in name)
    assert "This head is untrained" in (place / "dry" / "README.md").read_text()
    assert not (place / "dry" / "metrics.jsonl").exists()


def test_ptp_head_starts_from_another(place: Path, capsys: pytest.CaptureFixture) -> None:
    main(["train", *ptp_flags(place, "one", evaluation_sequences=0, learning_rate=3e-2)])
    assert main(["train", *ptp_flags(place, "two", init_from=place / "one", dry_run=True)]) == 0
    one, two = (load_ptp(place / name) for name in ("one", "two"))
    assert one.lora.keys() == two.lora.keys() and any(value.any() for value in one.lora.values())
    assert all(torch.equal(one.lora[name], two.lora[name]) for name in one.lora)
    assert two.late is None
    more = {"init_from": place / "one", "variant": "late", "late_width": 6, "evaluation_sequences": 0}
    main(["train", *ptp_flags(place, "new", **more, dry_run=True)])
    main(["train", *ptp_flags(place, "late", **more)])
    new, late = (load_ptp(place / name) for name in ("new", "late"))
    assert new.late.state.out_features == 6 and not new.late.outer.weight.any()  # of no effect yet
    assert late.late.outer.weight.any()
    assert all(torch.equal(one.lora[name], new.lora[name]) for name in one.lora)
    assert main(["train", *ptp_flags(place, "three", init_from=place / "late", dry_run=True)]) != 0
    assert "has variant=late, this run o-ptp; set variant to late" in capsys.readouterr().err
    for changes, message in (
        ({"lora_rank": 5}, "has lora_rank=3, this run 5"),
        ({"variant": "c-ptp"}, "has variant=o-ptp, this run c-ptp; set variant to o-ptp"),
    ):
        words = ptp_flags(place, "three", init_from=place / "one", dry_run=True)
        for name, value in changes.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        capsys.readouterr()
        assert main(["train", *words]) != 0
        assert message in capsys.readouterr().err


def test_card_compares_with_the_baseline(place: Path, capsys: pytest.CaptureFixture) -> None:
    """Measured on the same texts, from a head that was trained alike; another one is refused."""
    assert main(["train", *ptp_flags(place, "baseline", variant="independent")]) == 0
    assert main(["train", *ptp_flags(place, "next to", baseline=place / "baseline")]) == 0
    figures = {
        name: json.loads((place / name / "provenance.json").read_text())["figures"] for name in ("baseline", "next to")
    }
    theirs, ours = (figures[name]["t1"]["tokens_per_step"] for name in ("baseline", "next to"))
    assert figures["next to"]["t1"]["baseline_tokens_per_step"] == theirs
    assert f"{ours / theirs:.3f}x the tokens/step of the independent baseline, {theirs:.3f}" in capsys.readouterr().out
    card = (place / "next to" / "README.md").read_text()
    assert "Tokens/step of the independent baseline, trained alike" in card and f"{theirs:.3f}" in card
    for name, changes, message in (
        ("baseline", {"max_steps": 3}, "has max_steps=4, this run 3; train both alike"),
        ("next to", {}, "not a trained and measured head of variant independent; name one"),
    ):
        words = ptp_flags(place, "another", baseline=place / name, dry_run=True, **changes)
        assert main(["train", *words]) != 0
        assert message in capsys.readouterr().err


def test_circuit_as_start_is_refused(place: Path, capsys: pytest.CaptureFixture) -> None:
    main(["train", *flags(place, "circuit", dry_run=True)])
    assert main(["train", *ptp_flags(place, "four", init_from=place / "circuit", dry_run=True)]) != 0
    assert "a PTP head starts from a PTP head" in capsys.readouterr().err


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
    assert (ptp.trainer.kind(ptp), circuit.trainer.kind(circuit)) == ("o-ptp", "btree")
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
    assert not any("warning" in line for line in u_lines(options, used))
    assert "so u is not used" in u_lines(options, unused)[-1]
    assert not any("warning" in line for line in u_lines(baseline, unused))

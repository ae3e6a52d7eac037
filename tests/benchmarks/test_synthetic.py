"""SYNTHETIC targets: they say so everywhere, they serve, and drafts are accepted as prescribed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import synthetic
from tests.support.configs import engine_config
from tests.support.engine import Call, Engine, run
from vllm_mtpc.errors import MtpcError

RATES = [0.75, 0.5, 0.125]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic")
    words = ["--shape", "2x64", "--window", "4", "--components", "3", "--max-model-len", "256"]
    assert synthetic.main([*words, "--acceptance", *map(str, RATES), "--out", str(folder)]) == 0
    return folder


def test_everything_says_so(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = sorted(made.iterdir())
    assert [folder.name for folder in folders] == ["SYNTHETIC-head", "SYNTHETIC-target"]
    for folder in folders:
        assert "SYNTHETIC" in (folder / "README.md").read_text()
    assert "SYNTHETIC" in json.loads((made / "SYNTHETIC-head" / "provenance.json").read_text())["synthetic"]
    assert "SYNTHETIC" in json.loads((made / "SYNTHETIC-target" / "config.json").read_text())["synthetic"]
    assert not list((made / "SYNTHETIC-target").glob("*.safetensors"))  # vLLM makes the weights up
    assert synthetic.main(["--shape", "1x64", "--window", "2", "--out", str(made / "again")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert all("SYNTHETIC" in line for line in printed) and "tokens/step: 1.700" in printed[1]
    given = json.loads(printed[-1][printed[-1].index("'{") + 1 : -1])
    assert given == synthetic.arguments(made / "again", [0.7])["speculative_config"]


@pytest.mark.slow
def test_it_serves_as_prescribed(made: Path) -> None:
    """On Model Runner V2: vLLM's CPU kernels of V1 have no prescribed acceptance."""
    given = synthetic.arguments(made, RATES)
    how = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 60}
    call = Call([[1, 2, 3 + index] for index in range(8)], [how] * 8)
    engine = Engine(given.pop("model"), [call], {**given, "max_model_len": 128})
    reply = run({"synthetic": engine}, "v2")["synthetic"]
    assert not isinstance(reply, str), reply
    metrics = reply[0].metrics
    steps = metrics["vllm:spec_decode_num_drafts"]
    assert steps > 150
    for rate, count in zip(RATES, metrics["per_position"], strict=True):
        # 4 standard deviations of a share of so many steps: 0.12 to 0.16
        assert abs(count / steps - rate) < 4 * (rate * (1 - rate) / steps) ** 0.5, (rate, count / steps)


def test_a_cpu_without_triton_refuses(made: Path) -> None:
    given = synthetic.arguments(made, RATES)
    with pytest.raises(MtpcError, match="'synthetic' on Model Runner V1 on a CPU"):
        engine_config(Path(given["model"]), given["speculative_config"], load_format="dummy")


def test_sizes() -> None:
    assert synthetic.parse_shape("llama-8b").vocab == 128256
    assert synthetic.parse_shape("24x2048") == synthetic.Shape(24, 2048, 8192, 32, 32, 320)
    parameters = {
        name: shape.layers
        * shape.hidden
        * (2 * shape.hidden * (1 + shape.kv_heads / shape.heads) + 3 * shape.intermediate)
        + shape.vocab * shape.hidden * (1 if shape.tied else 2)
        for name, shape in synthetic.SHAPES.items()
    }
    for name, billions in (("evabyte-6.5b", 6.5), ("llama-3b", 3.2), ("llama-8b", 8.0)):
        assert parameters[name] / 1e9 == pytest.approx(billions, rel=0.02), name


def test_rates() -> None:
    assert synthetic.parse_rates([0.5], 3) == [0.5, 0.25, 0.125]
    assert synthetic.parse_rates([0.9, 0.4], 2) == [0.9, 0.4]


@pytest.mark.parametrize(
    "words",
    [
        ["--shape", "gpt-5"], ["--shape", "2x100"], ["--shape", "0x64"], ["--shape", "2x64", "--acceptance", "1.5"],
        ["--shape", "2x64", "--acceptance", "0.4", "0.9"], ["--shape", "2x64", "--circuit", "tree"],
        ["--shape", "2x64", "--window", "3", "--acceptance", "0.4", "0.5"],
    ],
)  # fmt: skip
def test_refusals(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert synthetic.main([*words, "--out", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err.strip()
    assert "\n" not in message and message.startswith("python -m benchmarks.synthetic: error: ")

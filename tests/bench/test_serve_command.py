"""`vllm-mtpc bench serve`: its words, what it writes, its exit code; engines are fakes but for the slow test."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tests.support.fakes import BTREE, NGRAM, PLAIN, Engines
from vllm_mtpc import cli, demo
from vllm_mtpc.bench import decodings, serve_command
from vllm_mtpc.bench.decodings import OWN, V2_INTERPRETED, command
from vllm_mtpc.engine.speculation import Speculation
from vllm_mtpc.errors import UsageError


def words(*typed: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve_command.add_arguments(parser)
    return parser.parse_args(typed)


def completed(*typed: str, on_gpu: bool = False) -> argparse.Namespace:
    args = words(*typed)
    serve_command.complete(args, on_gpu)
    return args


def test_the_demo_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speculation, "mtp_layers", lambda self: 0)  # which imports vLLM
    args = completed("--demo")
    assert (args.concurrency, args.temperature, args.minutes) == ([1, 4, 16], [1.0, 0.0], 13.0)
    assert (args.dtype, args.order) == ("float32", "interleaved")
    members, missing = serve_command.wanted(args, on_gpu=False)
    found = [one for group in (OWN, V2_INTERPRETED) for one in members[group]]
    names = ["plain", "ngram", "ff (Medusa-style)", "cp", "hmm", "btree", "plain", "late"]
    assert [one.name for one in found] == names and [one.group for one in found][-2:] == [V2_INTERPRETED] * 2
    assert [one.name for one in missing] in (["MTP"], ["suffix", "MTP"])


def test_peers_are_told_apart_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speculation, "problem", lambda self, speculative: None)
    peer = ["--peer", 'a={"method": "eagle", "model": "m"}']
    args = completed("--demo", "--peers", *peer, "--peer", 'EAGLE={"model": "n"}')
    members, missing = serve_command.wanted(args, on_gpu=False)
    assert [one.name for one in members[OWN][:4]] == ["plain", "a", "EAGLE", "ff (Medusa-style)"] and not missing
    with pytest.raises(UsageError, match="--peer a: there is a row of this name"):
        serve_command.wanted(completed("--demo", "--peers", *peer, *peer), on_gpu=False)


def test_what_is_not_typed() -> None:
    head = str(demo.path("btree"))
    args = completed("--heads", head)
    assert Path(args.target) == demo.path("target") and args.concurrency == [1, 2, 4, 8, 16, 32, 64]
    assert completed("--heads", head, on_gpu=True).order == "bracketed"
    assert completed("--heads", head, "--runner", "http").order == "bracketed"
    assert completed("--heads", head, on_gpu=True).dtype == "auto"


def test_interpreted_passes_are_small_unless_asked_for() -> None:
    by_default, asked = (
        completed("--demo"),
        completed("--demo", "--prompts", "9", "--max-tokens", "60", "--rounds", "5"),
    )
    own, few = (serve_command.cells(by_default, group) for group in (OWN, V2_INTERPRETED))
    assert [(cell.clients, cell.prompts, cell.max_tokens) for cell in own[:3]] == [
        (1, 8, 96),
        (4, 12, 96),
        (16, 48, 96),
    ]
    assert [(cell.clients, cell.prompts, cell.max_tokens) for cell in few[:3]] == [(1, 4, 48), (4, 4, 48), (16, 16, 48)]
    assert serve_command.cells(asked, V2_INTERPRETED)[0].prompts == 9
    assert [serve_command.size(args, V2_INTERPRETED, "rounds") for args in (by_default, asked)] == [2, 5]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ([], "nothing to compare"),
        (["--demo", "--target", "x"], "its own target"),
        (["--demo", "--rounds", "0"], "--rounds 0"),
        (["--demo", "--num-drafts", "-1"], "--num-drafts -1"),
        (["--demo", "--concurrency", "0"], "--concurrency must be"),
        (["--demo", "--temperature", "-1"], "--temperature 0 or more"),
    ],
)
def test_wrong_words_are_refused(typed: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        completed(*typed)


def test_options_that_are_no_json_are_refused(capsys: pytest.CaptureFixture) -> None:
    for typed in (["--engine", "[1]"], ["--variant", "K=3"], ["--engine", "{"], ["--peer", "a=[1]"], ["--peer", "={}"]):
        with pytest.raises(SystemExit):
            words(*typed)
        assert "expected is" in capsys.readouterr().err
    assert words("--variant", 'K=3={"num_speculative_tokens": 3}').variant == [("K=3", {"num_speculative_tokens": 3})]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines(lambda name, setting, turn: 0.5 if name == "btree" else 1.0)
    monkeypatch.setattr(decodings, "start", lambda decoding, *_: made.start(decoding))
    missing = decodings.Missing("suffix", "not installed")
    monkeypatch.setattr(serve_command, "wanted", lambda *_: ({OWN: [PLAIN, BTREE]}, [missing]))
    return made


def run(file: Path, *more: str) -> int:
    typed = [
        "--target",
        str(demo.path("target")),
        "--heads",
        str(demo.path("btree")),
        "--rounds",
        "2",
        "--prompts",
        "1",
    ]
    return cli.main(["bench", "serve", *typed, "--concurrency", "1", "2", "--json", str(file), *more])


def test_the_result_says_everything(fakes: Engines, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(tmp_path / "r.json") == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["kind"] == "bench serve" and {"command", "commit", "hardware", "versions", "time"} <= result.keys()
    assert [(row["decoding"], row["temperature"], row["clients"]) for row in result["rows"]] == [
        (name, T, c) for T in (1.0, 0.0) for c in (1, 2) for name in ("plain", "btree")
    ]
    assert {row["speedup"] for row in result["rows"]} == {None, 2.0}
    assert result["not_run"] == [{"name": "suffix", "reason": "not installed", "ours": False}]
    assert not any("/" in str(value) and Path(str(value)).is_absolute() for value in result["settings"].values())
    printed = capsys.readouterr().out
    for piece in ("not run: suffix", "16 (2.00x)", "tokens/step:", "interleaved:", "slower than 0.97x plain: none"):
        assert piece in printed
    assert cli.main(["plot", str(tmp_path / "r.json")]) == 0
    drawn = {file.name for file in tmp_path.iterdir()} - {"r.json"}
    assert drawn == {f"r-{what}.{kind}" for what in ("latency", "frontier") for kind in ("png", "svg")}


def test_other_output_fails_in_float32_alone(fakes: Engines, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    fakes.wrong["btree"] = 1
    assert run(tmp_path / "r.json") == 1
    assert "btree T=0 c=1: greedy output differs" in capsys.readouterr().out
    assert run(tmp_path / "r.json", "--dtype", "bfloat16") == 0


def test_heads_that_did_not_run_or_nothing_compared_fail(fakes: Engines, tmp_path: Path, monkeypatch, capsys) -> None:
    dead, alone, peer = ({OWN: [PLAIN, BTREE]}, []), ({OWN: [PLAIN]}, []), ({OWN: [PLAIN, NGRAM]}, [])
    refused = ({OWN: [PLAIN, NGRAM]}, [decodings.Missing("late", "needs a GPU", ours=True)])
    fakes.cannot_start.add("btree")
    for found, code, line in (
        (dead, 1, "failed: btree did not run"),
        (alone, 1, "failed: nothing was compared with plain vLLM"),
        (refused, 1, "failed: late did not run"),
        (peer, 0, "identical greedy outputs: 8 of 8"),
    ):
        monkeypatch.setattr(serve_command, "wanted", lambda *_, found=found: found)
        assert run(tmp_path / "r.json") == code
        assert capsys.readouterr().out.strip().endswith(line)


def test_plain_that_does_not_start_ends_the_run(fakes: Engines, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    fakes.cannot_start.add("plain")
    assert run(tmp_path / "r.json") == 2 and "no such model" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


def test_arguments_as_flags() -> None:
    engine = {
        "model": "m",
        "seed": 0,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "speculative_config": {"a": 1},
    }
    assert command(engine) == [
        *("m", "--seed", "0", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--speculative-config", '{"a": 1}'),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["offline", "http"])
def test_engines(runner: str, tmp_path: Path) -> None:
    """Plain, btree and, offline, ngram and the target as its own draft model, really; a few tokens."""
    words = ["--heads", str(demo.path("btree")), "--concurrency", "1", "2", "--prompts", "2", "--max-tokens", "16"]
    more = ["--rounds", "1", "--runner", runner, "--peers", *(["ngram"] if runner == "offline" else [])]
    if runner == "offline":
        draft = {"method": "draft_model", "model": str(demo.path("target")), "num_speculative_tokens": 2}
        more += ["--peer", f"itself={json.dumps(draft)}"]
    assert cli.main(["bench", "serve", *words, *more, "--json", str(tmp_path / "r.json")]) == 0
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert len(rows) == (16 if runner == "offline" else 8) and all(row["tokens_per_second"] > 0 for row in rows)
    for row in rows:
        assert (row["tokens_per_step"] > 1) == (row["decoding"] != "plain") or row["decoding"] == "ngram"
        assert row["identical"] is None or row["identical"][0] == row["identical"][1]
        assert row["ttft_ms"] > 0 and row["tpot_ms"] > 0 and (runner == "http") == (row["step_ms"] is None)

"""`vllm-mtpc bench serve`: options, ways of decoding, result, exit code; engines are fakes but in the slow test."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.fakes import BTREE, NGRAM, PLAIN, Engines
from vllm_mtpc import cli, demo
from vllm_mtpc.bench import decodings, serve_command
from vllm_mtpc.bench.decodings import Missing, find_heads, find_peers
from vllm_mtpc.errors import CheckpointError, UsageError

HEAD = str(demo.path("btree"))


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve_command.add_arguments(parser)
    return parser.parse_args(["serve", *words])


def with_defaults(*words: str, on_gpu: bool = False) -> argparse.Namespace:
    args = parse(*words)
    serve_command.set_defaults(args, on_gpu)
    return args


def test_demo_compares_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decodings, "count_mtp_layers", lambda engine: 0)
    args = with_defaults("--demo")
    assert (args.concurrency, args.rounds, args.dtype, args.order) == ([1, 4, 16], 4, "float32", "interleaved")
    found, missing = serve_command.find_decodings(args, on_gpu=False)
    names = [one.name for one in found if one.name != "suffix"]
    assert names == ["plain", "ngram", "ff (Medusa-style)", "cp", "hmm", "btree"]
    assert "MTP" in [one.name for one in missing]
    cells = serve_command.make_cells(args)
    assert [(one.clients, one.prompts, one.max_tokens) for one in cells[:3]] == [(1, 8, 96), (4, 12, 96), (16, 48, 96)]
    assert Path(with_defaults("--demo", on_gpu=True).heads[-1]) == demo.path("late")


def test_defaults_follow_the_head_and_the_machine() -> None:
    args = with_defaults("--heads", HEAD)
    assert Path(args.target) == demo.path("target") and args.concurrency == [1, 2, 4, 8, 16, 32, 64]
    on_gpu = with_defaults("--heads", HEAD, on_gpu=True)
    assert (on_gpu.order, on_gpu.dtype) == ("bracketed", "auto")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to compare"),
        (["--demo", "--target", "x"], "its own target"),
        (["--demo", "--rounds", "0"], "--rounds 0"),
        (["--demo", "--num-drafts", "-1"], "--num-drafts -1"),
        (["--demo", "--concurrency", "0"], "--concurrency must be"),
        (["--demo", "--temperature", "-1"], "--temperature 0 or more"),
        (["--demo", "--peers", "--peer", 'cp={"method": "eagle"}'], "--peer cp: another row"),
    ],
)
def test_options_that_exclude_each_other_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        serve_command.find_decodings(with_defaults(*words), on_gpu=False)


@pytest.mark.parametrize(
    "words", [("--variant", "K=3"), ("--engine", "{"), ("--engine", "[1]"), ("--peer", "a=[1]"), ("--peer", "={}")]
)
def test_options_that_are_not_json_are_refused(words: tuple[str, str]) -> None:
    with pytest.raises(SystemExit):
        parse(*words)
    assert parse("--variant", 'K=3={"a": 3}').variant == [("K=3", {"a": 3})]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines(lambda name, setting, turn: 0.5 if name == "btree" else 1.0)
    made.decodings, made.missing = [PLAIN, BTREE], [Missing("suffix", "not installed")]

    monkeypatch.setattr(
        serve_command,
        "run_server",
        lambda words, log: made.start(next(d for d in made.decodings if d.name == log.stem)),
    )
    monkeypatch.setattr(serve_command, "Engine", lambda client, texts: client)
    monkeypatch.setattr(serve_command, "find_decodings", lambda *_: (made.decodings, list(made.missing)))
    return made


def run(file: Path, *more: str) -> int:
    words = ["--heads", HEAD, "--rounds", "2", "--prompts", "1", "--concurrency", "1", "2", "--json", str(file)]
    return cli.main(["bench", "serve", *words, *more])


def test_result_names_machine_settings_and_rows(engines: Engines, tmp_path: Path, capsys) -> None:
    assert run(tmp_path / "r.json") == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["kind"] == "bench serve" and {"command", "commit", "hardware", "versions", "time"} <= result.keys()
    assert [(row["decoding"], row["temperature"], row["clients"], row["speedup"]) for row in result["rows"]] == [
        (name, T, c, speedup) for T in (1.0, 0.0) for c in (1, 2) for name, speedup in (("plain", None), ("btree", 2.0))
    ]
    assert result["not_run"] == [{"name": "suffix", "reason": "not installed", "is_required": False}]
    assert not any(Path(str(value)).is_absolute() for value in result["settings"].values())
    printed = capsys.readouterr().out
    for piece in ("not run: suffix", "16 (2.00x)", "tokens/step:", "interleaved:", "slower than 0.97x plain: none"):
        assert piece in printed
    assert printed.strip().endswith("identical greedy outputs: 8 of 8")


def test_greedy_answers_that_differ_fail_in_float32(engines: Engines, tmp_path: Path, capsys) -> None:
    engines.wrong["btree"] = 1
    assert run(tmp_path / "r.json") == 1
    assert "btree: 1 of 8 greedy answers differ" in capsys.readouterr().out
    assert run(tmp_path / "r.json", "--dtype", "bfloat16") == 0


@pytest.mark.parametrize(
    ("decodings", "missing", "code", "line"),
    [
        ([PLAIN, BTREE], [], 1, "failed: btree did not run"),
        ([PLAIN], [], 1, "failed: nothing was compared with plain vLLM"),
        ([PLAIN, NGRAM], [Missing("late", "needs a GPU", True)], 1, "failed: late did not run"),
        ([PLAIN, NGRAM], [], 0, "identical greedy outputs: 8 of 8"),
    ],
)
def test_heads_that_did_not_run_fail(engines: Engines, tmp_path, capsys, decodings, missing, code, line) -> None:
    engines.cannot_start.add("btree")
    engines.decodings, engines.missing = decodings, missing
    assert run(tmp_path / "r.json") == code
    assert capsys.readouterr().out.strip().endswith(line)


def test_plain_that_does_not_start_ends_the_run(engines: Engines, tmp_path: Path, capsys) -> None:
    engines.cannot_start.add("plain")
    assert run(tmp_path / "r.json") == 2 and "no such model" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


@pytest.mark.slow
def test_engines(tmp_path: Path) -> None:
    """Plain, btree, ngram and the target as its own draft model, served; a few tokens."""
    words = ["--heads", HEAD, "--concurrency", "1", "2", "--prompts", "2", "--max-tokens", "16", "--rounds", "1"]
    draft = {"method": "draft_model", "model": str(demo.path("target")), "num_speculative_tokens": 2}
    words += ["--peers", "ngram", "--peer", f"itself={json.dumps(draft)}", "--json", str(tmp_path / "r.json")]
    assert cli.main(["bench", "serve", *words]) == 0
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert len(rows) == 16 and all(row["tokens_per_second"] > 0 and row["ttft_ms"] > 0 for row in rows)
    for row in rows:
        assert (row["tokens_per_step"] > 1) == (row["decoding"] != "plain") or row["decoding"] == "ngram"
        assert row["identical"] is None or row["identical"][0] == row["identical"][1]


NAMES = [str(demo.path(name)) for name in (*demo.CIRCUITS, *demo.PTP)]


def test_heads_that_need_v2_are_missing_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((demo.path("btree") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "lora_layers": 2}))
    names = [*NAMES, str(tmp_path)]
    found, missing = find_heads(names, {}, None, on_gpu=False)
    assert [one.circuit for one in found] == ["ff", "cp", "hmm", "btree"] and len(missing) == 4
    assert all(one.is_ours and one.is_required and not one.is_plain for one in found)
    assert all("needs a GPU" in one.reason and one.is_required for one in missing)
    on_gpu, _ = find_heads(names, {}, 3, on_gpu=True)
    assert [one.speculative["method"] for one in on_gpu] == ["mtpc"] * 4 + ["ptp"] * 3 + ["mtpc"]
    assert {one.speculative["num_speculative_tokens"] for one in on_gpu} == {3}
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert len(find_heads(names, {}, None, on_gpu=False)[0]) == 8


def test_heads_have_different_names(tmp_path: Path) -> None:
    found, _ = find_heads(NAMES, {}, None, on_gpu=True)
    assert [one.name for one in found] == ["ff (Medusa-style)", "cp", "hmm", "btree", "o-ptp", "c-ptp", "late"]
    places = [tmp_path / place for place in ("a/head", "b/head", "b/mine")]
    for place in places:
        place.mkdir(parents=True)
        (place / "config.json").write_bytes((demo.path("ff") / "config.json").read_bytes())
    kind = " [ff (Medusa-style)]"
    for few, names in ((places[1:], ["head", "mine"]), (places, ["a/head", "b/head", "b/mine"])):
        found, _ = find_heads(list(map(str, few)), {}, None, False)
        assert [one.name for one in found] == [f"{name}{kind}" for name in names]
    with pytest.raises(UsageError, match="named twice"):
        find_heads([NAMES[0], NAMES[0]], {}, None, on_gpu=False)
    with pytest.raises(CheckpointError, match="no head"):
        find_heads(["/no/such/head"], {}, None, on_gpu=False)


def test_variants_are_rows_of_their_own() -> None:
    found, _ = find_heads(NAMES[3:4], {"K=3": {"num_speculative_tokens": 3}}, None, on_gpu=False)
    assert [one.name for one in found] == ["btree", "btree, K=3"]
    assert found[1].speculative == {"method": "mtpc", "model": NAMES[3], "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("names", "configured", "num_drafts", "layers", "wanted"),
    [
        (["ngram"], {}, None, 0, {"ngram": 5}),
        (["suffix"], {}, None, 0, {"suffix": None}),
        (["mtp"], {}, None, 2, {"MTP": 2}),
        (["mtp"], {}, 4, 2, {"MTP": 4}),
        ([], {"e": {"method": "eagle", "model": "m"}}, None, 0, {"e": 5}),
        ([], {"e": {"method": "eagle", "model": "m", "num_speculative_tokens": 7}}, 3, 0, {"e": 7}),
    ],
)
def test_peers_have_a_number_of_drafts(monkeypatch, names, configured, num_drafts, layers, wanted) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "installed")
    monkeypatch.setattr(decodings, "count_mtp_layers", lambda engine: layers)
    found, missing = find_peers(names, configured, num_drafts, {})
    assert {one.name: one.speculative.get("num_speculative_tokens") for one in found} == wanted and not missing
    assert [one.is_required for one in found] == [bool(configured)] and not found[0].is_ours


def test_peers_that_cannot_run_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(decodings, "count_mtp_layers", lambda engine: 0)
    found, missing = find_peers(["suffix", "mtp"], {}, None, {})
    assert not found and missing == [
        ("suffix", "arctic-inference is not installed", False),
        ("MTP", "the target bundles no MTP layers that vLLM serves", False),
    ]
    with pytest.raises(UsageError, match="type --heads FOLDER"):
        find_peers([], {"e": {"method": "mtpc", "model": "FOLDER"}}, None, {})

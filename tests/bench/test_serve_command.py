"""`vllm-mtpc bench serve`: ways of decoding, order of passes, rows, tables, result, exit code; engines are fakes."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.demo import demo_heads
from vllm_mtpc import cli
from vllm_mtpc.bench import serve_command
from vllm_mtpc.bench.serve_command import ORDERS, Comparison, Decoding, Pass, find_heads, make_rows, make_table
from vllm_mtpc.checkpoint import read_config
from vllm_mtpc.engine.served import Load, PassResult
from vllm_mtpc.engine.server import Acceptance
from vllm_mtpc.errors import EngineFailed, MtpcError
from vllm_mtpc.report import print_table

GREEDY = Load(1, 0.0, 4, 2)
SAMPLED = Load(1, 1.0, 4, 2)


def decoding(name: str, method: str | None = "mtpc") -> Decoding:
    return Decoding(name, None if method is None else {"method": method}, is_required=method == "mtpc")


PLAIN, NGRAM, BTREE = decoding("plain", None), decoding("ngram", "ngram"), decoding("btree")
MISSING = Decoding("suffix", {}, fault="not installed")


def measured(seconds: float, **more: Any) -> PassResult:
    """Eight tokens, three of them accepted drafts, in four steps of a request."""
    acceptance = Acceptance(3, 6, 3, (2, 1), steps=4)
    return PassResult(seconds, 8, **{"acceptance": acceptance, "ttft_ms": 20.0, "tpot_ms": 5.0, **more})


class Engines:
    """Fake engines, whose clients are names; `seconds(name, setting, pass)` is the duration of a pass, and may raise.

    wrong: greedy answers that differ from plain's, by engine. cannot_start: names of engines that fail.
    """

    def __init__(self, patch: pytest.MonkeyPatch, seconds: Callable[[str, Load, int], float]) -> None:
        self.seconds = seconds
        self.wrong: dict[str, int] = {}
        self.log: list[tuple[str, ...]] = []
        self.passes: Counter[str] = Counter()
        self.cannot_start: set[str] = set()
        patch.setattr(serve_command, "measure", self.measure)
        patch.setattr(serve_command, "complete_greedy", self.complete_greedy)

    @contextlib.contextmanager
    def start(self, decoding: Decoding) -> Iterator[Any]:
        if decoding.name in self.cannot_start:
            raise EngineFailed("ended with exit code 1; the end of its log:\nValueError: no such model\n  at the end")
        self.log.append(("start", decoding.name))
        yield decoding.name
        self.log.append(("end", decoding.name))

    def complete_greedy(self, name: str, prompts: list[Any], max_tokens: int) -> list[list[int]]:
        return [[number, 99 if number < self.wrong.get(name, 0) else 3] for number in range(len(prompts))]

    def measure(self, name: str, setting: Load, prompts: list[Any]) -> PassResult:
        self.log.append((name, setting.name, *prompts))
        self.passes[name] += 1
        return measured(self.seconds(name, setting, self.passes[name] - 1))


HEAD = str(demo_heads.path("btree"))


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve_command.add_arguments(parser)
    return parser.parse_args(["serve", *words])


def with_defaults(*words: str, on_gpu: bool = False) -> argparse.Namespace:
    args = parse(*words)
    serve_command.set_defaults(args, on_gpu)
    return args


def test_defaults_follow_the_heads_and_the_machine() -> None:
    heads = [str(demo_heads.path(name)) for name in ("ff", "cp", "btree")]
    args = with_defaults("--heads", *heads, "--concurrency", "1", "4", "16")
    assert (args.rounds, args.dtype, args.order) == (3, "float32", "interleaved")
    names = [one.name for one in serve_command.find_decodings(args, on_gpu=False)]
    assert names == ["plain", "ngram", "ff (Medusa-style)", "cp", "btree"]
    cells = serve_command.make_loads(args)
    assert [(one.clients, one.prompts) for one in cells[:3]] == [(1, 16), (4, 16), (16, 48)]
    on_gpu = with_defaults("--heads", HEAD, on_gpu=True)
    assert (on_gpu.order, on_gpu.dtype) == ("bracketed", "auto") and Path(on_gpu.target) == demo_heads.path("target")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to compare"),
        (["--heads", HEAD, "--rounds", "0"], "--rounds 0"),
        (["--heads", HEAD, "--concurrency", "0"], "--concurrency must be"),
        (["--heads", HEAD, "--temperature", "-1"], "--temperature 0 or more"),
        (["--heads", HEAD, "--peers", "--peer", 'btree={"method": "eagle"}'], "--peer btree: another row"),
        (["--heads", HEAD, HEAD], "named twice"),
        (["--heads", "/no/such/head", "--target", "x"], "no head"),
        *((words, "") for words in (["--variant", "K=3"], ["--engine", "["], ["--peer", "a=[1]"], ["--peer", "={}"])),
    ],
)
def test_invalid_options_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(MtpcError if message else SystemExit, match=message or None):
        serve_command.find_decodings(with_defaults(*words), on_gpu=False)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines(monkeypatch, lambda name, setting, turn: 0.5 if name == "btree" else 1.0)
    made.decodings = [PLAIN, BTREE, MISSING]

    def run_server(words: list[str], log: Path) -> contextlib.AbstractContextManager[str]:
        return made.start(next(one for one in made.decodings if one.name == log.stem))

    monkeypatch.setattr(serve_command, "run_server", run_server)
    monkeypatch.setattr(serve_command, "find_decodings", lambda *_: made.decodings)
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
    for piece in ("not run: suffix", "| 16.0 | 2.00x |", "tokens/step:", "interleaved:"):
        assert piece in printed
    assert printed.strip().endswith("identical greedy outputs: 8 of 8")


@pytest.mark.parametrize(
    ("decodings", "failing", "wrong", "dtype", "code", "line"),
    [
        ([PLAIN, BTREE], "btree", 0, "float32", 1, "failed: btree did not run"),
        ([PLAIN], "", 0, "float32", 1, "failed: nothing was compared with plain vLLM"),
        ([PLAIN, NGRAM, replace(BTREE, fault="needs a GPU")], "", 0, "float32", 1, "failed: btree did not run"),
        ([PLAIN, NGRAM, MISSING], "", 0, "float32", 0, "identical greedy outputs: 8 of 8"),
        ([PLAIN, BTREE], "", 1, "float32", 1, "identical greedy outputs: 7 of 8"),
        ([PLAIN, BTREE], "", 1, "bfloat16", 0, "identical greedy outputs: 7 of 8"),
    ],
)
def test_heads_that_did_not_run_or_differ_fail(
    engines: Engines, tmp_path, capsys, decodings, failing, wrong, dtype, code, line
) -> None:
    engines.cannot_start.add(failing)
    engines.decodings, engines.wrong["btree"] = decodings, wrong
    assert run(tmp_path / "r.json", "--dtype", dtype) == code
    printed = capsys.readouterr().out
    assert printed.strip().endswith(line) and ("btree: 1 of 8 greedy answers differ" in printed) == bool(wrong)


@pytest.mark.slow
def test_engines(tmp_path: Path) -> None:
    """Plain, btree, ngram and the target as its own draft model, served; a few tokens."""
    words = ["--heads", HEAD, "--concurrency", "1", "2", "--prompts", "2", "--max-tokens", "16", "--rounds", "1"]
    draft = {"method": "draft_model", "model": str(demo_heads.path("target")), "num_speculative_tokens": 2}
    words += ["--peers", "ngram", "--peer", f"itself={json.dumps(draft)}", "--json", str(tmp_path / "r.json")]
    assert cli.main(["bench", "serve", *words]) == 0
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert len(rows) == 16 and all(row["tokens_per_second"] > 0 and row["ttft_ms"] > 0 for row in rows)
    for row in rows:
        assert (row["tokens_per_step"] > 1) == (row["decoding"] != "plain") or row["decoding"] == "ngram"
        assert row["identical"] is None or row["identical"][0] == row["identical"][1]


NAMES = [str(demo_heads.path(name)) for name in (*demo_heads.CIRCUITS, *demo_heads.PTP)]


def test_heads_that_need_v2_are_missing_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(demo_heads.path("btree")).model_dump(exclude_none=True)
    lora = {"kind": "lora", "layers": 2, "rank": 4, "alpha": 4.0}
    (tmp_path / "config.json").write_text(json.dumps(config | {"trunk": lora}))
    names = [*NAMES, str(tmp_path)]
    found = find_heads(names, {}, on_gpu=False)
    runs = [Path(one.speculative["model"]).name for one in found if not one.fault]
    assert runs == ["ff", "cp", "hmm", "btree"] and len(found) == 8
    assert all(one.is_ours and one.is_required and not one.is_plain for one in found)
    assert all("needs a GPU" in one.fault for one in found[4:])
    on_gpu = find_heads(names, {}, on_gpu=True)
    assert not any(one.fault for one in on_gpu)
    assert [one.speculative["method"] for one in on_gpu] == ["mtpc"] * 4 + ["ptp"] * 3 + ["mtpc"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not any(one.fault for one in find_heads(names, {}, on_gpu=False))


def test_heads_variants_and_peers_have_different_names(tmp_path: Path) -> None:
    found = find_heads(NAMES, {}, on_gpu=True)
    assert [one.name for one in found] == ["ff (Medusa-style)", "cp", "hmm", "btree", "o-ptp", "c-ptp", "late"]
    places = [str(tmp_path / place) for place in ("a/head", "b/head", "b/mine")]
    for place in places:
        shutil.copytree(demo_heads.path("ff"), place)
    for few, names in ((places[1:], ["head", "mine"]), (places, ["a/head", "b/head", "b/mine"])):
        assert [one.name for one in find_heads(few, {}, False)] == [f"{name} [ff (Medusa-style)]" for name in names]
    words = ["--heads", HEAD, "--variant", 'K=3={"num_speculative_tokens": 3}', "--peer", 'e={"method": "eagle"}']
    found = serve_command.find_decodings(with_defaults(*words), on_gpu=False)
    assert [(one.name, one.is_required) for one in found] == [
        *(("plain", False), ("ngram", False), ("e", True), ("btree", True), ("btree, K=3", True)),
    ]
    assert found[2].speculative == {"method": "eagle"} and not found[2].is_ours
    assert found[4].speculative == {"method": "mtpc", "model": HEAD, "num_speculative_tokens": 3}


def compare_engines(engines: Engines, decodings=(PLAIN, BTREE), cells=(SAMPLED,), rounds=1, order="interleaved"):
    found = Comparison(cells, "abcd", rounds)
    found.run(decodings, engines.start, order)
    return found


def test_interleaved_rounds_reverse_the_order_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """btree takes half of plain's time, while the machine slows down threefold from pass to pass."""
    engines = Engines(monkeypatch, lambda name, _, turn: 3.0**turn * (0.5 if name == "btree" else 1.0))
    found = compare_engines(engines, cells=[SAMPLED, GREEDY], rounds=2)
    assert engines.log[:2] == [("start", "plain"), ("start", "btree")]  # all run before the first pass
    turns = [entry for entry in engines.log if entry[0] in ("plain", "btree")]
    assert [name for name, *_ in turns] == ["plain", "btree"] * 2 + ["btree", "plain"] * 2
    assert [cell for _, cell, *_ in turns] == ["T=1, c=1", "T=1, c=1", "T=0, c=1", "T=0, c=1"] * 2
    assert ["".join(prompts) for _, _, *prompts in turns] == ["ab"] * 4 + ["cd"] * 4  # other ones in the second round
    plain, btree, *_ = make_rows(found)
    assert btree["speedup_spread"] == [2.0, 2.0] and btree["speedup"] == 2.0 and plain["speedup"] is None
    assert plain["tokens_per_second_spread"] == [0.89, 8.0]


def test_sequential_engines_are_compared_with_plain_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain takes 1 s before and 2 s after: 8 and 4 tok/s, on average 6."""
    engines = Engines(monkeypatch, lambda name, _, turn: 0.5 if name == "btree" else 1.0 + turn)
    plain, btree = make_rows(compare_engines(engines, order="bracketed"))
    alone = [entry for entry in engines.log if entry[0] in ("start", "end")]
    assert alone == [(what, name) for name in ("plain", "btree", "plain") for what in ("start", "end")]
    assert btree["speedup"] == pytest.approx(16 / 6, abs=1e-4)
    assert plain["rounds"] == 2 and plain["tokens_per_second"] == 6.0


@pytest.mark.parametrize("order", ORDERS)
def test_engine_that_fails_is_reported_and_keeps_its_passes(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """btree does not start, ngram ends in its second pass."""

    def seconds(name: str, load: Load, turn: int) -> float:
        if (name, turn) == ("ngram", 1):
            raise EngineFailed("ended\nout of memory")
        return 1.0

    engines = Engines(monkeypatch, seconds)
    engines.cannot_start.add("btree")
    found = compare_engines(engines, [PLAIN, NGRAM, BTREE], order=order, rounds=3)
    assert {one.name: one.fault for one in found.missing} == {
        "btree": "its engine failed: ValueError: no such model",
        "ngram": "its engine failed: out of memory",
    }
    rounds = {row["decoding"]: row["rounds"] for row in make_rows(found)}
    assert rounds == {"plain": 3 if order == "interleaved" else 6, "ngram": 1}
    engines.cannot_start.add("plain")
    with pytest.raises(EngineFailed, match="no such model"):
        compare_engines(engines, order=order)


def passes(who, cell, *seconds: float, **more) -> list[Pass]:
    """A pass for each duration, compared with plain passes of one second."""
    return [Pass(who, cell, turn, measured(value, **more), 8.0) for turn, value in enumerate(seconds)]


def test_rows_are_medians_of_rounds_and_sums_of_counters(capsys: pytest.CaptureFixture) -> None:
    found = passes(BTREE, SAMPLED, 1.0, 0.5, 4.0) + passes(PLAIN, GREEDY, 1.0) + passes(BTREE, GREEDY, 1.0)
    # steps are those with drafts where others are not counted
    found += passes(NGRAM, replace(SAMPLED, clients=4), 1.0, acceptance=Acceptance(3, 6, 3, (2, 1)))
    greedy = {PLAIN: [[1, 2], [3, 4]], BTREE: [[1, 2], [3, 5]]}
    rows = make_rows(Comparison(passes=found, greedy=greedy))
    assert [(row["setting"], row["decoding"], row["identical"]) for row in rows] == [
        ("T=1, c=1", "btree", None),
        ("T=1, c=4", "ngram", None),
        ("T=0, c=1", "plain", None),
        ("T=0, c=1", "btree", (1, 2)),
    ]
    row = rows[0]
    assert (row["tokens_per_second"], row["speedup"], row["speedup_spread"]) == (8.0, 1.0, [0.25, 2.0])
    assert row["tokens_per_step"] == 1 + 9 / 12 and rows[1]["tokens_per_step"] == 2.0  # of 12 steps of a request
    assert row["acceptance_per_position"] == [round(6 / 9, 4), round(3 / 9, 4)]
    assert (row["ttft_ms"], row["tpot_ms"]) == (20.0, 5.0)
    print_table("title", *make_table(rows))
    _, title, _, _, line, first, *_ = capsys.readouterr().out.splitlines()
    assert title == "title" and set(line) == set("|- ")
    assert first == "| T=1, c=1 | btree | 8.0 | 1.00x | 0.25..2.00 | 1.75 | 0.67 0.33 | 20.0 | 5.00 | - |"

"""benchmarks/gpu/window.py with engines that do not exist."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import window
from vllm_mtpc import demo
from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.served import PassResult
from vllm_mtpc.errors import EngineFailed

SECONDS = {"plain": 2.0, "btree": 1.0, "cp": 1.0}  # of a pass of 100 tokens


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Any]]]:
    """A function that runs the window with some engines at fault, and returns its exit code and its result."""
    clock, file = SimpleNamespace(now=0.0), tmp_path / "window.json"

    def kept() -> dict[str, Any]:
        return json.loads(file.read_text())

    def run(
        *words: str, broken: str = "", dies: str = "", differs: str = "", idle: str = "", dtype: str = "float32"
    ) -> tuple[int, Any]:
        passes, running = [], []

        class Server:
            def __init__(self, words: list[str], variables: Any, program: Any, log: Path, port: int) -> None:
                given = words[words.index("--speculative-config") + 1] if "--speculative-config" in words else None
                self.name, self.log = Path(json.loads(given)["model"]).name if given else "plain", log

            def start(self, timeout_s: float) -> None:
                if self.name == broken:
                    self.log.write_text("\n".join(f"line {number}" for number in range(100)))
                    raise EngineFailed("vllm serve ended\nValueError: no such kernel")
                running.append(self.name)

            def stop(self) -> None:
                running.remove(self.name)

        def measure(server: Server, load: Any, texts: list[Any]) -> PassResult:
            assert len(kept()["rows"]) == len(passes) and len(texts) == load.prompts  # what is known is written
            clock.now += SECONDS[server.name]
            if server.name == dies:
                raise EngineFailed("RuntimeError: illegal memory access")
            passes.append(server.name)
            drafts = 0 if server.name in ("plain", idle) else 10
            return PassResult(SECONDS[server.name], 100, Acceptance(drafts, 7 * drafts, 3 * drafts, (), 20))

        fakes = {
            "VllmServer": Server,
            "measure": measure,
            "complete_greedy": lambda server, texts, tokens: [[int(server.name == differs)]] * (1 + len(texts)),
            "import_module": lambda name: None,
            "prompts": SimpleNamespace(load=lambda *_: [[1, 2, 3]]),
            "time": SimpleNamespace(monotonic=lambda: clock.now),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(window, name, fake)
        options = ["serve", "--peers", "--target", str(demo.path("target")), "--temperature", "0", "--prompts", "2"]
        options += ["--heads", str(demo.path("btree")), str(demo.path("cp")), "--concurrency", "1", "4"]
        options += ["--dtype", dtype]
        code = window.main([*words, *options, "--json", str(file), "--logs", str(tmp_path / "logs")])
        assert not running
        return code, kept()

    return run


def test_window_measures_every_engine_and_writes_each_result(run: Any) -> None:
    code, result = run()
    assert code == 0 and result["identical"] == {"btree": [4, 4], "cp": [4, 4]} and not result["not_run"]
    speedups = [("plain", None), ("btree", 2.0), ("cp", 2.0)]
    assert [(row["decoding"], row["speedup"]) for row in result["rows"]] == 2 * speedups  # at 1 and 4 clients


def test_window_reports_an_engine_that_fails_and_measures_the_others(run: Any, capsys: Any) -> None:
    code, result = run(broken="btree", dies="cp")
    printed = capsys.readouterr().out
    assert code == 1 and {row["decoding"] for row in result["rows"]} == {"plain"}
    assert {one["name"]: one["reason"].partition(": ")[2] for one in result["not_run"]} == {
        "btree": "vllm serve ended: ValueError: no such kernel",
        "cp": "RuntimeError: illegal memory access",
    }
    assert "FAILED btree: vllm serve ended: ValueError: no such kernel\nline 60\n" in printed and "line 99" in printed


@pytest.mark.parametrize(
    ("fault", "dtype", "code"),
    [
        ({"differs": "cp"}, "float32", 1),
        ({"differs": "cp"}, "bfloat16", 0),  # two tokens may be as likely as each other
        ({"idle": "cp"}, "float32", 1),
        ({"dies": "cp"}, "float32", 1),
        ({"broken": "plain"}, "float32", 1),
    ],
)
def test_window_that_compares_too_little_has_failed(run: Any, fault: dict[str, str], dtype: str, code: int) -> None:
    assert run(dtype=dtype, **fault)[0] == code


@pytest.mark.parametrize(("until", "passes", "code"), [("4.5", 4, 0), ("3.5", 3, 0), ("1", 1, 1), ("-1", 0, 1)])
def test_window_ends_in_time_with_what_is_measured(run: Any, capsys: Any, until: str, passes: int, code: int) -> None:
    found, result = run("--until", until)
    assert (found, len(result["rows"])) == (code, passes)
    assert "not measured: T=0, c=" in capsys.readouterr().out

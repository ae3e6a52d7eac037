"""scripts/demo.py with engines that do not run: what it compares, says and exits with."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import fakes
from vllm_mtpc.bench import serve
from vllm_mtpc.data import prompts
from vllm_mtpc.engine import passes

SCRIPT = Path(__file__).parents[2] / "scripts" / "demo.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """The script as a module; its engines are those of `fakes`, ``wrong`` of their answers not plain's."""
    spec = importlib.util.spec_from_file_location("demo_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.engines_made = fakes.Engines(lambda name, setting, turn: 0.5 if name == "btree" else 1.0)
    module.wrong_served = 0

    def launched(engine, texts, log, environment):
        return module.engines_made.start(fakes.decoding(log.stem))

    def measured(self, setting):
        return fakes.measured(setting, 1.0, module.wrong_served)

    monkeypatch.setattr(passes, "launched", launched)
    monkeypatch.setattr(serve, "server", lambda words, log: contextlib.nullcontext())
    monkeypatch.setattr(serve.Served, "measure", measured)
    monkeypatch.setattr(prompts, "held_out", lambda count: ["prompt"] * count)
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)  # this process keeps its own handlers
    return module


def test_plain_and_head_take_turns_and_only_the_same_is_compared(script, capsys):
    assert script.main([]) == 0
    said = capsys.readouterr().out
    assert "| btree | 16 (2.00x) | 16 (2.00x) | 16 (2.00x) | 16 (2.00x) |" in said  # 8 tokens in 0.5 s next to 1 s
    assert "BTree / FF" not in said  # the schedule gives FF no drafts at a batch: nothing to divide
    assert "late, T=1, c=1 (V2, interpreted): 1.75 tokens/step" in said and "late | " not in said
    assert "identical to plain vLLM's, offline and served: 12 of 12" in said
    assert [name for what, name, *_ in script.engines_made.log if what == "start"] == ["plain", "btree", "late"]


@pytest.mark.parametrize("where", ["btree", "late", "server"])
def test_a_greedy_answer_that_is_not_plains_is_an_error(script, where, capsys):
    if where == "server":
        script.wrong_served = 1
    else:
        script.engines_made.wrong[where] = 1
    assert script.main([]) == 1
    assert "of 12" in capsys.readouterr().out


def test_an_engine_that_fails_is_an_error(script, capsys):
    script.engines_made.cannot_start.add("btree")
    assert script.main([]) == 2
    assert "no such model" in capsys.readouterr().err


def test_silence_is_broken(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "SILENCE_S", 0.0)
    lines = script.Lines(1)
    deadline = time.monotonic() + 30  # a second on a machine that is not busy
    while "... engines are starting" not in (said := capsys.readouterr().err) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "... engines are starting" in said
    lines.now = ""
    lines.bar.close()


def test_same_counts_answers_as_far_as_they_go(script):
    plain = fakes.measured(fakes.GREEDY, 1.0)
    given = zip(plain.answers, (plain.outputs[0][:2], [5]), strict=True)
    shorter = replace(plain, answers=[replace(answer, tokens=tokens) for answer, tokens in given])
    assert script.same(shorter, plain) == (1, 2)

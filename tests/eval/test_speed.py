"""Default serving timed against plain vLLM: paired passes, a record in the head's folder, a verdict in one line."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fakes import measured
from vllm_mtpc.engine import provenance
from vllm_mtpc.eval import doctor, speed
from vllm_mtpc.eval.speed import read_served, verdict, worth


def rows(*speedups: float, temperature: float = 1.0) -> list[dict[str, Any]]:
    return [
        {"temperature": temperature, "clients": clients, "speedup": value}
        for clients, value in zip(speed.CLIENTS, speedups, strict=False)
    ]


@pytest.mark.parametrize("together", [True, False])
def test_passes_are_paired_by_round_and_end_in_time(
    together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain takes 1 s a pass and drafts half of it; the machine slows down by 3 from round to round."""
    log: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def launched(engine: dict[str, Any], prompts: Any, place: Path) -> Any:
        def measure(setting: Any) -> Any:
            log.append((place.stem, setting.clients))
            assert ("speculative_config" in engine) == (place.stem == "default")
            seconds = 3.0 ** (setting.first // setting.prompts)
            return measured(setting, seconds / (2 if place.stem == "default" else 1))

        yield SimpleNamespace(about={}, measure=measure)

    monkeypatch.setattr(speed, "launched", launched)
    given = ({"model": "m"}, {"method": "mtpc"}, [[1]], [(1.0, 1), (1.0, 4)], 99, together, tmp_path)
    found = speed.measure(*given)
    assert [(row["clients"], row["speedup"], row["speedups"]) for row in found] == [
        (1, 2.0, [2.0] * 3),
        (4, 2.0, [2.0] * 3),
    ]
    assert len(log) == 12 and [name for name, _ in log[:2]] == ["plain", "default" if together else "plain"]
    assert not together or [name for name, _ in log[4:6]] == ["default", "plain"]  # each second round backwards
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    assert [row["clients"] for row in speed.measure(*given)] == [1]  # one pair in any case


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (rows(1.4, 1.2, 1.1), "serve it here: measured at 1, 4, 16 clients"),
        (rows(1.4, 1.2, 0.9), "do not serve at more than 4 clients here"),
        (rows(1.4, 0.9, 0.8), "do not serve at more than 1 clients here"),
        (rows(1.4, 1.2, 1.1) + rows(0.9, 1.2, 1.1, temperature=0.0), "do not serve at 1 clients here"),
        (rows(0.9, 0.8, 0.7), "do not serve it here"),
        (rows(1.0, 0.98, 1.02), "no gain here: measured at 1, 4, 16 clients"),
    ],
)
def test_verdict_is_that_of_the_slowest_temperature(found: list[dict[str, Any]], words: str) -> None:
    assert verdict(found) == words


def test_slower_head_is_not_healthy() -> None:
    for found, healthy in ((rows(1.4, 1.2, 1.1), True), (rows(1.4, 1.2, 0.9), False), ([], True)):
        found_verdict = doctor._verdict([], None, found)
        assert found_verdict.startswith("healthy") == healthy and ("more than 4 clients" in found_verdict) == (
            not healthy
        )
        assert doctor.Diagnosis([], None, found_verdict, [], found, "").healthy == healthy


def test_summary_names_the_machine_of_the_measurement(tmp_path: Path) -> None:
    expected = {"T=1": 2.31, "T=0": 3.5}
    start, hint = "expected with all drafts: 2.31 at T=1, 3.50 at T=0 tokens/step; ", f"vllm-mtpc doctor {tmp_path}"
    assert worth(expected, tmp_path).startswith(start) and worth(expected, tmp_path).endswith(
        f"not measured on this machine, type: {hint}"
    )
    record = {"hardware": provenance.hardware(), "rows": rows(1.4, 1.2, 0.9)}
    (tmp_path / "served.json").write_text(json.dumps(record))
    said = "T=1: 1.40x at 1, 1.20x at 4, 0.90x at 16 clients; "
    here = f"served by default on this machine compared with plain vLLM; {said}do not serve at more than 4 clients here"
    assert worth(expected, tmp_path) == start + here
    (tmp_path / "served.json").write_text(json.dumps({**record, "hardware": {"cpu": "other"}}))
    assert "on another machine" in worth(expected, tmp_path) and worth(expected, tmp_path).endswith(hint)
    assert "do not serve" not in worth(expected, tmp_path)
    for odd in ("[]", "{}", '{"rows": []}', '{"rows": [{"temperature": 1, "clients": 1, "speedup": NaN}]}', "{"):
        (tmp_path / "served.json").write_text(odd)
        assert read_served(tmp_path) is None and "not measured on this machine" in worth(expected, tmp_path)

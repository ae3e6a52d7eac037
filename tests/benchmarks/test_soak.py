"""What the soak holds against a server, and a short one."""

from __future__ import annotations

import http.client
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import soak
from benchmarks.soak import Clients, Tally
from vllm_mtpc.engine.passes import Answer
from vllm_mtpc.errors import EngineFailed

ASKED = [[1, 2], [3]]
REFERENCE = [list(range(soak.LONGEST)), list(range(100, 100 + soak.LONGEST))]


class FakeServer:
    """Answers as it should, but for what `wrong` changes in an answer."""

    port, process = 1, 1

    def __init__(self, wrong: dict[str, Any] | None = None) -> None:
        self.wrong = wrong or {}

    def complete(self, body: dict[str, Any]) -> Answer:
        if "error" in self.wrong:
            raise self.wrong["error"]
        tokens = REFERENCE[ASKED.index(body["prompt"])][: body["max_tokens"]] * body.get("n", 1)
        return Answer("", self.wrong.get("tokens", lambda said: said)(tokens), 0.0, 0.0)

    def post(self, path: str, body: bytes) -> tuple[int, str]:
        return self.wrong.get("status", 400), json.dumps({"error": {"message": "no"}})


def faults(wrong: dict[str, Any] | None, kind: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(soak, "KINDS", {kind: 1})
    tally, chance = Tally(), random.Random(0)
    clients = Clients(FakeServer(wrong), "m", ASKED, REFERENCE)
    for _ in range(20):
        clients.act(chance, tally)
    assert tally.answered == {kind: 20}
    return tally.faults


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("greedy", {"tokens": lambda said: [*said[:-1], 255]}),
        ("logprobs", {"tokens": lambda said: [*said[:-1], 255]}),
        ("sampled", {"tokens": lambda said: said[:-1]}),
        ("two answers", {"tokens": lambda said: said[: len(said) // 2]}),
        ("greedy", {"error": EngineFailed("the stream ended with an error")}),
        ("sampled", {"error": ConnectionResetError("gone")}),
        ("greedy", {"error": http.client.IncompleteRead(b"")}),
        ("refused", {"status": 200}),
        ("refused", {"status": 500}),
    ],
)
def test_faults_are_found(kind: str, wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults(None, kind, monkeypatch) == []
    assert len(faults(wrong, kind, monkeypatch)) == 20


def test_growing_memory_is_found() -> None:
    flat = Tally(memory=[(t, 1000 << 20) for t in range(40)])
    assert flat.growth() == 1.0 < soak.GROWTH
    leaking = Tally(memory=[(t, (1000 + 2 * t) << 20) for t in range(40)])  # 2 MiB a look
    assert leaking.growth() > soak.GROWTH
    assert Tally().growth() is None


@pytest.mark.parametrize(
    ("metrics", "fault"),
    [
        ("vllm:num_preemptions_total 3", None),
        ("vllm:num_preemptions_total 3\nvllm:num_requests_running 2", "2 requests are left"),
        ("vllm:num_preemptions_total 3\nvllm:kv_cache_usage_perc 0.25", "25.00 % of the KV cache"),
        ("vllm:num_preemptions_total 0", "nothing was preempted"),
    ],
)
def test_what_is_left_behind(metrics: str, fault: str | None) -> None:
    pages = {"/health": (200, ""), "/metrics": (200, metrics + "\n")}
    found = list(soak.aftermath(SimpleNamespace(get=pages.get), patience_s=0))
    assert found == [] if fault is None else len(found) == 1 and fault in found[0]
    pages["/health"] = (503, "")
    assert list(soak.aftermath(SimpleNamespace(get=pages.get))) == ["the server is not healthy"]


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path) -> None:
    report = tmp_path / "soak.json"
    assert soak.main(["--minutes", "0.5", "--clients", "16", "--json", str(report)]) == 0
    told = json.loads(report.read_text())
    assert told["faults"] == [] and set(told["requests"]) == set(soak.KINDS)
    assert told["greedy_equal_to_plain"] > 20 and told["preemptions"] > 0 and told["tokens_per_step"] > 1.5

"""The soak test of a server finds wrong answers, leaks and stuck requests; a short soak finds none."""

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
from vllm_mtpc import demo
from vllm_mtpc.errors import EngineFailed

ASKED = [[1, 2], [3]]
REFERENCE = [list(range(soak.LONGEST)), list(range(100, 100 + soak.LONGEST))]


class FakeServer:
    """Answers as it should, but for what `wrong` changes in an answer."""

    port, process = 1, 1

    def __init__(self, wrong: dict[str, Any] | None = None) -> None:
        self.wrong = wrong or {}

    def complete(self, body: dict[str, Any]) -> list[list[int]]:
        if "error" in self.wrong:
            raise self.wrong["error"]
        tokens = REFERENCE[ASKED.index(body["prompt"])][: body["max_tokens"]] * body.get("n", 1)
        return [self.wrong.get("tokens", lambda tokens: tokens)(tokens)]

    def post(self, path: str, body: bytes) -> tuple[int, str]:
        return self.wrong.get("status", 400), json.dumps({"error": {"message": "no"}})


def faults(wrong: dict[str, Any] | None, kind: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(soak, "KINDS", {kind: 1})
    tally, chance = Tally(), random.Random(0)
    clients = Clients(FakeServer(wrong), "m", ASKED, REFERENCE, drafts=3)
    for _ in range(20):
        clients.act(chance, tally)
    assert tally.answered == {kind: 20}
    return tally.faults


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("greedy", {"tokens": lambda tokens: [*tokens[:-1], 255]}),
        ("logprobs", {"tokens": lambda tokens: [*tokens[:-1], 255]}),
        ("sampled", {"tokens": lambda tokens: tokens[:-1]}),
        ("two answers", {"tokens": lambda tokens: tokens[: len(tokens) // 2]}),
        ("greedy", {"error": EngineFailed("the stream ended with an error")}),
        ("sampled", {"error": ConnectionResetError("gone")}),
        ("greedy", {"error": http.client.IncompleteRead(b"")}),
        ("refused", {"status": 200}),
        ("refused", {"status": 500}),
    ],
)
def test_wrong_answer_is_found(kind: str, wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults(None, kind, monkeypatch) == []
    assert len(faults(wrong, kind, monkeypatch)) == 20


def test_heads_are_swapped_in_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every SWAP_S, while clients ask; what is not answered with 200 is a fault."""
    monkeypatch.setattr(soak, "SWAP_S", 0.1)
    monkeypatch.setattr(soak, "resident_bytes", lambda process: {})
    monkeypatch.setattr(soak, "KINDS", {"greedy": 1})
    posted: list[tuple[str, dict[str, Any]]] = []
    server = FakeServer({"status": 200})
    monkeypatch.setattr(server, "post", lambda path, body: (posted.append((path, json.loads(body))), (200, "{}"))[1])
    heads, tally = [str(tmp_path / "one"), str(tmp_path / "two")], Tally()
    soak.soak(Clients(server, "m", ASKED, REFERENCE, 3), 2, 0.6, 0, tally, heads)
    assert tally.faults == [] and tally.answered["swap"] == len(posted) >= 2
    assert posted[:2] == [("/mtpc/head", {"path": head}) for head in heads]
    refusing = Clients(FakeServer({"status": 400}), "m", ASKED, REFERENCE, 3)
    refusing.swap(heads[0], tally)
    assert len(tally.faults) == 1 and "status 400" in tally.faults[0]


def test_growing_memory_is_found() -> None:
    flat = Tally(memory=[(t, {"server": 300 << 20, "core": 700 << 20}) for t in range(40)])
    assert flat.growth() == 1.0 < soak.GROWTH
    leaking = Tally(memory=[(t, {"server": 300 << 20, "core": (700 + t) << 20}) for t in range(40)])  # 1 MiB a look
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
def test_stuck_request_or_block_is_found(metrics: str, fault: str | None) -> None:
    pages = {"/health": (200, ""), "/metrics": (200, metrics + "\n")}
    found = list(soak.aftermath(SimpleNamespace(get=pages.get), patience_s=0))
    assert found == [] if fault is None else len(found) == 1 and fault in found[0]
    pages["/health"] = (503, "")
    assert list(soak.aftermath(SimpleNamespace(get=pages.get))) == ["the server is not healthy"]


@pytest.mark.slow
@pytest.mark.parametrize(("runner", "head"), [("v1", "btree"), ("v2", "btree"), ("v2", "o-ptp")])
def test_short_soak_finds_no_fault(runner: str, head: str, tmp_path: Path) -> None:
    report = tmp_path / "soak.json"
    words = ["--runner", runner, "--head", str(demo.path(head)), "--clients", "16", "--json", str(report)]
    assert soak.main([*words, "--minutes", "0.5" if runner == "v1" else "1.5"]) == 0
    found = json.loads(report.read_text())
    assert found["faults"] == [] and set(found["requests"]) == set(soak.KINDS)
    assert found["greedy_equal_to_plain"] > 20 and found["preemptions"] > 0 and found["tokens_per_step"] > 1.5

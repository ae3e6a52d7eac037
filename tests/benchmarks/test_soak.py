"""The soak test of a server finds wrong answers, leaks and stuck requests; a short soak finds none."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
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

    def send(self, path: str, body: Any, timeout_s: float) -> httpx.Response:
        return httpx.Response(self.wrong.get("status", 400), json={"error": {"message": "no"}})


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("greedy", {"tokens": lambda tokens: [*tokens[:-1], 255]}),
        ("sampled", {"tokens": lambda tokens: tokens[:-1]}),
        ("two answers", {"tokens": lambda tokens: tokens[: len(tokens) // 2]}),
        ("greedy", {"error": EngineFailed("the stream ended with an error")}),
        ("sampled", {"error": ConnectionResetError("gone")}),
        ("refused", {"status": 200}),
    ],
)
def test_wrong_answer_is_found(kind: str, wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "KINDS", {kind: 1})
    for server, count in ((FakeServer(), 0), (FakeServer(wrong), 20)):
        tally, chance, clients = Tally(), random.Random(0), Clients(server, "m", ASKED, REFERENCE, drafts=3)
        for _ in range(20):
            clients.act(chance, tally)
        assert tally.answered == {kind: 20} and len(tally.faults) == count


def test_growing_memory_is_found() -> None:
    """Of the second process, by nothing and by 1 MiB a look."""
    for leak in (0, 1):
        tally = Tally(memory=[(t, {"server": 300 << 20, "core": (700 + leak * t) << 20}) for t in range(40)])
        assert (tally.growth() > soak.GROWTH) == bool(leak)
    assert Tally().growth() is None


@pytest.mark.parametrize(
    ("metrics", "fault"),
    [
        ("vllm:num_preemptions_total 3", None),
        ("vllm:num_preemptions_total 3\nvllm:num_requests_running 2", "2 requests are left"),
        ("vllm:num_preemptions_total 3\nvllm:kv_cache_usage_perc 0.25", "25.00 % of the KV cache"),
        ("vllm:num_preemptions_total 0", "nothing was preempted"),
        ("", "the server is not healthy"),
    ],
)
def test_stuck_request_or_block_is_found(metrics: str, fault: str | None) -> None:
    pages = {"/health": httpx.Response(200 if metrics else 503), "/metrics": httpx.Response(200, text=metrics + "\n")}
    found = list(soak.aftermath(SimpleNamespace(send=lambda path, timeout_s: pages[path]), patience_s=0))
    assert found == [] if fault is None else len(found) == 1 and fault in found[0]


@pytest.mark.slow
@pytest.mark.parametrize(("runner", "head"), [("v1", "btree"), ("v2", "btree"), ("v2", "o-ptp")])
def test_short_soak_finds_no_fault(runner: str, head: str, tmp_path: Path) -> None:
    report = tmp_path / "soak.json"
    words = ["--runner", runner, "--head", str(demo.path(head)), "--clients", "16", "--json", str(report)]
    assert soak.main([*words, "--minutes", "0.5" if runner == "v1" else "1.5"]) == 0
    found = json.loads(report.read_text())
    assert found["faults"] == [] and set(found["requests"]) == set(soak.KINDS)
    assert found["greedy_equal_to_plain"] > 20 and found["preemptions"] > 0 and found["tokens_per_step"] > 1.5

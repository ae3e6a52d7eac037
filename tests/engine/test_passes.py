"""Passes of `vllm bench serve` as `bench serve` measures them."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_mtpc.engine import passes
from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.passes import Engine, Setting
from vllm_mtpc.errors import EngineFailed

SETTING = Setting(clients=2, temperature=0.0, max_tokens=4, prompts=3, first=1)
RESULT = {
    "completed": 3,
    "duration": 2.0,
    "total_output_tokens": 12,
    "ttfts": [0.1, 0.2, 0.3],
    "latencies": [0.4, 0.8, 0.9],
    "output_lens": [4, 4, 4],
}


class FakeClient:
    """A server whose counters grow by three accepted drafts in four steps from one reading to the next."""

    process, url = None, "http://localhost:1"

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.counted = Acceptance()

    def model(self) -> str:
        return "m"

    def complete(self, body: dict[str, Any]) -> list[list[int]]:
        self.bodies.append(body)
        return [[len(prompt)] for prompt in body["prompt"]]

    def acceptance(self) -> Acceptance:
        self.counted += Acceptance(4, 8, 3, (3,), steps=4)
        return self.counted


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    found: list[list[str]] = []

    def run_bench_serve(words: list[str]) -> dict[str, Any]:
        found.append([*words, open(words[words.index("--dataset-path") + 1]).read()])  # noqa: SIM115
        return RESULT

    monkeypatch.setattr(passes, "_run_bench_serve", run_bench_serve)
    return found


def test_measure_sends_the_prompts_of_the_setting(sent: list[list[str]]) -> None:
    client = FakeClient()
    found = Engine(client, ["a", [7, 8]]).measure(SETTING)
    (words,) = sent
    assert words[-1] == '{"prompt": [7, 8]}\n{"prompt": "a"}\n{"prompt": [7, 8]}\n'  # from `first` on, repeated
    assert words[words.index("--max-concurrency") + 1] == "2" and words[words.index("--temperature") + 1] == "0.0"
    assert client.bodies[0]["prompt"] == [[7, 8], "a"]  # the warm-up, of so many clients
    assert (found.tokens_per_second, found.tokens_per_step) == (6.0, 1.75)
    assert (found.ttft_ms, found.tpot_ms) == (200.0, 200.0)


def test_unanswered_requests_fail(sent: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RESULT, "completed", 2)
    with pytest.raises(EngineFailed, match="answered 2 of 3 requests"):
        Engine(FakeClient(), ["a"]).measure(SETTING)


def test_greedy_check_sends_prompts_alone_and_together() -> None:
    client = FakeClient()
    assert Engine(client, ["a", "bc"]).complete_greedy(SETTING, 3) == [[1], [1], [2], [1]]
    assert [(body["prompt"], body["temperature"]) for body in client.bodies] == [(["a"], 0.0), (["a", "bc", "a"], 0.0)]

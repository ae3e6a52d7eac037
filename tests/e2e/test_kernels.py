"""The draft kernel inside vLLM's Model Runner V2: with the same noise it drafts what the definition drafts.

The definition picks through vLLM's own `gumbel_sample`, the kernel through the jit function inside it. What greedy
output and the distribution of sampled output are with the kernel is tested in test_greedy.py and test_distribution.py,
which run V2 too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.engine import Call, Engine, Reply, run
from vllm_mtpc import demo

TEXT = b"def read(path):\n    with open(path) as file:\n        return file.read()\n"
PATHS = ("kernel", "blocks", "definition")
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 16}
CALL = Call(
    [list(TEXT[:length]) for length in (9, 30, 47)],
    [GREEDY, {**GREEDY, "temperature": 0.8, "seed": 3}, {**GREEDY, "temperature": 1.3, "seed": 4}],
)


def engine(speculative_config: dict[str, Any] | None, injected: str | None = None) -> Engine:
    """Prompts are read in several steps: rows of unfinished prompts are drafted for as well."""
    arguments = {"speculative_config": speculative_config, "max_model_len": 160, "max_num_batched_tokens": 32}
    return Engine(str(demo.path("target")), [CALL], arguments, injected)


def replies(circuits: tuple[str, ...], paths: tuple[str, ...], runner: str = "v2", **options: Any) -> dict[str, Reply]:
    """By "CIRCUIT by PATH", and "plain"."""
    engines = {"plain": engine(None)}
    for circuit in circuits:
        for path in paths:
            config = {"method": "mtpc", "model": str(demo.path(circuit)), **options}
            engines[f"{circuit} by {path}"] = engine(config, f"drafts by {path}")
    outputs = run(engines, runner, async_scheduling=True)
    return {name: reply[0] for name, reply in outputs.items()}


def check(outputs: dict[str, Reply], circuit: str, paths: tuple[str, ...]) -> None:
    wanted = outputs[f"{circuit} by definition"]
    for path in paths:
        got = outputs[f"{circuit} by {path}"]
        assert got.tokens[0] == outputs["plain"].tokens[0], path
        assert len(got.recorded) == len(wanted.recorded), path
        for (tokens, confidences), (same_tokens, same_confidences) in zip(got.recorded, wanted.recorded, strict=True):
            assert torch.equal(tokens, same_tokens), path
            # float32 sums in another order
            torch.testing.assert_close(confidences, same_confidences, atol=1e-5, rtol=0)
            assert ((confidences > 0) & (confidences <= 1 + 1e-5)).all()
        assert got.tokens == wanted.tokens, path
        for what in ("accepted_tokens", "draft_tokens", "drafts"):
            assert got.metrics[f"vllm:spec_decode_num_{what}"] == wanted.metrics[f"vllm:spec_decode_num_{what}"], path
    accepted, drafted = (wanted.metrics[f"vllm:spec_decode_num_{what}_tokens"] for what in ("accepted", "draft"))
    assert 0.05 < accepted / drafted < 0.95  # acceptances and rejections alike


@pytest.mark.parametrize("runner", ["v2", pytest.param("v2 on triton", marks=pytest.mark.slow)])
def test_kernel_drafts_equal_the_definition(runner: str) -> None:
    paths = ("kernel", "definition")
    check(replies(("btree",), paths, runner), "btree", paths)


@pytest.mark.slow
@pytest.mark.parametrize("circuit", ["ff", "cp", "hmm", "btree"])
def test_drafts_of_every_circuit_and_path_equal_the_definition(circuit: str) -> None:
    check(replies((circuit,), PATHS), circuit, PATHS)


@pytest.mark.slow
def test_greedy_drafts_equal_the_definition() -> None:
    """Without a distribution of the drafts: every draft is the argmax, at any temperature."""
    check(replies(("btree",), PATHS, draft_sample_method="greedy"), "btree", PATHS)


@pytest.mark.slow
def test_number_of_drafts_follows_the_schedule_of_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests end one after the other; the head is not run while none is to be drafted."""
    ends = [{**GREEDY, "max_tokens": length} for length in (40, 24, 8)]  # a seed would ask for all drafts always
    monkeypatch.setitem(globals(), "CALL", Call(CALL.prompts, ends))
    paths = ("kernel", "definition")
    outputs = replies(("btree",), paths, num_speculative_tokens_per_batch_size=[(1, 1, 7), (2, 2, 3), (3, 8, 0)])
    check(outputs, "btree", paths)
    shapes = {tuple(tokens.shape) for tokens, _ in outputs["btree by kernel"].recorded}
    assert {(1, 7), (2, 3)} <= shapes and all(len(shape) == 2 and shape[0] < 3 for shape in shapes)

"""The draft kernel inside vLLM's Model Runner V2: with the same noise it drafts what the definition drafts.

The definition picks through vLLM's own `gumbel_sample`, the kernel through the jit function inside it. What greedy
output and the distribution of sampled output are with the kernel is tested in test_greedy.py and test_distribution.py,
which run V2 too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.engine import DEMO, Call, Reply, build, run

TEXT = b"def read(path):\n    with open(path) as file:\n        return file.read()\n"
PROMPTS = [list(TEXT[:length]) for length in (9, 30, 47)]
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 16}
CALL = Call(PROMPTS, [GREEDY, GREEDY | {"temperature": 0.8, "seed": 3}, GREEDY | {"temperature": 1.3, "seed": 4}])
SLOW = pytest.mark.slow


def check(circuit: str, runner: str, paths: tuple[str, ...], call: Call = CALL, **options: Any) -> dict[str, Reply]:
    """Compare the drafts of `paths` with the definition's; returns replies by path.

    Prompts are read in several steps: rows of unfinished prompts are drafted for as well.
    """
    arguments = {"max_model_len": 160, "max_num_batched_tokens": 32}
    engines = {"plain": build(DEMO, None, [call], **arguments)}
    for path in ("definition", *paths):
        engines[path] = build(DEMO, circuit, [call], f"drafts by {path}", options, **arguments)
    replies = {name: reply for name, (reply,) in run(engines, runner).items()}
    wanted = replies["definition"]
    for path in paths:
        got = replies[path]
        assert got.tokens[0] == replies["plain"].tokens[0], path
        for (tokens, confidences), (same_tokens, same_confidences) in zip(got.recorded, wanted.recorded, strict=True):
            assert torch.equal(tokens, same_tokens), path
            # float32 sums in another order
            torch.testing.assert_close(confidences, same_confidences, atol=1e-5, rtol=0)
            assert ((confidences > 0) & (confidences <= 1 + 1e-5)).all()
        assert got.tokens == wanted.tokens, path
        assert (got.accepted, got.drafted, got.steps) == (wanted.accepted, wanted.drafted, wanted.steps), path
    assert 0.05 < wanted.accepted / wanted.drafted < 0.95  # acceptances and rejections alike
    return replies


@pytest.mark.parametrize(
    ("circuit", "runner", "paths", "options"),
    [
        ("btree", "v2", ("kernel",), {}),
        pytest.param("btree", "v2 on triton", ("kernel",), {}, marks=SLOW),
        *(pytest.param(name, "v2", ("kernel", "blocks"), {}, marks=SLOW) for name in ("ff", "cp", "hmm", "btree")),
        # without a distribution of the drafts: every draft is the argmax, at any temperature
        pytest.param("btree", "v2", ("kernel", "blocks"), {"draft_sample_method": "greedy"}, marks=SLOW, id="greedy"),
    ],
)
def test_kernel_drafts_equal_the_definition(
    circuit: str, runner: str, paths: tuple[str, ...], options: dict[str, Any]
) -> None:
    check(circuit, runner, paths, **options)


@pytest.mark.slow
def test_number_of_drafts_follows_the_schedule_of_batch_sizes() -> None:
    """Requests end one after the other; the head is not run while none is to be drafted."""
    ends = [{**GREEDY, "max_tokens": length} for length in (40, 24, 8)]  # a seed would ask for all drafts always
    schedule = [(1, 1, 7), (2, 2, 3), (3, 8, 0)]
    call = Call(PROMPTS, ends)
    replies = check("btree", "v2", ("kernel",), call, num_speculative_tokens_per_batch_size=schedule)
    shapes = {tuple(tokens.shape) for tokens, _ in replies["kernel"].recorded}
    assert {(1, 7), (2, 3)} <= shapes and all(len(shape) == 2 and shape[0] < 3 for shape in shapes)

"""What serving a head takes of memory: the figures known before start, against what is allocated at toy size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from tests.support import forks
from tests.support.speculators import CPU, Setting, batch, drafted, made_heads, speculator
from vllm_mtpc.heads.memory import LiveBytes, by_batch, draft_memory

SCHEDULE = [(1, 2, 4), (3, 12, 1), (13, 13, 0)]
BATCH, VOCAB, WINDOW = 24, 96, 5
HEADS: dict[str, dict[str, Any]] = {
    "linear": {},
    "linear, tokens": {"token_rank": 4},
    "mlp": {"head": "mlp"},
    "shared": {"head": "shared"},
    "shared, cp": {"head": "shared", "circuit": "cp"},
    "low rank": {"head": "shared", "component_rank": 4},
    "many components": {"head": "shared", "num_components": 65},  # drafted by the definition
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made_heads(tmp_path_factory.mktemp("memory"), VOCAB, HEADS)


def allocated(settings: dict[str, Setting]) -> dict[str, Any]:
    """In a fork, by case: bytes there are, bytes that were said, rows of every product of the profile run."""
    return {name: _allocated(setting) for name, setting in settings.items()}


def _allocated(setting: Setting) -> dict[str, Any]:
    with speculator(setting) as made:
        head, drafter = made.model, made.drafter
        named = [*head.named_parameters(), *head.named_buffers()]
        own = [value for name, value in vars(made).items() if name not in ("input_buffers", "draft_is_prefilling")]
        tensors = [part for value in (*own, vars(drafter) if drafter else ()) for part in leaves(value)]
        said = draft_memory(
            made.speculative_config.head, made.drafts_by_batch, made.num_speculative_steps, made.dtype, 1, "cpu"
        )
        goes: list[tuple[int, int]] = []
        draft_params = head.draft_params

        def noting(hidden: Any, first: Any, num_drafts: int) -> Any:
            goes.append((len(hidden), num_drafts))
            return draft_params(hidden, first, num_drafts)

        head.draft_params = noting
        if drafter is not None:  # the interpreter moves numbers that a kernel does not
            made.drafter = lambda evidence, leaf, *params, **given: (
                None if drafter.one_launch else drafter.buffers(*leaf.shape[:2], leaf.device)
            )
        arguments = batch(made, BATCH)
        with LiveBytes() as live:
            made.propose(**arguments, dummy_run=True, is_profile=True)
        return {
            # "kept" names what there is once more, for vLLM's sleep
            "weights": sum(part.nbytes for name, part in named if not name.startswith("kept")),
            "buffers": sum(part.nbytes for part in tensors),
            "activation": live.peak,
            "said": said,
            "goes": goes,
        }


def leaves(value: Any) -> list[torch.Tensor]:
    from torch.utils._pytree import tree_leaves

    return [
        part for part in tree_leaves(value) if isinstance(part, torch.Tensor) and not isinstance(value, torch.nn.Module)
    ]


CASES = {
    "off": ("off", 1 << 30),
    "scheduled": (SCHEDULE, 1 << 30),
    "in goes": ("off", 1 << 16),
    "one row is too large": (SCHEDULE, 1),
}


@pytest.fixture(scope="module")
def found(places: dict[str, Path]) -> dict[str, Any]:
    settings = {
        f"{name}, {case}": Setting(place, BATCH, schedule, logits_bytes=size)
        for name, place in places.items()
        for case, (schedule, size) in CASES.items()
    }
    return forks.call("v2", "tests.proposers.test_draft_memory:allocated", settings)


def test_memory_is_what_was_said(found: dict[str, Any]) -> None:
    for case, got in found.items():
        assert (got["weights"], got["buffers"]) == got["said"][:2], case
        over = got["activation"] - got["said"].activation
        # the definition looks up the temperature of each row, a float32; the kernel does so in its launch
        assert over == 0 or ("many components" in case and over == 4 * got["goes"][0][0]), case


def test_the_profile_run_drafts_once_and_no_more_than_is_allowed(found: dict[str, Any]) -> None:
    """Without a number of drafts, as vLLM's dummy runs are, and of as many requests as there may be."""
    for name in HEADS:
        of_case = {case: found[f"{name}, {case}"]["goes"] for case in CASES}
        assert of_case["off"] == [(BATCH, 4)] and of_case["one row is too large"] == [(1, 4)]
        assert of_case["scheduled"] == [(12, 1)]  # 12 requests of two positions are more than 2 of five
        ((rows, drafts),) = of_case["in goes"]
        r = HEADS[name].get("num_components", 3)
        base = HEADS[name].get("component_rank") is not None
        # logits of a row, those of x_1 once more, and what components have in common
        one = 4 * (r * VOCAB * 2 + r * VOCAB * drafts + base * VOCAB * (1 + drafts))
        assert drafts == 4 and rows == max(1, (1 << 16) // one) < BATCH


def in_goes(settings: list[Setting], drafts: int) -> list[Any]:
    """In a fork: what each setting drafts for a full batch."""
    said = []
    for setting in settings:
        with speculator(setting) as made:
            said.append(drafted(made, BATCH, drafts))
    return said


@pytest.mark.parametrize("name", ["shared", "many components"])
def test_a_batch_drafted_in_several_goes_is_the_same(places: dict[str, Path], name: str) -> None:
    settings = [Setting(places[name], BATCH, logits_bytes=size) for size in (1 << 30, 1 << 16)]
    (tokens, *numbers), (same_tokens, *same_numbers) = forks.call(
        "v2", "tests.proposers.test_draft_memory:in_goes", settings, 4
    )
    assert torch.equal(tokens, same_tokens)
    for ours, theirs in zip(numbers, same_numbers, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)  # products of other sizes, float32


@pytest.mark.parametrize("ranges", [SCHEDULE, [(1, 8, 7), (16, 20, 3)], [(1, 1, 5)], [(1, 50, 4), (51, 60, 0)]])
@pytest.mark.parametrize("largest", [1, 2, 15, 55])
def test_drafts_by_batch_are_vllms(ranges: list[tuple[int, int, int]], largest: int) -> None:
    assert by_batch(ranges, largest, 7)[1:] == build_dynamic_sd_schedule_lookup(ranges, largest, 7)[1:]
    assert by_batch(None, largest, 7)[1:] == [7] * largest


def test_live_bytes_counts_what_is_alive_at_once() -> None:
    with LiveBytes() as live:
        a = torch.ones(100, device=CPU)  # 400 bytes
        b = a.view(10, 10)[2:]  # none
        c = b + 1  # 320
        del c
        c = a.exp()  # 400, in the place of c
        del a, b
        c.mul_(2)
    assert live.peak == 800 and live.now == 400

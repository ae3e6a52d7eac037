"""The draft in CUDA graphs, with a stand-in for CUDA: the captured sizes, and padding rows."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support import forks
from tests.support.speculators import Recorder, Setting, Target, batch, drafted, made_heads, speculator

SCHEDULE = [(1, 3, 4), (4, 5, 2), (6, 6, 1), (7, 8, 0)]
SIZES = (1, 2, 4, 8)
# vLLM's sizes that hold a batch of SCHEDULE, largest first: 8 pads batches of 5 (two drafts) and 6 (one)
KEYS = [(8, 2), (8, 1), (4, 4), (4, 2), (2, 4), (1, 4)]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made_heads(tmp_path_factory.mktemp("graphs"), 32, {"one": {}, "other": {}})


@pytest.fixture(scope="module")
def setting(places: dict[str, Path]) -> Setting:
    return Setting(places["one"], 8, SCHEDULE, graph_sizes=SIZES)


def captured(setting: Setting, modes: list[str]) -> dict[str, Any]:
    """In a fork: keys by mode; then drafts of every batch size with graphs and without."""
    from vllm.config.compilation import CUDAGraphMode

    from vllm_mtpc.proposers.v2.speculator import DraftGraphs

    recorder, found = Recorder(), {"keys": {}, "needs": {}, "drafts": [], "replayed": [], "untouched": [], "log": []}
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: found["log"].append(record.getMessage())
    logging.getLogger("vllm.mtpc").addHandler(handler)
    logging.getLogger("vllm.mtpc").setLevel(logging.INFO)
    with recorder.in_place(), speculator(setting) as made:
        eager = {
            (num_reqs, drafts): drafted(made, num_reqs, drafts)
            for num_reqs in range(1, 9)
            for drafts in {made.drafts_by_batch[num_reqs], 4} - {0}
        }
        planned = DraftGraphs(
            made.vllm_config, made.device, CUDAGraphMode.FULL, [0, 4, 4, 4, 4, 1, 1, 1, 1], arms=(0, 1, 4)
        )
        found["planned"] = [
            (desc.num_reqs, desc.num_speculative_tokens) for desc in planned._capture_descs[CUDAGraphMode.FULL]
        ]
        for mode in modes:
            recorder.captured.clear()
            made.init_cudagraph_manager(CUDAGraphMode[mode])
            found["needs"][mode] = made.graphs.needs_capture()
            made.idx_mapping.fill_(0)
            made.draft_logits.fill_(7)
            made.capture()
            found["keys"][mode] = [(desc.num_reqs, desc.num_speculative_tokens) for desc in recorder.captured]
            found["untouched"].append(bool((made.draft_logits == 7).all()))
        for (num_reqs, drafts), wanted in eager.items():
            # padding rows hold values of an earlier batch
            made.hidden_states.fill_(torch.nan)
            made.first_tokens.fill_(31)
            made.noise_pos.fill_(2**40)
            made.draft_logits.fill_(7)
            wanted[2][: 8 - num_reqs] = 7
            wanted[2][:, drafts:] = 7
            recorder.replayed.clear()
            got = drafted(made, num_reqs, drafts)
            found["drafts"].append(((num_reqs, drafts), got, wanted))
            sizes = [(desc.num_reqs, desc.num_speculative_tokens) for desc in recorder.replayed]
            found["replayed"] += [((num_reqs, drafts), size) for size in sizes]
        made.draft_logits.fill_(7)
        made.propose(**batch(made, 5), num_speculative_tokens=2, dummy_run=True)
        found["untouched"].append(bool((made.draft_logits == 7).all()))
        names = [name for name, value in vars(made).items() if type(value).__mro__[1].__name__ == "CudaGraphManager"]
        found["dropped by profiling"] = names
    return found


@pytest.fixture(scope="module")
def found(setting: Setting) -> dict[str, Any]:
    modes = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
    return forks.call("v2", "tests.proposers.test_graphs:captured", setting, modes)


def swapped(setting: Setting, other: Path) -> dict[str, Any]:
    """In a fork: drafts of a captured step before and after a swap to another head of equal shape, and its own."""
    from vllm.config.compilation import CUDAGraphMode

    from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator

    recorder, found = Recorder(), {}
    equal = mock.patch.object(MtpcSpeculator, "keeps_shapes", True)
    with recorder.in_place(), equal, speculator(setting) as made:
        made.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
        made.capture()
        head, sizes = made.model, made.speculative_config.head
        places = [part.data_ptr() for part in (*head.parameters(), *head.buffers())]
        found["old"] = drafted(made, 4, 4)
        new = SimpleNamespace(model_folder=str(other / "head"))
        commit = made.prepare_swap(new, Target(sizes.vocab_size, sizes.hidden_size))
        found["prepared"] = drafted(made, 4, 4)
        commit()
        found["swapped"] = drafted(made, 4, 4)
        now = [part.data_ptr() for part in (*made.model.parameters(), *made.model.buffers())]
        found["in place"], found["replays"] = made.model is head and now == places, len(recorder.replayed)
    with speculator(replace(setting, place=other)) as made:
        found["new"] = drafted(made, 4, 4)
    return found


def test_swapped_head_of_equal_shape_is_copied_into_captured_buffers(setting: Setting, places: dict[str, Path]) -> None:
    """Graphs hold the addresses of weights (`keeps_shapes`); a replay drafts as the new head does."""
    found = forks.call("v2", "tests.proposers.test_graphs:swapped", setting, places["other"])
    assert found["in place"] and found["replays"] == 3
    for one, same, is_equal in (("old", "prepared", True), ("swapped", "new", True), ("old", "new", False)):
        of_four = found[one][2][-4:], found[same][2][-4:]  # conditionals of 4 requests
        assert torch.equal(*of_four) == is_equal, (one, same)


def test_graphs_are_captured_for_scheduled_batches(found: dict[str, Any]) -> None:
    """Also where the target's graphs are piecewise: a draft has no attention."""
    for mode in ("PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        assert found["keys"][mode] == KEYS and found["needs"][mode], mode
    assert found["keys"]["NONE"] == [] and not found["needs"]["NONE"]
    assert found["planned"] == [(8, 1), (4, 4), (4, 1), (2, 4), (2, 1), (1, 4), (1, 1)]
    assert found["dropped by profiling"] == ["graphs"]
    assert all(found["untouched"]), "capturing and dummy runs write no conditionals"


def test_start_logs_runner_graphs_head_and_drafts_once(found: dict[str, Any]) -> None:
    _, eager, captured = [line for line in found["log"] if line.startswith("Model")]  # of five managers
    for line, graphs in ((eager, "NONE"), (captured, "6")):
        assert line.startswith(f"Model Runner V2, CUDA graphs of the target: NONE, of drafts: {graphs}; Mtpc")
        assert "/head'" in line and "by running requests: [[1, 3, 4], [4, 5, 2]" in line


def test_replayed_draft_equals_the_eager_one(found: dict[str, Any]) -> None:
    """Token for token; the conditionals of slots without a request are not written."""
    for case, (tokens, *numbers), (same_tokens, *same_numbers) in found["drafts"]:
        assert torch.equal(tokens, same_tokens), case
        for ours, theirs in zip(numbers, same_numbers, strict=True):
            # a product with more rows may add float32 numbers in another order
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0, msg=lambda text, case=case: f"{case}: {text}")


def test_smallest_graph_that_holds_a_batch_is_replayed(found: dict[str, Any]) -> None:
    batches = {1: (1, 4), 2: (2, 4), 3: (4, 4), 4: (4, 2), 5: (8, 2), 6: (8, 1)}
    expected = {(num_reqs, drafts): (size, drafts) for num_reqs, (size, drafts) in batches.items()}
    expected |= {(4, 4): (4, 4)}  # of a smaller batch's schedule; other sizes have no such graph
    assert dict(found["replayed"]) == expected and len(found["replayed"]) == len(expected)

"""States that vLLM records are those of transformers, on both model runners, through chunks and preemption."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.tiny_targets import HYBRIDS, make_family
from tests.support import forks
from tests.support.engine import SMALL
from vllm_mtpc.engine.served_target import RecordedText, ServedTarget, load_served_target
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.text import Sampling, generate
from vllm_mtpc.hf import Target, load_target

LENGTHS = (2, 61, 17, 40, 5, 33, 58, 29)
PROMPTS = [[(7 * number + place * place) % 41 + 1 for place in range(size)] for number, size in enumerate(LENGTHS)]
# Chunks of 32 tokens; the blocks hold half of all texts, so that requests are preempted.
TIGHT = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "max_model_len": 96, "num_gpu_blocks_override": 7}
TWO_GROUPS = {"num_gpu_blocks_override": 9}  # of Gemma2: windows are apart from full attention
ATOL = 1e-4  # float32: sums in another order; the states are of order 1, other tokens or positions differ by 0.1


def recorded(folder: Path, out: Path, layers: list[int], more: dict[str, Any]) -> dict[str, Any]:
    """In a fork: the texts of an engine that records, and how often it preempted."""
    from vllm import LLM, SamplingParams

    engine = SMALL | TIGHT | more | {"block_size": 32, "enable_prefix_caching": False, "skip_tokenizer_init": True}
    llm = LLM(str(folder), worker_extension_cls="vllm_mtpc.proposers.recorder.Recorder", **engine)
    llm.collective_rpc("start_recording", args=(json.dumps(layers),))
    how = [SamplingParams(temperature=0, max_tokens=30 if number % 2 else 1, ignore_eos=True) for number in range(8)]
    for number, (prompt, one) in enumerate(zip(PROMPTS, how, strict=True)):
        llm.llm_engine.add_request(f"text-{number}", {"prompt_token_ids": prompt}, one)
    texts: dict[str, list[int]] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                texts[output.request_id] = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    rows = [(name, len(tokens) - 1) for name, tokens in texts.items()]
    llm.collective_rpc("write_states", args=(str(out), json.dumps(rows)))
    llm.collective_rpc("write_states", args=("", "[]"))
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    return {"texts": texts, "preemptions": metrics["vllm:num_preemptions"].value}


@pytest.mark.parametrize(
    ("family", "runner", "layers"),
    [
        ("Llama", "v1", [1, 2]),
        ("Qwen3", "v1", [0]),
        ("Gemma2", "v1", []),
        ("MiniCPM3", "v1", []),
        ("Llama", "v2", [1]),
        ("FalconH1", "v1", []),
        # caches as Llama's and as FalconH1's
        *(pytest.param(name, "v1", [], marks=pytest.mark.slow) for name in ("GPTNeoX", "GraniteMoeHybrid")),
    ],
)
def test_recorded_states_are_those_of_transformers(tmp_path: Path, family: str, runner: str, layers: list[int]) -> None:
    folder, out = make_family(family, tmp_path / "target"), tmp_path / "states.safetensors"
    more = {"num_gpu_blocks_override": None} if family in HYBRIDS else TWO_GROUPS if family == "Gemma2" else {}
    found = forks.call(runner, f"{__name__}:recorded", folder, out, layers, more, timeout=300)
    target, texts = load_target(folder, torch.float32), found["texts"].values()
    states = load_file(out)["states"].split([len(tokens) - 1 for tokens in texts])
    for tokens, rows in zip(texts, states, strict=True):
        expected = target.hidden_with(layers, torch.tensor([tokens]))[0, :-1]
        torch.testing.assert_close(rows, expected, rtol=0, atol=ATOL)
    assert found["preemptions"] > 0 or family in HYBRIDS, "no request was read again from its start"
    assert max(map(len, texts)) > 80, "no text with a response"


def test_target_dtype_by_name_is_that_of_engine_and_lm_head(tmp_path: Path) -> None:
    folder = make_family("Llama", tmp_path)
    for name, dtype in (("bfloat16", torch.bfloat16), ("auto", torch.float32)):
        target = load_served_target(folder, name, "cpu", {})
        assert target.dtype == dtype and target.recorder.options["dtype"] == str(dtype).removeprefix("torch.")


def test_lm_head_that_the_trainer_would_misread_is_refused(tmp_path: Path) -> None:
    made = load_file(make_family("Llama", tmp_path / "target") / "model.safetensors")
    save_file({**made, "lm_head.bias": torch.ones(48)}, tmp_path / "target" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"one lm_head without bias.*type --states transformers"):
        load_served_target(tmp_path / "target", "auto", "cpu", {})


def test_responses_end_at_the_tokens_of_the_target_and_at_those_that_are_asked_for() -> None:
    asked: list[dict[str, Any]] = []
    recorder = SimpleNamespace(record=lambda prompts, sampling, seeds: asked.append(sampling) or ())
    target: Any = SimpleNamespace(stop_ids={2, 5}, recorder=recorder)
    for given in ({"stop_token_ids": [3]}, {}, {"ignore_eos": True}):
        list(ServedTarget.respond(target, [[1]], given, [0]))
    assert [one.get("stop_token_ids") for one in asked] == [[2, 3, 5], [2, 5], None]


@pytest.mark.slow
def test_prompts_without_room_are_skipped_or_refused(tmp_path: Path) -> None:
    target = load_served_target(make_family("Llama", tmp_path / "target"), "auto", "cpu", {"max_model_len": 32})
    try:
        prompts = [[1] * 40] * 65 + [[1, 2, 3]]  # the texts of the first file have no room
        found = list(target.respond(prompts, {"max_tokens": 4, "temperature": 0.0}, range(66)))
        assert [len(one.tokens) for one in found] == [40] * 65 + [7] and len(found[-1].states) == 6
        with pytest.raises(UsageError, match="raise max_model_len in --engine"):
            generate(target, [torch.tensor([1] * 20)], 20, Sampling(0.0))
        with pytest.raises(UsageError, match="lower seq_len, or raise max_model_len"):
            target.hidden(torch.ones(1, 40, dtype=torch.long))
    finally:
        target.recorder.close()


class Transformers:
    """A recorder that returns what vLLM's returns, computed by a target on transformers; `scale`: vLLM's own."""

    def __init__(self, target: Target, scale: float) -> None:
        self.target, self.scale, self.layers = target, scale, ()

    def record(self, prompts: list[list[int]], layers: list[int] = ()) -> Iterator[RecordedText]:  # type: ignore[assignment]
        for tokens in prompts:
            yield RecordedText(tokens, self.target.hidden(torch.tensor([tokens[:-1]]))[0])

    def log_probs(self, prompt: list[int]) -> dict[int, float]:
        logits = self.scale * self.target.logits(self.target.hidden(torch.tensor([prompt]))[0, -1])
        values, ids = logits.log_softmax(-1).topk(3)
        return dict(zip(ids.tolist(), values.tolist(), strict=True))


@pytest.mark.parametrize(
    ("family", "scale"), [("HyperCLOVAX", 1.0), ("HyperCLOVAX", 0.5), ("Gemma2", 1.0), ("MiniCPM3", 1.0)]
)
def test_logits_of_served_states_are_those_of_vllm_or_refused(tmp_path: Path, family: str, scale: float) -> None:
    target = load_target(make_family(family, tmp_path), torch.float32)
    served = load_served_target(tmp_path, torch.float32, "cpu", {})
    served.recorder = Transformers(target, scale)  # type: ignore[assignment]
    tokens = torch.tensor([PROMPTS[3]])
    if scale != 1:
        with pytest.raises(UsageError, match=r"log-probabilities of vLLM differ by .*type --states transformers"):
            served.hidden(tokens)
        return
    states = served.hidden(tokens)[:, :-1]
    torch.testing.assert_close(served.logits(states), target.logits(states))

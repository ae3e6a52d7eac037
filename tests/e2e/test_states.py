"""Draft layers and backbones in vLLM: the states that a head reads are those of its definition, the text the target's.

Engines run Model Runner V2 in Triton's interpreter, float32, asynchronously scheduled. Adapters are random and large,
so states without them, or of a neighbouring row, are far away. Prompts are read in pieces, found in the prefix cache,
and read again after preemption; heads are fitted to the beginnings of answers, so drafts are accepted and rejected.
A draft that depended on anything but its text would differ from the definition, which reads the whole text at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support import backbones, forks
from tests.support.engine import TWO_RANKS, Call, Engine, Reply, ask, build, run
from tests.support.heads import fit_head
from tests.support.models import make_target, random_layers
from tests.support.requests import LONGEST, PROMPTS, SMALL, VOCAB
from vllm_mtpc.checkpoint import check_tensors, load_head
from vllm_mtpc.heads.trunk.lora import LoraDraftLayers
from vllm_mtpc.hf import load_target
from vllm_mtpc.kernels.draft import naive

SHARED = [5, 6, 7, 8] * 10  # long enough for blocks to be found again in the prefix cache
CALLS = [
    ask(PROMPTS, 12),
    ask([[*SHARED, 9]], 6),
    ask([[*SHARED, 9], [*SHARED, 4]], 6),  # after the call before: found in the cache
    ask([[*range(40), *range(16)], [1] * 32], 24),  # more than there are blocks: preempted
    ask([[2] * 84], 12),  # to the model's length, which queries of a backbone go beyond
]
ALONE = CALLS[1:2]  # a prompt whose first pieces are read in steps that sample nothing
BACKBONES: dict[str, dict[str, Any]] = {
    "hmm": {"leaves": {"token_rank": 4}},
    "from anchor": {
        "circuit": "ff",
        "num_components": 1,
        "leaves": {"component_rank": 0},
        "trunk": {"sample_from_anchor": True},
    },
}
NOTED = "noted states"
Case = tuple[str, str, list[Call], int]  # head, injected change, calls, compared drafts at least; 0: a fault
CASES: dict[str, Case] = {
    "hmm": ("hmm", NOTED, CALLS, 40),
    "lora-2": ("lora-2", NOTED, CALLS, 40),
    "from anchor": ("from anchor", NOTED, ALONE, 4),
    "in graphs": ("hmm", "backbone in graphs", CALLS[:1], 20),
    "backbone context one on": ("hmm", "backbone context one on", ALONE, 0),
    "layers stale trunk": ("lora-2", "layers stale trunk", ALONE, 0),
}
if forks.ON_GPU:  # all draft in graphs
    del CASES["in graphs"]
Outputs = dict[str, list[Reply]]


def make_layers(folder: Path, layers: int) -> None:
    """A head on draft layers, fitted to the beginnings of the target's own answers."""
    split = random_layers(folder / "target", layers)
    reads = SimpleNamespace(hidden=lambda text: split.draft(split.trunk(torch.tensor([text])))[0].detach())
    target, prompts = backbones.Target(folder / "target", []), [prompt for call in CALLS for prompt in call.prompts]
    fit_head(folder / f"lora-{layers}", target, split._target[0].config.to_dict(), prompts, 6, reads, split.adapters)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    make_target(folder / "target", VOCAB, seed=3, layers=5)
    make_layers(folder, 2)
    reader = backbones.Target(folder / "target", [])
    texts = [prompt + reader.greedy(prompt, 6) for call in CALLS for prompt in call.prompts]
    for name, settings in BACKBONES.items():
        # not the target's own key and value heads: pages of another size; what enters its first layer, leaves its last
        trunk = {"kv_heads": 1, "aux_hidden_state_layer_ids": [0, 2, 5], **settings.get("trunk", {})}
        backbones.fit(folder / name, folder / "target", texts, 4, **settings | {"trunk": trunk})
    return folder


def engine(folder: Path, head: str, injected: str | None, calls: list[Call], least: int = 0) -> Engine:
    spec: dict[str, Any] = {"num_speculative_tokens_per_batch_size": "off"}
    if head == "from anchor":
        spec["num_speculative_tokens"] = 2  # with fewer drafts than the window holds there are as many queries
    blocks = 5 if head.startswith("lora") else 6  # too few; vLLM keeps one for itself
    return build(folder, head, calls, injected, spec, **{**SMALL, "num_gpu_blocks_override": blocks})


def serve(folder: Path, cases: dict[str, Case]) -> Outputs:
    return run({name: engine(folder, *case) for name, case in cases.items()}, "v2")


@pytest.fixture(scope="module")
def outputs(place: Path) -> Outputs:
    return serve(place, CASES)


def reference(head: Path, target: Path) -> Callable[[list[int], Tensor], tuple[Tensor, Tensor]]:
    """A head by its definition, on transformers, of whole texts.

    Returns:
        A function of a text and prefix[W]: the states [W, n or 1, D] that the head reads there, and its greedy drafts
        [W, n - 1].
    """
    config, made = load_head(head)
    if config.lora_layers:
        layers = LoraDraftLayers.load(check_tensors(head, config), load_target(target, torch.float32))
    else:
        reader = backbones.Target(target, config.trunk.aux_hidden_state_layer_ids)
        reader.lend(made)

    @torch.no_grad()
    def drafts(text: list[int], prefix: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.tensor(text)[prefix]
        if config.lora_layers:
            read = layers.draft(layers.trunk(torch.tensor([text])))[0][prefix - 1]
        else:
            read = backbones.states(made, reader.aux(text), prefix - 1, first)
        params = made.draft_params(read, first, config.window - 1)
        found = naive.draft(made.circuit.program, *params, pick=lambda log_q, k: log_q.argmax(dim=-1))
        return read if read.dim() == 3 else read[:, None], found

    return drafts


def check_drafts(folder: Path, head: str, calls: list[Call], replies: list[Reply]) -> int:
    """Compare what was noted with the definition's states and greedy drafts; returns the number of comparisons."""
    expected = reference(folder / head, folder / "target")
    pairs = [(call.prompts, reply.tokens) for call, reply in zip(calls, replies, strict=True)]
    texts = [prompt + answer[0] for some in pairs for prompt, answer in zip(*some, strict=True)]
    notes = [note for reply in replies for note in reply.recorded if "drafts" in note]
    compared = 0
    for request, text in enumerate(texts):
        # the last step went beyond what was asked for
        mine = [note for note in notes if note["request"] == request and note["prefix"] < len(text)]
        read, drafts = expected(text, torch.tensor([note["prefix"] for note in mine]))
        for note, states, own in zip(mine, read, drafts, strict=True):
            if note["prefix"] + len(states) > LONGEST:
                continue  # queries past the model's length are padding
            # other kernels, the same numbers in float32
            assert (note["hidden"] - states).abs().max() < 2e-4 * states.abs().max(), (request, note["prefix"])
            assert torch.equal(note["drafts"], own[: len(note["drafts"])]), (request, note["prefix"])
            compared += 1
    return compared


def check(folder: Path, case: Case, replies: list[Reply]) -> None:
    """Every token of the answers is the target's likeliest one, whatever is drafted: drafts alone show a fault."""
    head, injected, calls, least = case
    target = backbones.Target(folder / "target", [])
    for call, reply in zip(calls, replies, strict=True):
        for prompt, (answer,), one in zip(call.prompts, reply.tokens, call.sampling, strict=True):
            assert len(answer) == one["max_tokens"]
            assert target.is_greedy(prompt, answer)
    if not least:
        with pytest.raises(AssertionError):
            check_drafts(folder, head, calls, replies)
        return
    assert check_drafts(folder, head, calls, replies) > least
    assert "in graphs" not in injected or sum(note.get("replayed", 0) for note in replies[0].recorded) > 10
    if calls is CALLS:
        last = replies[-1]
        assert 0.05 < last.accepted / last.drafted < 0.95  # acceptances and rejections alike
        assert last.metrics["vllm:prefix_cache_hits"] > 0 and last.metrics["vllm:num_preemptions"] > 0


@pytest.mark.parametrize("name", CASES)
def test_drafts_equal_the_definition_and_faults_are_found(place: Path, outputs: Outputs, name: str) -> None:
    check(place, CASES[name], outputs[name])


@pytest.mark.slow
@pytest.mark.parametrize("head", ["hmm", "lora-2"])
def test_tensor_parallel_accepts_as_many_drafts(place: Path, outputs: Outputs, head: str) -> None:
    """Workers are processes of their own, where nothing is noted: as many drafts are accepted as on one rank."""
    one = engine(place, head, None, CALLS)
    two = replace(one, arguments=one.arguments | {"tensor_parallel_size": 2})
    replies = run({"two": two}, "v2", **TWO_RANKS)["two"]
    assert [each.tokens for each in replies] == [each.tokens for each in outputs[head]]
    # sums in another order may turn a near tie; without adapters hardly any draft is accepted
    assert replies[-1].accepted == pytest.approx(outputs[head][-1].accepted, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "layers", "settings"),
    [("qwen2", 1, {}), ("qwen3", 4, {}), *(("mistral", 2, {"sliding_window": size}) for size in (None, 24))],
)
def test_drafts_behind_layers_of_other_models_equal_the_definition(
    tmp_path: Path, model_type: str, layers: int, settings: dict[str, Any]
) -> None:
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5, "head_dim": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.15, **settings}
    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, **sizes, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "target")
    make_layers(tmp_path, layers)
    case: Case = (f"lora-{layers}", NOTED, CALLS, 40)
    check(tmp_path, case, serve(tmp_path, {"it": case})["it"])

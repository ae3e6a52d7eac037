"""Two tensor-parallel ranks: drafts as on one rank, and a failure that both ranks report.

Processes over gloo, Model Runner V2's speculator on vLLM's own layers and groups; the kernels are interpreted.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.support import forks, speculators
from tests.support.configs import engine_config
from tests.support.speculators import Setting, batch, drafted, made_heads, speculator

TIMEOUT_S = 1200.0
VOCAB = 1090  # divided into 2 x 576 columns, of which the second rank has 514 tokens
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "capped": {"soft_cap": 5.0, "scale": 0.7}}
# 32 components of the vocabulary are no small leaf.
WINDOW, BATCH, DRAFTS = 5, 6, 4
COMPONENTS = {"kernel": 32, "128 components": 128, "kernel with tokens": 32}
GREEDY = {"draft_sample_method": "greedy"}
LM_HEAD = {"kind": "lm_head", "component_rank": 0}
HEADS = {
    name: {"num_components": r, "window": WINDOW, "leaves": LM_HEAD | {"token_rank": 5 * ("tokens" in name)}}
    for name, r in COMPONENTS.items()
}
HEADS["low rank"] = HEADS["kernel"] | {"leaves": LM_HEAD | {"component_rank": 4}}
HEADS["few ids"] = HEADS["low rank"] | {"ids": list(range(1, VOCAB, 2))}
HEADS["mlp"] = HEADS["low rank"] | {"trunk": {"kind": "mlp", "width": 16}}


class Target(nn.Module):
    """vLLM's layers of `compute_logits`, with the options of `kind`."""

    kind = "plain"

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        super().__init__()
        whole = torch.randn(vocab_size, hidden_size, generator=torch.Generator().manual_seed(5))
        self.lm_head = ParallelLMHead(vocab_size, hidden_size)
        self.lm_head.weight_loader(self.lm_head.weight, whole)
        self.lm_head.quant_method.process_weights_after_loading(self.lm_head)
        self.embedding = VocabParallelEmbedding(vocab_size, hidden_size)
        self.embedding.weight_loader(self.embedding.weight, whole)
        self.logits_processor = LogitsProcessor(vocab_size, **KINDS.get(self.kind, {}))

    def embed_input_ids(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def compute_logits(self, states: Tensor) -> Tensor:
        logits = self.logits_processor(self.lm_head, states)
        if self.kind == "forbids a token":
            logits[:, VOCAB - 2] = -torch.inf
        return logits


def on_ranks(num_ranks: int, place: Path, store: Path, call: Callable[..., Any], *args: Any) -> list[Any]:
    """In a fork: `call(rank, *args)` of every rank, each in a fork of it.

    place: a folder with `target`. store: an empty folder.
    """
    # As vLLM's worker does: on AVX-512 ranks share memory by this name. A process number comes again; a forked rank
    # ends without its destructors, so the memory stays after it.
    name = os.environ["VLLM_DIST_IDENT"] = uuid.uuid4().hex
    try:
        return _answers(num_ranks, place, store, call, *args)
    finally:
        for shared in Path("/dev/shm").glob(f"{name}*"):
            shared.unlink()


def _answers(num_ranks: int, place: Path, store: Path, call: Callable[..., Any], *args: Any) -> list[Any]:
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    for rank, (_, theirs) in enumerate(pipes):
        context.Process(target=_rank, args=(rank, num_ranks, place, store, theirs, call, *args)).start()
    for _, theirs in pipes:
        theirs.close()
    return [pickle.loads(ours.recv_bytes()) for ours, _ in pipes]


def _rank(rank: int, num_ranks: int, place: Path, store: Path, answers: Any, call: Callable, *args: Any) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    torch.set_num_threads(1)
    torch._dynamo.config.disable = True  # vLLM's embedding of several ranks is compiled, which needs a device here
    with set_current_vllm_config(engine_config(place / "target", None)):
        parallel_state.init_distributed_environment(num_ranks, rank, f"file://{store}/{num_ranks}", rank, "gloo")
        parallel_state.ensure_model_parallel_initialized(num_ranks, 1)
        answers.send_bytes(pickle.dumps(call(rank, *args)))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made_heads(tmp_path_factory.mktemp("ranks"), VOCAB, HEADS)


def _all_drafted(rank: int, settings: dict[str, tuple[Setting, str]]) -> dict[str, Any]:
    return {name: _drafted(*setting) for name, setting in settings.items()}


def _drafted(setting: Setting, kind: str) -> list[Tensor | None]:
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Target, "kind", kind))
        stack.enter_context(mock.patch.object(speculators, "Target", Target))
        made = stack.enter_context(speculator(setting))
        if made.draft_logits is not None:
            return drafted(made, BATCH, DRAFTS)
        made.propose(**batch(made, BATCH), num_speculative_tokens=DRAFTS)
        confidences = made.draft_token_confidence_probs[:BATCH, :DRAFTS]
        return [made.draft_tokens[:BATCH, :DRAFTS], confidences, None]


CASES = {
    **{f"{name}, {kind}": (name, None, kind) for name in COMPONENTS if "tokens" not in name for kind in KINDS},
    **{f"{name}, plain": (name, None, "plain") for name in COMPONENTS if "tokens" in name},
    "kernel, argmax": ("kernel", GREEDY, "plain"),
    "kernel, forbids a token": ("kernel", None, "forbids a token"),
    "low rank, plain": ("low rank", None, "plain"),
    "mlp, plain": ("mlp", None, "plain"),
    "few ids, plain": ("few ids", None, "plain"),
    "few ids, capped": ("few ids", None, "capped"),
    "kernel, bfloat16": ("kernel", {"head_dtype": "bfloat16"}, "plain"),
}


@pytest.fixture(scope="module")
def found(places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    store = tmp_path_factory.mktemp("store")
    settings = {
        name: (Setting(places[which], BATCH + 2, options=options), kind)
        for name, (which, options, kind) in CASES.items()
    }
    given = (places["kernel"], store, _all_drafted, settings)
    return {size: forks.call("v2", f"{__name__}:on_ranks", size, *given, timeout=TIMEOUT_S) for size in (1, 2)}


@pytest.mark.parametrize("name", list(CASES))
def test_two_ranks_draft_as_one_rank(name: str, found: dict[int, list[dict[str, Any]]]) -> None:
    tokens, *numbers = found[1][0][name]
    ranks = [rank[name] for rank in found[2]]
    for mine, theirs in zip(*ranks, strict=True):
        assert mine is theirs is None or torch.equal(mine, theirs), "the ranks differ"
    same_tokens, *same_numbers = ranks[0]
    assert torch.equal(tokens, same_tokens)
    assert len(tokens.unique()) > 4 and (tokens >= 576).any() and (tokens < 576).any(), "tokens of both ranks"
    # float32 sums in another order; a number in bfloat16 may be rounded to its neighbour
    rtol = 2**-7 if name == "kernel, bfloat16" else 0
    for one, other in zip(numbers, same_numbers, strict=True):
        assert one is other is None or torch.testing.assert_close(one, other, atol=2e-5, rtol=rtol) is None


def test_token_that_the_target_forbids_has_no_mass_in_the_drafts(found: dict[int, list[dict[str, Any]]]) -> None:
    for size in (1, 2):
        *_, distribution = found[size][0]["kernel, forbids a token"]
        assert (distribution[-BATCH:, :DRAFTS, VOCAB - 2] == -torch.inf).all()


def failing_on_rank_1(rank: int, place: Path) -> str:
    """The error of a load that fails on rank 1."""
    from vllm_mtpc.proposers.worker import load

    failing = mock.patch.object(load, "load_head", side_effect=MemoryError("no room\n  for it"))
    with mock.patch.object(speculators, "Target", Target), failing if rank else ExitStack():
        try:
            with speculator(Setting(place, 4)):
                return "no error"
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def test_failed_load_returns_on_both_ranks(places: dict[str, Path], tmp_path: Path) -> None:
    given = (places["kernel"], tmp_path, failing_on_rank_1, places["kernel"])
    found = forks.call("v2", f"{__name__}:on_ranks", 2, *given, timeout=240)  # it takes some seconds on a busy core
    assert found == ["RuntimeError: on rank 1: no room for it", "MemoryError: no room\n  for it"]

"""Modules and weights in a worker: shared with the target, copies of compiled ones, and what a sleep loses.

vLLM's sleep of level 2 saves the buffers of the speculator's model only. Here every tensor that loading a speculator
allocated is zeroed, then those buffers are copied back as `Worker.wake_up` does.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from tests.support import forks
from tests.support.configs import engine_config
from vllm_mtpc import demo
from vllm_mtpc.checkpoint import load_head, save_head
from vllm_mtpc.circuits.base import DraftVocabulary
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads.head import Head, build_head
from vllm_mtpc.proposers.v2.hosted import SPECULATORS, hosted_class
from vllm_mtpc.proposers.worker.load import _lm_head_of, load_served_head

V, D = 7, 8
CPU = torch.device("cpu")
FIRST = torch.tensor([6, 0, 3])
HEADS: dict[str, dict[str, Any]] = {
    "head": {"method": "mtpc"},
    "shared": {"method": "mtpc"},
    "mlp": {"method": "mtpc"},
    "layered": {"method": "mtpc"},
    "o-ptp": {"method": "ptp", "draft_pass": "two-pass"},
    "late": {"method": "ptp", "draft_pass": "merged"},
}


@contextmanager
def worker_target(config: Any) -> Iterator[nn.Module]:
    """In a fork: vLLM's model of this configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

    with set_current_vllm_config(config):
        init_worker_distributed_environment(config, 0, "tcp://127.0.0.1:0", 0, "gloo")
        yield initialize_model(config)


def spec_of(folder: Path, head_dtype: str = "auto") -> SimpleNamespace:
    return SimpleNamespace(model_folder=str(folder), head_dtype=head_dtype, num_speculative_tokens=2)


class FakeTarget(nn.Module):
    """vLLM's `compute_logits`: two-dimensional states of the model's dtype; here with padding left in."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lm_head = nn.Linear(D, V, bias=False, dtype=dtype)
        self.seen: list[torch.Tensor] = []

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        self.seen.append(states)
        return nn.functional.pad(self.lm_head(states), (0, 5), value=1e4)  # would win every draft


def save(folder: Path) -> Path:
    target = {"hidden_size": D, "vocab_size": V}
    config = HeadConfig.create(circuit="cp", window=4, num_components=2, target=target, verifier="x")
    torch.manual_seed(1)
    save_head(folder, config, build_head(config), {}, "card", torch.float32)
    return folder


def save_vocabulary(folder: Path, ids: list[int], **given: Any) -> tuple[HeadConfig, Head]:
    target, ranks = {"hidden_size": D, "vocab_size": V}, {"kind": "lm_head", "expander_rank": 4, **given}
    sizes = {"circuit": "cp", "window": 4, "num_components": 2, "draft_vocab_size": len(ids), "leaves": ranks}
    config = HeadConfig.create(**sizes, target=target, verifier="x")
    torch.manual_seed(1)
    head = build_head(config)
    head.set_vocabulary(torch.tensor(ids))
    save_head(folder, config, head, {}, "card", torch.float32)
    return config, head


class CappedTarget(FakeTarget):
    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(states).div(0.3).tanh()


@pytest.mark.parametrize("kind", [FakeTarget, CappedTarget])
def test_draft_vocabulary_reads_the_logits_of_its_ids(tmp_path: Path, kind: type[FakeTarget]) -> None:
    """By rows of the lm_head where nothing follows the product; x_1 = 0 is outside and gives no evidence."""
    ids, target, hidden = torch.tensor([1, 3, 6]), kind(torch.float32), torch.randn(3, D)
    _, plain = save_vocabulary(tmp_path, ids.tolist())
    head = load_served_head(spec_of(tmp_path), torch.float32, CPU, target, torch.float32)
    target.seen.clear()
    params = head.draft_params(hidden, FIRST, 2)
    assert bool(target.seen) == (kind is CappedTarget)
    plain.leaves.bind_lm_head(lambda states: target.compute_logits(states)[..., ids])
    wanted = plain.draft_params(hidden, FIRST, 2)
    # float32 sums in another order
    torch.testing.assert_close(params.leaf, wanted.leaf, rtol=0, atol=1e-5)
    torch.testing.assert_close(params.evidence, wanted.evidence, rtol=0, atol=1e-5)
    assert not params.evidence[1].any() and params.evidence[0].any()


def _by_int8(states: Tensor, weight: Tensor) -> Tensor:
    step = states.abs().amax(-1, keepdim=True) / 127
    return (states / step).round() * step @ weight.T


LM_HEADS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "float32 in another order": lambda states, weight: (states.double() @ weight.double().T).float(),
    "bfloat16": lambda states, weight: (states.bfloat16() @ weight.bfloat16().T).float(),
    "int8 states": _by_int8,
    "soft cap": lambda states, weight: 30 * (states @ weight.T / 30).tanh(),
}


@pytest.mark.parametrize("kind", LM_HEADS)
def test_rows_of_a_wide_lm_head_are_read_alone(kind: str) -> None:
    """Rounding of hundreds of sums, and of a quantised product, is none of the differences that a soft cap makes."""
    size, weight, seen = 576, torch.randn(2048, 576, generator=torch.Generator().manual_seed(1)) / 24, list[Tensor]()
    vocabulary = DraftVocabulary.of(torch.arange(0, 2048, 4), 2048)

    def lm_head(states: Tensor) -> Tensor:
        seen.append(states)
        return LM_HEADS[kind](states, weight)

    head: Any = SimpleNamespace(vocabulary=vocabulary, hidden_size=size, vocab_size=2048)
    logits = _lm_head_of(lm_head, head, torch.float32, CPU)
    states = torch.randn(3, 2, size)
    seen.clear()
    found = logits(states)
    assert bool(seen) == (kind == "soft cap")
    wanted = LM_HEADS[kind](states, weight)[..., vocabulary.ids]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.1)  # of logits up to 4: bfloat16 and int8 round


def served(folder: Path, dtype: torch.dtype, head_dtype: str = "auto") -> nn.Module:
    return load_served_head(spec_of(folder, head_dtype), dtype, CPU, FakeTarget(torch.float32), torch.float32)


@pytest.mark.parametrize("head_dtype", ["auto", "float32", "bfloat16", "float16"])
def test_the_head_has_the_dtype_that_is_asked_for(tmp_path: Path, head_dtype: str) -> None:
    head, hidden = served(save(tmp_path), torch.bfloat16, head_dtype=head_dtype), torch.randn(3, D)
    wanted = torch.bfloat16 if head_dtype == "auto" else getattr(torch, head_dtype)
    assert head.hidden_dtype == wanted
    params = head.draft_params(hidden, FIRST, 2)
    assert params.leaf.dtype == wanted
    _, plain = load_head(tmp_path, wanted)
    same = plain.draft_params(hidden, FIRST, 2)
    # the same products, of weights laid out in another way: one rounding of logits below 0.1
    torch.testing.assert_close(params.leaf, same.leaf, rtol=0, atol=1e-3)
    torch.testing.assert_close(params.evidence, same.evidence, rtol=0, atol=1e-3)


def lost(place: Path, name: str) -> tuple[int, list[int]]:
    """In a fork: the number of storages that loading the head allocated, and sizes of those that a sleep changes."""
    from vllm_mtpc.proposers.v2.model_runner_v2 import speculator_class

    config = engine_config(place / "target", {"model": str(place / name), **HEADS[name]}, enforce_eager=True)
    with worker_target(config) as target:
        made = speculator_class(config.speculative_config)(config, CPU)
        target.compute_logits = lambda states: states.new_zeros(len(states), V)  # its lm_head is not laid out
        before = _tensors()
        made.load_model(target)
    left = {key: part for key, part in _tensors().items() if key not in before}
    saved = {name: part.clone() for name, part in made.model.named_buffers()}
    were = {key: part.clone() for key, part in left.items()}
    for part in left.values():
        part.zero_()
    for name, part in made.model.named_buffers():
        part.data.copy_(saved[name])
    return len(left), [part.numel() for key, part in left.items() if not torch.equal(part, were[key])]


def _tensors() -> dict[int, Tensor]:
    """The bytes of every storage that a tensor has."""
    gc.collect()
    parts = [part for part in gc.get_objects() if isinstance(part, Tensor) and part.device == CPU and part.numel()]
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage() for part in parts}
    return {key: torch.empty(0, dtype=torch.uint8).set_(storage) for key, storage in storages.items()}


@pytest.mark.parametrize("name", HEADS)
def test_head_is_kept_after_sleep(made: Path, name: str) -> None:
    count, changed = forks.call("v2", "tests.proposers.test_load:lost", made, name)
    assert count > 3 and changed == []


@pytest.mark.parametrize("is_fault", [False, True])
def test_an_engine_forked_after_the_head_was_checked_can_compute(is_fault: bool) -> None:
    """On a GPU vLLM forks its engine, and OpenMP's threads do not survive a fork."""
    ended = forks.call("v1", "tests.proposers.test_load:_fork_with_head", is_fault)
    assert ended == (-signal.SIGALRM if is_fault else 0)


def _fork_with_head(is_fault: bool) -> int:
    """Return the exit code of a fork that converts a tensor with two threads, as the engine that loads weights."""
    torch.set_num_threads(2)
    if is_fault:  # a check by PyTorch
        torch.ones(1 << 22).isfinite()
    engine_config(demo.path("target"), {"method": "mtpc", "model": str(demo.path("btree"))})
    if (child := os.fork()) == 0:
        signal.alarm(5)
        torch.ones(1 << 22, dtype=torch.bfloat16).float()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Processor(LogitsProcessor):
    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, lm_head: nn.Module, states: Tensor) -> Tensor:
        return lm_head(states)


class Drafter(nn.Module):
    """A model that normalises its states in `compute_logits`, as MTP layers of DeepSeek and GLM do, or in its layer."""

    def __init__(self, is_in_logits: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(4) if is_in_logits else nn.Identity()
        self.lm_head, self.processor = nn.Linear(4, 7, bias=False), Processor()

    def compute_logits(self, states: Tensor) -> Tensor:
        return self.processor(self.lm_head, self.norm(states))


@pytest.mark.parametrize(("method", "is_in_logits"), [("mtp", True), ("mtp", False), ("eagle3", True)])
def test_states_of_mtp_layers_are_normalised_before_they_are_kept(
    method: str, is_in_logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SPECULATORS[method], "load_model", lambda self, target: None)
    made, model = object.__new__(hosted_class(method)), Drafter(is_in_logits).requires_grad_(False)
    vars(made).update(method=method, model=model, dtype=torch.float32, kept=torch.zeros(3, 1, 4))
    made.draft_tokens = torch.zeros(3, 1)
    made.load_model(nn.Identity())
    states = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    made.sample_draft(states)
    assert torch.equal(made.kept[:2, 0], model.norm(states) if method == "mtp" else states)
    if method == "mtp":
        assert torch.equal(made.lm_head.compute_logits(made.kept[:2, 0]), model.compute_logits(states))

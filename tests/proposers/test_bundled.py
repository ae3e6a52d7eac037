"""Heads that a target bundles and that fail once a worker runs: the target is served, with one warning and no
drafts."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads import build_head
from vllm_mtpc.proposers.config import switches
from vllm_mtpc.proposers.heads import counts, ranks
from vllm_mtpc.proposers.patches.patch import derived
from vllm_mtpc.proposers.patches.scheduler import HeadScheduler
from vllm_mtpc.proposers.v1 import proposer
from vllm_mtpc.proposers.v1.model_runner_v1 import HeadModelRunner as runner_v1
from vllm_mtpc.proposers.v2 import model_runner_v2 as v2
from vllm_mtpc.proposers.v2.model_runner_v2 import HeadModelRunner as runner_v2

CPU = torch.device("cpu")


@pytest.fixture(name="said")
def fixture_said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings of the package."""
    lines: list[str] = []
    monkeypatch.setattr(switches.logger, "warning", lambda text, *values: lines.append(text % values))
    monkeypatch.setattr(ranks, "get_tp_group", lambda: SimpleNamespace(rank_in_group=0))
    return lines


def raising(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("out of shared memory:\n  block size 16")


def test_failure_is_one_warning_in_one_line(said: list[str]) -> None:
    assert ranks.attempt(lambda: "made", "head") == "made" and said == []
    with pytest.raises(ranks.GivenUp):
        ranks.attempt(raising, "head")
    assert said == [
        "Serving without drafts: the head that the target bundles, head, is not served here: "
        "out of shared memory: block size 16"
    ]


@pytest.mark.parametrize("where", ["__init__", "load_model", "draft_params", "nowhere"])
def test_v1_drafts_nothing(where: str, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {name: lambda self, *args, name=name: f"{name} of vLLM" for name in ("__init__", "load_model")}
    calls["__init__"] = lambda self, config: None
    calls[where] = raising
    for name in ("__init__", "load_model"):
        monkeypatch.setattr(proposer.MtpcProposer, name, calls[name])
    target = {"model_type": "llama", "vocab_size": 8, "hidden_size": 4}
    head = build_head(HeadConfig.create(circuit="ff", window=4, num_components=1, target=target, verifier="x"))
    if where == "draft_params":
        monkeypatch.setattr(head, "draft_params", raising)
    monkeypatch.setattr(proposer.MtpcProposer, "propose", lambda self, *args: "drafts")
    one = proposer.BundledProposer(SimpleNamespace(speculative_config=SimpleNamespace(model_folder="head")))
    one.model, one.target_dtype, one.num_drafts = head, torch.float32, 3
    one.load_model(torch.nn.Linear(1, 1))
    runner = SimpleNamespace(_draft_probs="stale", _draft_prob_req_ids=["stale"])
    drafts = one.propose(runner, [[1], [2, 3]], None, None, None, None)
    if where == "nowhere":
        assert drafts == "drafts" and said == []
        return
    assert drafts == [[], []] and runner._draft_probs is None and len(said) == 1


class Speculator:
    """Takes hold of the target's forward and registers a layer, then loads; notes what is called."""

    def __init__(self, context: dict[str, Any], fails: str) -> None:
        self.context, self.fails, self.buffer = context, fails, torch.zeros(1 << 10)

    def _called(self, name: str) -> str:
        if name == self.fails:
            raising()
        return name

    def load_model(self, target: torch.nn.Module) -> str:
        target.forward, self.context["layer.draft"] = raising, object()
        return self._called("load_model")

    def __getattr__(self, name: str) -> Any:
        if name not in v2.GUARDED:
            raise AttributeError(name)
        return lambda *args, **given: self._called(name)


def runner_with(fails: str) -> SimpleNamespace:
    context: dict[str, Any] = {"layer.0": object()}
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(model_folder="head", num_speculative_tokens=3),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        compilation_config=SimpleNamespace(static_forward_context=context),
    )
    runner = SimpleNamespace(vllm_config=config, device=CPU, speculator=Speculator(context, fails))
    v2.guard(runner)
    return runner


@pytest.mark.parametrize("fails", v2.GUARDED)
def test_v2_drafts_nothing(fails: str, said: list[str]) -> None:
    runner, target = runner_with(fails), torch.nn.Linear(2, 2)
    runner.speculator.load_model(target)
    runner.speculator.init_cudagraph_manager(None)
    runner.speculator.propose(input_batch=SimpleNamespace(num_reqs=2), dummy_run=True)
    runner.speculator.capture()
    v2.unguard(runner)
    assert isinstance(runner.speculator, v2.IdleSpeculator) and len(said) == 1
    assert runner.speculator.propose(SimpleNamespace(num_reqs=2)).tolist() == [[0] * 3] * 2
    config = runner.vllm_config
    assert v2.build_or_idle(lambda: "made", config, CPU) == "made"
    assert isinstance(v2.build_or_idle(raising, config, CPU), v2.IdleSpeculator)
    if fails == "load_model":  # the target is unchanged
        assert target(torch.ones(2)).shape == (2,)
        assert set(runner.vllm_config.compilation_config.static_forward_context) == {"layer.0"}


def test_v2_fails_once_requests_have_come(said: list[str]) -> None:
    runner = runner_with("propose")
    v2.unguard(runner)
    with pytest.raises(RuntimeError, match="out of shared memory"):
        runner.speculator.propose(None)
    assert said == [] and not set(v2.GUARDED) & set(vars(runner.speculator))


@pytest.mark.parametrize("is_idle", [True, False])
@pytest.mark.parametrize("ours", [runner_v1, runner_v2])
def test_a_steps_output_says_it(ours: type, is_idle: bool) -> None:
    class Vllm(ours.__mro__[1]):
        def sample_tokens(self, grammar_output: Any) -> Any:
            return SimpleNamespace(model_runner_output=SimpleNamespace(req_ids=["a"]))  # an asynchronous one

    one = object.__new__(derived(ours, Vllm))
    drafter = object.__new__(v2.IdleSpeculator) if is_idle else SimpleNamespace()
    drafter.pruned, drafter.is_idle = Counter(budget=1), is_idle
    one.drafter = one.speculator = drafter
    output = one.sample_tokens(None).model_runner_output
    assert getattr(output, counts.IDLE, False) == is_idle
    assert getattr(output, counts.PRUNED, None) == (None if is_idle else {"budget": 1})


def test_the_scheduler_plans_no_drafts_from_then_on() -> None:
    class Vllm(Scheduler):
        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
            return {}

    one = object.__new__(derived(HeadScheduler, Vllm))
    one.dynamic_sd_lookup, one.max_num_running_reqs, one.log_stats = None, 8, True
    one.verifies_forbidden, one.use_v2_model_runner = True, False
    one.update_from_output(None, SimpleNamespace())
    assert one.dynamic_sd_lookup is None
    one.update_from_output(None, SimpleNamespace(**{counts.IDLE: True}))
    assert one.dynamic_sd_lookup == [0] * 9 and not one.verifies_forbidden

"""Steps and pruned drafts, from the worker to the log and /metrics."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import prometheus_client
import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode import metrics
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_mtpc import plugin
from vllm_mtpc.proposers.options.switches import AUTO, SWAP
from vllm_mtpc.proposers.patches import patch, vllm_patches
from vllm_mtpc.proposers.patches.patch import derived
from vllm_mtpc.proposers.patches.scheduler import SENT_STEPS, HeadScheduler
from vllm_mtpc.proposers.worker import counts

NOTHING_VERIFIED = SimpleNamespace(scheduled_spec_decode_tokens={})


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    plugin.register()
    patch.apply(*vllm_patches.WITH_HEAD)


def test_our_variables_are_no_part_of_vllms_compile_cache_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that depends on this package would have every model compiled again, heads or not."""
    import vllm.envs as envs

    plain = envs.compile_factors()
    assert not [name for name in plain if "MTPC" in name]
    for variable in (AUTO, SWAP):
        monkeypatch.setenv(variable, "1")
    assert envs.compile_factors() == plain


def sent(stats: Any) -> SimpleNamespace:
    return SimpleNamespace(scheduler_stats=SimpleNamespace(spec_decoding_stats=stats))


def scheduler_that(answers: list[dict[int, Any]]) -> HeadScheduler:
    class Answering(Scheduler):
        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
            return answers.pop(0)

    made = object.__new__(derived(HeadScheduler, Answering))
    made.log_stats, made.num_spec_tokens, made.drafts_asked, made.requests = True, 3, {}, {}
    made.kinds, made.counts, made.counted_steps = {}, Counter(), 0
    made.use_v2_model_runner, made.verifies_forbidden = False, True
    return made


def test_counts_of_all_steps_are_sent() -> None:
    """Those of steps that verified nothing, too: tokens/step is over all of them. No step or count is lost."""
    stats, plain = SpecDecodingStats.new(3), sent(None)
    scheduler = scheduler_that([{0: SimpleNamespace(scheduler_stats=None)}, {0: plain}, {}, {0: sent(stats)}])
    for pruned in (1, 2, 3, 4):  # no request is left after each step; a step without statistics keeps its counts
        output = SimpleNamespace(
            **{counts.PRUNED: {"confidence": pruned}}, req_ids="abc", sampled_token_ids=[[5], [], [7, 8]]
        )
        scheduler.update_from_output(NOTHING_VERIFIED, output)
    assert +counts.read_counts(stats) == {"steps": 4, "confidence": 7}
    made = plain.scheduler_stats.spec_decoding_stats
    assert +counts.read_counts(made) == {"steps": 4, "confidence": 3}
    assert (made.num_drafts, made.num_spec_tokens) == (0, 3)
    answer = {0: sent(None)}  # a step without a head
    scheduler_that([answer]).update_from_output(NOTHING_VERIFIED, SimpleNamespace())
    assert answer[0].scheduler_stats.spec_decoding_stats is None
    assert counts.read_counts(SpecDecodingStats.new(3)) == {}


def test_measured_costs_of_steps_reach_the_plan() -> None:
    scheduler, received = scheduler_that([{}]), []
    scheduler.plan, scheduler.kv_cost = SimpleNamespace(set_costs=received.append), 0.5
    scheduler.update_from_output(NOTHING_VERIFIED, SimpleNamespace(**{counts.COSTS: np.full((2, 2), 8.0)}, req_ids=[]))
    assert len(received) == 1 and scheduler.kv_cost == 4


def test_steps_without_drafts_are_sent_together() -> None:
    """While requests run; a step that verified drafts sends all counts before it."""
    answers = [{0: sent(None)} for _ in range(SENT_STEPS + 3)]
    scheduler = scheduler_that(list(answers))
    scheduler.requests = {"a": None}
    verified = SimpleNamespace(scheduled_spec_decode_tokens={"a": [1]})
    for step in [NOTHING_VERIFIED] * (SENT_STEPS + 2) + [verified]:
        output = SimpleNamespace(**{counts.PRUNED: {"schedule": 3}}, req_ids="a", sampled_token_ids=[[5]])
        scheduler.update_from_output(step, output)
    received = [one[0].scheduler_stats.spec_decoding_stats for one in answers]
    read = {number: +counts.read_counts(one) for number, one in enumerate(received) if one is not None}
    first = {"steps": SENT_STEPS, "schedule": 3 * SENT_STEPS}
    assert read == {SENT_STEPS - 1: first, SENT_STEPS + 2: {"steps": 3, "schedule": 9}}


def test_scheduler_counts_unscheduled_drafts_on_model_runner_v2() -> None:
    """Request b asked for one draft, request d is not in the step."""
    scheduler = scheduler_that([{0: sent(stats := SpecDecodingStats.new(3))}])
    scheduler.use_v2_model_runner, scheduler.drafts_asked = True, {"b": 1, "d": 0}
    step = SimpleNamespace(
        scheduled_spec_decode_tokens={}, num_spec_tokens_to_schedule=2, num_scheduled_tokens=dict.fromkeys("abc", 1)
    )
    scheduler.plan = None
    scheduler.update_from_output(step, SimpleNamespace(req_ids="abc", sampled_token_ids=[[5], [], [7, 8]]))
    assert +counts.read_counts(stats) == {"steps": 2, "schedule": 2, "request": 2}


def test_counts_travel_between_processes() -> None:
    """As vLLM sends them, without a field that its classes do not have."""
    stats = SpecDecodingStats.new(3)
    given = dict(zip(counts.NAMES, range(1, 1 + len(counts.NAMES)), strict=True))
    counts.append_counts(stats, given)
    wire = msgspec.msgpack.encode(SchedulerStats(spec_decoding_stats=stats))
    arrived = msgspec.msgpack.Decoder(SchedulerStats).decode(wire).spec_decoding_stats
    assert arrived.num_spec_tokens == 3 and counts.read_counts(arrived) == given


def test_the_log_says_tokens_per_step_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.metrics.loggers import SpecDecodingLogging

    now = 1000.0
    monkeypatch.setattr(counts, "time", SimpleNamespace(monotonic=lambda: now))
    logging, said = SpecDecodingLogging(), []

    def log_after(seconds: float) -> list[str]:
        nonlocal now
        now += seconds
        said.clear()
        logging.log(log_fn=lambda text, *values: said.append(text % values))
        return said

    def step(drafts: int, given: dict[str, int]) -> None:
        stats = SpecDecodingStats.new(2)
        for _ in range(drafts):
            stats.observe_draft(2, 1)
        counts.append_counts(stats, given)
        logging.observe(stats)

    classes = {"greedy steps": 3, "sampled steps": 1, "greedy accepted_tokens": 1}
    for _ in range(2):
        step(1, {"steps": 4, "confidence": 4, **classes})
    theirs, line = log_after(7)
    assert theirs.startswith("SpecDecoding metrics: Mean acceptance length: 2.00")  # vLLM's: of steps with drafts
    assert line == (
        "Drafts of the last 7 s: 1.25 tokens/step over all 8 steps (greedy 1.33, sampled 1.00), without drafts 1.00; "
        "of 2 per step 0.5 were verified and 0.2 accepted; pruned by confidence 50%"
    )
    step(0, {"steps": 3, "schedule": 6, "step_us": 2000, "trial_us": 10})
    assert log_after(10) == []  # a minute is not over
    (line,) = log_after(50)
    assert "last 60 s: 1.00 tokens/step over all 3 steps, without" in line
    assert line.endswith("pruned by schedule 100%; trials of other numbers cost 0.5%")
    assert log_after(60) == []


def test_requests_are_counted_count_by_class() -> None:
    def request(temperature: float, is_structured: bool = False) -> SimpleNamespace:
        sampling = SimpleNamespace(temperature=temperature)
        return SimpleNamespace(use_structured_output=is_structured, sampling_params=sampling)

    requests = {"a": request(0.0), "b": request(0.7), "c": request(0.7, True), "d": request(0.0)}
    kinds = {name: counts.class_name(one) for name, one in requests.items()}
    output = SimpleNamespace(req_ids=list("abcdx"), sampled_token_ids=[[1, 2, 3], [4], [5, 6], [], [7]])
    found = counts.count_by_class(kinds, {"a": [1, 1, 1], "c": [2, 2]}, output)
    assert {name: count for name, count in found.items() if count} == {
        "steps": 4,
        "greedy steps": 1,
        "greedy draft_tokens": 3,
        "greedy accepted_tokens": 2,
        "sampled steps": 1,
        "structured steps": 1,
        "structured draft_tokens": 2,
        "structured accepted_tokens": 1,
    }
    assert set(found) <= set(counts.NAMES)


def test_log_of_other_methods_is_that_of_vllm() -> None:
    """In a process that serves a head and, in another engine, another method."""
    from vllm.v1.metrics.loggers import SpecDecodingLogging

    lines: dict[type, list[str]] = {SpecDecodingLogging: [], metrics.SpecDecodingLogging: []}
    for kind, own in lines.items():
        logging, stats = kind(), SpecDecodingStats.new(2)
        stats.observe_draft(2, 1)
        logging.observe(stats)
        logging.last_log_time = float("inf")  # throughputs of 0
        for _ in range(2):
            logging.log(log_fn=lambda text, *values, own=own: own.append(text % values))
    ours, theirs = lines.values()
    assert ours == theirs and len(ours) == 1


@pytest.mark.parametrize(("method", "counted"), [("mtpc", 10), ("ngram", None)])
def test_prometheus_counts(method: str, counted: int | None) -> None:
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    registry = prometheus_client.CollectorRegistry()

    class Prom(PrometheusStatLogger._spec_decoding_cls):
        @staticmethod
        def _counter_cls(*args: Any, **kwargs: Any) -> prometheus_client.Counter:
            return prometheus_client.Counter(*args, **kwargs, registry=registry)

    spec = SimpleNamespace(method=method, num_speculative_tokens=2)
    prom = Prom(spec, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}, is_diffusion=False)
    for engine in (0, 0, 1):
        stats = SpecDecodingStats.new(2)
        counts.append_counts(stats, {"steps": 5, "budget": 3})
        prom.observe(stats, engine)
    of = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value("vllm:spec_decode_steps_total", of) == counted
    pruned = {
        name: registry.get_sample_value("vllm:spec_decode_drafts_pruned_total", {**of, "by": name})
        for name in counts.PRUNED_BY
    }
    assert pruned == {name: counted and (6 if name == "budget" else 0) for name in counts.PRUNED_BY}
    assert registry.get_sample_value("vllm:spec_decode_num_drafts_total", of) == 0

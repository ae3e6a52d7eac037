"""What drafts cost, from the worker to the log and /metrics, and ranks that are held to the same drafts."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec
import prometheus_client
import pytest
import torch

from vllm_mtpc import plugin
from vllm_mtpc.proposers import watch
from vllm_mtpc.proposers.seam import watch as seam

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    plugin.register()


def test_passes_are_timed_and_taken_once() -> None:
    clock = watch.DraftClock(CPU)
    for _ in range(2):
        with clock.timed():
            pass
    seconds, passes = clock.take()
    assert 0 < seconds < 1 and passes == 2
    assert clock.take() == (0.0, 0)


def test_a_device_is_not_waited_for() -> None:
    """Events that are still to come stay for a later step, and those behind them, too."""
    clock = watch.DraftClock(CPU)
    start = SimpleNamespace(elapsed_time=lambda end: 250.0)
    done, ahead = SimpleNamespace(query=lambda: True), SimpleNamespace(query=lambda: False)
    clock.running = deque([(start, done), (start, done), (start, ahead), (start, done)])
    assert clock.take() == (0.5, 2)
    assert len(clock.running) == 2


def test_only_steps_that_draft_count() -> None:
    speculator = SimpleNamespace(device=CPU, num_speculative_steps=3, propose=lambda *args, **kwargs: "drafts")
    watch.watch_speculator(speculator)
    assert speculator.propose(dummy_run=True) == speculator.propose(num_speculative_tokens=0) == "drafts"
    assert speculator.clock.take()[1] == 0
    speculator.propose(num_speculative_tokens=2)
    speculator.propose()
    assert speculator.clock.take()[1] == 2
    proposer = SimpleNamespace(num_drafts=3, propose_drafts=lambda *args: [[1]])
    watch.watch_proposer(proposer, CPU)
    for generators, scheduled in (({}, 0), ({}, 2), ({0: "generator"}, 0)):  # a seeded request is drafted for in full
        proposer.propose_drafts(None, None, SimpleNamespace(generators=generators), None, None, scheduled)
    assert proposer.clock.take()[1] == 2


class Group:
    """A group of two ranks whose other member has drafted `other`."""

    world_size, rank_in_group, cpu_group = 2, 0, None

    def __init__(self, monkeypatch: pytest.MonkeyPatch, other: list[list[int]]) -> None:
        def all_gather(sums: list[torch.Tensor], own: torch.Tensor, group: None) -> None:
            sums[0].copy_(own)
            sums[1].fill_(watch.zlib.crc32(repr(other).encode()))

        monkeypatch.setattr(watch, "get_tp_group", lambda: self)
        monkeypatch.setattr(torch.distributed, "all_gather", all_gather)


@pytest.mark.parametrize("drafts", [torch.tensor([[1, 2, 9], [3, 4, 9]]), [[1, 2], [3, 4]]], ids=["v2", "v1"])
def test_ranks_that_differ_are_found(drafts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(seam.DEBUG, "1")
    propose = watch._watched(lambda: drafts, watch.DraftClock(CPU), lambda: 2)
    Group(monkeypatch, [[1, 2], [3, 4]])
    assert propose() is drafts
    Group(monkeypatch, [[1, 2], [3, 5]])
    with pytest.raises(RuntimeError, match=r"different tokens .*rank 0 drafted \[\[1, 2\], \[3, 4\]\]"):
        propose()
    monkeypatch.setenv(seam.DEBUG, "0")
    assert watch._watched(lambda: drafts, watch.DraftClock(CPU), lambda: 2)() is drafts


def test_vllm_knows_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.envs as envs

    monkeypatch.setenv(seam.DEBUG, "true")
    assert envs.environment_variables[seam.DEBUG]() is True
    monkeypatch.delenv(seam.DEBUG)
    assert envs.environment_variables[seam.DEBUG]() is False


def sent(stats: Any) -> SimpleNamespace:
    return SimpleNamespace(scheduler_stats=SimpleNamespace(spec_decoding_stats=stats))


def test_costs_wait_for_a_step_with_figures() -> None:
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    stats = SpecDecodingStats.new(3)
    answers = [{0: SimpleNamespace(scheduler_stats=None)}, {0: sent(None)}, {}, {0: sent(stats)}, {0: sent(None)}]
    scheduler = SimpleNamespace()
    update = seam.SchedulerUpdateFromOutput.replace(lambda self, scheduler_output, output: answers.pop(0))
    for cost in ((0.5, 1), (0.25, 1), None, (0.125, 1), (1.0, 4)):
        output = SimpleNamespace() if cost is None else SimpleNamespace(**{seam.COST: cost})
        update(scheduler, None, output)
    assert (stats.draft_seconds, stats.draft_passes) == (0.875, 3)
    assert getattr(scheduler, seam.COST) == (1.0, 4)  # of the step after


def test_costs_travel_between_processes() -> None:
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    stats = SpecDecodingStats.new(3)
    stats.draft_seconds, stats.draft_passes = 0.5, 7
    wire = msgspec.msgpack.encode(SchedulerStats(spec_decoding_stats=stats))
    arrived = msgspec.msgpack.Decoder(SchedulerStats).decode(wire).spec_decoding_stats
    assert (arrived.draft_seconds, arrived.draft_passes, arrived.num_spec_tokens) == (0.5, 7, 3)


def test_the_log_says_what_a_pass_takes() -> None:
    from vllm.v1.metrics.loggers import SpecDecodingLogging
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    logging, said = SpecDecodingLogging(), []

    def log(text: str, *values: Any) -> None:
        said.append(text % values)

    for seconds, passes in ((0.006, 3), (0.002, 1), (0.0, 0)):
        stats = SpecDecodingStats.new(2)
        stats.observe_draft(2, 1)
        stats.draft_seconds, stats.draft_passes = seconds, passes
        logging.observe(stats)
    logging.log(log_fn=log)
    assert said[1:] == ["Draft passes: 4, 2.00 ms each"]
    logging.log(log_fn=log)
    assert len(said) == 2  # nothing was drafted since


@pytest.mark.parametrize(("method", "counted"), [("mtpc", 0.75), ("ngram", None)])
def test_prometheus_counts(method: str, counted: float | None) -> None:
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    registry = prometheus_client.CollectorRegistry()

    class Prom(PrometheusStatLogger._spec_decoding_cls):
        @staticmethod
        def _counter_cls(*args: Any, **kwargs: Any) -> prometheus_client.Counter:
            return prometheus_client.Counter(*args, **kwargs, registry=registry)

    spec = SimpleNamespace(method=method, num_speculative_tokens=2)
    prom = Prom(spec, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}, is_diffusion=False)
    for engine, seconds in ((0, 0.5), (0, 0.25), (1, 8.0)):
        stats = SpecDecodingStats.new(2)
        stats.draft_seconds, stats.draft_passes = seconds, 2
        prom.observe(stats, engine)
    of = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value("vllm:spec_decode_draft_seconds_total", of) == counted
    assert registry.get_sample_value("vllm:spec_decode_draft_passes_total", of) == (counted and 4)
    assert registry.get_sample_value("vllm:spec_decode_num_drafts_total", of) == 0

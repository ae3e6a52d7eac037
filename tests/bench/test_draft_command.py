"""`vllm-mtpc bench draft`: what is timed drafts, what is counted is read, steps are those that were given."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support import heads_zoo
from vllm_mtpc import cli, demo
from vllm_mtpc.bench import draft_command, timing
from vllm_mtpc.bench.draft_command import Shape, cases, check, parts, shape, steps, weight_bytes
from vllm_mtpc.bench.timing import Time
from vllm_mtpc.circuits import CIRCUITS
from vllm_mtpc.errors import UsageError


@pytest.fixture(autouse=True)
def little_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timing.COPIED, "cpu", 1 << 16)


def words(*typed: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    draft_command.add_arguments(parser)
    return parser.parse_args(typed)


def made(*typed: str) -> list[draft_command.Case]:
    return list(cases(words(*typed), torch.float32, torch.device("cpu")))


def test_shapes_become_heads_of_every_circuit() -> None:
    found = made("--shape", "D=8,V=11,n=4,r=2", "--num-drafts", "2")
    assert [case.name.split()[0] for case in found] == list(CIRCUITS)
    components = {case.name.split()[0]: case.head.circuit.num_components for case in found}
    assert (components["ff"], components["btree"]) == (1, 2) and found[0].num_drafts == 2
    assert {case.num_drafts for case in made("--shape", "D=8,V=11,n=4,r=2", "--num-drafts", "9")} == {3}
    with pytest.raises(argparse.ArgumentTypeError, match="expected is"):
        shape("D=8,V=11")
    assert shape("D=8,V=11,n=4,r=2") == Shape(8, 11, 4, 2)


def test_shapes_may_have_components_by_rank_and_a_support() -> None:
    sizes = "D=8,V=400,n=4,r=2"
    found = made("--shape", sizes, f"{sizes},c=2", f"{sizes},c=2,M=5", "--circuits", "ff", "cp")
    names = [case.name.removesuffix(" D=8 V=400 (random)") for case in found]
    assert names == ["ff n=4 r=1", "cp n=4 r=2", "cp n=4 r=2 c=2", "ff n=4 r=1 M=5", "cp n=4 r=2 c=2 M=5"]
    with torch.inference_mode():
        _, tokens, _ = parts(found[-1], 3, 1.0)
        assert tokens().shape == (3, 3)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_what_is_timed_drafts(temperature: float) -> None:
    """All drafts of the circuit's own support; at T=0 the very ones of the circuit's greedy path."""
    case = made("--head", str(demo.path("hmm")))[0]
    torch.manual_seed(0)
    with torch.inference_mode():
        _, tokens, both = parts(case, 3, temperature)
        found, again = tokens(), both()
    assert found.shape == again.shape == (3, 7) and int(found.min()) >= 0 and int(found.max()) < 257
    if temperature == 0:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(3, 128, generator=generator)
        first = torch.randint(0, 257, (3,), generator=generator)
        expected = case.head.circuit.greedy(case.head(hidden, 8), first[:, None])[:, 1:]
        assert torch.equal(found, again) and torch.equal(found, expected)


def test_a_backbone_s_pass_is_that_of_its_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind nothing but what a step verified, its states are those of windows of such a text."""
    monkeypatch.setattr(draft_command, "CONTEXT", 3)
    head, first = heads_zoo.build("backbone", std=0.3), torch.tensor([4, 1])
    torch.manual_seed(0)
    read = draft_command.backbone_pass(head, first, 2)
    torch.manual_seed(0)
    aux = torch.randn(2, 3, head.backbone.fc.in_features)
    context = head.context(aux, torch.arange(3).expand(2, -1), torch.zeros(2, 3, dtype=torch.long))
    expected = head.read(context, torch.tensor([0, 1]), torch.tensor([2, 2]), first)
    torch.testing.assert_close(read(), expected, rtol=0, atol=1e-5)  # sums over other numbers of masked terms
    *_, both = parts(draft_command.Case("", head, 2), 2, 1.0)
    assert both().shape == (2, 2)


def test_bytes_are_of_what_a_draft_reads() -> None:
    """Leaves of 1 + K positions, sums whole: float32, n=4, r=2, V=11, D=8, K=1."""
    case = made("--shape", "D=8,V=11,n=4,r=2", "--circuits", "hmm", "--num-drafts", "1")[0]
    leaves, root, inner = 2 * 2 * 11 * 8, 2 * 8, 3 * 2 * 2 * (8 + 1)
    assert weight_bytes(case.head, 1) == 4 * (leaves + root + inner)


def test_steps_are_given_or_read(tmp_path: Path) -> None:
    assert steps(words("--batch", "1", "4", "--step-ms", "5"), 7) == {1: 5.0, 4: 5.0}
    assert steps(words("--batch", "1", "4", "--step-ms", "5", "6"), 7) == {1: 5.0, 4: 6.0}
    assert steps(words("--batch", "1", "4"), 7) == {}
    curves = tmp_path / "curves.json"
    curves.write_text(json.dumps({"step_ms": [[1, 8, 4.5], [4, 32, None], [9, 6.0]]}))
    assert steps(words("--batch", "1", "4", "--curves", str(curves)), 7) == {1: 4.5}
    assert steps(words("--batch", "3", "--curves", str(curves)), 2) == {3: 6.0}
    curves.write_text("[]")
    with pytest.raises(UsageError, match="advise --measure"):
        steps(words("--batch", "1", "--curves", str(curves)), 7)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ([], "nothing to time"),
        (["--head", "h", "--step-ms", "1", "2"], "--step-ms: 2 values"),
        (["--head", "h", "--step-ms", "1", "--curves", "c"], "leave one of them out"),
        (["--head", "h", "--batch", "0"], "--batch: must be above 0"),
        (["--head", "h", "--repeats", "0"], "--repeats: must be above 0"),
    ],
)
def test_wrong_words_are_refused(typed: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(words(*typed))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    typed = ["--head", str(demo.path("ff")), "--batch", "2", "--step-ms", "10", "--repeats", "3", "--dtype", "float32"]
    assert cli.main(["bench", "draft", *typed, "--json", str(tmp_path / "d.json")]) == 0
    result = json.loads((tmp_path / "d.json").read_text())
    assert result["kind"] == "bench draft" and result["how"]["dtype"] == "float32" and "commit" in result
    for row, temperature in zip(result["rows"], (1.0, 0.0), strict=True):
        assert (row["batch"], row["temperature"], row["drafts"]) == (2, temperature, 7)
        assert row["share"] == pytest.approx(row["draft_ms"][0] / 10, abs=1e-4)
        assert row["draft_ms"][1] <= row["draft_ms"][0] <= row["draft_ms"][2]
    assert "of a step" in capsys.readouterr().out


def test_times_are_quartiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_on_cpu", lambda call, repeats: [5.0, 1.0, 2.0, 4.0, 3.0])
    assert timing.measure(lambda: None, torch.device("cpu"), 5) == Time(3.0, 2.0, 4.0)


def test_a_large_vocabulary_gets_the_head_that_borrows_the_lm_head() -> None:
    (case,) = made("--shape", "D=8,V=321,n=4,r=2", "--circuits", "btree")
    assert case.head.needs_lm_head and not made("--shape", "D=8,V=320,n=4,r=2")[0].head.needs_lm_head


def test_captured_and_counted_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for CUDA: calls that warm up come before the capture, what cannot be captured has no graph."""
    calls, capturing = [], []

    @contextlib.contextmanager
    def context(*given: object) -> Iterator[SimpleNamespace]:
        capturing.append(given)
        kinds = [torch.autograd.DeviceType.CPU] + [torch.autograd.DeviceType.CUDA] * 3
        yield SimpleNamespace(events=lambda: [SimpleNamespace(device_type=kind) for kind in kinds])

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: "replayed"))
    monkeypatch.setattr(torch.cuda, "stream", lambda which: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", context)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: context())
    assert timing.captured(lambda: calls.append(len(capturing)))() == "replayed"
    assert calls == [0] * timing.WARM_UP + [1]

    def waits() -> None:
        if len(capturing) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")

    assert timing.captured(waits) is None
    assert timing.launches(lambda: None) == 3

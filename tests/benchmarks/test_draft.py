"""benchmarks.draft and benchmarks.kernels: the timed calls draft, bytes are counted, wrong kernels are refused."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import draft, kernels, timing
from tests.support import heads_zoo
from vllm_mtpc import demo
from vllm_mtpc.circuits import CIRCUITS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timing.COPIED, "cpu", 1 << 16)


def cases_of(*words: str) -> list[draft.Case]:
    return list(draft.cases(draft.parser().parse_args(words), torch.float32, CPU))


def test_shape_makes_a_head_of_every_circuit() -> None:
    found = cases_of("--shape", "D=8,V=11,n=4,r=2")
    assert [case.name.split()[0] for case in found] == list(CIRCUITS)
    components = {case.name.split()[0]: case.head.circuit.num_components for case in found}
    assert (components["ff"], components["btree"]) == (1, 2) and found[0].num_drafts == 3
    (large,) = cases_of("--shape", "D=8,V=321,n=4,r=2,c=2", "--circuits", "cp")
    assert large.head.needs_lm_head and " c=2 " in large.name and not found[0].head.needs_lm_head
    with pytest.raises(argparse.ArgumentTypeError, match="expected is"):
        draft.shape("D=8,V=11")


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_timed_call_drafts(temperature: float) -> None:
    """At T=0 the tokens of the circuit's greedy path."""
    (case,) = cases_of("--head", str(demo.path("hmm")))
    torch.manual_seed(0)
    with torch.inference_mode():
        _, tokens, both = draft.parts(case, 3, temperature)
        found, again = tokens(), both()
    assert found.shape == again.shape == (3, 7) and int(found.min()) >= 0 and int(found.max()) < 257
    if temperature == 0:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(3, 128, generator=generator)
        first = torch.randint(0, 257, (3,), generator=generator)
        expected = case.head.circuit.greedy(case.head(hidden, 8), first[:, None])[:, 1:]
        assert torch.equal(found, again) and torch.equal(found, expected)


def test_backbone_pass_equals_its_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "CONTEXT", 3)
    head, first = heads_zoo.build("backbone", std=0.3), torch.tensor([4, 1])
    torch.manual_seed(0)
    read = draft.backbone_pass(head, first, 2)
    torch.manual_seed(0)
    aux = torch.randn(2, 3, head.backbone.fc.in_features)
    context = head.context(aux, torch.arange(3).expand(2, -1), torch.zeros(2, 3, dtype=torch.long))
    expected = head.read(context, torch.tensor([0, 1]), torch.tensor([2, 2]), first)
    torch.testing.assert_close(read(), expected, rtol=0, atol=1e-5)  # sums over other numbers of masked terms


def test_bytes_are_those_a_draft_reads() -> None:
    """Leaves of 1 + K positions, sums whole: float32, n=4, r=2, V=11, D=8, K=1."""
    (case,) = cases_of("--shape", "D=8,V=11,n=4,r=2", "--circuits", "hmm")
    leaves, root, inner = 2 * 2 * 11 * 8, 2 * 8, 3 * 2 * 2 * (8 + 1)
    assert draft.weight_bytes(case.head, 1) == 4 * (leaves + root + inner)


def test_draft_command_divides_by_the_step_of_its_rows(tmp_path: Path) -> None:
    curves, out = tmp_path / "curves.json", tmp_path / "d.json"
    curves.write_text(json.dumps({"step_ms": [[2, 16, 10.0], [4, 32, None]]}))
    words = ["--head", str(demo.path("ff")), "--batch", "2", "4", "--curves", str(curves), "--repeats", "3"]
    assert draft.main([*words, "--json", str(out)]) == 0
    two, four = json.loads(out.read_text())["rows"]
    assert two["share"] == pytest.approx(two["draft_ms"][0] / 10, abs=1e-4) and four["share"] is None
    assert two["draft_ms"][1] <= two["draft_ms"][0] <= two["draft_ms"][2]
    assert draft.main([]) == 1


@pytest.mark.parametrize("name", kernels.OPERATIONS)
def test_every_operation_has_cases_that_run(name: str) -> None:
    torch.manual_seed(0)
    case = next(iter(kernels.OPERATIONS[name](CPU)))
    found = case.naive()
    assert case.kernel is None and case.moved > 0
    if name in ("pick", "draft"):
        assert torch.equal(found, case.eager().view_as(found))
    if name == "leaf":
        normaliser, logit = found.unbind(1)
        torch.testing.assert_close(logit - normaliser, case.eager()[..., 0], atol=1e-4, rtol=1e-4)  # sums of 256 terms


def test_every_kernel_is_an_operation(root: Path) -> None:
    assert {file.parent.name for file in (root / "kernels").glob("*/kernel.py")} == set(kernels.OPERATIONS)


def test_kernel_that_differs_from_its_definition_ends_the_run(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    wrong = kernels.Case("T=1", naive=lambda: torch.zeros(2), moved=8, kernel=lambda: torch.tensor([0.0, 0.1]))
    monkeypatch.setitem(kernels.OPERATIONS, "uniform", lambda device: iter([wrong]))
    assert kernels.main(["--only", "uniform", "--repeats", "1"]) == 1
    assert "the kernel differs from its definition" in capsys.readouterr().err
    right = wrong._replace(kernel=lambda: torch.zeros(2))
    monkeypatch.setitem(kernels.OPERATIONS, "uniform", lambda device: iter([right]))
    assert kernels.main(["--only", "uniform", "--repeats", "1"]) == 0


INTERPRETED = """
import torch
from benchmarks.timing import draft_kernel
from vllm_mtpc.circuits import get_circuit
from vllm_mtpc.kernels.draft import naive

circuit, cpu = get_circuit("hmm", 3, 2), torch.device("cpu")
torch.manual_seed(0)
leaf = torch.randn(4, 2, 2, 5)
params = (torch.randn(4, 2) - 3, leaf, torch.randn(4, 2), torch.randn(4, circuit.num_inner, 2, 2))
greedy = naive.draft(circuit.program, *params, pick=lambda log_q, k: log_q.argmax(-1))
assert torch.equal(draft_kernel(circuit.program, leaf.shape, 0.0, cpu)(params), greedy)
"""


@pytest.mark.slow
def test_timed_draft_kernel_equals_its_definition_interpreted(root: Path) -> None:
    env = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=str(root / "scripts" / "interpreter"))
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]

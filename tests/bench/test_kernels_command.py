"""`vllm-mtpc bench kernels` reports an operation only where its tests have passed; on a CPU it times no kernel."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from vllm_mtpc import cli
from vllm_mtpc.bench import kernels_command, timing
from vllm_mtpc.bench.kernels_command import ABSENT, OPERATIONS, REFUSED, TIMED, Case, Operation, judge, passed, row

CPU = torch.device("cpu")
TESTS = {
    "test_good.py": "def test_one():\n    pass\n",
    "test_bad.py": "def test_one():\n    pass\n\ndef test_two():\n    assert 1 == 2\n",
    "test_skipped.py": "import pytest\n\n@pytest.mark.skip(reason='none')\ndef test_one():\n    pass\n",
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose kernel tests are those above."""
    (tmp_path / "tests" / "kernels").mkdir(parents=True)
    for name, text in TESTS.items():
        (tmp_path / "tests" / "kernels" / name).write_text(text)
    monkeypatch.setattr(kernels_command, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # seconds less to start
    monkeypatch.setitem(timing.COPIED, "cpu", 1 << 16)
    return tmp_path


def operation(*tests: str) -> Operation:
    return Operation(tests, kernels_command.uniform)


def test_only_tests_that_pass_let_an_operation_through(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")  # of a shell: says nothing about an operation
    assert judge("uniform", operation("test_good.py")).state == TIMED
    for files, reason in (
        (("test_good.py", "test_bad.py"), "1 failed, 2 passed"),
        (("test_skipped.py",), "1 skipped"),
        (("test_good.py", "test_none.py"), "not found: test_none.py"),
    ):
        verdict = judge("uniform", operation(*files))
        assert verdict.state == REFUSED and reason in verdict.reason
    assert judge("no_such_operation", operation("test_good.py")).state == ABSENT


def test_a_refused_operation_has_no_row(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path
) -> None:
    registry = {
        "uniform": operation("test_good.py"),
        "pick": operation("test_bad.py"),
        "none": operation("test_good.py"),
    }
    monkeypatch.setattr(kernels_command, "OPERATIONS", registry)
    assert cli.main(["bench", "kernels", "--repeats", "2", "--json", str(tmp_path / "k.json")]) == 1
    result = json.loads((tmp_path / "k.json").read_text())
    assert {name: found["state"] for name, found in result["operations"].items()} == {
        "uniform": TIMED,
        "pick": REFUSED,
        "none": ABSENT,
    }
    assert {one["operation"] for one in result["rows"]} == {"uniform"}
    printed = capsys.readouterr().out
    assert "pick: refused: its tests did not pass" in printed and "none: absent" in printed


def test_there_is_no_way_around_the_tests() -> None:
    parser = argparse.ArgumentParser()
    kernels_command.add_arguments(parser)
    assert {action.dest for action in parser._actions} == {"help", "only", "repeats", "json"}


def test_summaries_of_pytest() -> None:
    assert passed("3 passed in 0.1s") == 3 and passed("2 failed, 11 passed, 1 skipped in 9s") == 11
    assert passed("4 skipped in 0.1s") == passed("no tests ran in 0.01s") == 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_its_files_and_cases_that_run(name: str, root: Path) -> None:
    """The smallest case of each; eager chains that have a definition to agree with agree with it."""
    assert (root / "kernels" / name / "kernel.py").is_file()
    assert all((root / "tests" / "kernels" / file).is_file() for file in OPERATIONS[name].tests)
    torch.manual_seed(0)
    case = next(iter(OPERATIONS[name].setup(CPU)))
    assert case.kernel is None and case.moved > 0
    found = case.naive()
    if name == "pick":
        assert torch.equal(found, case.eager()[:, 0])
    if name == "leaf":
        normaliser, logit = found.unbind(1)
        torch.testing.assert_close(logit - normaliser, case.eager()[..., 0], atol=1e-4, rtol=1e-4)  # sums of 256 terms
    if name == "draft":
        assert found.shape == case.eager().shape


def test_a_cpu_times_the_definition_alone() -> None:
    case = Case("T=1", lambda: None, 1000, kernel=lambda: pytest.fail("a kernel was run"))
    one = row("uniform", case, CPU, 3, 1e9)
    assert one["kernel_ms"] is None and one["eager_ms"] is None and one["naive_ms"][0] >= 0
    assert one["floor_ms"] == 0.001 and one["of_bandwidth"] is None
    header, lines = timing.table([one], kernels_command.COLUMNS)
    assert lines[0][header.index("kernel ms")] == "not run"


def test_every_kernel_is_in_the_list(root: Path) -> None:
    assert {file.parent.name for file in (root / "kernels").glob("*/kernel.py")} == set(OPERATIONS)

"""What a release has moved is found in its sources."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("check_vllm", ROOT / "scripts" / "check_vllm.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@cache
def installed(check: ModuleType) -> Any:
    """The installed vLLM, parsed once."""
    return check.Sources(check.installed())


def moved(check: ModuleType, file: str, old: str, new: str) -> list:
    """Findings that are not ok, of the installed vLLM with one piece of its text replaced."""

    class Edited(check.Sources):
        def _read(self, path: str) -> str | None:
            text = super()._read(path)
            if path != file:
                return text
            assert old in text
            return text.replace(old, new)

    known, edited = installed(check), Edited(check.installed())
    edited.parsed = {name: tree for name, tree in known.parsed.items() if f"{name.replace('.', '/')}.py" != file}
    found = check.findings(edited, known)
    assert {finding.what for finding in found} == set(check.WHAT)
    return [(finding.what, finding.name, finding.state, finding.detail) for finding in found if finding.state != "ok"]


def test_the_installed_vllm_fits(check: ModuleType) -> None:
    assert moved(check, "vllm/version.py", "version", "version") == []


def test_a_replaced_attribute_that_is_gone(check: ModuleType) -> None:
    sampler = "vllm/v1/sample/rejection_sampler.py"
    (found,) = moved(check, sampler, "def expand_batch_to_tokens(", "def expand_elsewhere(")
    assert found[:3] == ("replaced", "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens", "gone")


def test_an_overridden_method_that_is_gone(check: ModuleType) -> None:
    runner = "vllm/v1/worker/gpu_model_runner.py"
    (found,) = moved(check, runner, "def propose_draft_token_ids(", "def propose_drafts_elsewhere(")
    assert found[:3] == ("overridden", "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids", "gone")


def test_a_parameter_that_is_gone(check: ModuleType) -> None:
    (found,) = moved(check, "vllm/v1/sample/rejection_sampler.py", "    cu_num_tokens: ", "    cu_tokens: ")
    assert found == (
        "replaced",
        "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
        "gone",
        "no longer takes cu_num_tokens",
    )


def test_an_overridden_method_whose_parameters_changed(check: ModuleType) -> None:
    sampler = "vllm/v1/worker/gpu/sample/sampler.py"
    (found,) = moved(
        check, sampler, "use_fused_sampler: bool,\n    )", "use_fused_sampler: bool,\n        more: int,\n    )"
    )
    assert found == (
        "overridden",
        "vllm.v1.worker.gpu.sample.sampler:Sampler._sample_random",
        "changed",
        "parameters +more",
    )


def test_an_imported_name_that_is_gone(check: ModuleType) -> None:
    found = moved(check, "vllm/v1/worker/gpu/sample/gumbel.py", "def gumbel_noised_argmax(", "def noised_argmax(")
    assert ("imported", "vllm.v1.worker.gpu.sample.gumbel:gumbel_noised_argmax", "gone", "") in found


@pytest.mark.parametrize(
    "file, old, new, attribute",
    [
        (  # engine/steps.py writes it
            "v1/core/sched/scheduler.py",
            "self.dynamic_sd_lookup",
            "self.drafts_by_batch",
            "vllm.v1.core.sched.scheduler:Scheduler.dynamic_sd_lookup",
        ),
        (  # engine/steps.py wraps it
            "v1/worker/gpu/model_runner.py",
            "def execute_model(",
            "def execute_rows(",
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
        ),
        (  # our scheduler reads it of the one it derives from
            "v1/core/sched/scheduler.py",
            "self.use_v2_model_runner",
            "self.is_v2",
            "vllm.v1.core.sched.scheduler:Scheduler.use_v2_model_runner",
        ),
    ],
)
def test_an_attribute_that_is_gone(check: ModuleType, file: str, old: str, new: str, attribute: str) -> None:
    assert ("reached", attribute, "gone", "") in moved(check, f"vllm/{file}", old, new)


def test_an_attribute_that_only_later_releases_have(check: ModuleType) -> None:
    """A patch with a first release is asked of sources from that release on; sources say which they are."""
    key = next(one.key for one in check.declared(check.frontend, minor=(9, 0)) if one.since > (0, 32))

    class Of(check.Sources):
        def __init__(self, minor: str) -> None:
            super().__init__(check.installed())
            self.number = minor

        def _read(self, path: str) -> str | None:
            return f"__version_tuple__ = {self.number}" if path == "vllm/_version.py" else super()._read(path)

    assert key not in {finding.name for finding in check.replaced(Of("(0, 32, 1)"))}
    assert key in {finding.name for finding in check.replaced(Of("(0, 33, 0)"))}


def test_a_folder_without_vllm_is_refused(check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["check_vllm.py", "--sources", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"has no vllm/__init__\.py; name the folder above it"):
        check.main()

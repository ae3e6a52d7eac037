"""What a release has moved is found in its sources."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

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


def moved(check: ModuleType, file: str, old: str, new: str) -> list:
    """Findings that are not ok, of the installed vLLM with one piece of its text replaced."""

    class Edited(check.Sources):
        def _read(self, path: str) -> str | None:
            text = super()._read(path)
            if path != file:
                return text
            assert old in text
            return text.replace(old, new)

    installed = check.installed()
    found = check.findings(Edited(installed), check.Sources(installed))
    assert {finding.what for finding in found} == {"replaced", "imported", "overridden"}
    return [(finding.what, finding.name, finding.state, finding.detail) for finding in found if finding.state != "ok"]


def test_the_installed_vllm_fits(check: ModuleType) -> None:
    assert moved(check, "vllm/version.py", "version", "version") == []


def test_a_replaced_attribute_that_is_gone(check: ModuleType) -> None:
    runner = "vllm/v1/worker/gpu_model_runner.py"
    (found,) = moved(check, runner, "def propose_draft_token_ids(", "def propose_drafts_elsewhere(")
    assert found[:3] == ("replaced", "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids", "gone")


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


def test_a_folder_without_vllm_is_refused(check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["check_vllm.py", "--sources", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"has no vllm/__init__\.py; name the folder above it"):
        check.main()

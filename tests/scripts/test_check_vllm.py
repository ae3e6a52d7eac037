"""scripts/check_vllm.py finds in a release's sources every attribute that moved."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SAMPLER_V1, GUMBEL = "vllm/v1/sample/rejection_sampler.py", "vllm/v1/worker/gpu/sample/gumbel.py"
SCHEDULER, RUNNER_V1 = "vllm/v1/core/sched/scheduler.py", "vllm/v1/worker/gpu_model_runner.py"
EXPAND = "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens"
PARAMETER = "no longer takes cu_num_tokens"
RANDOM = "vllm.v1.worker.gpu.sample.sampler:Sampler._sample_random"


@pytest.fixture(scope="module")
def check(root: Path) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("check_vllm", root / "scripts" / "check_vllm.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    module.known = module.Sources(module.installed())
    yield module
    del sys.modules[spec.name]


def moved(check: ModuleType, file: str, old: str, new: str) -> list[tuple[Any, ...]]:
    """Findings that are not ok, of the installed vLLM with one piece of its text replaced."""

    class Edited(check.Sources):
        def _read(self, path: str) -> str | None:
            text = super()._read(path)
            assert path != file or old in text
            return text.replace(old, new) if path == file else text

    edited = Edited(check.installed())
    edited.parsed = {name: tree for name, tree in check.known.parsed.items() if f"{name.replace('.', '/')}.py" != file}
    found = check.findings(edited, check.known)
    assert {finding.what for finding in found} == set(check.WHAT)
    return [(finding.what, finding.name, finding.state, finding.detail) for finding in found if finding.state != "ok"]


@pytest.mark.parametrize(
    ("file", "old", "new", "finding"),
    [
        pytest.param("vllm/version.py", "version", "version", None, id="installed release"),
        (SAMPLER_V1, "def expand_batch_to_tokens(", "def expand_elsewhere(", ("replaced", EXPAND, "gone")),
        (SAMPLER_V1, "  cu_num_tokens: ", "  cu_tokens: ", ("replaced", EXPAND, "gone", PARAMETER)),
        (
            RUNNER_V1,
            "def propose_draft_token_ids(",
            "def propose_drafts_elsewhere(",
            ("overridden", "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids", "gone"),
        ),
        (
            "vllm/v1/worker/gpu/sample/sampler.py",
            "use_fused_sampler: bool,\n    )",
            "use_fused_sampler: bool,\n        more: int,\n    )",
            ("overridden", RANDOM, "changed", "parameters +more"),
        ),
        (
            GUMBEL,
            "def gumbel_noised_argmax(",
            "def noised_argmax(",
            ("imported", "vllm.v1.worker.gpu.sample.gumbel:gumbel_noised_argmax", "gone"),
        ),
        (
            SCHEDULER,
            "self.use_v2_model_runner",
            "self.is_v2",
            ("reached", "vllm.v1.core.sched.scheduler:Scheduler.use_v2_model_runner", "gone"),
        ),
    ],
)  # fmt: skip
def test_moved_attribute_is_found(check: ModuleType, file: str, old: str, new: str, finding: Any) -> None:
    found = moved(check, file, old, new)
    assert any(one[: len(finding)] == finding for one in found) if finding else found == []


def test_attribute_that_only_later_releases_have(check: ModuleType) -> None:
    """A patch with a first release is asked of sources from that release on; sources say which they are."""
    key = next(one.key for one in check.EVERY_PROCESS if one.since > (0, 32))

    class Of(check.Sources):
        def __init__(self, minor: str) -> None:
            super().__init__(check.installed())
            self.number = minor

        def _read(self, path: str) -> str | None:
            return f"__version_tuple__ = {self.number}" if path == "vllm/_version.py" else super()._read(path)

    assert key not in {finding.name for finding in check.replaced(Of("(0, 32, 1)"))}
    assert key in {finding.name for finding in check.replaced(Of("(0, 33, 0)"))}


def test_folder_without_vllm_is_refused(check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["check_vllm.py", "--sources", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"has no vllm/__init__\.py; name the folder above it"):
        check.main()

"""scripts/check_vllm.py finds in a release's sources every attribute that moved."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SAMPLER, GUMBEL = "vllm/v1/sample/rejection_sampler", "vllm/v1/worker/gpu/sample/gumbel"
SCHEDULER, RUNNER = "vllm/v1/core/sched/scheduler", "vllm/v1/worker/gpu_model_runner"
RANDOM, LAST = "vllm/v1/worker/gpu/sample/sampler", "use_fused_sampler: bool,\n    )"
MORE, EXPAND = f"{LAST[:-1]}    more: int,\n    )", "replaced: expand_batch_to_tokens"
# module, old and new text, how a finding begins
EDITS = [
    (SAMPLER, "def expand_batch_to_tokens(", "def elsewhere(", f"{EXPAND}, gone"),
    (RUNNER, "def propose_draft_token_ids(", "def elsewhere(", "overridden: GPUModelRunner.propose_draft_token"),
    (RANDOM, LAST, MORE, "overridden: Sampler._sample_random, changed parameters +more"),
    (GUMBEL, "def gumbel_noised_argmax(", "def elsewhere(", "imported: gumbel_noised_argmax, gone"),
    (SCHEDULER, "self.use_v2_model_runner", "self.is_v2", "reached: Scheduler.use_v2_model_runner, gone"),
]
PARAMETER = [(SAMPLER, "  cu_num_tokens: ", "  cu_tokens: ", f"{EXPAND}, gone no longer takes cu_num_tokens")]


@pytest.fixture(scope="module")
def check(root: Path) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("check_vllm", root / "scripts" / "check_vllm.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    module.known = module.Sources(module.installed())
    yield module
    del sys.modules[spec.name]


@pytest.mark.slow
@pytest.mark.parametrize("edited", [EDITS, PARAMETER, []], ids=["names", "parameter", "installed release"])
def test_moved_attributes_are_found(check: ModuleType, edited: list[tuple[str, str, str, str]]) -> None:
    """Of the installed vLLM with pieces of its text replaced; nothing is found where nothing is."""
    edits = {f"{module}.py": (old, new) for module, old, new, _ in edited}

    class Edited(check.Sources):
        def _read(self, path: str) -> str | None:
            text, (old, new) = super()._read(path), edits.get(path, ("", ""))
            assert text is None or old in text
            return text.replace(old, new) if old else text

    sources = Edited(check.installed())
    parsed = check.known.parsed.items()
    sources.parsed = {module: tree for module, tree in parsed if f"{module.replace('.', '/')}.py" not in edits}
    findings = check.findings(sources, check.known)
    assert {finding.what for finding in findings} == set(check.WHAT)
    lines = [
        f"{one.what}: {one.name.partition(':')[2]}, {one.state} {one.detail}" for one in findings if one.state != "ok"
    ]
    assert bool(lines) == bool(edits)
    for *_, wanted in edited:
        assert any(line.startswith(wanted) for line in lines), wanted

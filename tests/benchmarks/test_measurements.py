"""A draft has no more launches than its table says; options of kept plans are accepted; every script imports."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest

import benchmarks
from benchmarks import launches
from vllm_mtpc.files import read_yaml
from vllm_mtpc.train.options import parse

OTHERS = ("registry.yaml", "support.yaml")
PLANS = sorted(file for file in Path("benchmarks").glob("*.yaml") if file.name not in OTHERS)


@pytest.mark.parametrize("name", [*launches.SETTINGS, *launches.PASSES])
def test_draft_has_no_more_launches_and_bytes_than_before(name: str, root: Path) -> None:
    kept = json.loads((root / "benchmarks" / "results" / "launches.json").read_text())["rows"]
    (before,) = (row for row in kept if (row["head"], row["batch"]) == (name, 32))
    found = launches.measure(name, 32)
    assert all(found[key] <= before[key] for key in ("operations", "triton", "bytes", "flops"))
    assert min(found[key] for key in ("operations", "bytes", "flops")) > 0


@pytest.mark.parametrize("file", PLANS, ids=lambda file: file.stem)
def test_options_of_kept_plans_are_accepted(root: Path, file: Path) -> None:
    plan = read_yaml(root / file)
    for changed in plan["cells"].values():
        options = {name: value for name, value in (changed or {}).items() if name != "apart"}  # the grid's own
        parse({"data": ["text"], **plan["common"], "out": Path("head"), **options})


def test_every_script_imports() -> None:
    for module in walk_packages(benchmarks.__path__, "benchmarks."):
        if not module.name.endswith("__main__"):
            import_module(module.name)

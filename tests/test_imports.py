"""Packages import one way, without cycles, and three packages of the wheel import vLLM."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]

# A package imports those before it. A package is a folder of vllm_mtpc, or a file next to the folders.
ORDER = (
    *("errors", "families", "files", "flags"),
    *("kernels", "circuits", "heads", "config", "plan", "checkpoint"),
    *("proposers.options", "proposers.worker", "proposers.v1", "proposers.v2", "proposers.patches"),
    *("proposers.recorder", "models", "hf", "plugin"),
    *("engine", "report", "demo", "data", "eval", "regenerate", "plots", "train", "bench"),
    *("speculators", "cli", "benchmarks"),
)
KNOW_VLLM = ("proposers", "models", "engine", "benchmarks")  # the last is not in the wheel
INSIDE = {"engine_core", "model_runner"}
MOST_LINES = 20_000  # of Python in the wheel, docstrings and blank lines too


@cache
def files() -> dict[str, tuple[Path, ast.Module]]:
    """Every module of the wheel by its name, and those of benchmarks/, which nothing of the wheel may need."""
    found = {}
    for folder in ("vllm_mtpc", "proposers", "kernels", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            parts = ["vllm_mtpc", *parts] if parts[0] in ("proposers", "kernels") else parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path, ast.parse(path.read_text(encoding="utf-8"))
    return found


def package_of(module: str) -> str:
    package, *parts = module.split(".")
    return package if package == "benchmarks" else ".".join(parts[: 1 + (parts[:1] == ["proposers"])])


def imports(name: str) -> set[str]:
    """Modules of the package that a module imports anywhere: at its top, in functions, for annotations."""
    found = set()
    for node in ast.walk(files()[name][1]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {one if one in files() else node.module for one in inner}
    return {one for one in found if one in files() and one != name}


def test_packages_import_one_way():
    known = {package_of(name) for name in files()} - {"", "__main__", "proposers"}
    assert known <= set(ORDER), f"packages without a place: {sorted(known - set(ORDER))}"
    rank = {package: place for place, package in enumerate(ORDER)}
    pairs = [(name, other) for name in files() for other in imports(name) if package_of(other) in rank]
    wrong = [
        f"{name} imports {other}"
        for name, other in pairs
        if rank[package_of(other)] > rank.get(package_of(name), len(ORDER))
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_no_circle():
    TopologicalSorter({name: imports(name) for name in files()}).prepare()  # raises CycleError


def test_byte_models_are_imported_by_their_registration_only():
    pairs = [(name, other) for name in files() for other in imports(name) if package_of(other) == "models"]
    used = {other for name, other in pairs if package_of(name) != "models"}
    assert used == {"vllm_mtpc.models.registration"}


def test_vllm_is_imported_by_three_packages_only():
    wrong = []
    for name, (path, tree) in files().items():
        if package_of(name).split(".")[0] in KNOW_VLLM:
            continue
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found = [module for module in modules if module.split(".")[0] == "vllm"]
            found += [node.attr] if isinstance(node, ast.Attribute) and node.attr in INSIDE else []
            wrong += [f"{path.relative_to(ROOT)}:{node.lineno}: {one}" for one in found]
    assert not wrong, "\n".join(wrong)


def test_wheel_has_no_more_lines_than_allowed():
    lines: Counter[str] = Counter()
    for name, (path, _) in files().items():
        if package_of(name) != "benchmarks":
            lines[package_of(name)] += path.read_text(encoding="utf-8").count("\n")
    sizes = ", ".join(f"{package or 'vllm_mtpc'} {count:,}" for package, count in lines.most_common())
    assert lines.total() <= MOST_LINES, f"{lines.total():,} lines; allowed are {MOST_LINES:,}. Packages: {sizes}"

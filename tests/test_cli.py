"""The command line: exit codes, one-line errors, and what it imports."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import vllm_mtpc
from vllm_mtpc.checkpoint import save_head
from vllm_mtpc.cli import COMMANDS, guard, main
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import SETUP
from vllm_mtpc.heads import build_head

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path) -> Path:
    target = {"hidden_size": 4, "vocab_size": 7, "architectures": ["LlamaForCausalLM"]}
    config = HeadConfig.create(circuit="hmm", window=3, num_components=2, target=target, verifier="org/model")
    save_head(tmp_path / "head", config, build_head(config), {}, "card")
    return tmp_path / "head"


def python(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=False, cwd=ROOT)


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"vllm-mtpc {vllm_mtpc.__version__}\n"


@pytest.mark.parametrize("argv", [["--help"], []])
def test_help_names_every_command(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())  # long lines are broken
    assert all(name in text and command.help in text for name, command in COMMANDS.items())


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_its_own_help(capsys, name):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert f"vllm-mtpc {name}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["nonsense"], ["inspect"], ["inspect", "a", "b"], ["inspect", "--nonsense", "a"]])
def test_unknown_commands_and_options_are_usage_errors(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: vllm-mtpc" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "damaged"), [("nowhere", ""), ("config.json", ""), ("", "config.json"), ("", "model.safetensors")]
)
def test_bad_input_is_one_line_and_exit_code_one(folder, capsys, place, damaged):
    if damaged:
        (folder / damaged).write_text("")
    assert main(["inspect", str(folder / place)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("vllm-mtpc: error: ")
    assert len(err.splitlines()) == 1 and str(folder / place) in err


def raising(error: BaseException) -> Callable[[], int]:
    def call() -> int:
        raise error

    return call


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC, errno.ENOENT, errno.ENOTDIR, errno.EISDIR])
def test_file_system_error_is_one_line(code, capsys):
    assert guard("program", raising(OSError(code, "why", "place"))) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("program: error: place: why; ") and printed.count("\n") == 1


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "no path"), OSError(errno.EIO, "why", "place"), KeyError()])
def test_bug_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        guard("program", raising(error))


def test_interrupted_command_exits_with_130():
    assert guard("program", raising(KeyboardInterrupt())) == 130


def test_help_imports_neither_torch_nor_vllm():
    code = """
import contextlib, sys
from vllm_mtpc.cli import main
for argv in (["--help"], ["inspect", "--help"]):
    with contextlib.suppress(SystemExit):
        main(argv)
print(sorted({"torch", "vllm", "transformers", "rich"} & set(sys.modules)))
"""
    assert python("-c", code).stdout.splitlines()[-1] == "[]"


def test_python_m_runs_the_command_line(tmp_path):
    """An error, so that it is over before torch is imported."""
    result = python("-m", "vllm_mtpc", "inspect", str(tmp_path / "nowhere"))
    assert result.returncode == 1 and result.stderr.startswith("vllm-mtpc: error: no head at ")


def test_missing_torch_names_a_script_that_installs_everything(folder, root):
    """`pip install '.[cpu]'` brings a vLLM that does not start; tests/test_packaging.py runs what is named here."""
    code = f"""
import sys
sys.modules["torch"] = None
from vllm_mtpc.cli import main
sys.exit(main(["inspect", {str(folder)!r}]))
"""
    result = python("-c", code)
    assert result.returncode == 1
    assert result.stderr.startswith(f"vllm-mtpc: error: torch is not installed; type: {SETUP}")
    assert os.access(root / SETUP.split()[0], os.X_OK)
    assert len(result.stderr.splitlines()) == 1


def test_reading_a_head_does_not_import_the_compiler_of_torch(folder):
    """Filling tensors on the meta device would: seconds at the start of every process that loads a head."""
    code = f"""
import sys
from vllm_mtpc.cli import main
assert main(["inspect", {str(folder)!r}]) == 0
print(sorted({{"torch._dynamo", "sympy"}} & set(sys.modules)))
"""
    assert python("-c", code).stdout.splitlines()[-1] == "[]"

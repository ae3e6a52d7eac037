"""The command line: exit codes, one-line errors, and what it imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_mtpc
from vllm_mtpc.checkpoint import save_head
from vllm_mtpc.cli import COMMANDS, main
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


def test_inspect_of_a_good_head_succeeds(folder, capsys):
    assert main(["inspect", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert "hmm" in out
    assert "weights: ok" in out
    assert err == ""


@pytest.mark.parametrize("damage", ["missing", "file", "config", "weights"])
def test_bad_input_is_one_line_and_exit_code_one(folder, capsys, damage):
    path = folder
    if damage == "missing":
        path = folder / "nowhere"
    elif damage == "file":
        path = folder / "config.json"
    elif damage == "config":
        (folder / "config.json").write_text("{")
    else:
        (folder / "model.safetensors").write_bytes(b"")
    assert main(["inspect", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("vllm-mtpc: error: ")
    assert len(err.splitlines()) == 1
    assert str(path) in err


def test_bugs_keep_their_traceback(folder, monkeypatch):
    monkeypatch.setattr("vllm_mtpc.eval.inspect_command.inspect_head", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["inspect", str(folder)])


def test_interrupted_command_exits_with_130(folder, monkeypatch):
    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm_mtpc.eval.inspect_command.inspect_head", interrupt)
    assert main(["inspect", str(folder)]) == 130


def test_help_imports_neither_torch_nor_vllm():
    code = """
import sys
from vllm_mtpc.cli import main
for argv in (["--help"], ["inspect", "--help"]):
    try:
        main(argv)
    except SystemExit:
        pass
print(sorted({"torch", "vllm", "transformers", "rich"} & set(sys.modules)))
"""
    assert python("-c", code).stdout.splitlines()[-1] == "[]"


def test_python_m_runs_the_command_line(tmp_path):
    """An error, so that it is over before torch is imported."""
    result = python("-m", "vllm_mtpc", "inspect", str(tmp_path / "nowhere"))
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("vllm-mtpc: error: no head at ")
    assert len(result.stderr.splitlines()) == 1


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

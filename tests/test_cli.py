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
from vllm_mtpc.checkpoint import read_config, save_head
from vllm_mtpc.cli import COMMANDS, guard, main
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import SETUP, EngineFailed
from vllm_mtpc.families import FAMILIES, Family
from vllm_mtpc.heads.head import build_head

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path) -> Path:
    target = {"hidden_size": 4, "vocab_size": 7, "architectures": ["LlamaForCausalLM"]}
    config = HeadConfig.create(circuit="hmm", window=3, num_components=2, target=target, verifier="org/model")
    save_head(tmp_path / "head", config, build_head(config), {}, "card")
    return tmp_path / "head"


def python(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize(
    ("argv", "printed"),
    [
        (["--version"], f"vllm-mtpc {vllm_mtpc.__version__}"),
        *(([*argv], f"{name} {about}") for argv in ((), ("--help",)) for name, (about, _) in COMMANDS.items()),
        *(([name, "--help"], f"usage: vllm-mtpc {name}") for name in COMMANDS),
        *((words.split(), "vllm-mtpc 0") for words in ("-V", "-v")),  # as by vLLM
        *((words.split(), "usage: vllm-mtpc eval") for words in ("help eval", "eval -h")),
        (["train", "--help=learning"], "--learning-rate FLOAT"),
    ],
)
def test_version_and_help_are_printed(capsys, argv, printed):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 0
    assert printed in " ".join(capsys.readouterr().out.split())  # long lines are broken


@pytest.mark.parametrize(("place", "damaged"), [("nowhere", ""), ("config.json", ""), ("", "config.json")])
def test_bad_input_is_one_line_and_exit_code_one(folder, capsys, place, damaged):
    if damaged:
        (folder / damaged).write_text("")
    assert main(["eval", str(folder / place), "--data", __file__]) == 1
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


def test_failed_engine_prints_its_log_and_is_exit_code_one(capsys):
    assert guard("program", raising(EngineFailed("ended\nthe last line"))) == 1
    assert capsys.readouterr().err == "ended\nthe last line\n"


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "no path"), OSError(errno.EIO, "why", "place"), KeyError()])
def test_bug_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        guard("program", raising(error))
    assert guard("program", raising(KeyboardInterrupt())) == 130


HELP = "for words in ['--help'], ['eval', '--help']:\n try: main(words)\n except SystemExit: pass"


@pytest.mark.parametrize(
    ("code", "modules"),
    [
        ("import vllm_mtpc; assert vllm_mtpc.METHODS", {"torch", "pydantic", "vllm"}),
        (f"from vllm_mtpc.cli import main\n{HELP}", {"torch", "vllm", "transformers", "rich"}),
        ("from vllm_mtpc.eval import command, doctor", {"torch", "vllm", "transformers"}),
        ("from vllm_mtpc.eval import circuit_evaluator, evaluator, ptp_evaluator", {"vllm"}),
        # Filling tensors on the meta device would: seconds at the start of every process that loads a head
        ("from vllm_mtpc.checkpoint import load_head; load_head('HEAD')", {"torch._dynamo", "sympy"}),
    ],
)
def test_slow_modules_are_not_imported(folder, code, modules):
    check = f"import sys; print(sorted({modules} & set(sys.modules)))"
    assert python("-c", f"{code.replace('HEAD', str(folder))}\n{check}").stdout.splitlines()[-1] == "[]"


def test_missing_torch_names_a_script_that_installs_everything(folder, root):
    """`pip install '.[cpu]'` brings a vLLM that does not start."""
    code = "import sys; sys.modules['torch'] = None; from vllm_mtpc.cli import main; sys.exit(main(sys.argv[1:]))"
    result = python("-c", code, "eval", str(folder), "--data", __file__)
    assert result.returncode == 1
    assert result.stderr == f"vllm-mtpc: error: torch is not installed; type: {SETUP}\n"
    assert os.access(root / SETUP.split()[0], os.X_OK)


def test_a_family_of_the_table_is_read_by_it(monkeypatch, tmp_path: Path):
    """A config of a third family is read by the class that its entry names; no other code knows the name."""
    (tmp_path / "config.json").write_text('{"speculators_model_type": "third"}')
    monkeypatch.setitem(FAMILIES, "third", Family(config="tests.test_cli:Third"))
    assert read_config(tmp_path) == "read by the third"


class Third:
    @staticmethod
    def parse(values: dict[str, str], source: str) -> str:
        assert values == {"speculators_model_type": "third"} and source.endswith("config.json")
        return "read by the third"

"""Files of ours take their names when they are whole; the place of a result is checked before it is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_mtpc.cli import main
from vllm_mtpc.files import replace_file, replacing


def test_replace_file_does_not_follow_a_planted_link(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("of somebody else")
    (tmp_path / "file.partial").symlink_to(other)
    replace_file(tmp_path / "file", b"ours")
    assert other.read_text() == "of somebody else"
    assert (tmp_path / "file").read_bytes() == b"ours" and not (tmp_path / "file").is_symlink()


def test_replacing_refuses_a_link_planted_after_its_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: path.symlink_to(other))
    with pytest.raises(FileExistsError), replacing(tmp_path / "file"):
        pytest.fail("the link is written to")
    assert not other.exists()


def test_replacing_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    (tmp_path / "file.partial").write_text("half")
    with replacing(tmp_path / "file") as (partial,):
        assert partial.read_bytes() == b""
        partial.write_bytes(b"whole")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("file", b"whole")]


CACHE = ["cache", "--target", "x", "--data", "x", "--out", "x"]
HEAD = "vllm_mtpc/demo/assets/btree"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", HEAD, "--data", "x", "--device", "foo"], "--device foo: allowed are auto, cpu, cuda and cuda:N"),
        (["eval", HEAD, "--data", "x", "--device", "cuda:99"], "--device cuda:99: torch sees"),
        (["eval", HEAD, "--data", "x", "--json", "setup.py/x"], "--json setup.py/x: cannot be written"),
        (["doctor", HEAD, "--json", "setup.py/x"], "--json setup.py/x: cannot be written"),
        ([*CACHE, "--device", "foo"], "--device foo: allowed are"),
    ],
)
def test_commands_say_what_is_wrong_before_they_measure(words, message, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert f"vllm-mtpc: error: {message}" in printed and len(printed.splitlines()) == 1

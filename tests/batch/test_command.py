"""`vllm-mtpc batch` on this machine, its engine a fake server: faults, refusals, the summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.clusters import FAKE
from vllm_mtpc.batch import worker
from vllm_mtpc.cli import main


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Writes prompts; gives the words of a job on them, its server a fake one."""
    monkeypatch.setattr(worker, "PROGRAM", FAKE)

    def words(prompts: list[str], *more: str) -> list[str]:
        lines = [json.dumps({"id": f"n{number}", "prompt": prompt}) for number, prompt in enumerate(prompts)]
        (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
        where = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out")]
        return ["batch", *where, "--model", "m", "--part-lines", "4", *more]

    return words


def found(folder: Path) -> dict[str, dict]:
    """Answers by id; every id once."""
    lines = [json.loads(line) for part in folder.glob("part-*.jsonl") for line in part.read_text().splitlines()]
    answers = {line["custom_id"]: line for line in lines}
    assert len(answers) == len(lines)
    return answers


def text(answer: dict) -> str:
    return answer["response"]["body"]["choices"][0]["text"]


def test_second_run_sends_no_request(job, tmp_path, capsys):
    prompts = [f"prompt {number}" for number in range(30)]
    assert main(job(prompts)) == 0
    answers = found(tmp_path / "out")
    assert {name: text(answer) for name, answer in answers.items()} == {
        f"n{number}": prompt[::-1] for number, prompt in enumerate(prompts)
    }
    said = capsys.readouterr().out
    assert "30 lines answered, 0 of them with an error" in said
    assert "2.50 tokens/step" in said  # the fake server's counters: 1 + 15 / 10
    assert main(job(prompts)) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert found(tmp_path / "out") == answers


def test_lines_that_fail_are_recorded(job, tmp_path, capsys):
    """The engine dies with one line three times; the other lines are answered all the same."""
    assert main(job(["a", "refuse", "die", "bc"], "--attempts", "2")) == 0
    answers = found(tmp_path / "out")
    assert (text(answers["n0"]), text(answers["n3"])) == ("a", "cb")
    assert answers["n1"]["response"]["status_code"] == 400
    assert answers["n1"]["error"] == {"code": "400", "message": "no such thing"}
    assert answers["n2"]["response"] is None
    assert "died while it answered, 2 times" in answers["n2"]["error"]["message"]
    assert "4 lines answered, 2 of them with an error" in capsys.readouterr().out


def test_api_key_of_the_environment_is_ignored(job, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    assert main(job(["a"])) == 0
    assert not found(tmp_path / "out")["n0"]["response"]["body"]["api_key"]


def test_engine_that_does_not_start_is_one_line(job, capsys):
    words = job(["a"])
    words[words.index("m")] = "broken"
    assert main(words) == 1
    assert "error: the engine does not start: ValueError: this model is broken" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--engine", "max-model-len"], "KEY=VALUE is wanted"),
        (["--engine", "bogus=1"], "unrecognized arguments: --bogus 1"),
        (["--speculative-config", "{bad"], "key 'speculative_config' = '{bad': not JSON"),
        (["--part-lines", "0"], "key 'part_lines' = '0'"),
    ],
)
def test_refusals_are_one_line(job, capsys, more, message):
    assert main(job(["a"], *more)) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("vllm-mtpc: error: ")
    assert message in error


def test_missing_options_are_named(capsys):
    assert main(["batch", "--model", "m", "--output", "o"]) == 1
    assert "input is missing; type: vllm-mtpc batch --input FILE" in capsys.readouterr().err

"""`vllm-mtpc batch` with a fake server: input, output, faults, refusals, and a job that is killed."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_mtpc import progress
from vllm_mtpc.batch import command
from vllm_mtpc.batch.lines import Line, read, record
from vllm_mtpc.cli import main
from vllm_mtpc.errors import UsageError

COMPLETIONS = "/v1/completions"
FAKE = [sys.executable, str(Path(__file__).parents[1] / "support" / "fake_server.py")]


def write_prompts(path: Path, prompts: dict[str, str]) -> None:
    lines = [{"custom_id": name, "url": COMPLETIONS, "body": {"prompt": text}} for name, text in prompts.items()]
    path.write_text("\n".join(map(json.dumps, lines)))


def answers_of(file: Path) -> dict[str, dict[str, Any]]:
    """Complete lines of the output by id; every id has one."""
    lines = [json.loads(line) for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    answers = {line["custom_id"]: line for line in lines}
    assert len(answers) == len(lines)
    return answers


def text_of(answer: dict[str, Any]) -> str:
    return answer["response"]["body"]["choices"][0]["text"]


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Writes prompts; gives the words of a job on them, its server a fake one."""
    monkeypatch.setattr(command, "PROGRAM", FAKE)

    def words(prompts: list[str], *more: str, names: tuple[str, str] = ("--input", "--output")) -> list[str]:
        write_prompts(tmp_path / "in.jsonl", {f"n{number}": text for number, text in enumerate(prompts)})
        where = [names[0], str(tmp_path / "in.jsonl"), names[1], str(tmp_path / "out.jsonl")]
        return ["batch", *where, "--model", "m", *more]

    return words


@pytest.mark.parametrize("names", [("-i", "-o"), ("--input-file", "--output-file")])
def test_64_lines_are_answered_once_with_progress(job, tmp_path, capsys, monkeypatch, names):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    monkeypatch.setenv("VLLM_API_KEY", "sesame")  # of another server
    words = job([f"prompt {number}" for number in range(64)], names=names)
    assert main(words) == 0
    answers = answers_of(tmp_path / "out.jsonl")
    assert {name: text_of(answer) for name, answer in answers.items()} == {
        f"n{number}": f"prompt {number}"[::-1] for number in range(64)
    }
    assert not any(answer["response"]["body"]["api_key"] for answer in answers.values())
    printed = capsys.readouterr()
    assert "64 lines answered, 0 of them with an error" in printed.out
    assert "2.50 tokens/step" in printed.out  # the fake server's counters: 1 + 15 / 10
    assert len(set(re.findall(r"answers: (\d+)/64", printed.err))) > 10
    assert main(words) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert answers_of(tmp_path / "out.jsonl") == answers


def test_lines_that_fail_are_recorded(job, tmp_path, capsys):
    """The engine dies with one line three times; the other lines are answered all the same."""
    assert main(job(["a", "refuse", "die", "bc"])) == 0
    answers = answers_of(tmp_path / "out.jsonl")
    assert (text_of(answers["n0"]), text_of(answers["n3"])) == ("a", "cb")
    assert answers["n1"]["response"]["status_code"] == 400
    assert answers["n1"]["error"] == {"code": "400", "message": "no such thing"}
    assert answers["n2"]["response"] is None
    assert "died while it answered, 3 times" in answers["n2"]["error"]["message"]
    assert "4 lines answered, 2 of them with an error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--model", "broken"], 1, "the engine does not start: ValueError: this model is broken"),
        (["--engine", "max-model-len"], 2, "KEY=VALUE is wanted"),
        (["--speculative-config", "{bad"], 2, "key 'speculative_config' = '{bad': not JSON"),
        (["--input", "absent.jsonl"], 1, "absent.jsonl: No such file"),
    ],
)
def test_refusals_are_one_line(job, capsys, more, code, message):
    assert main(job(["a"], *more)) == code
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("vllm-mtpc: error: ")
    assert message in error


def test_answers_of_another_job_are_refused(job, tmp_path, capsys):
    assert main(job(["a"])) == 0
    assert main(job(["a", "b"])) == 0  # its lines have ids
    assert main(job(["a", "b"], "--body", '{"max_tokens": 2}')) == 2
    assert "body {} (asked for: {'max_tokens': 2})" in capsys.readouterr().err


BAD_URLS = ("/v1/../mtpc/head", "/v1/%2e%2e/mtpc/head", "/v1/.\t./x", "/v1//x", "/v1/a?b", "/v1/a#b", "/v1/a\n")


def test_lines_of_files_are_requests_with_defaults(tmp_path):
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [], "max_tokens": 3}},
        {"custom_id": "b", "url": COMPLETIONS, "body": {"prompt": "once", "temperature": 1}},
    ]
    (tmp_path / "a.jsonl").write_text("\n" + json.dumps(lines[0]) + "\n\n")
    (tmp_path / "b.jsonl").write_text(json.dumps(lines[1]))
    assert read([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], {"max_tokens": 9, "temperature": 0}) == [
        Line("a", "/v1/chat/completions", {"messages": [], "max_tokens": 3, "temperature": 0}),
        Line("b", COMPLETIONS, {"prompt": "once", "temperature": 1, "max_tokens": 9}),
    ]


GOOD = {"custom_id": "x", "url": COMPLETIONS, "body": {"prompt": "a"}}


@pytest.mark.parametrize(
    ("text", "name", "fault"),
    [
        ('{"prompt": "cut of', "line-2", "Invalid JSON"),
        ('{"prompt": "\udcff"}', "line-2", "Invalid JSON"),
        ("[1, 2]", "line-2", "an object"),
        ({"custom_id": "x", "prompt": "a"}, "x", "key 'url' is missing"),
        ({"url": COMPLETIONS, "body": {}}, "line-2", "key 'custom_id' is missing"),
        ({**GOOD, "body": "a"}, "x", "key 'body' = 'a'"),
        ({**GOOD, "method": "GET"}, "x", "key 'method' = 'GET'"),
        *(({**GOOD, "url": url}, "x", "key 'url' =") for url in ("http://elsewhere/", *BAD_URLS)),
        ({**GOOD, "body": {"prompt": "a", "stream": True}}, "x", "a batch has no streams"),
    ],
)
def test_line_that_is_not_a_request_keeps_its_fault(tmp_path, text, name, fault):
    text = text if isinstance(text, str) else json.dumps(text)
    good = json.dumps({**GOOD, "custom_id": "good"})
    (tmp_path / "in.jsonl").write_text(f"{good}\n{text}\n", errors="surrogateescape")
    good, bad = read([tmp_path / "in.jsonl"], {})
    assert not good.fault and bad.id == name
    assert fault in bad.fault and "\n" not in bad.fault
    assert record(bad, fault=bad.fault)["error"]["message"] == bad.fault


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{json.dumps(GOOD)}\n" * 2, "line 2 of the input has an id of another line, 'x'"),
        ("\n", "no line in the input"),
    ],
)
def test_input_without_distinct_requests_is_refused(tmp_path, text, message):
    (tmp_path / "in.jsonl").write_text(text)
    with pytest.raises(UsageError, match=message):
        read([tmp_path / "in.jsonl"], {})


PROMPTS = {f"n{number}": f"prompt {number} " + "long " * (3000 * (number % 20 == 19)) for number in range(60)}
ANSWERS = {name: prompt[::-1] for name, prompt in PROMPTS.items()}
CODE = (
    "import sys; from vllm_mtpc.batch import command; from vllm_mtpc.cli import main; "
    f"command.PROGRAM = {FAKE}; command.IN_FLIGHT = 6; sys.exit(main(sys.argv[1:]))"
)
PATIENCE_S = 120.0


def test_job_killed_at_any_moment_is_resumed(tmp_path: Path) -> None:
    """What a killed job has written stays, and its servers end; at the end every line has one answer."""
    chance, kept, seen = random.Random(0), dict[str, dict[str, Any]](), [0]
    output, log = tmp_path / "out.jsonl", tmp_path / "log"
    write_prompts(tmp_path / "in.jsonl", PROMPTS)

    def start() -> subprocess.Popen[bytes]:
        """60 lines, six at once, 0.15 s each."""
        words = ["batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(output), "--model", "m"]
        command = [sys.executable, "-c", CODE, *words, "--body", '{"max_tokens": 15}']
        return subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT)

    def wait(is_so: Callable[[], bool], child: subprocess.Popen[bytes] | None = None) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert (child is None or child.poll() in (None, 0)) and time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)

    for new in (0, 9, 6):
        child, more = start(), len(kept) + new
        wait(lambda: output.exists() and len(answers_of(output)) >= more, child)  # noqa: B023
        time.sleep(chance.uniform(0, 0.2))
        child.kill()
        child.wait()
        found = answers_of(output)
        assert found.items() >= kept.items()
        kept = found
        seen.append(len(kept))
        servers = {answer["response"]["body"]["process"] for answer in kept.values()}
        wait(lambda: not any(Path(f"/proc/{server}").exists() for server in servers))  # noqa: B023
        with output.open("ab") as file:  # as an append that a kill cut off
            file.write(b'{"custom_id": "n')
    assert start().wait(PATIENCE_S) == 0, log.read_text()
    assert {name: text_of(answer) for name, answer in answers_of(output).items()} == ANSWERS
    assert any(0 < count < len(PROMPTS) for count in seen), seen  # else no kill came while it answered

"""What a batch job reads and how its output is kept, without an engine."""

from __future__ import annotations

import gzip
import json

import pytest

from vllm_mtpc.batch.lines import Line, Output, read, record, split_into_parts
from vllm_mtpc.errors import UsageError

BAD_URLS = ("/v1/../mtpc/head", "/v1/%2e%2e/mtpc/head", "/v1/.\t./x", "/v1//x", "/v1/a?b", "/v1/a#b", "/v1/a\n")


def test_all_forms_are_read(tmp_path):
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [], "max_tokens": 3}},
        {"prompt": "once", "id": 7, "temperature": 1},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    (tmp_path / "in.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    found = read(str(tmp_path / "in.jsonl"), {"max_tokens": 9, "temperature": 0})
    assert found.lines == [
        Line("a", "/v1/chat/completions", {"messages": [], "max_tokens": 3, "temperature": 0}),
        Line("7", "/v1/completions", {"prompt": "once", "temperature": 1, "max_tokens": 9}),
        Line("line-5", "/v1/chat/completions", {**lines[2], "max_tokens": 9, "temperature": 0}),
    ]
    assert found.sha256
    (tmp_path / "ids.jsonl").write_text('{"prompt": "a", "custom_id": 0, "id": 5}\n{"prompt": "b", "stream": false}\n')
    zero, streaming = read(str(tmp_path / "ids.jsonl"), {"stream": True}).lines
    assert zero.id == "0" and "a batch has no streams" in zero.fault and not streaming.fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"prompt": "cut of', "not JSON"),
        ("[1, 2]", "a JSON object is wanted, this is a list"),
        ('{"id": "x", "text": "a"}', "no 'prompt', 'messages' or 'url'"),
        ('{"url": "/v1/completions"}', "body: a JSON object is wanted"),
        ('{"url": "http://elsewhere/", "body": {}}', "POST to a url that begins with /v1/"),
        ('{"method": "GET", "url": "/v1/models", "body": {}}', "POST to a url that begins with /v1/"),
        *((json.dumps({"url": url, "body": {}}), "POST to a url that begins with /v1/") for url in BAD_URLS),
        ('{"prompt": "a", "stream": true}', "a batch has no streams"),
    ],
)
def test_line_that_is_not_a_request_keeps_its_fault(tmp_path, text, fault):
    (tmp_path / "in.jsonl").write_text(f'{{"prompt": "good"}}\n{text}\n')
    good, bad = read(str(tmp_path / "in.jsonl"), {}).lines
    assert not good.fault
    assert fault in bad.fault
    assert record(bad, fault=bad.fault)["error"]["message"] == bad.fault


def test_folders_globs_and_gzip(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"prompt": "b"}\n')
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"prompt": "a"}\n')
    (tmp_path / "c.txt").write_text("no line")
    assert [line.body["prompt"] for line in read(str(tmp_path), {}).lines] == ["a", "b"]
    assert [line.body["prompt"] for line in read(str(tmp_path / "*.jsonl"), {}).lines] == ["b"]


def test_unreadable_input_is_refused(tmp_path):
    (tmp_path / "twice.jsonl").write_text('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": "1"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, message in (
        ("twice.jsonl", "id '1' is on lines 1 and 2"),
        ("empty.jsonl", "no line in it"),
        ("absent.jsonl", "cannot be read"),
        ("nope*.jsonl", r"nope\*.jsonl: cannot be read: no file matches"),
    ):
        with pytest.raises(UsageError, match=message) as refused:
            read(str(tmp_path / name), {})
        assert "\n" not in str(refused.value)


@pytest.fixture
def input_(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(f'{{"prompt": "{n}", "id": {n}}}\n' for n in range(10)))
    return read(str(tmp_path / "in.jsonl"), {})


def answers(lines):
    return "".join(json.dumps(record(line, 200, "{}")) + "\n" for line in lines)


@pytest.mark.parametrize("where", ["{tmp_path}/out", "memory://{name}"])
def test_answered_lines_are_left_out_of_parts(tmp_path, request, input_, where):
    where = where.format(tmp_path=tmp_path, name=request.node.name.replace("/", "_"))
    output = Output(where, {"model": "m"}, input_)
    assert output.answered == set()
    parts = split_into_parts(input_.lines, set(), 4)
    assert [len(part) for part in parts.values()] == [4, 4, 2]
    name = list(parts)[1]
    output.write(name, answers(parts[name]))
    output.write(name, answers(parts[name]))  # twice is once
    answered = Output(where, {"model": "m"}, input_).answered
    assert answered == {"4", "5", "6", "7"}
    left = [line.id for part in split_into_parts(input_.lines, answered, 4).values() for line in part]
    assert left == ["0", "1", "2", "3", "8", "9"]


def test_parts_are_written_atomically(tmp_path, input_, monkeypatch):
    """A full disk while a part is written: refused in one line, and nothing of it is there."""
    output = Output(str(tmp_path / "out"), {}, input_)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UsageError, match="No space left on device"):
        output.write("part-1.jsonl", answers(input_.lines))
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["job.json"]


def test_answers_of_another_job_are_refused(tmp_path, input_):
    path, unnamed = str(tmp_path / "out"), str(tmp_path / "unnamed")
    Output(path, {"model": "m", "body": {}}, input_)
    Output(path, {"model": "m", "body": {}}, input_._replace(lines=[]))  # its lines have ids
    with pytest.raises(UsageError, match="holds answers of another job"):
        Output(path, {"model": "other", "body": {}}, input_)
    Output(unnamed, {}, input_._replace(sha256="a"))
    with pytest.raises(UsageError, match="an input that has changed"):
        Output(unnamed, {}, input_._replace(sha256="b"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file; name a folder"):
        Output(str(tmp_path / "file"), {}, input_)

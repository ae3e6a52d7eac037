"""`vllm-mtpc batch` on this machine and on S3, its engine a fake server: input, output, faults, refusals."""

from __future__ import annotations

import gzip
import json
import uuid
from typing import Any

import fsspec
import pytest

from tests.support.clusters import FAKE, answers_of, text_of, write_prompts
from vllm_mtpc.batch import worker
from vllm_mtpc.batch.lines import Line, Output, read, record, split_into_parts
from vllm_mtpc.cli import main
from vllm_mtpc.errors import UsageError

PROMPTS = {f"n{number}": f"prompt {number}" for number in range(30)}
ANSWERS = {name: prompt[::-1] for name, prompt in PROMPTS.items()}


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Writes prompts; gives the words of a job on them, its server a fake one."""
    monkeypatch.setattr(worker, "PROGRAM", FAKE)

    def words(prompts: list[str] | dict[str, str], *more: str, place: Any = tmp_path) -> list[str]:
        named = prompts if isinstance(prompts, dict) else {f"n{number}": text for number, text in enumerate(prompts)}
        write_prompts(tmp_path / "in.jsonl", named)
        where = ["--input", f"{place}/in.jsonl", "--output", f"{place}/out"]
        return ["batch", *where, "--model", "m", "--part-lines", "4", *more]

    return words


def test_second_run_sends_no_request(job, tmp_path, capsys):
    assert main(job(PROMPTS)) == 0
    answers = answers_of(tmp_path / "out")
    assert {name: text_of(answer) for name, answer in answers.items()} == ANSWERS
    said = capsys.readouterr().out
    assert "30 lines answered, 0 of them with an error" in said
    assert "2.50 tokens/step" in said  # the fake server's counters: 1 + 15 / 10
    assert main(job(PROMPTS)) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert answers_of(tmp_path / "out") == answers


@pytest.fixture
def bucket(monkeypatch):
    """A bucket of a server on this machine that speaks the protocol of S3, and the store it is in."""
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install '.[s3]'")
    moto_server = pytest.importorskip("moto.server", reason="moto is not installed: pip install '.[test]'")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    store = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    name = f"jobs-{uuid.uuid4().hex}"  # servers of one process share what they store
    store.mkdir(name)
    yield name, store
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.stop()


def test_lost_part_on_s3_is_answered_again(job, bucket, capsys):
    name, store = bucket
    prompts = dict(list(PROMPTS.items())[:10])
    write_prompts(f"{name}/in.jsonl", prompts, store)
    words = job([], place=f"s3://{name}")
    lost = 10
    for _ in range(2):
        assert main(words) == 0
        assert f"{lost} lines answered, 0 of them with an error" in capsys.readouterr().out
        answers = answers_of(f"{name}/out", store)
        assert {id_: text_of(answer) for id_, answer in answers.items()} == {id_: ANSWERS[id_] for id_ in prompts}
        assert main(words) == 0 and "nothing to do" in capsys.readouterr().out
        part = store.glob(f"{name}/out/part-*.jsonl")[0]
        lost = store.cat_file(part).count(b"\n")
        store.rm_file(part)


def test_missing_bucket_is_one_line(job, bucket, capsys):
    for place in (f"s3://{bucket[0]}", "s3://nowhere"):
        assert main(job([], place=place)) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "cannot be read" in line


def test_lines_that_fail_are_recorded(job, tmp_path, capsys):
    """The engine dies with one line three times; the other lines are answered all the same."""
    assert main(job(["a", "refuse", "die", "bc"], "--attempts", "2")) == 0
    answers = answers_of(tmp_path / "out")
    assert (text_of(answers["n0"]), text_of(answers["n3"])) == ("a", "cb")
    assert answers["n1"]["response"]["status_code"] == 400
    assert answers["n1"]["error"] == {"code": "400", "message": "no such thing"}
    assert answers["n2"]["response"] is None
    assert "died while it answered, 2 times" in answers["n2"]["error"]["message"]
    assert "4 lines answered, 2 of them with an error" in capsys.readouterr().out


def test_api_key_of_the_environment_is_ignored(job, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    assert main(job(["a"])) == 0
    assert not answers_of(tmp_path / "out")["n0"]["response"]["body"]["api_key"]


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

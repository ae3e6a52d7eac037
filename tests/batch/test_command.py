"""`vllm-mtpc batch` on this machine and on S3, its engine a fake server: faults, refusals, the summary."""

from __future__ import annotations

import uuid
from typing import Any

import fsspec
import pytest

from tests.support.clusters import FAKE, answers_of, text_of, write_prompts
from vllm_mtpc.batch import worker
from vllm_mtpc.cli import main

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

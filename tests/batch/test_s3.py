"""`vllm-mtpc batch` from S3 to S3: a server that speaks its protocol on this machine, and the engine a fake one."""

from __future__ import annotations

import json
import uuid

import fsspec
import pytest

from tests.support.clusters import FAKE
from vllm_mtpc.batch import worker
from vllm_mtpc.cli import main

pytest.importorskip("s3fs", reason="s3fs is not installed: pip install '.[s3]'")
moto_server = pytest.importorskip("moto.server", reason="moto is not installed: pip install '.[test]'")
PROMPTS = {f"n{number}": f"prompt {number}" for number in range(10)}


@pytest.fixture
def bucket(monkeypatch):
    """A bucket with an input of ten lines, and the store it is in."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(worker, "PROGRAM", FAKE)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    store = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    name = f"jobs-{uuid.uuid4().hex}"  # servers of one process share what they store
    store.mkdir(name)
    text = "".join(json.dumps({"id": id_, "prompt": prompt}) + "\n" for id_, prompt in PROMPTS.items())
    store.pipe_file(f"{name}/in.jsonl", text.encode())
    yield name, store
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.stop()


def test_lost_part_is_answered_again(bucket, capsys):
    name, store = bucket
    where = ["--input", f"s3://{name}/in.jsonl", "--output", f"s3://{name}/out"]
    words = ["batch", *where, "--model", "m", "--part-lines", "4"]
    assert main(words) == 0
    assert len(parts(*bucket)) == 3  # 4 + 4 + 2 lines
    assert found(*bucket) == {id_: prompt[::-1] for id_, prompt in PROMPTS.items()}

    assert main(words) == 0
    assert "nothing to do" in capsys.readouterr().out

    store.rm_file(parts(*bucket)[0])
    lost = set(PROMPTS) - set(found(*bucket))
    assert lost
    assert main(words) == 0
    assert f"{len(lost)} lines answered, 0 of them with an error" in capsys.readouterr().out
    assert found(*bucket) == {id_: prompt[::-1] for id_, prompt in PROMPTS.items()}


def test_missing_bucket_is_one_line(bucket, capsys):
    name, _ = bucket
    output = ["--output", f"s3://{name}/out", "--model", "m"]
    assert main(["batch", "--input", f"s3://{name}/nothing.jsonl", *output]) == 1
    assert main(["batch", "--input", "s3://nowhere/in.jsonl", *output]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert all("cannot be read" in line for line in said)


def parts(name, store) -> list[str]:
    return store.glob(f"{name}/out/part-*.jsonl")


def found(name, store) -> dict[str, str]:
    """Answers by id, of all parts."""
    records = [json.loads(line) for part in parts(name, store) for line in store.cat_file(part).splitlines()]
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in records}

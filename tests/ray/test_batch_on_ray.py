"""`vllm-mtpc batch` on two Ray nodes of which one dies, its servers fake ones (fake_server.py)."""

from __future__ import annotations

import json
import threading
import time

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from tests.support.clusters import FAKE, cluster
from vllm_mtpc.batch import worker
from vllm_mtpc.cli import main


@pytest.mark.slow
def test_node_that_dies_loses_no_line(tmp_path, monkeypatch, capsys):
    """60 lines of 0.3 s, two engines that take four at once; the second node is killed after the first parts."""
    monkeypatch.setattr(worker, "PROGRAM", FAKE)
    lines = [json.dumps({"id": f"n{number}", "prompt": f"prompt {number}"}) for number in range(60)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out"
    with cluster(2, cpus=1) as nodes:

        def kill() -> None:
            while len(list(out.glob("part-*.jsonl"))) < 3:
                time.sleep(0.05)
            nodes.kill()

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        where = ["--input", str(tmp_path / "in.jsonl"), "--output", str(out), "--model", "m", "--replicas", "2"]
        size = ["--part-lines", "4", "--in-flight", "4", "--body", '{"max_tokens": 30}']
        assert main(["batch", *where, *size]) == 0
        killer.join(timeout=1)
        assert not killer.is_alive()
    answers = [json.loads(line) for part in out.glob("part-*.jsonl") for line in part.read_text().splitlines()]
    texts = {answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"] for answer in answers}
    assert len(answers) == len(texts) == 60
    assert texts == {f"n{number}": f"prompt {number}"[::-1] for number in range(60)}
    assert len({answer["response"]["body"]["process"] for answer in answers}) >= 2  # both nodes have answered
    assert "60 lines answered, 0 of them with an error" in capsys.readouterr().out

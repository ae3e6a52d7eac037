"""Clusters with a test each: real engines of the README's app, of Ray's LLM library and of one model on two nodes; and
with fake servers autoscaling and a node that dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import httpx
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from benchmarks.child_process import group
from benchmarks.ray_demo import BIN, ENVIRONMENT, PAIRS, is_healthy, wait
from tests.support import clusters
from tests.support.engine import Call, Engine, run
from tests.support.models import make_head, make_target
from tests.support.requests import prompt
from vllm_mtpc import demo
from vllm_mtpc.batch import worker
from vllm_mtpc.cli import main
from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.server import Client, free_port
from vllm_mtpc.ray_serve.deployments import build
from vllm_mtpc.ray_serve.options import ServeOptions

TARGET, HEAD = str(demo.path("target")), str(demo.path("btree"))
SPECULATIVE = {"method": "mtpc", "model": HEAD}
SAMPLING = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
GREEDY = {**SAMPLING, "return_token_ids": True}
ASKED = [prompt(20, 3 * number) for number in range(6)]
KEYS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 320, "kv_cache_memory_bytes": 1 << 27}


def assert_greedy_text(answers: list[tuple[int, dict]]) -> None:
    """The answers to ASKED are those of plain vLLM."""
    plain = run({"plain": Engine(TARGET, [Call(ASKED, [SAMPLING] * len(ASKED))], KEYS)}, "v1")["plain"]
    assert [status for status, _ in answers] == [200] * len(ASKED), answers
    assert [body["choices"][0]["token_ids"] for _, body in answers] == [tokens for (tokens,) in plain[0].tokens]


def typed(root: Path) -> list[str]:
    """The README's command, its TARGET and HEAD the demo's, one engine in place of two."""
    (line,) = re.findall(r"^serve run vllm_mtpc\.ray_serve:app .*$", (root / "README.md").read_text(), re.MULTILINE)
    words = shlex.split(line)
    assert words[:5] == ["serve", "run", "vllm_mtpc.ray_serve:app", "model=TARGET", "replicas=2"]
    assert json.loads(words[5].partition("=")[2]) == {"method": "mtpc", "model": "HEAD"}
    named = [word.replace("TARGET", TARGET).replace('"HEAD"', json.dumps(HEAD)) for word in words[1:]]
    return [str(BIN / "serve"), *(word.replace("replicas=2", "replicas=1") for word in named)]


def ask(client: Client, path: str, authorization: str | None, body: dict | None = None) -> tuple[int, dict]:
    headers = {"Authorization": authorization} if authorization else {}
    response = httpx.request("POST" if body else "GET", client.url + path, json=body, headers=headers, timeout=120)
    return response.status_code, json.loads(response.content or b"{}")


@pytest.mark.slow
def test_serve_run_requires_its_key_and_returns_greedy_text_of_plain_vllm(root: Path, tmp_path: Path) -> None:
    log, port, bodies = tmp_path / "log", free_port(), [{"model": TARGET, "prompt": one, **GREEDY} for one in ASKED]
    with clusters.cluster(cpus=3) as nodes:
        environment = {**os.environ, "RAY_ADDRESS": nodes.address, "VLLM_API_KEY": "sesame"}
        start = [str(BIN / "serve"), "start", "--proxy-location", "HeadOnly", "--http-port", str(port)]
        subprocess.run([*start, "--http-host", "127.0.0.1"], env=environment, check=True, capture_output=True)
        with group([*typed(root), f"env={json.dumps(ENVIRONMENT)}", *PAIRS], log, environment) as process:
            client = Client(port, timeout_s=120)
            wait(lambda: is_healthy(client) and "is ready at" in log.read_text(), 600, process, log)
            for key in (None, "sesame", "Bearer sesamex", "Bearer", "Basic sesame"):
                for path, body in (("/v1/models", None), ("/v1/completions", bodies[0])):
                    status, answer = ask(client, path, key, body)
                    assert (status, "choices" in answer or "data" in answer) == (401, False), key
            answers = [ask(client, "/v1/completions", "Bearer sesame", body) for body in bodies]
            assert client.acceptance().accepted_tokens > 0
    assert_greedy_text(answers)


def accepted_tokens() -> int:
    """Of all engines, by the metrics of Ray's node."""
    import ray

    (node,) = ray.nodes()
    with contextlib.suppress(OSError):
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urlopen(url, timeout=10) as response:
            return Acceptance.read(response.read().decode().replace("ray_vllm_", "vllm:")).accepted_tokens
    return 0


@pytest.mark.slow
def test_ray_serve_llm_returns_greedy_text_of_plain_vllm() -> None:
    """`ray.serve.llm` as docs/ray.md has it: it gives a head to vLLM as it is."""
    from ray.serve.llm import LLMConfig, build_openai_app

    config = LLMConfig(
        model_loading_config={"model_id": "demo", "model_source": TARGET},
        engine_kwargs={**KEYS, "speculative_config": SPECULATIVE},
        placement_group_config={"bundles": [{"CPU": 1}]},
        runtime_env={"env_vars": ENVIRONMENT},
    )
    arguments = config.get_engine_config().get_initialization_kwargs()
    assert arguments["speculative_config"] == SPECULATIVE
    assert arguments["distributed_executor_backend"] == "mp"  # on a CPU the executor is vLLM's own
    with clusters.serving(lambda: build_openai_app({"llm_configs": [config]}), cpus=4) as client:
        answers = [clusters.ask(client, one, model="demo", **GREEDY) for one in ASKED]
        wait(lambda: accepted_tokens() > 0, 60)  # they come a few seconds late
    assert_greedy_text(answers)


# vLLM's Ray executor takes accelerators only: a CPU platform with one "GPU" a worker
PLATFORM = """
from vllm.platforms.cpu import CpuPlatform

class RayCpuPlatform(CpuPlatform):
    ray_device_key = "GPU"

def register():
    return "mtpc_test_platform.RayCpuPlatform"
"""


def install_platform(folder: Path) -> None:
    """Make a distribution that vLLM finds by its entry point in every process with the folder on its path."""
    info = folder / "mtpc_test_platform-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "mtpc_test_platform.py").write_text(PLATFORM)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mtpc_test_platform\nVersion: 1.0\n")
    entry = "mtpc_test_platform = mtpc_test_platform:register"
    (info / "entry_points.txt").write_text(f"[vllm.platform_plugins]\n{entry}\n")


@pytest.mark.slow
def test_tensor_parallel_over_two_nodes(tmp_path: Path) -> None:
    """vLLM's Ray executor. Each node has one "GPU", so the two workers, both with the plugin, cannot share one."""
    target = make_target(tmp_path / "target", vocab_size=32, seed=3)
    make_head(tmp_path / "btree", target, "btree", window=5, components=3)
    install_platform(tmp_path / "plugin")
    path = str(tmp_path / "plugin")
    prompts = [[3, 9, 4], [7, 7, 1, 12, 5, 2], [8]]
    greedy = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "detokenize": False}
    calls = [Call(prompts, [greedy] * 3), Call(prompts, [{**greedy, "temperature": 1.0, "seed": 11}] * 3)]

    def engine(**arguments: Any) -> Engine:
        return Engine(str(tmp_path / "target"), calls, {"skip_tokenizer_init": True, "max_model_len": 64, **arguments})

    drafts = {"speculative_config": {"method": "mtpc", "model": str(tmp_path / "btree")}}
    on_ray = engine(**drafts, tensor_parallel_size=2, distributed_executor_backend="ray")
    environment = {"PYTHONPATH": path, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    with clusters.cluster(2, gpus=1, **environment) as nodes:
        two = run({"drafted": on_ray}, "v1", RAY_ADDRESS=nodes.address)["drafted"]
    one = run({"plain": engine(), "drafted": engine(**drafts)}, "v1")
    assert two[0].tokens == one["plain"][0].tokens
    assert two[1].tokens == one["drafted"][1].tokens  # seeded: both ranks drew the same drafts
    assert two[0].metrics["vllm:spec_decode_num_accepted_tokens"] > 0


def replicas() -> int:
    from ray import serve

    states = serve.status().applications["default"].deployments["Engine"].replica_states
    return states.get("RUNNING", 0)


@pytest.mark.slow
def test_engines_scale_with_requests():
    quick = {"upscale_delay_s": 0.5, "downscale_delay_s": 1, "look_back_period_s": 2, "metrics_interval_s": 0.5}
    options = ServeOptions(model="m", max_replicas=2, target_ongoing_requests=2, autoscaling=quick, health_period_s=1)
    with clusters.serving(lambda: build(options, clusters.FAKE), cpus=3) as client, ThreadPoolExecutor(12) as pool:
        assert replicas() == 1
        found, deadline = set(), time.monotonic() + 180
        while len(found) < 2 and time.monotonic() < deadline:  # twelve at once, where two are an engine's share
            answers = list(pool.map(lambda number: clusters.ask(client, f"n {number}", max_tokens=100), range(12)))
            assert [status for status, _ in answers] == [200] * 12
            found |= {body["process"] for _, body in answers}
        assert len(found) == 2
        while replicas() != 1:
            assert time.monotonic() < deadline + 180
            time.sleep(0.5)
        assert clusters.ask(client, "abc")[0] == 200


@pytest.mark.slow
def test_node_that_dies_loses_no_line_of_a_batch_job(tmp_path, monkeypatch, capsys):
    """60 lines of 0.3 s, two engines that take four at once; the second node is killed after the first parts."""
    monkeypatch.setattr(worker, "PROGRAM", clusters.FAKE)
    prompts, out = {f"n{number}": f"prompt {number}" for number in range(60)}, tmp_path / "out"
    clusters.write_prompts(tmp_path / "in.jsonl", prompts)
    with clusters.cluster(2, cpus=1) as nodes:

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
    answers = clusters.answers_of(out)
    texts = {name: clusters.text_of(answer) for name, answer in answers.items()}
    assert texts == {name: prompt[::-1] for name, prompt in prompts.items()}
    assert len({one["response"]["body"]["process"] for one in answers.values()}) >= 2  # both nodes have answered
    assert "60 lines answered, 0 of them with an error" in capsys.readouterr().out

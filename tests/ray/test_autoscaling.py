"""The app's number of engines follows what is asked of it. Its servers are fake ones."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from tests.support.clusters import FAKE, ask, cluster
from vllm_mtpc.engine.server import Client, free_port
from vllm_mtpc.errors import UsageError
from vllm_mtpc.ray_serve.options import ServeOptions

QUICK = {"upscale_delay_s": 0.5, "downscale_delay_s": 1, "look_back_period_s": 2, "metrics_interval_s": 0.5}
PATIENCE_S = 180  # to see a replica come or go; a few seconds on an idle machine


def replicas() -> int:
    """Engines that run."""
    from ray import serve

    states = serve.status().applications["default"].deployments["Engine"].replica_states
    return states.get("RUNNING", 0)


def wait_for(count: int) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while replicas() != count and time.monotonic() < deadline:
        time.sleep(0.5)
    return replicas() == count


@pytest.mark.slow
def test_engines_scale_with_requests():
    from ray import serve

    from vllm_mtpc.ray_serve.deployments import build

    port = free_port()
    options = ServeOptions(model="m", max_replicas=2, target_ongoing_requests=2, autoscaling=QUICK, health_period_s=1)
    with cluster(cpus=3), ThreadPoolExecutor(12) as pool:
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        serve.run(build(options, FAKE), route_prefix="/")
        assert replicas() == 1
        client, processes = Client(port, timeout_s=60), set()
        deadline = time.monotonic() + PATIENCE_S
        while len(processes) < 2 and time.monotonic() < deadline:  # twelve at once, where two are an engine's share
            answers = list(pool.map(lambda number: ask(client, f"n {number}", max_tokens=100), range(12)))
            assert [status for status, _ in answers] == [200] * 12
            processes |= {body["process"] for _, body in answers}
        assert len(processes) == 2
        assert wait_for(1)
        assert ask(client, "abc")[0] == 200
        serve.shutdown()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"upscale_delay": 1}, "unknown key upscale_delay; allowed: aggregation_function, downscal"),
        ({"upscale_delay_s": -1}, "key 'upscale_delay_s' = -1: Input should be greater"),
    ],
)
def test_unknown_autoscaling_keys_are_refused(given, message):
    from vllm_mtpc.ray_serve.deployments import build

    with pytest.raises(UsageError, match="autoscaling: ") as refused:
        build(ServeOptions(model="m", max_replicas=2, autoscaling=given), FAKE)
    assert message in str(refused.value)

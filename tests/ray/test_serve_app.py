"""The app on Ray Serve with fake servers: its answers, and engines that die (retries: test_router.py)."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from prometheus_client.parser import text_string_to_metric_families

from tests.support.clusters import FAKE, ask, serving
from vllm_mtpc.engine.server import Client
from vllm_mtpc.ray_serve.deployments import build
from vllm_mtpc.ray_serve.options import ServeOptions


@pytest.fixture(scope="module")
def client():
    """A client of an app of two engines; a request may outlive one engine, and takes at most 15 seconds."""
    options = ServeOptions(model="m", replicas=2, attempts=2, request_timeout_s=15, health_period_s=1)
    with pytest.MonkeyPatch.context() as patch:

        def app():
            patch.setenv("VLLM_API_KEY", "sesame")  # after the nodes: it is not in their environment
            return build(options, FAKE)

        with serving(app, cpus=3) as client:
            yield client


def processes(client: Client) -> set[int]:
    """Servers that answer, once there are two of them."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: ask(client, "who", max_tokens=20), range(8)))
        found = {body["process"] for status, body in answers if status == 200}
        if len(found) == 2:
            return found
    raise AssertionError("no two engines answer")


def test_responses_and_errors_are_those_of_the_server(client):
    assert processes(client)
    status, body = ask(client, "abc")
    assert (status, body["choices"], body["token"]) == (200, [{"text": "cba"}], None)
    status, body = ask(client, "refuse")
    assert (status, body["error"]["message"]) == (400, "no such thing")
    assert client.send("/health").status_code == 200
    assert client.send("/nothing").status_code == 404


def test_headers_are_forwarded_both_ways(client):
    headers = {"Authorization": "Bearer me", "X-Request-Id": "seven"}
    response = httpx.post(f"{client.url}/v1/completions", json={"prompt": "x"}, headers=headers, timeout=60)
    assert response.json()["token"] == "Bearer me" and response.headers["X-Request-Id"] == "seven"


def test_api_key_reaches_engines_by_their_environment(client):
    """And stands in the command line of no process of the machine."""
    processes(client)
    assert ask(client, "abc")[1]["api_key"] == "sesame"
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # a process that has just ended
            assert b"sesame" not in place.read_bytes()


def stream(client: Client, prompt: str, on_first=lambda event: None) -> tuple[list[dict], list[float]]:
    """Events of a stream and when each came; `on_first` is called at the first one."""
    events, times, is_done = [], [], False
    body = {"prompt": prompt, "stream": True, "max_tokens": 20}
    with httpx.stream("POST", f"{client.url}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[len("data: ") :]))
                times.append(time.monotonic())
                if len(events) == 1:
                    on_first(events[0])
            is_done = is_done or line == "data: [DONE]"
        assert is_done
    return events, times


def test_streams_are_forwarded_without_delay(client):
    events, times = stream(client, "abcde")
    assert [event["choices"][0]["text"] for event in events] == list("abcde")
    assert times[-1] - times[0] > 0.4  # five events, 0.2 s apart


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_engine_that_ends_loses_no_request(client, how):
    """20 requests of 3 s are under way when one of the two servers is killed or stopped: the other one, or the one that
    replaces it, answers them. A stopped vLLM answers 200 with finish_reason "abort", which no client receives.
    """
    victim, other = processes(client)
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(ask, client, f"prompt {number}", max_tokens=300) for number in range(20)]
        time.sleep(1.0)
        os.kill(victim, how)
        answers = [future.result() for future in asked]
    assert [status for status, _ in answers] == [200] * 20
    assert [body["choices"] for _, body in answers] == [[{"text": f"prompt {n}"[::-1]}] for n in range(20)]
    assert victim not in {body["process"] for _, body in answers}
    assert other in processes(client)


def test_metrics_are_those_of_all_replicas(client):
    """One at random would give a counter that jumps."""
    processes(client)
    pages = [counts(client) for _ in range(10)]
    assert len(pages[0]) == 2 and all(page == pages[0] for page in pages)
    assert ask(client, "abc")[0] == 200
    assert sum(counts(client).values()) == sum(pages[0].values()) + 1


def counts(client: Client) -> dict[str, float]:
    """Requests by replica, as the app's page has them."""
    answer = client.send("/metrics", timeout_s=30)
    assert answer.status_code == 200
    found = [one for family in text_string_to_metric_families(answer.text) for one in family.samples]
    return {one.labels["replica"]: one.value for one in found if one.name == "fake:asked_total"}


def test_started_stream_ends_with_an_error(client):
    processes(client)
    events, _ = stream(client, "abcdefghij", on_first=lambda event: os.kill(event["process"], signal.SIGKILL))
    assert "died" in events[-1]["error"]["message"]
    assert 2 <= len(events) < 10

"""One model on two nodes: vLLM's Ray executor loads the plugin in every worker."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

import ray
from ray.cluster_utils import Cluster

from tests.support.engine import Call, Engine, run
from tests.support.models import make_head, make_target

# vLLM's Ray executor takes accelerators only: a CPU platform with one "GPU" a worker
PLATFORM = """
from vllm.platforms.cpu import CpuPlatform

class RayCpuPlatform(CpuPlatform):
    ray_device_key = "GPU"

def register():
    return "mtpc_test_platform.RayCpuPlatform"
"""


STARTS = 4  # of a node: Ray gives one up after 30 s, which a busy machine may need


@contextlib.contextmanager
def cluster(count: int, **options: Any) -> Iterator[str]:
    """`count` equal nodes, for a driver in this process; yields their address.

    They have a folder of their own (a short path: sockets lie in it), so that tests do not find each other's.
    options: those of a node in lower case (num_cpus), environment of all processes in upper case.
    """
    environment = {name: value for name, value in options.items() if name.isupper()}
    node = {name: value for name, value in options.items() if not name.isupper()}
    node |= {"object_store_memory": 80 << 20, "include_dashboard": False}  # Ray's minimum: 75 MB
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mtpc-ray-", ignore_cleanup_errors=True))
        environment |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        stack.enter_context(mock.patch.dict(os.environ, environment))
        nodes = Cluster()
        stack.callback(nodes.shutdown)
        for number in range(count):
            add_node(nodes, **node, **({} if number else {"gcs_server_port": 0}))
        stack.callback(ray.shutdown)
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes.address


def add_node(nodes: Any, **options: Any) -> None:
    for left in reversed(range(STARTS)):
        try:
            nodes.add_node(**options)
            return
        except Exception as error:  # Ray has no class for this
            if "timed out" not in str(error) or not left:
                raise


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
    with cluster(2, num_cpus=2, num_gpus=1, **environment) as address:
        two = run({"drafted": on_ray}, "v1", RAY_ADDRESS=address)["drafted"]
    one = run({"plain": engine(), "drafted": engine(**drafts)}, "v1")
    assert two[0].tokens == one["plain"][0].tokens
    assert two[1].tokens == one["drafted"][1].tokens  # seeded: both ranks drew the same drafts
    assert two[0].metrics["vllm:spec_decode_num_accepted_tokens"] > 0

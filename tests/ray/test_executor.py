"""vLLM's Ray executor: the two halves of a model on two nodes, the plugin in the workers of both."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from tests.support.clusters import cluster
from tests.support.engine import Call, Engine, run
from tests.support.models import make_head, make_target

PROMPTS = [[3, 9, 4], [7, 7, 1, 12, 5, 2], [8]]
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "detokenize": False}
ON_RAY = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}


@pytest.mark.slow
def test_tensor_parallel_over_two_nodes(tmp_path) -> None:
    """Slow: two Ray nodes and six engine processes. Each node has one "GPU", so the two workers cannot share one."""
    from tests.support.cpu_platform import install

    target = make_target(tmp_path / "target", vocab_size=32, seed=3)
    make_head(tmp_path / "btree", target, "btree", window=5, components=3)
    (tmp_path / "plugin").mkdir()
    path = str(install(tmp_path / "plugin"))

    def engine(with_head: bool, **arguments) -> Engine:
        head = {"method": "mtpc", "model": str(tmp_path / "btree")}
        drafts = {"speculative_config": head} if with_head else {}
        calls = [Call(PROMPTS, [GREEDY] * 3), Call(PROMPTS, [{**GREEDY, "temperature": 1.0, "seed": 11}] * 3)]
        arguments |= {"skip_tokenizer_init": True, "max_model_len": 64, **drafts}
        return Engine(str(tmp_path / "target"), calls, arguments)

    with cluster(2, gpus=1, PYTHONPATH=path, VLLM_CPU_OMP_THREADS_BIND="nobind", TORCHDYNAMO_DISABLE="1") as nodes:
        two = run({"drafted": engine(True, **ON_RAY)}, "v1", RAY_ADDRESS=nodes.address)
    one = run({"plain": engine(False), "drafted": engine(True)}, "v1")
    for replies in (*one.values(), *two.values()):
        assert not isinstance(replies, str), replies
    assert two["drafted"][0].tokens == one["plain"][0].tokens
    assert two["drafted"][1].tokens == one["drafted"][1].tokens  # seeded: both ranks drew the same drafts
    assert two["drafted"][0].metrics["vllm:spec_decode_num_accepted_tokens"] > 0

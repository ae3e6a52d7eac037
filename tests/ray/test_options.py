"""The options of the app on Ray Serve; every refusal is one line."""

from __future__ import annotations

import pytest

from vllm_mtpc import demo
from vllm_mtpc.engine.options import EngineOptions
from vllm_mtpc.errors import UsageError
from vllm_mtpc.ray_serve.options import ServeOptions, parse

TARGET = str(demo.path("target"))


def test_other_keys_are_flags_of_vllm_serve():
    given = {"model": TARGET, "replicas": "2", "max-model-len": "320", "enforce-eager": "true", "seed": 3}
    options = parse({**given, "speculative-config": '{"method": "mtpc", "model": "HEAD"}'})
    assert options.replicas == 2
    flags = ["--shutdown-timeout", "30", "--max-model-len", "320", "--enforce-eager", "--seed", "3"]
    assert options.command == [TARGET, *flags, "--speculative-config", '{"method": "mtpc", "model": "HEAD"}']


def test_folders_become_absolute_paths(tmp_path, monkeypatch):
    (tmp_path / "target").mkdir()
    (tmp_path / "head").mkdir()
    monkeypatch.chdir(tmp_path)
    options = parse({"model": "target", "speculative_config": {"method": "mtpc", "model": "head"}})
    assert options.model == str(tmp_path / "target")
    assert options.speculative_config["model"] == str(tmp_path / "head")
    assert parse({"model": "some/repository"}).model == "some/repository"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "model is missing; type: serve run vllm_mtpc.ray_serve:app model=TARGET"),
        ({"model": TARGET, "replicas": "many"}, "key 'replicas' = 'many'"),
        ({"model": TARGET, "speculative-config": "{bad"}, "key 'speculative_config' = '{bad': not JSON"),
        ({"model": TARGET, "autoscaling": "fast"}, "key 'autoscaling' = 'fast': not JSON"),
        ({"model": TARGET, "engine": {"seed": 3}}, "unrecognized arguments: --engine"),
        ({"model": TARGET, "port": 80}, "port=80 is not an engine's here: remove it; type: serve start --http-port"),
        ({"model": TARGET, "api-key": "sesame"}, "type: VLLM_API_KEY=... serve run vllm_mtpc.ray_serve:app model="),
        ({"model": TARGET, "uds": "x"}, "uds='x' is not an engine's here: remove it"),
        ({"model": TARGET, "bogus": 1}, "vllm serve: unrecognized arguments: --bogus 1"),
        ({"model": TARGET, "dtype": "float9"}, "argument --dtype: invalid choice: 'float9'"),
    ],
)
def test_refusals_are_one_line(given, message):
    with pytest.raises(UsageError) as refused:
        parse(given)
    shown = str(refused.value)
    assert message in shown and "\n" not in shown and "sesame" not in shown


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"autoscaling": {"upscale_delay": 1}},
            "autoscaling: unknown key upscale_delay; allowed: aggregation_function",
        ),
        ({"autoscaling": {"upscale_delay_s": -1}}, "autoscaling: key 'upscale_delay_s' = -1: Input should be greater"),
        ({"replicas": 3}, r"autoscaling: max_replicas \(2\) must be greater than or equal to initial_replicas \(3\)"),
        ({"autoscaling": {"upscale_delay_s": 1}, "max_replicas": None}, "it is off; name max_replicas"),
    ],
)
def test_autoscaling_that_serve_refuses_is_refused(given, message):
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    from vllm_mtpc.ray_serve.deployments import build

    with pytest.raises(UsageError, match=message):
        build(ServeOptions(**{"model": "m", "max_replicas": 2, **given}))


def test_gpus_follow_the_parallel_sizes():
    options = EngineOptions(model="m", engine={"tensor_parallel_size": "2", "pipeline_parallel_size": 2})
    assert (options.num_gpus(True), options.num_gpus(False)) == (4, 0)
    assert EngineOptions(model="m", gpus=0.5).num_gpus(True) == 0.5

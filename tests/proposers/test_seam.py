"""Every declared patch against the installed vLLM, and a vLLM that nobody asked for a head."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

from vllm_mtpc import demo, plugin
from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.proposers.seam import config, engine_core, frontend, patch, patches, versions, worker

PATCHES = patches(versions.vllm_minor())


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    plugin.register()


@pytest.mark.parametrize("declared", PATCHES, ids=lambda declared: declared.__name__)
def test_a_patch_fits_this_vllm(declared: type[patch.Patch]) -> None:
    importlib.import_module(declared.module)
    assert patch.applied[declared.key()] is declared
    assert not [problem for problem in patch.problems if problem.startswith(declared.key())]
    assert len(declared.reason) > 10


def test_registering_again_changes_nothing() -> None:
    from vllm.engine.arg_utils import EngineArgs

    before = EngineArgs.create_speculative_config
    plugin.register()
    assert EngineArgs.create_speculative_config is before


def test_register_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("a seam that cannot be installed")

    monkeypatch.setattr("vllm_mtpc.proposers.seam.install", broken)
    plugin.register()


def test_registering_is_cheap() -> None:
    """Nothing heavy is loaded, so a vLLM without a head pays nothing for the plugin."""
    code = (
        "import sys, time; from vllm_mtpc import plugin; start = time.perf_counter(); plugin.register();"
        "seconds = time.perf_counter() - start;"
        "heavy = {'torch', 'vllm', 'transformers', 'safetensors', 'pydantic'} & set(sys.modules);"
        "assert not heavy, heavy; assert seconds < 2, seconds"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plain_vllm_falls_through() -> None:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=str(demo.path("target")))
    assert args.create_speculative_config(None, None) is None


def test_spec_method_flag_knows_our_methods() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert parser.parse_args(["--spec-method", "mtpc"]).spec_method == "mtpc"
    assert parser.parse_args(["--spec-method", "ngram"]).spec_method == "ngram"


@pytest.mark.parametrize(("method", "hint"), [("mtcp", "did you mean mtpc"), ("tpp", "did you mean ptp")])
def test_a_misspelled_method_is_answered_with_ours(method: str, hint: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=str(demo.path("target")), speculative_config={"method": method, "model": "x"})
    with pytest.raises(ServeConfigError, match=f"vLLM knows no method '{method}'; {hint}"):
        args.create_speculative_config(None, None)


def test_methods_of_vllm_are_not_taken_for_ours() -> None:
    for method in ("mtp", "ngram", "nothing like it", None):
        frontend.refuse_misspelt(method)


def test_a_misspelled_option_is_answered_with_what_was_meant() -> None:
    with pytest.raises(ServeConfigError, match="remove it; did you mean min_survival"):
        config._check_request({"method": "mtpc", "min_survial": 0}, config.USER_KEYS)


def test_untested_version_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "vllm_version", lambda: "0.99.1+cpu")
    assert versions.vllm_minor() == (0, 99)
    assert "0.99.1" in versions.untested_warning() and "untested" in versions.untested_warning()
    monkeypatch.setattr(versions, "vllm_version", lambda: f"{versions.TESTED[-1]}.7")
    assert versions.untested_warning() is None


def test_moved_attributes_are_reported_when_a_head_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(patch, "problems", ["vllm.somewhere:thing (this vLLM has no such attribute)"])
    args = EngineArgs(model=str(demo.path("target")), speculative_config={"method": "mtpc", "model": "x"})
    with pytest.raises(ValueError, match=r"has moved what vllm_mtpc hooks: vllm\.somewhere:thing"):
        args.create_speculative_config(None, None)


@pytest.mark.parametrize("process", ["worker, V1", "worker, V2", "engine core"])
def test_moved_attributes_are_reported_in_every_process(process: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most modules of vLLM are first imported where they run: what is missing there is refused there."""
    from vllm.v1.worker import gpu_model_runner

    monkeypatch.setattr(patch, "problems", ["vllm.somewhere:thing (it no longer takes x)"])
    config = SimpleNamespace(speculative_config=SimpleNamespace(method="mtpc"))
    monkeypatch.setattr(worker, "_is_ours", lambda config: True)
    with pytest.raises(ServeConfigError, match=r"has moved what vllm_mtpc hooks: vllm\.somewhere:thing"):
        if process == "worker, V1":
            gpu_model_runner.GPUModelRunner.__init__(SimpleNamespace(), config, "cpu")
        elif process == "worker, V2":
            worker.InitSpeculator.replace(lambda *_: None)(config, "cpu")
        else:
            engine_core.SchedulerInit.replace(lambda *_: None)(SimpleNamespace(), config)

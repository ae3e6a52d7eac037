"""Every declared patch against the installed vLLM, and a vLLM without a head."""

from __future__ import annotations

import colorsys
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.scheduler import SchedulerConfig
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from tests.support.configs import engine_config
from vllm_mtpc import demo, plugin
from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.models import registration
from vllm_mtpc.proposers.options import versions
from vllm_mtpc.proposers.patches import patch, scheduler, vllm_patches, worker
from vllm_mtpc.proposers.v1.model_runner_v1 import HeadModelRunner as runner_v1
from vllm_mtpc.proposers.v2.model_runner_v2 import HeadModelRunner as runner_v2
from vllm_mtpc.proposers.worker.derive import derived


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    plugin.register()
    patch.apply(*vllm_patches.WITH_HEAD)


def never(original: Callable, *args: object) -> None: ...


@patch.patch("colorsys", "rgb_to_yiq")
def half_installed(original: Callable) -> Callable:
    raise ImportError("half an install")


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (patch.patch("colorsys", "gone")(never), ":gone .*AttributeError"),
        (patch.patch("colorsys", "rgb_to_yiq", needs=("r", "x"))(never), ":rgb_to_yiq .*no longer takes x"),
        (half_installed, r":rgb_to_yiq \(ImportError: half an install\)"),
    ],
)
def test_what_vllm_moved_is_reported_and_left_alone(
    declared: patch.Patch, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch, "applied", {})
    monkeypatch.setattr(patch, "problems", [])
    patch.apply(declared)
    assert colorsys.rgb_to_yiq(0, 0, 0) == (0, 0, 0)
    assert len(patch.problems) == 1 and re.match("colorsys" + said, patch.problems[0])


def test_registering_again_changes_nothing_and_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs

    before = EngineArgs.create_speculative_config
    plugin.register()
    assert EngineArgs.create_speculative_config is before
    monkeypatch.setattr("vllm_mtpc.proposers.patches.install", None)  # calling it raises
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


def test_untested_version_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "vllm_version", lambda: "0.99.1+cpu")
    assert versions.vllm_minor() == (0, 99)
    assert "0.99.1" in versions.untested_warning() and "untested" in versions.untested_warning()
    monkeypatch.setattr(versions, "vllm_version", lambda: f"{versions.TESTED[-1]}.7")
    assert versions.untested_warning() is None


@pytest.mark.parametrize("process", ["front end", "worker", "engine core"])
def test_moved_attributes_are_reported_in_every_process(process: str, request: pytest.FixtureRequest) -> None:
    """Most modules of vLLM are first imported where they run: attributes that are missing there are refused there."""
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=str(demo.path("target")), speculative_config={"method": "mtpc", "model": "x"})
    start = {
        "front end": lambda: args.create_speculative_config(None, None),
        "worker": lambda: worker.HeadWorker.init_device(SimpleNamespace()),
        "engine core": lambda: scheduler.HeadScheduler(None, None),
    }[process]
    patch.problems.append("vllm.somewhere:thing (it no longer takes x)")
    request.addfinalizer(patch.problems.clear)
    with pytest.raises(ServeConfigError, match=r"has moved what vllm_mtpc hooks: vllm\.somewhere:thing"):
        start()


def test_a_method_that_vllm_moved_is_named() -> None:
    class Theirs:
        def first(self, x: int) -> None: ...

    class Ours(Theirs):
        def first(self, x: int, *args: Any) -> None: ...

    class Moved(Theirs):
        def first(self, y: int) -> None: ...

    assert issubclass(derived(Ours, Theirs), Ours)
    with pytest.raises(
        ServeConfigError, match=r"has moved what vllm_mtpc hooks: .*Moved\.first \(it no longer takes x"
    ):
        derived(Ours, Moved)


@pytest.mark.parametrize(
    ("ours", "name"),
    [
        (worker.HeadWorker, "worker.gpu_worker.Worker"),
        (worker.HeadWorker, "worker.cpu_worker.CPUWorker"),
        (runner_v1, "worker.gpu_model_runner.GPUModelRunner"),
        (runner_v1, "worker.cpu_model_runner.CPUModelRunner"),
        (runner_v2, "worker.gpu.model_runner.GPUModelRunner"),
        (runner_v2, "worker.cpu.model_runner.CPUModelRunner"),
        (scheduler.HeadScheduler, "core.sched.scheduler.Scheduler"),
        (scheduler.HeadScheduler, "core.sched.async_scheduler.AsyncScheduler"),
    ],
)
def test_our_classes_fit_every_class_of_this_vllm(ours: type, name: str) -> None:
    theirs = resolve_obj_by_qualname(f"vllm.v1.{name}")
    made = derived(ours, theirs)
    assert issubclass(made, ours) and issubclass(made, theirs)


def test_a_configuration_names_our_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They survive the way to an engine's process, and follow what vLLM would choose; nothing is warned of."""
    given = {"method": "mtpc", "model": str(demo.path("btree"))}
    made = engine_config(demo.path("target"), given)
    sent = pickle.loads(pickle.dumps(made))
    assert {CPUWorker, worker.HeadWorker} < set(resolve_obj_by_qualname(sent.parallel_config.worker_cls).__mro__)
    warned: list[str] = []
    monkeypatch.setattr("vllm.config.scheduler.logger.warning_once", lambda *args: warned.append(args[0]))
    for is_async, base in ((False, Scheduler), (True, AsyncScheduler)):
        sent.scheduler_config.async_scheduling = is_async
        chosen = sent.scheduler_config.get_scheduler_cls()
        assert chosen.__mro__[1:3] == (scheduler.HeadScheduler, base)
    assert warned == [] and sent.scheduler_config.scheduler_cls is None


# What plugin.register() imports: the rest of the package is for those who serve a head.
REGISTERED = (
    "",
    ".plugin",
    ".proposers",
    ".proposers.patches",
    ".proposers.options",
    ".models",
    ".models.registration",
)
REGISTERED += tuple(f".proposers.patches.{name}" for name in ("patch", "vllm_patches"))
REGISTERED += tuple(f".proposers.options.{name}" for name in ("switches", "versions"))


def test_who_serves_no_head_needs_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything else of this package broken, vLLM is configured as if it were not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_mtpc"]:
        if name.removeprefix("vllm_mtpc") not in REGISTERED:
            monkeypatch.setitem(sys.modules, name, None)  # importing it raises
    with pytest.raises(ImportError):
        engine_config(demo.path("target"), {"method": "mtpc", "model": str(demo.path("btree"))})
    for asked in (None, {"method": "ngram", "num_speculative_tokens": 2}):
        made = engine_config(demo.path("target"), asked)
        assert made.speculative_config is None if asked is None else made.speculative_config.method == "ngram"
        assert resolve_obj_by_qualname(made.parallel_config.worker_cls) is CPUWorker
        assert type(made.scheduler_config) is SchedulerConfig
        made.scheduler_config.get_scheduler_cls()


def test_only_config_and_the_mend_are_replaced_without_a_head() -> None:
    """In the classes that run at every step nothing is."""
    for made in (GPUModelRunner, runner_v2.__mro__[1], Worker, Scheduler, AsyncScheduler):
        assert not [name for name, value in vars(made).items() if getattr(value, "__module__", "").startswith("vllm_m")]


def test_the_page_lists_every_replaced_attribute(root: Path) -> None:
    page = (root / "docs" / "internals.md").read_text(encoding="utf-8")
    table = page.partition("\n| vLLM attribute |")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `(?:vllm\.)?([\w.]+: [\w.]+)`", table, re.MULTILINE))
    patches = (*vllm_patches.EVERY_PROCESS, *vllm_patches.WITH_HEAD)
    every = {one.key for one in (*patches, scheduler.post_step, registration.try_get_generation_config)}
    assert listed == {key.removeprefix("vllm.").replace(":", ": ") for key in every} and len(listed) <= 16

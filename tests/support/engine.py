"""Run vLLM engines in a process of their own, on either model runner, and return their outputs.

A test describes engines (their arguments, then calls one after the other); `run` builds them in turn in one forked
process (tests/support/forks.py).
"""

from __future__ import annotations

import gc
import json
import os
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.demo import demo_heads
from tests.support import forks
from tests.support.faults import inject
from tests.support.recorders import RECORDED, TEXTS
from vllm_mtpc import demo
from vllm_mtpc.plan.draft_schedule import SCHEDULE_KEY

SMALL = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 26,
    "max_num_seqs": 8,
    "disable_log_stats": False,
    "seed": 0,
}
if forks.ON_GPU:  # vLLM's own: CUDA graphs, inductor, asynchronous scheduling; several engines may be alive
    del SMALL["enforce_eager"]
    SMALL |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 28}
SMALL |= json.loads(os.environ.get("MTPC_TEST_ENGINE", "{}"))
DEMO = demo.path("target").parent
# Environment of two tensor-parallel ranks on a CPU.
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"}


@dataclass
class Call:
    """One `LLM.generate`: prompts as token ids, one dict of SamplingParams arguments for each.

    lora: folder of the adapter to ask.
    sleep: level at which the engine sleeps before; without a GPU it stays awake.
    """

    prompts: list[list[int]]
    sampling: list[dict[str, Any]]
    lora: str | None = None
    sleep: int = 0


@dataclass
class Engine:
    """`LLM(model, **arguments)` and what to ask it; `injected` names an entry of faults.FAULTS."""

    model: str
    calls: list[Call]
    arguments: dict[str, Any] = field(default_factory=dict)
    injected: str | None = None


def ask(prompts: list[list[int]], max_tokens: int, **sampling: Any) -> Call:
    """The same request for each prompt: greedy where `sampling` has no temperature, and of `max_tokens` tokens."""
    return Call(
        prompts, [{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **sampling}] * len(prompts)
    )


def build(
    place: Path, head: str | None, calls: list[Call], injected: str | None = None, spec: Any = None, **arguments: Any
) -> Engine:
    """The engine of `place`/target, a tiny one where it has no tokenizer.

    head: the folder `place`/`head`, or a head of DEMO; None: without drafts. spec: `speculative_config` where it is not
    that of MtPC. All drafts are made in each step unless it has a schedule; None as schedule: by the online plan.
    """
    target = place / "target"
    if not (target / "tokenizer.json").exists():
        arguments = {"skip_tokenizer_init": True, "max_model_len": 64, **arguments}
    if head is not None:
        arguments["speculative_config"] = {
            "method": "mtpc",
            "model": str(demo_heads.path(head) if place == DEMO else place / head),
            SCHEDULE_KEY: "off",
            **(spec or {}),
        }
    return Engine(str(target), calls, arguments, injected)


@dataclass
class Reply:
    """Answers of one call, by prompt and sample, and the engine's counters after it."""

    tokens: list[list[list[int]]]
    texts: list[list[str]]
    finish: list[list[str | None]]
    logprobs: list[list[Any]]
    metrics: dict[str, float]
    recorded: list[Any] = field(default_factory=list)  # what an injected change noted while the engine ran
    prompt_logprobs: list[Any] = field(default_factory=list)
    modes: tuple[str, bool] = ("", False)  # CUDA graphs, asynchronous scheduling

    @property
    def accepted(self) -> float:
        """Drafts that were accepted, until the end of this call."""
        return self.metrics.get("vllm:spec_decode_num_accepted_tokens", 0)

    @property
    def drafted(self) -> float:
        return self.metrics.get("vllm:spec_decode_num_draft_tokens", 0)

    @property
    def steps(self) -> float:
        """Steps of a request that had drafts."""
        return self.metrics.get("vllm:spec_decode_num_drafts", 0)


def run(
    engines: dict[str, Engine],
    runner: str,
    async_scheduling: bool = True,
    timeout: float = 1200,
    **more_env: str,
) -> dict[str, Any]:
    """Return the replies of each engine by its name.

    Args:
        engines: Engines by name; each is started when the one before has ended.
        runner: One of tests.support.forks.ENVIRONMENTS.
        async_scheduling: Schedule asynchronously on V2, which on a CPU vLLM does not do by itself.
        timeout: Seconds for all engines together.
        more_env: Environment variables of the engines' process.
    """
    if async_scheduling and runner != "v1" and not forks.ON_GPU:
        more_env["MTPC_TEST_ASYNC"] = "1"
    replies = forks.call(runner, "tests.support.engine:answers", engines, timeout=timeout, **more_env)
    for name, reply in replies.items():
        assert not isinstance(reply, str), (name, reply)
    return replies


def run_with_plain(
    ours: Engine, runner: str, calls: list[Call] | None = None, **more: Any
) -> tuple[list[Reply], list[Reply]]:
    """Replies of an engine with a head, and of plain vLLM to the same calls or to `calls`."""
    arguments = {name: value for name, value in ours.arguments.items() if name != "speculative_config"}
    plain = replace(ours, calls=calls or ours.calls, arguments=arguments, injected=None)
    found = run({"ours": ours, "plain": plain}, runner, **more)
    return found["ours"], found["plain"]


def _answer(engine: Engine) -> list[Reply]:
    from vllm import LLM

    undo = inject(engine.injected) if engine.injected else None
    llm = LLM(engine.model, **{**SMALL, **engine.arguments})
    config, replies, texts = llm.llm_engine.vllm_config, [], []
    for call in engine.calls:
        outputs = _generate(llm, call)
        metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        per_position = next((m.values for m in llm.get_metrics() if m.name.endswith("tokens_per_pos")), None)
        replies.append(
            Reply(
                tokens=[[list(sample.token_ids) for sample in output.outputs] for output in outputs],
                texts=[[sample.text for sample in output.outputs] for output in outputs],
                finish=[[sample.finish_reason for sample in output.outputs] for output in outputs],
                logprobs=[[sample.logprobs for sample in output.outputs] for output in outputs],
                metrics={**metrics, "per_position": per_position},
                recorded=list(RECORDED),
                prompt_logprobs=[output.prompt_logprobs for output in outputs],
                modes=(config.compilation_config.cudagraph_mode.name, config.scheduler_config.async_scheduling),
            )
        )
        RECORDED.clear()
        answers = [output.outputs[0].token_ids for output in outputs]
        texts += [prompt + list(answer) for prompt, answer in zip(call.prompts, answers, strict=True)]
    TEXTS[:] = texts
    if undo:
        undo()
    return replies


def _generate(llm: Any, call: Call) -> list[Any]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    prompts, sampling = [{"prompt_token_ids": prompt} for prompt in call.prompts], []
    for given in call.sampling:
        structured = given.get("structured_outputs")
        structured = StructuredOutputsParams(**structured) if structured else None
        sampling.append(SamplingParams(**{**given, "structured_outputs": structured}))
    if call.sleep and forks.ON_GPU:
        _sleep(llm, call.sleep)
    lora = LoRARequest("adapter", 1, call.lora) if call.lora else None
    return llm.generate(prompts, sampling, use_tqdm=False, lora_request=lora)


def _sleep(llm: Any, level: int) -> None:
    """At level 2 weights are not kept: they are read from the checkpoint again."""
    llm.sleep(level=level)
    llm.wake_up(tags=["weights"])
    if level == 2:
        llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])


def answers(engines: dict[str, Engine]) -> dict[str, list[Reply] | str]:
    """Of engines that are started one after the other in this process."""
    if os.environ.get("MTPC_TEST_ASYNC") == "1":
        import sitecustomize  # which was imported before this variable was there

        sitecustomize._async_scheduling_on_cpu()
    replies: dict[str, list[Reply] | str] = {}
    for name, engine in engines.items():
        try:
            replies[name] = _answer(engine)
        except Exception:
            replies[name] = traceback.format_exc()
        gc.collect()
    return replies

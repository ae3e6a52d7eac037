"""The stages of the GPU programme, each a list of commands; what they share are models in the cache.

Everything measured is measured by commands that users have (`vllm-mtpc bench`, `train`, `regenerate`) or by tests.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.programme import Part, Programme
from vllm_mtpc import demo

MTPC = [sys.executable, "-m", "vllm_mtpc"]
CLIENTS = [1, 2, 4, 8, 16, 32, 64, 256]
EVERY_DRAFT = {"num_speculative_tokens_per_batch_size": "off", "min_survival": 0}


def words(*given: Any, **options: Any) -> list[str]:
    """Words of a command line; options by name, lists as several words, None left out."""
    found = [str(word) for word in given]
    for name, value in options.items():
        if value is not None:
            found += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list | tuple) else [value])]
    return found


# tests


def tests(programme: Programme) -> list[Part]:
    """Tests that have run on a CPU, natively, at vLLM's defaults but for float32 (tests/forks.py, tests/e2e/engine.py).

    In bfloat16 two tokens are often as likely as each other, and another batch decides between them: greedy outputs are
    compared there with VLLM_BATCH_INVARIANT=1.
    """
    on_gpu = {"MTPC_TEST_GPU": "1", "MTPC_TEST_ENGINE": json.dumps(programme.engine)}

    def tested(name: str, seconds: float, *selected: str) -> Part:
        # at toy size the selection alone: these run on the CPU in every run of all tests
        command = [sys.executable, "-m", "pytest", "-q", "-ra", *programme.size([], ["--collect-only"]), *selected]
        return Part(name, seconds, command, environment=programme.size(on_gpu, {}))

    def identity(name: str, heads: Sequence[str], seconds: float, dtype: str, **environment: str) -> Part:
        return bench_serve(
            programme, name, seconds, target=demo.path("target"), heads=[demo.path(head) for head in heads],
            dtype=dtype, temperature=0, concurrency=programme.size(32, 2), prompts=programme.size(200, 4),
            max_tokens=programme.size(128, 16), rounds=1, environment=environment,
        )  # fmt: skip

    law, ptp_law = "tests/e2e/test_law.py::test_law_v2", "tests/e2e/test_ptp_law.py"
    own = tested("graphs-sleep-seeds", 240, "tests/e2e/test_on_gpu.py")
    if programme.is_toy:
        command = [word for word in own.command if word != "--collect-only"]
        own = Part(own.name, own.seconds, command, environment={"MTPC_TEST_GPU": "toy"})
    ieee = {"TRITON_F32_DEFAULT": "ieee"}  # as in tests/forks.py
    return [
        tested("kernels", 240, "tests/kernels", "tests/heads/test_draft_params.py"),
        tested("law", 150, f"{law}[T=1]", "tests/e2e/test_law.py::test_planted_bias_is_caught_on_v2"),
        own,
        identity("identity-float32", programme.size(["ff", "cp", "hmm", "btree"], ["btree"]), 300, "float32", **ieee),
        *programme.size(
            [
                identity("identity-bfloat16", ["btree"], 200, "bfloat16", VLLM_BATCH_INVARIANT="1"),
                identity("identity-ptp", ["o-ptp"], 200, "float32", **ieee),
            ],
            [],  # a CPU has no such mode, and PTP heads take minutes there
        ),
        tested("greedy", 300, "tests/e2e/test_greedy.py", "-k", "v2"),
        tested("seeds", 120, "tests/e2e/test_limits.py", "-k", "seed"),
        tested("ptp", 420, "tests/e2e/test_ptp.py"),
        tested("ptp-law", 120, f"{ptp_law}::test_law_with_and_without_drafts", f"{ptp_law}::test_law_in_every_setting"),
        tested("law-settings", 420, law, "--deselect", f"{law}[T=1]"),
    ]


# kernels


def kernels(programme: Programme) -> list[Part]:
    """Each kernel against its definition, then drafts beside a step of targets of real size."""
    from vllm_mtpc.bench.kernel_cases import OPERATIONS

    parts = []
    for name in programme.size(list(OPERATIONS), ["couple"]):
        out = programme.cache / "kernels" / f"{name}.json"
        command = words(*MTPC, "bench", "kernels", only=name, repeats=programme.size(None, 2), json=out)
        parts.append(Part(f"each-{name}", 90, command, out))
    for target, sizes in programme.size(SIZES, TOY_SIZES).items():
        curves = programme.cache / "kernels" / f"steps-{target}.json"
        command = words(
            sys.executable, "-m", "benchmarks.gpu.steps", shape=target, windows=sorted({n for n, _ in sizes["heads"]}),
            batch=programme.size([1, 2, 4, 8, 16, 32, 64], [1, 2]), engine=json.dumps(programme.engine), json=curves,
        )  # fmt: skip
        parts.append(Part(f"steps-{target}", 300, command, curves))
        for n, r in sizes["heads"]:
            out = programme.cache / "kernels" / f"draft-{target}-n{n}-r{r}.json"
            command = words(
                *MTPC, "bench", "draft", shape=f"D={sizes['D']},V={sizes['V']},n={n},r={r}", curves=curves, json=out,
                circuits=["ff"] if r == 1 else ["cp", "hmm", "btree"], temperature=1,
                batch=programme.size(None, [1, 2]), repeats=programme.size(None, 2),
            )  # fmt: skip
            parts.append(Part(f"draft-{target}-n{n}-r{r}", 40, command, out, [curves]))
    return parts


SIZES = {
    "evabyte-6.5b": {"D": 4096, "V": 320, "heads": [(n, r) for n in (8, 16) for r in (1, 8, 32)]},
    "llama-8b": {"D": 4096, "V": 128256, "heads": [(8, r) for r in (1, 4, 8)]},
}
TOY_SIZES = {"1x64": {"D": 64, "V": 320, "heads": [(4, 1), (4, 2)]}}


# serve


def serve(programme: Programme) -> list[Part]:
    """Plain vLLM, ngram and heads side by side: on the demo, then on the target of stage `target`."""
    return [
        *on_target(
            programme, "demo", demo.path("target"), {name: demo.path(name) for name in (*demo.CIRCUITS, "o-ptp")}
        ),
    ]


def on_target(programme: Programme, label: str, target: Path, heads: dict[str, Path]) -> list[Part]:
    """A part for ngram and one for each head, at its defaults and with every draft verified; plain before and after."""
    sizes = {
        "concurrency": programme.size(CLIENTS, [1, 2]),
        "prompts": programme.size(8, 2),
        "max_tokens": programme.size(None, 16),
        "rounds": 1,
        "dtype": programme.size("bfloat16", None),
        "order": programme.size("bracketed", None),
    }
    needs = [] if label == "demo" else [target / "model.safetensors"]
    parts = [bench_serve(programme, f"{label}-ngram", 250, target=target, peers=["ngram"], needs=needs, **sizes)]
    for name, head in programme.size(heads, {"btree": heads["btree"]} if "btree" in heads else heads).items():
        variant = [f"every draft={json.dumps(EVERY_DRAFT)}"] if name in demo.CIRCUITS or "ptp" not in name else []
        parts.append(
            bench_serve(
                programme,
                f"{label}-{name}",
                360,
                target=target,
                heads=[head],
                variant=variant or None,
                needs=[*needs, head / "config.json"],
                **sizes,
            )
        )
    return parts


def bench_serve(
    programme: Programme,
    name: str,
    seconds: float,
    needs: Sequence[Path] = (),
    environment: dict[str, str] | None = None,
    peers: Sequence[str] = (),
    **options: Any,
) -> Part:
    """`vllm-mtpc bench serve` on Model Runner V2, which a CPU has not."""
    out = programme.cache / "serve" / f"{name}.json"
    engine = {**options.pop("engine", {}), **programme.engine}
    command = words(*MTPC, "bench", "serve", peers=list(peers), engine=json.dumps(engine), json=out, **options)
    v2 = programme.size({"VLLM_USE_V2_MODEL_RUNNER": "1"}, {})
    return Part(name, seconds, command, out, needs, {**v2, **(environment or {})})


STAGES: dict[str, Callable[[Programme], list[Part]]] = {
    "tests": tests,
    "kernels": kernels,
    "serve": serve,
}

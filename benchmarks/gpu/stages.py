"""Stages of the GPU programme: lists of commands (`vllm-mtpc`, benchmarks, tests) that share models in the cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.demo import demo_heads
from benchmarks.gpu.parts import ALL_DRAFTS, Part, Programme, bench_serve, windowed, words

# the first failure ends it, with the reason: time on a GPU is short
PYTEST = [sys.executable, "-m", "pytest", "-q", "-ra", "-x", "--tb=short"]
PASSED = r"\b[1-9]\d* passed"  # pytest ends with 0 where every test was skipped
# those of test_compiled.py need no GPU
KERNELS = ["tests/kernels/test_small_kernels.py", "tests/kernels/test_draft.py", "tests/heads/test_draft_params.py"]
CLIENTS = [1, 2, 4, 8, 16, 32, 64, 256]
EVERY_DRAFT = "every draft=" + json.dumps(ALL_DRAFTS)
IEEE = {"TRITON_F32_DEFAULT": "ieee"}  # as in tests/support/forks.py
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
NOT_COMPILED = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}}


# tests


def tests(programme: Programme) -> list[Part]:
    """Tests that have run on a CPU, natively, at vLLM's defaults but for float32 (tests/support/).

    In bfloat16 two tokens are often as likely as each other, and another batch decides between them: greedy outputs are
    compared there with VLLM_BATCH_INVARIANT=1.
    """
    on_gpu = {"MTPC_TEST_GPU": "1", "MTPC_TEST_ENGINE": json.dumps(programme.engine)}

    def tested(name: str, seconds: float, *selected: str) -> Part:
        # at toy size the selection alone: these run on the CPU in every run of all tests
        command = [*PYTEST, *programme.size([], ["--collect-only"]), *selected]
        return Part(name, seconds, command, environment=programme.size(on_gpu, {}), proof=programme.size(PASSED, None))

    def only_a_gpus() -> Part:
        command = [*PYTEST, "tests/e2e/test_on_gpu.py"]
        environment = programme.size(on_gpu, {"MTPC_TEST_GPU": "toy"})
        return Part("graphs-sleep-seeds", 300, command, environment=environment, proof=PASSED)

    first, every = (
        f"tests/e2e/test_distribution.py::test_distribution_of_{what}_tokens" for what in ("the_first", "all")
    )
    parts = [
        tested("kernels", 240, *KERNELS, "-m", "not slow"),
        tested("distribution", 150, first, "-k", "not V1"),
        only_a_gpus(),
        identity(programme, "identity-float32", ["ff", "cp", "hmm", "btree", "late"], 300, environment=IEEE),
        identity(programme, "identity-bfloat16", ["btree"], 200, dtype="bfloat16", environment=INVARIANT),
        tested("greedy", 300, "tests/e2e/test_matrix.py", "-k", "every_batch and v2"),
        tested("grammar", 400, "tests/e2e/test_grammar.py", "-k", "v2 and not distribution"),  # 10,000 answers
        tested("grammar-distribution", 200, "tests/e2e/test_grammar.py", "-k", "v2 and distribution"),
        tested("seeds", 240, "tests/e2e/test_seeds.py", "-k", "v2"),
        tested("states", 240, "tests/e2e/test_states.py", "-m", "not slow"),
        tested("ptp", 420, "tests/e2e/test_ptp.py"),
        tested(
            "ptp-distribution",
            180,
            f"{every}[o-ptp]",
            f"{every}[fault: o-ptp, u squared]",
        ),
        tested("distribution-13-kinds", 480, f"{every}[13 kinds, btree, bad]"),
        tested("distribution-faults", 300, every, "-k", "fault and not V1 and not ptp"),
    ]
    # A CPU has no batch-invariant mode
    return [part for part in parts if part.name != programme.size(None, "identity-bfloat16")]


def identity(programme: Programme, name: str, heads: Sequence[str], seconds: float, **options: Any) -> Part:
    """Greedy answers of the demo's heads compared with plain vLLM's; on a CPU PTP heads would take minutes."""
    folders = {"target": demo_heads.path("target"), "heads": [*map(demo_heads.path, programme.size(heads, ["btree"]))]}
    how = programme.size({"concurrency": 32, "prompts": 96}, {"concurrency": 2, "prompts": 4, "max_tokens": 16})
    return windowed(programme, name, seconds, **{"dtype": "float32", "temperature": 0, **folders, **how, **options})


# window


def window(programme: Programme) -> list[Part]:
    """15 minutes of a GPU, what is worth most first: identity, speed on the demo, distributions, an 8B model."""
    how = programme.size(
        {"dtype": "bfloat16", "concurrency": [1, 16, 64], "prompts": 8},
        {"concurrency": 1, "prompts": 2, "max_tokens": 8},
    )
    names = programme.size(("btree", demo_heads.BACKBONE, "late"), ("btree",))
    on_demo = {
        "target": demo_heads.path("target"),
        "heads": [*map(demo_heads.path, names)],
        "temperature": [0, 1],
        **how,
    }
    make, of_8b = synthetic(programme, *programme.size(("llama-8b", "btree", 8, 8), ("1x64", "btree", 4, 2)))
    wanted, engine = ("btree", demo_heads.BACKBONE, "late", "o-ptp"), programme.size(NOT_COMPILED, {})
    return [
        identity(programme, "identity", wanted, 200, environment=IEEE, engine=engine),
        windowed(programme, "speed", 300, peers=programme.size(["ngram"], []), **on_demo),
        next(part for part in tests(programme) if part.name == "distribution"),
        make,
        windowed(programme, "sizes", 200, cache_gib=3, **of_8b, **how),
    ]


# kernels

SHAPES = {
    "evabyte-6.5b": {"D": 4096, "V": 320, "heads": [(n, r) for n in (8, 16) for r in (1, 8, 32)]},
    "llama-8b": {"D": 4096, "V": 128256, "heads": [(8, r) for r in (1, 4, 8)]},
}
TOY_SHAPES = {"1x64": {"D": 64, "V": 320, "heads": [(4, 1), (4, 2)]}}


def kernels(programme: Programme) -> list[Part]:
    """Each kernel compared with its definition, then drafts compared with a step of targets of real size."""
    from benchmarks.kernels import OPERATIONS

    folder, parts = programme.cache / "kernels", []
    batch, repeats = programme.size([1, 2, 4, 8, 16, 32, 64], [1, 2]), programme.size(50, 2)
    for name in programme.size(list(OPERATIONS), ["couple"]):
        out = folder / f"{name}.json"
        command = words(sys.executable, "-m", "benchmarks.kernels", only=name, repeats=repeats, json=out)
        parts.append(Part(f"each-{name}", 90, command, out))
    for shape, sizes in programme.size(SHAPES, TOY_SHAPES).items():
        curves = {n: folder / f"steps-{shape}-n{n}.json" for n, _ in sizes["heads"]}
        for n, out in curves.items():
            steps = {"shape": shape, "window": n, "batch": batch, "engine": json.dumps(programme.engine)}
            command = words(sys.executable, "-m", "benchmarks.gpu.steps", **steps, json=out)
            parts.append(Part(out.stem, 150, command, out))
        for n, r in sizes["heads"]:
            name = f"draft-{shape}-n{n}-r{r}"
            shapes = [f"D={sizes['D']},V={sizes['V']},n={n},r={r}"]
            shapes += [f"{shapes[0]},c=16"] if (shape, r) == ("llama-8b", 8) else []  # `component_rank`
            given = {"shape": shapes, "curves": curves[n]}
            given["circuits"] = ["ff"] if r == 1 else ["cp", "hmm", "btree"]
            out = folder / f"{name}.json"
            command = words(sys.executable, "-m", "benchmarks.draft", **given, batch=batch, repeats=repeats, json=out)
            parts.append(Part(name, 40, command, out, [curves[n]]))
    return parts


# serve


def serve(programme: Programme) -> list[Part]:
    """Plain vLLM, ngram and the demo's heads at once, by default and with every draft verified; then ways of PTP."""
    sizes = programme.size(
        {"concurrency": CLIENTS, "prompts": 8, "max_tokens": 128, "dtype": "bfloat16"},
        {"concurrency": [1, 2], "prompts": 2, "max_tokens": 16},
    )
    heads = [*map(demo_heads.path, (*demo_heads.CIRCUITS, demo_heads.BACKBONE))]
    of_heads = {"heads": heads, "variant": EVERY_DRAFT, "concurrency": [1, 16, 256]}
    on_demo = {"target": demo_heads.path("target"), **sizes, **programme.size(of_heads, {})}
    parts = [windowed(programme, "demo", 480, peers=["ngram"], **on_demo)]
    if not programme.is_toy:  # elsewhere Model Runner V2 is interpreted, for minutes
        how = {"concurrency": [1, 4, 16, 64], "prompts": 8, "dtype": "bfloat16"}
        part = bench_serve(programme, "ptp", 420, heads=demo_heads.path("late"), **how)
        ways = [f"{way}={json.dumps({'draft_pass': way})}" for way in ("two-pass", "merged")]
        parts.append(replace(part, command=[*part.command, *(word for way in ways for word in ("--variant", way))]))
    return parts


# shapes

SYNTHETIC = [  # shape, circuit, n, r, chance of each further draft
    ("evabyte-6.5b", "btree", 16, 32, 0.85),
    ("llama-8b", "btree", 8, 8, 0.7),
    ("evabyte-6.5b", "ff", 8, 1, 0.75),
    ("llama-8b", "ff", 8, 1, 0.6),
]


def synthetic(programme: Programme, shape: str, circuit: str, n: int, r: int) -> tuple[Part, dict[str, Any]]:
    """The part that makes a random target and head, and how they are served."""
    name = f"{shape}-{circuit}-n{n}-r{r}"
    folder = programme.cache / "shapes" / name
    sizes = {"shape": shape, "circuit": circuit, "window": n, "components": r, "out": folder}
    head, weights = folder / "SYNTHETIC-head", folder / "SYNTHETIC-head" / "model.safetensors"
    served = {"target": folder / "SYNTHETIC-target", "heads": head, "temperature": 1, "needs": [weights]}
    make = words(sys.executable, "-m", "benchmarks.synthetic", **sizes)
    return Part(f"make-{name}", 60, make, makes=weights), {**served, "engine": {"load_format": "dummy"}}


def shapes(programme: Programme) -> list[Part]:
    """SYNTHETIC: random weights of real sizes, nearly flat distributions: all drafts are accepted, or as prescribed."""
    from benchmarks.child_process import INTERPRETED
    from benchmarks.synthetic import parse_rates

    parts = []
    for shape, circuit, n, r, chance in programme.size(SYNTHETIC, [("1x64", "btree", 4, 2, 0.7)]):
        made, given = synthetic(programme, shape, circuit, n, r)
        prescribed = {"synthetic_acceptance_rates": parse_rates([chance], n - 1)}
        variant = f"SYNTHETIC {chance}=" + json.dumps({"rejection_sample_method": "synthetic", **prescribed})
        how = programme.size(
            {"concurrency": [1, 4, 16, 64, 256], "prompts": 4, "max_tokens": 64},
            {"concurrency": 1, "prompts": 2, "max_tokens": 8},
        )
        given |= {"variant": variant, "environment": programme.size({}, INTERPRETED), **how}
        parts += [made, bench_serve(programme, made.name.replace("make", "serve", 1), 440, **given)]
    return parts


STAGES: dict[str, Callable[[Programme], list[Part]]] = {
    "window": window,
    "tests": tests,
    "kernels": kernels,
    "serve": serve,
    "shapes": shapes,
}

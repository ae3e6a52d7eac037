"""Stages of the GPU programme: lists of commands (`vllm-mtpc`, benchmarks, tests) that share models in the cache."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import ALL_DRAFTS, MTPC, Part, Programme, bench_serve, trained, windowed, words
from vllm_mtpc import demo

# the first failure ends it, with the reason: time on a GPU is short
PYTEST = [sys.executable, "-m", "pytest", "-q", "-ra", "-x", "--tb=short"]
PASSED = r"\b[1-9]\d* passed"  # pytest ends with 0 where every test was skipped
# those of test_compiled.py need no GPU
KERNELS = [*(f"tests/kernels/test_{name}.py" for name in ("small_kernels", "filter", "draft")),
           "tests/heads/test_draft_params.py"]  # fmt: skip
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
        tested("swap", 120, "tests/e2e/test_swap.py", "-k", "equal_shape"),
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
    folders = {"target": demo.path("target"), "heads": [*map(demo.path, programme.size(heads, ["btree"]))]}
    how = programme.size({"concurrency": 32, "prompts": 96}, {"concurrency": 2, "prompts": 4, "max_tokens": 16})
    return windowed(programme, name, seconds, **{"dtype": "float32", "temperature": 0, **folders, **how, **options})


# window


def window(programme: Programme) -> list[Part]:
    """15 minutes of a GPU, what is worth most first: identity, speed on the demo, distributions, an 8B model."""
    how = programme.size(
        {"dtype": "bfloat16", "concurrency": [1, 16, 64], "prompts": 8},
        {"concurrency": 1, "prompts": 2, "max_tokens": 8},
    )
    names = programme.size(("btree", demo.BACKBONE, "late"), ("btree",))
    on_demo = {"target": demo.path("target"), "heads": [*map(demo.path, names)], "temperature": [0, 1], **how}
    make, of_8b = synthetic(programme, *programme.size(("llama-8b", "btree", 8, 8), ("1x64", "btree", 4, 2)))
    wanted, engine = ("btree", demo.BACKBONE, "late", "o-ptp"), programme.size(NOT_COMPILED, {})
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


# target


def target(programme: Programme) -> list[Part]:
    """A byte-level Llama of about 100M parameters, trained on the Python text of this machine; then its own text."""
    folder, data = programme.cache / "target", programme.cache / "data"
    text = programme.size(["--packages", "torch", "transformers"], [])
    sizes = programme.size(
        {"hidden_size": 768, "layers": 12, "intermediate_size": 2560, "minutes": 6, "tokens_per_step": 65536},
        {"hidden_size": 64, "layers": 2, "intermediate_size": 128, "steps": 3, "long_steps": 1},
    )
    weights = folder / "model.safetensors"
    train = words(sys.executable, "-m", "benchmarks.demo.train_target", *text, out=folder, **sizes)
    split = words(sys.executable, "-m", "benchmarks.demo.corpus", *text, out=data)

    def written(name: str, source: str, seconds: float, **options: Any) -> Part:
        out, dtype = data / f"{name}.jsonl", programme.size("bfloat16", None)
        engine = json.dumps(programme.engine)
        given = {"target": folder, "data": data / source, "out": out, "dtype": dtype, "engine": engine, **options}
        command = words(*MTPC, "regenerate", "--ignore-eos", **given)
        return Part(name, seconds, command, needs=[weights, data / source], makes=out)

    tokens, crops = programme.size(128, 32), {"crops": 4}
    return [
        Part("train", 450, train, folder / "provenance.json", makes=weights),
        Part("text", 120, split, makes=data / "valid.jsonl"),
        written("sampled", "train.jsonl", 150, **crops, limit=programme.size(12288, 12), max_tokens=tokens),
        written("greedy", "train.jsonl", 120, **crops, limit=programme.size(2048, 2), max_tokens=tokens, temperature=0),
        written("heldout", "valid.jsonl", 90, **crops, limit=programme.size(256, 4), max_tokens=8),
    ]


def own_text(programme: Programme) -> dict[str, Any]:
    """Prompts for that target: text that it was not trained on."""
    sizes = programme.size({"dtype": "bfloat16"}, {"prompt_tokens": 16, "max_tokens": 16})
    return {"data": programme.cache / "data" / "valid.jsonl", **sizes}


# heads

CIRCUITS = [("ff", 1), *((circuit, r) for circuit in ("cp", "hmm", "btree") for r in (8, 32))]
WINDOWS = (8, 16)
LORA_LAYERS = (0, 1, 2, 4)


def lora(layers: int) -> dict[str, Any]:
    """Options of a head with adapters on so many layers, maybe none."""
    return {"trunk": "lora", "trunk.layers": layers} if layers else {}


AT_ONCE = 2  # heads served by one part: six starts of an engine


def head_folders(programme: Programme) -> dict[tuple[str, int, int], Path]:
    """Heads on that target by circuit, window and components."""
    every = [(circuit, n, r) for n in WINDOWS for circuit, r in CIRCUITS]
    wanted = programme.size(every, [("btree", 4, 2)])
    return {(name, n, r): programme.cache / "heads" / f"{name}-n{n}-r{r}" for name, n, r in wanted}


def heads(programme: Programme) -> list[Part]:
    """Every circuit on that target, then their speed with one client compared with plain vLLM."""
    folders = head_folders(programme)
    sizes = programme.size(
        {"learning_rate": 0.002, "windows_per_step": 1024, "max_steps": 1500}, {"windows_per_step": 16, "max_steps": 2}
    )
    parts = []
    for (circuit, n, r), folder in folders.items():
        options = {"circuit": circuit, "window": n, "components": r, **sizes}
        parts.append(trained(programme, f"train-{folder.name}", folder, 150, **options))
    how = {"concurrency": 1, "prompts": programme.size(16, 2), "variant": EVERY_DRAFT, **own_text(programme)}
    for window in sorted({n for _, n, _ in folders}):
        members = [folder for (_, n, _), folder in folders.items() if n == window]
        for first in range(0, len(members), AT_ONCE):
            some, name = members[first : first + AT_ONCE], f"table-n{window}-{1 + first // AT_ONCE}"
            needs = [folder / "config.json" for folder in some]
            parts.append(bench_serve(programme, name, 360, needs, heads=some, **how))
    return parts


def paper(programme: Programme) -> list[Part]:
    """What tables 1 and 3 of the MtPC paper have beyond `heads`: CP of other widths, adapters on the last layers."""
    folders, parts = head_folders(programme), []
    sizes = programme.size({"learning_rate": 0.002, "windows_per_step": 1024}, {"windows_per_step": 16})
    steps = {count: {**sizes, "max_steps": programme.size(count, 2)} for count in (400, 1500)}
    made = {programme.cache / "heads" / f"cp-n8-r{r}": {"circuit": "cp", "window": 8, "components": r, **steps[1500]}
            for r in programme.size((16, 64, 128), ())}  # fmt: skip
    for (circuit, n, r), start in folders.items():
        if (circuit, r) in programme.size((("ff", 1), ("btree", 32)), (("btree", 2),)):
            given = {"circuit": circuit, "window": n, "components": r, "init_from": start, **steps[400]}
            layers = programme.size(LORA_LAYERS, LORA_LAYERS[:2])  # the toy target has two
            made |= {start.with_name(f"{start.name}-lora{k}"): {**given, **lora(k)} for k in layers}
    how = {"concurrency": 1, "prompts": programme.size(16, 2), "variant": EVERY_DRAFT, **own_text(programme)}
    for folder, options in made.items():
        part = trained(programme, f"train-{folder.name}", folder, 150, **options)
        start = [options["init_from"] / "config.json"] if "init_from" in options else []
        parts.append(replace(part, needs=[*part.needs, *start]))
        if not start or programme.size(True, False):  # elsewhere Model Runner V2 is interpreted, for minutes
            parts.append(
                bench_serve(programme, f"table-{folder.name}", 200, [folder / "config.json"], heads=folder, **how)
            )
    return parts


# serve


def serve(programme: Programme) -> list[Part]:
    """Plain vLLM, ngram and heads side by side: on the demo, then on that target.

    Heads are served at their defaults, which verify adaptively, and with every draft verified.
    """
    sizes = {
        "concurrency": programme.size(CLIENTS, [1, 2]),
        "prompts": programme.size(8, 2),
        "max_tokens": programme.size(128, 16),
        "dtype": programme.size("bfloat16", None),
    }
    heads = [*map(demo.path, (*demo.CIRCUITS, demo.BACKBONE))]
    of_heads = {"heads": heads, "variant": EVERY_DRAFT, "concurrency": [1, 16, 256]}
    on_demo = {"target": demo.path("target"), **sizes, **programme.size(of_heads, {})}
    parts = [windowed(programme, "demo", 480, peers=["ngram"], **on_demo)]
    own = programme.cache / "target"
    on_own = {"target": own, **sizes, **own_text(programme)}
    weights = own / "model.safetensors"
    if not programme.is_toy:
        parts.append(bench_serve(programme, "own-ngram", 250, [weights], peers=["ngram"], **on_own))
    for (_, _, r), folder in head_folders(programme).items():
        if r != 8:
            needs = [weights, folder / "config.json"]
            name = f"own-{folder.name}"
            parts.append(bench_serve(programme, name, 360, needs, heads=folder, variant=EVERY_DRAFT, **on_own))
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


# ptp


def ptp(programme: Programme) -> list[Part]:
    """O-PTP and its independent baseline, trained alike on that target, in two passes and in one; the demo's late."""
    folder, baseline = (programme.cache / "heads" / name for name in ("o-ptp", "independent"))
    sizes = programme.size(
        {
            "window": 8, "lora_rank": 32, "lora_alpha": 32, "windows_per_step": 512, "max_steps": 1500,
            "learning_rate": 0.001, "precision": "bf16",
        },
        {"window": 4, "lora_rank": 4, "windows_per_step": 8, "max_steps": 2},
    )  # fmt: skip
    options = {"head": "ptp", "u_embedding": "threshold", "u_features": 64, **sizes}
    variants = []
    for way in programme.size(("two-pass", "merged"), ("two-pass",)):
        variants += ["--variant", f"{way}=" + json.dumps({"draft_pass": way})]
    how = programme.size(
        {"concurrency": [1, 4, 16, 64], "prompts": 8}, {"concurrency": 1, "prompts": 1, "temperature": 1}
    )

    def served(name: str, head: Path, needs: Sequence[Path], **more: Any) -> Part:
        part = bench_serve(programme, name, 420, needs, heads=head, **how, **more)
        return replace(part, command=[*part.command, *variants])

    on_demo = programme.size({"dtype": "bfloat16"}, {"max_tokens": 8})
    own = {**own_text(programme), **programme.size({}, {"max_tokens": 8})}
    return [
        *programme.size([served("demo", demo.path("late"), [], **on_demo)], []),
        trained(programme, "train-baseline", baseline, 450, variant="independent", **options),
        trained(programme, "train", folder, 450, variant="o-ptp", baseline=baseline, **options),
        served("own", folder, [folder / "config.json"], **own),
        served("own-baseline", baseline, [baseline / "config.json"], **own),
    ]


# drafters


def drafters(programme: Programme) -> list[Part]:
    """Public DFlash, DSpark and EAGLE-3 drafters, where a folder has some (MTPC_GPU_MODELS: NAME/drafter, NAME/target):
    heads that vLLM's drafter hosts, served next to plain vLLM.
    """
    models = Path(os.environ.get("MTPC_GPU_MODELS") or programme.cache / "models")
    parts = []
    for config in sorted(models.glob("*/drafter/config.json")):
        drafter, name = config.parent, config.parent.parent.name
        target, head = drafter.with_name("target"), programme.cache / "drafters" / name
        prompts, weights = programme.cache / "data" / "train.jsonl", head / "model.safetensors"
        command = words(*MTPC, "convert", drafter, target=target, out=head)
        parts.append(Part(f"convert-{name}", 60, command, needs=[target / "config.json"], makes=weights))
        how = {"concurrency": [1, 4, 16, 64], "prompts": 8, "data": prompts, "max_tokens": 128, "dtype": "bfloat16"}
        served = {"heads": head, "variant": EVERY_DRAFT, "target": target, **how}
        parts.append(bench_serve(programme, f"drafter-{name}", 440, [weights, prompts], **served))
    return parts


# train


def train(programme: Programme) -> list[Part]:
    """A rehearsal of training at a published size: random weights of Qwen3-0.6B's shape, states from vLLM.

    The toy has two small layers and the real vocabulary.
    """
    folder, tool = programme.cache / "train", [sys.executable, "-m", "benchmarks.gpu.rehearsal"]
    target, head = folder / "target", folder / "head"
    dtype, is_toy = programme.size(("bfloat16", []), ("float32", ["--toy"]))
    texts = programme.size({"texts": 8192, "length": 1024}, {"texts": 32, "length": 40})
    common = {"target": target, "engine": json.dumps({"max_model_len": 2048, **programme.engine})}
    rows = programme.size({"rows": 512, "rounds": 3}, {"rows": 8, "rounds": 1})
    greedy = {"target": target, "data": target / "texts.jsonl", "dtype": "float32", "temperature": 0, "prompts": 8}
    greedy |= programme.size({"concurrency": 8, "max_tokens": 32}, {"concurrency": 1, "max_tokens": 8})
    drafting = {"method": "mtpc", "model": str(head), "num_speculative_tokens": programme.size(7, 3), **ALL_DRAFTS}
    greedy |= {"peer": f"head={json.dumps(drafting)}", "environment": IEEE}
    options = {"states": "vllm", "trunk": "none", "leaves": "lm_head", "target_dtype": dtype}
    options |= {"leaves.component_rank": 16, "leaves.token_rank": 32}
    options |= programme.size(
        {"window": 8, "components": 8, "minutes": 4, "seq_len": 1024, "precision": "bf16", "evaluation_sequences": 8},
        {"window": 4, "components": 2, "max_steps": 2, "seq_len": 40, "windows_per_step": 8, "evaluation_sequences": 2},
    )
    options |= {"data": target / "texts.jsonl", "evaluation_tokens": programme.size(32, 8), "out": head}
    weights, head_weights, states = target / "model.safetensors", head / "model.safetensors", folder / "states.json"
    resume = ["--resume"] if any((head / "state").glob("step-*")) else []
    compare_states = words(*tool, "states", dtype=dtype, **rows, **common, json=states)
    are_equal = r"\b[1-9]\d* rows of states are equal"
    return [
        Part("target", 120, words(*tool, "target", *is_toy, out=target, **texts), makes=weights),
        Part("states", 240, compare_states, states, [weights], proof=are_equal),
        Part("train", 460, words(*MTPC, "train", *resume, **common, **options), head / "provenance.json", [weights]),
        windowed(programme, "greedy", 240, needs=[head_weights], **greedy),
    ]


STAGES: dict[str, Callable[[Programme], list[Part]]] = {
    "window": window,
    "tests": tests,
    "kernels": kernels,
    "target": target,
    "heads": heads,
    "paper": paper,
    "serve": serve,
    "shapes": shapes,
    "ptp": ptp,
    "drafters": drafters,
    "train": train,
}

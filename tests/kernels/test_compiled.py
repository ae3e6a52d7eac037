"""Every kernel compiled for GPUs that are not there.

A stand-in for Triton's driver names the chip. The launchers of `kernels/` are called with tensors on torch's meta
device, so Triton's own binder sees the dtypes, strides and sizes of serving and selects specialisations (pointers
are aligned, as allocated ones are). `variants` notes what would be compiled and launches nothing; `row_of` compiles it
with the ptxas of Triton's wheel. vLLM is not imported: its noise and our kernel that imports vLLM are read as files.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from vllm_mtpc.circuits import CIRCUITS, get_circuit
from vllm_mtpc.kernels.draft import SMALL_VOCAB
from vllm_mtpc.kernels.draft.kernel import CircuitDrafter
from vllm_mtpc.kernels.leaf import Bigram, LowRank

ROOT = Path(__file__).parents[2]
META = torch.device("meta")
SHARED = 99 << 10  # bytes that a block may have on GPUs of 8.6 and 8.9; those of 8.0, 9.0 and 10.0 have more
HALF, WHOLE, INT, LONG = torch.bfloat16, torch.float32, torch.int32, torch.int64
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Variant:
    """One kernel as it would be compiled."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]


# An entry of Triton's cache of compiled kernels: the next launch of the variant does nothing.
NOTHING = SimpleNamespace(run=lambda *_: None, launch_metadata=lambda *_: None, function=None, packed_metadata=None)


def variants(call: Callable[[], Any], chip: int = 90) -> dict[tuple[str, str], Variant]:
    """Return the variants that a call would compile, by kernel name and Triton's key; nothing is launched."""
    found: dict[tuple[str, str], Variant] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        (attributes,) = compile["configs"]
        options = json.loads(compile["specialization_data"])["options"]
        options = {name: options[name] for name in ("num_warps", "num_stages", "maxnreg")}
        what = (compile["signature"], compile["constants"], attributes, options)
        found[fn.name, compile["key"]] = Variant(fn.jit_function, *what)
        fn.jit_function.device_caches[chip][0][compile["key"]] = NOTHING
        return True  # handled: Triton neither compiles nor launches

    stand_in = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", chip, 32),
        get_current_device=lambda: chip,  # chips are cached apart
        get_current_stream=lambda device: 0,
    )
    with pytest.MonkeyPatch.context() as patch, knobs.runtime.scope():
        patch.setattr(driver, "_active", stand_in)
        knobs.runtime.jit_cache_hook = note
        call()
    for (_, key), variant in found.items():
        del variant.kernel.device_caches[chip][0][key]
    return found


def _read(path: Path) -> ModuleType:
    """A module that imports vLLM's Triton, with Triton itself and without vLLM."""
    stands = {
        "vllm.triton_utils": SimpleNamespace(tl=triton.language, triton=triton),
        "vllm.v1.worker.gpu.input_batch": SimpleNamespace(InputBatch=object),
        "vllm.v1.attention.backends.utils": SimpleNamespace(PAD_SLOT_ID=-1),
    }
    spec = importlib.util.spec_from_file_location(f"compiled_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name, stand in stands.items():
            patch.setitem(sys.modules, name, stand)
        spec.loader.exec_module(module)
    return module


def vllms_gumbel() -> ModuleType:
    folder = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    return _read(folder / "v1" / "worker" / "gpu" / "sample" / "gumbel.py")


def empty(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def draft(
    noise, name, sizes, drafts=None, dtype=HALF, draw=True, use_fp64=False, token_rank=0, low=0, masked=False
) -> None:
    """The draft kernel on two requests of sizes n, r, V (and Vd); leaf, cache and bigram have a dtype.

    low: rank of the components' differences; the leaves then begin with x_1.
    """
    n, r, vocab, *columns = sizes
    drafts = drafts or n - 1
    circuit = get_circuit(name, n, r)
    ids = empty(*columns, dtype=LONG) if columns else None
    drafter = CircuitDrafter(circuit.program, r, vocab, META, noise, use_fp64, ids=ids)
    width = min(sizes[2:])
    leaf = empty(2, drafts + bool(low), 1 if low else r, width, dtype=dtype)
    differences = LowRank(empty(2, 1 + drafts, r, low, dtype=dtype), empty(1 + drafts, low, width, dtype=dtype))
    bigram = None
    if token_rank:
        bigram = Bigram(empty(vocab, token_rank, dtype=dtype), empty(n - 1, token_rank, min(sizes[2:]), dtype=dtype))
    drafter(
        None if low else empty(2, r, dtype=WHOLE),
        leaf,
        empty(2, r, dtype=WHOLE),
        empty(2, circuit.num_inner, r, r, dtype=WHOLE),
        empty(2, dtype=LONG),
        bigram,
        differences if low else None,
        slots=empty(2, dtype=LONG),
        temperature=empty(64, dtype=WHOLE),
        seeds=empty(64, dtype=LONG),
        pos=empty(2, dtype=LONG),
        tokens=empty(64, n - 1, dtype=LONG)[:2, :drafts],
        confidences=empty(64, n - 1, dtype=WHOLE)[:2, :drafts],
        cache=empty(64, n - 1, vocab, dtype=dtype) if draw else None,
        allowed=empty(2, drafts, -(-vocab // 32), dtype=INT) if masked else None,
        draw=draw,
    )


def coupled(vocab: int, width: int) -> None:
    """What drafts and verifies coupled tokens: PTP's number, the token it falls on, how many drafts are kept."""
    from vllm_mtpc.kernels.couple import kernel as couple
    from vllm_mtpc.kernels.pick import kernel as pick
    from vllm_mtpc.kernels.uniform import kernel as uniform

    u = uniform.uniform(empty(24, dtype=LONG), empty(24, dtype=LONG))
    pick.pick(empty(24, vocab, dtype=WHOLE), u)
    state = empty(24, dtype=INT), empty(24, dtype=LONG), empty(64, dtype=LONG), empty(64, dtype=WHOLE)
    for dtype, trust in ((HALF, None), (WHOLE, None), (HALF, 0.8), (WHOLE, 0.8)):
        pick.select_tokens(empty(24, vocab, dtype=dtype), *state, trust)
    rows, begins = (empty(24, dtype=LONG), empty(24, dtype=INT)), empty(4, dtype=INT)
    kept, count = couple.accept(*rows, begins, width)
    couple.accept(*rows, begins, width, (empty(3, dtype=INT), kept, count))


def gathered() -> None:
    counts, slots, last, given = (empty(*shape, dtype=INT) for shape in ((3,), (3,), (64, 1), (1, 64)))
    ends, long, table = empty(65, dtype=INT), empty(64, dtype=LONG), empty(64, 128, dtype=INT)
    gather = _read(ROOT / "proposers" / "v2" / "gather.py")
    read = long, long, empty(64, dtype=WHOLE), long, empty(64, 4096, dtype=HALF), 4096
    filled = long, long, long, slots, empty(64, dtype=WHOLE), long, empty(64, 4096, dtype=HALF)
    for block in (0, 1024):
        gather.gather_inputs[(64,)](
            ends[1:], counts, counts, slots, last.long(), 1, given, 1, *read, *filled, 3, 3, 4096, BLOCK=block
        )
    gather.place_query_rows[(3,)](long[:3], long, long, table, 128, long, long, ends, 16, 8192, 8, PAD=-1, BLOCK=8)


# Other numbers of drafts, dtypes and options that a circuit is served with, and leaves that look at the token before
DRAFTED: dict[str, dict[str, Any]] = {
    "K=2": {"drafts": 2},
    "float32": {"dtype": WHOLE},
    "argmax": {"draw": False},
    "masked": {"masked": True},
    "float64": {"use_fp64": True},
    "token 32": {"token_rank": 32},
    "token 64": {"token_rank": 64},
    "token 64, float32": {"token_rank": 64, "dtype": WHOLE},
    "token 64, argmax": {"token_rank": 64, "draw": False},
    "token 64, float64": {"token_rank": 64, "use_fp64": True},
}
IN_BLOCKS: dict[str, dict[str, Any]] = {
    "low rank 16": {"low": 16},
    "low rank 64, float64": {"low": 64, "use_fp64": True},
    "low rank 16, float32, token 32": {"low": 16, "dtype": WHOLE, "token_rank": 32},
}


def served() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield a name and a call that launches it for every served shape."""
    noise, last = vllms_gumbel().gumbel_noised_argmax, [name for name in CIRCUITS if name != "ff"][-1]
    heads = {"demo": (8, 8, 257), "EvaByte": (16, 32, 320), "Llama": (8, 8, 128_256), "Qwen": (8, 8, 151_936)}
    for model, sizes in heads.items():
        alone = (sizes[0], 1, sizes[2])  # one component
        for name in CIRCUITS:
            yield f"{model} {name}", partial(draft, noise, name, alone if name == "ff" else sizes)
        yield f"{model} ff, token 256", partial(draft, noise, "ff", alone, token_rank=256)
        for what, options in (DRAFTED | IN_BLOCKS if sizes[2] > SMALL_VOCAB else DRAFTED).items():
            yield f"{model} {last}, {what}", partial(draft, noise, last, sizes, **options)
    yield "128 components", partial(draft, noise, last, (16, 128, 320))
    for r, name in ((1, "ff"), (8, last)):  # one launch, and blocks
        drafter = partial(draft, noise, name, (8, r, 49_152, 8192), token_rank=64, masked=True)
        yield f"8192 of 49152 tokens, r={r}", drafter
    for vocab in (257, 320, 128_256, 151_936):
        yield f"PTP V={vocab}", partial(coupled, vocab, 8)
    yield "rows", gathered


def row_of(variant: Variant, chip: int) -> dict[str, int]:
    """Compile a kernel; return its registers and bytes of the stack (spills) per thread, and shared bytes."""
    source = ASTSource(variant.kernel, variant.signature, variant.constants, variant.attributes)
    built = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=variant.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        said = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", said).groups())
    return {"registers": registers, "spilled": stack, "shared": built.metadata.shared}


# One of each kernel, at the sizes with most in registers; the other circuits are the same code with a smaller stack,
# and kernels without tokens or draws a part of those with them.
QUICK = (
    *("demo btree, float64", "demo btree, token 32", "EvaByte btree, token 64, float32"),
    *("Qwen btree, token 64, float32", "Qwen btree, token 64, float64"),
    *("128 components", "demo btree, masked"),
    *("Qwen btree, low rank 64, float64", "Qwen btree, low rank 16, float32, token 32"),
    *("8192 of 49152 tokens, r=1", "8192 of 49152 tokens, r=8"),
    *("PTP V=128256", "rows"),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def launched_kernels(*folders: str) -> set[str]:
    """Names of the jit functions that the sources in these folders of the repository launch."""
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    kernels = set(re.findall(r"@triton\.jit(?:\([^)]*\))?\s+def (\w+)", text))
    return kernels & set(re.findall(r"\b(\w+)\[\(", text))


@pytest.mark.parametrize(
    "chip, names", [(90, QUICK), *(pytest.param(chip, (), marks=pytest.mark.slow) for chip in (80, 90, 100))]
)
def test_every_kernel_compiles_and_does_not_spill(chip: int, names: tuple[str, ...]) -> None:
    """The interpreter takes more than the compiler does; Triton compiles without a GPU. No names: all shapes."""
    found: dict[tuple[str, str], Variant] = {}
    for name, call in served():
        if not names or name in names:
            found |= variants(call, chip)
    rows = [(variant.kernel.__name__, row_of(variant, chip)) for variant in found.values()]
    assert {kernel for kernel, _ in rows} == launched_kernels("kernels", "proposers")
    assert not [row for row in rows if row[1]["spilled"] or row[1]["shared"] > SHARED]
    assert max(row["registers"] for kernel, row in rows if kernel == "draft_rows") <= 128, "two instances at once"


def test_spill_is_found_by_the_check() -> None:
    found = variants(lambda: coupled(257, 8))
    variant = next(one for one in found.values() if one.kernel.__name__ == "_pick_rows")
    squeezed = replace(variant, options={**variant.options, "maxnreg": 24})
    assert row_of(variant, 90)["spilled"] == 0 < row_of(squeezed, 90)["spilled"]

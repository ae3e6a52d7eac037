"""What `vllm-mtpc bench kernels` times: an entry of OPERATIONS per folder of `kernels/`, with cases on random inputs.

An eager chain is what one would write with PyTorch's own operations where no kernel is at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_mtpc.circuits import CIRCUITS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Call = Callable[..., Any]
BYTES, SUBWORDS = 320, 32000  # vocabularies


class Case(NamedTuple):
    """One size of an operation. ``moved``: bytes that must be read and written at least."""

    sizes: str
    naive: Call
    moved: int
    kernel: Call | None = None  # None: there is no GPU
    eager: Call | None = None  # None: the definition is that chain


class Operation(NamedTuple):
    """``tests``: files of tests/kernels that decide whether it is reported; ``setup``: its cases on a device."""

    tests: tuple[str, ...]
    setup: Callable[[torch.device], Iterator[Case]]


def size_of(*tensors: Tensor) -> int:
    """Bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def uniform(device: torch.device) -> Iterator[Case]:
    import torch

    def eager(seed: Tensor, pos: Tensor) -> Tensor:
        return torch.rand(len(seed), device=device)  # another generator: what a draw costs

    for count in (64, 4096):
        seed = torch.randint(2**62, (count,), device=device)
        pos = torch.randint(2**20, (count,), device=device)
        yield _case("uniform.uniform", f"T={count}", (seed, pos), 4 * count, eager)


def pick(device: torch.device) -> Iterator[Case]:
    import torch

    def eager(logits: Tensor, u: Tensor) -> Tensor:
        edges = logits.softmax(dim=-1).cumsum(dim=-1)
        return torch.searchsorted(edges, u[:, None], right=True)

    for rows, vocab_size in ((16, BYTES), (512, BYTES), (16, SUBWORDS), (512, SUBWORDS)):
        logits, u = torch.randn(rows, vocab_size, device=device) * 3, torch.rand(rows, device=device)
        yield _case("pick.pick", f"T={rows} V={vocab_size}", (logits, u), 8 * rows, eager)


def couple(device: torch.device) -> Iterator[Case]:
    import torch

    for requests in (1, 64):
        width = 8
        tokens, drafts = torch.randint(2, (2, requests * width), device=device)  # half of the drafts are right
        begins = torch.arange(requests + 1, dtype=torch.int32, device=device) * width
        written = size_of(tokens) + 4 * requests
        yield _case("couple.accept", f"R={requests} K={width - 1}", (tokens, drafts, begins, width), written)


def filter_(device: torch.device) -> Iterator[Case]:
    import torch

    from vllm_mtpc.circuits import circuit_class, get_circuit

    for name, batch in ((name, batch) for name in CIRCUITS for batch in (64, 2048)):
        n, r = 16, min(32, circuit_class(name).max_components)
        circuit = get_circuit(name, n, r)
        evidence = torch.randn(batch, n, r, device=device) - 5
        sums = torch.randn(batch, r, device=device), torch.randn(batch, circuit.num_inner, r, r, device=device)
        given = (circuit.program, evidence, *sums)
        yield _case("filter.filter_weights", f"{name} n={n} r={r} B={batch}", given, size_of(evidence))


def draft(device: torch.device) -> Iterator[Case]:
    for name, vocab_size, batch in (
        (name, vocab, batch) for vocab in (BYTES, SUBWORDS) for name in CIRCUITS for batch in (1, 64)
    ):
        yield _draft(device, name, vocab_size, batch if vocab_size == BYTES else min(batch, 8))


def _draft(device: torch.device, name: str, vocab_size: int, batch: int) -> Case:
    import torch

    from vllm_mtpc.circuits import CircuitParams, circuit_class, get_circuit
    from vllm_mtpc.kernels.draft import naive

    n, r = 8, min(8, circuit_class(name).max_components)
    circuit, drafts = get_circuit(name, n, r), n - 1
    first = torch.zeros(batch, dtype=torch.int64, device=device)
    leaf = torch.randn(batch, n, r, vocab_size, device=device)
    evidence = leaf[:, 0].log_softmax(dim=-1)[..., 0]
    sums = torch.randn(batch, r, device=device), torch.randn(batch, circuit.num_inner, r, r, device=device)
    params = (evidence, leaf[:, 1:], *sums)

    def gumbel(log_q: Tensor, k: int) -> Tensor:
        return (log_q - torch.empty_like(log_q).exponential_().log()).argmax(dim=-1)

    def eager() -> Tensor:
        whole = CircuitParams(leaf.log_softmax(dim=-1), *(part.log_softmax(dim=-1) for part in sums))
        state, columns = circuit.observe(whole, circuit.start(whole), 0, first), []
        for k in range(1, n):
            columns.append(gumbel(circuit.next_log_probs(whole, state, k), k))
            state = circuit.observe(whole, state, k, columns[-1])
        return torch.stack(columns, dim=1)

    kernel = None
    if device.type == "cuda":
        from vllm_mtpc.bench import drafter

        drawn = drafter.kernel(circuit.program, tuple(params[1].shape), 1.0, device)
        kernel = lambda: drawn(params)  # noqa: E731
    return Case(
        f"{name} V={vocab_size} n={n} r={r} B={batch}",
        lambda: naive.draft(circuit.program, *params, gumbel),
        size_of(*params) + 4 * batch * drafts * vocab_size + 12 * batch * drafts,
        kernel,
        eager,
    )


def leaf(device: torch.device) -> Iterator[Case]:
    import torch
    import torch.nn.functional as F

    def eager(states: Tensor, weight: Tensor, bias: None, token: Tensor) -> Tensor:
        logits = F.linear(states[:, 0], weight.flatten(0, 1)).view(-1, *weight.shape[:2]).float()
        index = token[:, None, None].expand(-1, weight.shape[0], 1)
        return logits.log_softmax(dim=-1).gather(2, index)

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for batch, r, vocab_size in ((batch, *size) for size in ((32, BYTES), (8, SUBWORDS)) for batch in (1, 16, 64)):
        hidden = 256 if device.type == "cpu" else 4096 if vocab_size == BYTES else 1024
        states = torch.randn(batch, 1, hidden, device=device, dtype=dtype)
        weight = torch.randn(r, vocab_size, hidden, device=device, dtype=dtype) / 64
        token = torch.randint(vocab_size, (batch,), device=device)
        sizes = f"x_1: B={batch} r={r} V={vocab_size} D={hidden}"
        yield _case("leaf.terms", sizes, (states, weight, None, token), 8 * batch * r, eager)


def _case(name: str, sizes: str, given: tuple[Any, ...], written: int, eager: Call | None = None) -> Case:
    """A function of a folder of `kernels/`, which is called alike in its kernel and its definition.

    written: bytes of what it writes; all tensors of `given` are read. eager: takes what they take.
    """
    folder, _, function = name.partition(".")
    tensors = [value for value in given if hasattr(value, "element_size")]

    def of(module: str) -> Call:
        call = getattr(import_module(f"vllm_mtpc.kernels.{folder}.{module}"), function)
        return lambda: call(*given)

    kernel = of("kernel") if tensors[0].device.type == "cuda" else None
    chain = None if eager is None else lambda: eager(*given)
    return Case(sizes, of("naive"), size_of(*tensors) + written, kernel, chain)


OPERATIONS = {
    "uniform": Operation(("test_uniform.py", "test_triton.py"), uniform),
    "pick": Operation(("test_pick.py", "test_triton.py"), pick),
    "couple": Operation(("test_couple.py",), couple),
    "filter": Operation(("test_filter.py",), filter_),
    "draft": Operation(("test_draft.py",), draft),
    "leaf": Operation(("test_leaf.py",), leaf),
}

"""What `vllm-mtpc bench kernels` times: an entry of OPERATIONS per folder of `kernels/`, with cases on random inputs.

An eager chain is what one would write with PyTorch's own operations where no kernel is at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_mtpc.circuits import CIRCUITS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Call = Callable[[], Any]
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

    from vllm_mtpc.kernels.uniform import naive

    for count in (64, 4096):
        seed = torch.randint(2**62, (count,), device=device)
        pos = torch.randint(2**20, (count,), device=device)
        yield Case(
            f"T={count}",
            lambda seed=seed, pos=pos: naive.uniform(seed, pos),
            size_of(seed, pos) + 4 * count,
            _on_gpu(device, "uniform", "uniform", seed, pos),
            lambda count=count: torch.rand(count, device=device),  # another generator: what a draw costs
        )


def pick(device: torch.device) -> Iterator[Case]:
    import torch

    from vllm_mtpc.kernels.pick import naive

    def eager(logits: Tensor, u: Tensor) -> Tensor:
        edges = logits.softmax(dim=-1).cumsum(dim=-1)
        return torch.searchsorted(edges, u[:, None], right=True)

    for rows, vocab_size in ((16, BYTES), (512, BYTES), (16, SUBWORDS), (512, SUBWORDS)):
        logits, u = torch.randn(rows, vocab_size, device=device) * 3, torch.rand(rows, device=device)
        yield Case(
            f"T={rows} V={vocab_size}",
            lambda logits=logits, u=u: naive.pick(logits, u),
            size_of(logits, u) + 8 * rows,
            _on_gpu(device, "pick", "pick", logits, u),
            lambda logits=logits, u=u: eager(logits, u),
        )


def couple(device: torch.device) -> Iterator[Case]:
    import torch

    from vllm_mtpc.kernels.couple import naive

    for requests in (1, 64):
        width = 8
        tokens, drafts = torch.randint(2, (2, requests * width), device=device)  # half of the drafts are right
        begins = torch.arange(requests + 1, dtype=torch.int32, device=device) * width
        yield Case(
            f"R={requests} K={width - 1}",
            lambda given=(tokens, drafts, begins, width): naive.accept(*given),
            2 * size_of(tokens) + size_of(drafts, begins) + 4 * requests,
            _on_gpu(device, "couple", "accept", tokens, drafts, begins, width),
        )


def filter_(device: torch.device) -> Iterator[Case]:
    import torch

    from vllm_mtpc.circuits import circuit_class, get_circuit
    from vllm_mtpc.kernels.filter import naive

    for name, batch in ((name, batch) for name in CIRCUITS for batch in (64, 2048)):
        n, r = 16, min(32, circuit_class(name).max_components)
        circuit = get_circuit(name, n, r)
        evidence = torch.randn(batch, n, r, device=device) - 5
        sums = torch.randn(batch, r, device=device), torch.randn(batch, circuit.num_inner, r, r, device=device)
        given = (circuit.program, evidence, *sums)
        yield Case(
            f"{name} n={n} r={r} B={batch}",
            lambda given=given: naive.filter_weights(*given),
            size_of(evidence, *sums) + size_of(evidence),
            _on_gpu(device, "filter", "filter_weights", *given),
        )


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

    from vllm_mtpc.kernels.leaf import naive

    def eager(states: Tensor, weight: Tensor, token: Tensor) -> Tensor:
        logits = F.linear(states[:, 0], weight.flatten(0, 1)).view(-1, *weight.shape[:2]).float()
        index = token[:, None, None].expand(-1, weight.shape[0], 1)
        return logits.log_softmax(dim=-1).gather(2, index)

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for batch, r, vocab_size in ((batch, *size) for size in ((32, BYTES), (8, SUBWORDS)) for batch in (1, 16, 64)):
        hidden = 256 if device.type == "cpu" else 4096 if vocab_size == BYTES else 1024
        states = torch.randn(batch, 1, hidden, device=device, dtype=dtype)
        weight = torch.randn(r, vocab_size, hidden, device=device, dtype=dtype) / 64
        token = torch.randint(vocab_size, (batch,), device=device)
        yield Case(
            f"x_1: B={batch} r={r} V={vocab_size} D={hidden}",
            lambda given=(states, weight, None, token): naive.terms(*given),
            size_of(states, weight, token) + 8 * batch * r,
            _on_gpu(device, "leaf", "terms", states, weight, None, token),
            lambda given=(states, weight, token): eager(*given),
        )


def _on_gpu(device: torch.device, name: str, function: str, *given: Any) -> Call | None:
    """The kernel of an operation on what is given; None without a GPU."""
    if device.type != "cuda":
        return None
    from importlib import import_module

    kernel = getattr(import_module(f"vllm_mtpc.kernels.{name}.kernel"), function)
    return lambda: kernel(*given)


OPERATIONS = {
    "uniform": Operation(("test_uniform.py", "test_triton.py"), uniform),
    "pick": Operation(("test_pick.py", "test_triton.py"), pick),
    "couple": Operation(("test_couple.py",), couple),
    "filter": Operation(("test_filter.py",), filter_),
    "draft": Operation(("test_draft.py",), draft),
    "leaf": Operation(("test_leaf.py",), leaf),
}

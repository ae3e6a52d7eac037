"""Brute force over every latent assignment and every token, in float64.

Of a circuit it reads the tree of latents that its class declares (`Circuit.latents`), neither its program nor its joint
value. `written` has those trees by hand, from the definitions of the circuits.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
from scipy.special import log_softmax, logsumexp

import vllm_mtpc.circuits
from vllm_mtpc.circuits import circuit_class, get_circuit
from vllm_mtpc.circuits.base import Circuit, CircuitParams, Latents
from vllm_mtpc.kernels.leaf import Bigram

CIRCUITS = tuple(vllm_mtpc.circuits.CIRCUITS)


def split(first: int, length: int) -> tuple | int:
    """The tree of `length` tokens from `first` on; the left part has round-half-to-even(length / 2) of them."""
    left = round(length / 2)
    return (split(first, left), split(first + left, length - left)) if length > 1 else first


TREES = {length: split(0, length) for length in (*range(2, 10), 16)}
assert TREES[7] == (((0, 1), (2, 3)), ((4, 5), 6)) and TREES[5] == ((0, 1), ((2, 3), 4))  # as the paper's code splits


def height(region: tuple | int) -> int:
    return 0 if isinstance(region, int) else 1 + max(map(height, region))


def inner_regions(tree: tuple) -> list[tuple]:
    """Regions below the root that have a sum, in the order of the checkpoint: leaves to root, then left to right."""
    found = [region for part in tree if isinstance(part, tuple) for region in (*inner_regions(part), part)]
    return sorted(found, key=height)


def written(name: str, n: int) -> Latents:
    """The latents of the packaged circuits, written down once more."""
    if name in ("ff", "cp"):
        return Latents([], [0] * n)
    if name == "hmm":
        return Latents(list(range(n - 1)), list(range(n)))
    regions = [TREES[n], *inner_regions(TREES[n])]  # the latent of a region is its place here
    above = {child: latent for latent, region in enumerate(regions) for child in region}
    return Latents([above[region] for region in regions[1:]], [above[k] for k in range(n)])


class Enumerated:
    """One circuit of a batch, with every latent assignment listed."""

    def __init__(self, name: str, params: CircuitParams, b: int = 0) -> None:
        self.leaf, self.root, self.inner = (part[b].double().numpy() for part in params[:3])
        self.bigram = params.bigram and [part.double().numpy() for part in params.bigram]
        self.n, r, self.vocab = self.leaf.shape
        parents, reads = make(name, self.n, r).latents
        self.num_inner = len(parents)
        states = np.array(list(product(range(r), repeat=1 + len(parents))))  # [A, latents]
        self.prior = self.root[states[:, 0]]  # [A], log p(assignment)
        for f, parent in enumerate(parents):
            self.prior = self.prior + self.inner[f][states[:, parent], states[:, f + 1]]
        self.emit = [self.leaf[k][states[:, reads[k]]] for k in range(self.n)]  # [A, V] each

    def latent_terms(self, tokens: tuple[int, ...]) -> np.ndarray:
        """log p(assignment, tokens) of every assignment, [A]; -1 leaves the token out."""
        seen = [self.emit[k][:, token] for k, token in enumerate(tokens) if token >= 0]
        return self.prior + sum(seen, np.zeros_like(self.prior))

    def table(self) -> np.ndarray:
        """log p of every token sequence, [V] * n."""
        total = self.prior.reshape([-1] + [1] * self.n)
        for k, emit in enumerate(self.emit):
            own = [k]
            if self.bigram and k:  # by the token before: [A, V, V]
                own = [k - 1, k]
                emit = log_softmax(emit[:, None] + self.bigram[0] @ self.bigram[1][k - 1], axis=-1)
            total = total + emit.reshape([-1] + [self.vocab if axis in own else 1 for axis in range(self.n)])
        return logsumexp(total, axis=0)


def marginals(table: np.ndarray) -> np.ndarray:
    """The table with a marginal in front of every axis, [V + 1] * n: index 0 (token -1) sums the position out."""
    for axis in range(table.ndim):
        table = np.concatenate([logsumexp(table, axis=axis, keepdims=True), table], axis=axis)
    return table


def prefix_marginals(table: np.ndarray, m: int, skip: bool = False) -> np.ndarray:
    """log p of every prefix of m tokens, [V] * m; with `skip`, tokens may also be -1: [V + 1] * m."""
    picked = [slice(None if skip else 1, None)] * m + [0] * (table.ndim - m)
    return marginals(table)[tuple(picked)]


def conditionals(table: np.ndarray, prefix: tuple[int, ...]) -> np.ndarray:
    """log p(x_k = . | prefix) with k = len(prefix), [V]."""
    return log_softmax(prefix_marginals(table, len(prefix) + 1)[prefix])


def all_tokens(n: int, vocab: int) -> torch.Tensor:
    """Every token sequence, [V**n, n], in the order of a flattened table."""
    return torch.tensor(list(product(range(vocab), repeat=n)))


def random_params(
    circuit: Circuit, vocab: int, batch: int = 1, seed: int = 0, scale: float = 1.5, token_rank: int = 0
) -> CircuitParams:
    """Normalised float32 parameters; `scale` is the spread of the logits."""
    generator = torch.Generator().manual_seed(seed)
    n, r = circuit.window, circuit.num_components

    def logs(*shape: int) -> torch.Tensor:
        return (torch.randn(batch, *shape, generator=generator) * scale).log_softmax(dim=-1)

    root = logs(r) if circuit.has_root else torch.zeros(batch, r)
    params = CircuitParams(logs(n, r, vocab), root, logs(circuit.num_inner, r, r))
    if not token_rank:
        return params
    source = torch.randn(vocab, token_rank, generator=generator) * scale
    target = torch.randn(n - 1, token_rank, vocab, generator=generator)
    return params._replace(bigram=Bigram(source, target))


def repeated(params: CircuitParams, b: int, count: int) -> CircuitParams:
    """Circuit b of a batch, `count` times."""
    return params.each(lambda part: part[b : b + 1].expand(count, *part.shape[1:]))


def make(name: str, n: int, r: int) -> Circuit:
    return get_circuit(name, n, min(r, circuit_class(name).max_components))

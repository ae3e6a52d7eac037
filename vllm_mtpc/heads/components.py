"""Components by low-rank differences, over one row of the target's lm_head per position.

base[k] = lm_head(s_k)        leaf[k, z, :] = log_softmax(base[k] + (A[k, z] s_k) B[k])

s_k [D]: the state that lm_head reads at position k; A [n, r, R_c, D]: `component_in`; B [n, R_c, V]: `component_out`.
A position then costs one row of the lm_head and r R_c V products more, where components with states of their own cost r
rows, r D V: with D = 4096 and R_c = 16 a 256th for each component.

B starts as small noise and A at the size of the state, so every leaf starts near the base, components differ, and both
factors have a gradient: that of B is the numbers A s, different in every component and as large as the state; that of A
is as small as B until B has grown. Were both small, both gradients would be.

Within a support of M tokens, the most probable ones of base[k], a draft is picked from the leaves' logits there alone:
exactly the circuit whose leaves are truncated to these tokens and renormalised. Nothing but the base is then computed
over the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm_mtpc.heads.base import INIT_STD, Head

COMPONENT_DIMS = {"component_in": (1,)}  # for `Head.component_dims`
NOISE_IN = "component_in"  # for `Head.noise_in`


def add_components(head: Head, rank: int) -> None:
    """Give `head` uninitialised component_in [n, r, R_c, D] and component_out [n, R_c, V]."""
    n, r = head.circuit.window, head.circuit.num_components
    head.component_in = nn.Parameter(torch.empty(n, r, rank, head.hidden_size))
    head.component_out = nn.Parameter(torch.empty(n, rank, head.vocab_size))


def reset_components(head: Head) -> None:
    """Initial values, from torch's own generator."""
    head.component_in.normal_().mul_(head.hidden_size**-0.5)  # keeps the size of the state
    head.component_out.normal_().mul_(INIT_STD)


def split(base: Tensor, states: Tensor, given: Tensor, out: Tensor) -> Tensor:
    """Logits [B, k, r, V] of the components from base[B, k, V] and states[B, k, D], in the dtype of base.

    given [k, r, R_c, D] and out [k, R_c, V]: `component_in` and `component_out` of these positions.
    """
    batch, positions, r = len(states), *given.shape[:2]
    low = torch.einsum("bkd,kzcd->kbzc", states, given).flatten(1, 2)  # [k, B r, R_c]: out is read once for all
    terms = torch.bmm(low, out).view(positions, batch, r, -1).transpose(0, 1)
    return terms.to(base.dtype).add_(base[:, :, None])  # in place: they are as large as what is returned


def split_within(base: Tensor, states: Tensor, given: Tensor, out: Tensor, support: int) -> tuple[Tensor, Tensor]:
    """`split` at the `support` most probable tokens of base: logits [B, k, r, M] and these tokens [B, k, M] int64."""
    logits, tokens = base.topk(support, dim=-1, sorted=False)
    low = torch.einsum("bkd,kzcd->bkzc", states, given)
    index = tokens[:, :, None].expand(-1, -1, out.shape[1], -1)
    at = out.expand(len(base), -1, -1, -1).gather(3, index)  # [B, k, R_c, M]
    return (low @ at).to(base.dtype).add_(logits[:, :, None]), tokens

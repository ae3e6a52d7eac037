"""The product of a drafter's distributions and a circuit with trained leaves, conditioned exactly.

    q(x_2 .. x_(1+K)) = PC(x_2 .. x_(1+K)) prod_k f_k(x_k) / Z
    f_k = softmax(base[k])                    the drafter's distribution of x_k (`hosted.py`)
    PC's leaf[k, z, v] = exp((A[k, z] B[k])_v)     the same for every text; PC's sums are those of every head

A product of a circuit and a factorised distribution is a circuit of the same structure: its leaves are
log_softmax(base[k] + A[k, z] B[k]), whose normalisers s[k, z] one upward pass moves into the sums (`Circuit.multiply`).
Z and all conditionals are then exact, and drafts are sampled as for every circuit. K positions have a factor: the
drafted ones in serving, all in training. CoDD (a product of a circuit and a diffusion drafter) has the same form.

B starts at zero: the untrained product is the drafter's own distribution. With `token_rank` the leaves are normalised
again after the token before is known; the sums are those without it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mtpc.circuits import CircuitParams
from vllm_mtpc.heads.base import DraftParams
from vllm_mtpc.heads.hosted import HostedHead
from vllm_mtpc.kernels.low_rank import LowRank

LEAST = torch.finfo(torch.float32).min


class ProductHead(HostedHead):
    """Leaf parameters: those of HostedHead, with component_in [n, r, R_c] (A) and component_out [n, R_c, V] (B)."""

    def add_components(self, rank: int) -> None:
        """As in BorrowedLmHead; the components depend on no state."""
        super().add_components(rank)
        if rank:
            self.component_in = nn.Parameter(torch.empty(self.component_in.shape[:3]))

    def reset_components(self) -> None:
        """As in BorrowedLmHead."""
        if self.component_rank:
            self.component_in.normal_().mul_(self.component_rank**-0.5)
            self.component_out.zero_()

    def component_states(self, states: Tensor, positions: slice) -> Tensor:
        """As in BorrowedLmHead."""
        return self.component_in[positions].expand(len(states), -1, -1, -1).contiguous()

    def draft_params(self, hidden: Tensor, first: Tensor, num_drafts: int, in_blocks: bool = False) -> DraftParams:
        """As in Head; the sums are those of the product over K drafts."""
        params = super().draft_params(hidden, first, num_drafts, in_blocks)
        if not self.component_rank:
            return params
        norms = self._normalisers(params.leaf, params.low)
        return params._replace(**self._sums(params.root, params.inner, norms))

    def forward(self, hidden: Tensor, num_positions: int | None = None) -> CircuitParams:
        """As in Head; the sums are those of the product over `num_positions`."""
        if not self.component_rank:
            return super().forward(hidden, num_positions)
        logits = self.unembed(hidden, 0, num_positions or self.circuit.window).float()
        norms = logits.logsumexp(-1, keepdim=True)
        sums = self._sums(*self.sum_logits(hidden), norms[:, 1:, :, 0])
        return CircuitParams(logits - norms, **sums, bigram=self.bigram())

    def _sums(self, root: Tensor, inner: Tensor, norms: Tensor) -> dict[str, Tensor]:
        """Return the product's root and inner from their logits and the normalisers [B, K, r] of x_2 .. x_(1+K)."""
        scores = F.pad(norms, (0, 0, 1, 0))  # x_1 is given: its factor is 1
        root, inner = self.circuit.multiply(root.log_softmax(-1), inner.log_softmax(-1), scores)
        return {"root": root.log_softmax(-1), "inner": inner.log_softmax(-1)}

    def _normalisers(self, leaf: Tensor, low: LowRank | None) -> Tensor:
        """Return log sum_v exp of the logits of `DraftParams`: [B, K, r], float32, also of a shard of them."""
        shard = self.leaf_shard
        columns = leaf.shape[-1] if shard is None else shard.stop - shard.start  # the others are padding
        leaf = leaf[..., :columns].float()
        if low is None:
            norms = leaf.logsumexp(-1)
        else:  # A is the same for every request: a matrix product, without the leaves [B, K, r, V]
            top = F.pad(leaf, (0, 1), value=LEAST).amax(-1)
            factors = torch.bmm(low.low[0].float(), low.out[..., :columns].float()).exp()
            norms = torch.einsum("bkv,kzv->bkz", (leaf[:, :, 0] - top).exp(), factors).log() + top
        return norms if shard is None else shard.normalisers(norms)

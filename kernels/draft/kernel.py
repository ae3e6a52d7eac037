"""`naive.draft` in Triton: drafts, their conditionals in a cache like vLLM's `draft_logits`, and confidences.

Two paths, alike in what they store (README.md): one launch for all drafts where a leaf is small (`rows.py`), else
blocks of the vocabulary, two launches before the first draft and two for each (`blocked.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from vllm_mtpc.kernels.draft import blocked, rows
from vllm_mtpc.kernels.filter import MAX_COMPONENTS, machine
from vllm_mtpc.kernels.filter.program import Program

# Sizes are reasoned, not measured: README.md says what they rest on.
TILE = 16384  # elements of a leaf that one program instance has in registers: 64 per thread of 8 warps
SMALL_LEAF, SMALL_VOCAB = 2 * TILE, TILE // 2  # up to these one instance drafts for a request
BLOCKED_TILE = 4096  # beyond: many instances share a leaf
MIN_BLOCK = 64


class Drafter:
    """Drafts of batches of up to `max_batch` circuits of one program; everything it needs is allocated once.

    noised_argmax is a jit function of one vector, (logits, keys, mask, seed, pos, temp, IS_DRAFTING, USE_FP64) ->
    (value, index): vLLM's `gumbel_noised_argmax`, from which alone a served draft has its noise. use_fp64: what it
    compares is float64. one_launch: which path; None chooses by the size of a leaf.
    """

    def __init__(
        self,
        program: Program,
        num_components: int,
        vocab_size: int,
        max_batch: int,
        max_drafts: int,
        device: torch.device,
        noised_argmax: Any,
        use_fp64: bool = False,
        one_launch: bool | None = None,
    ) -> None:
        if not 1 <= num_components <= MAX_COMPONENTS:
            raise ValueError(
                f"num_components={num_components}: the kernel takes 1 to {MAX_COMPONENTS}; use naive.draft"
            )
        self.code, self.begins, depth = machine.encode(program, device)
        size = triton.next_power_of_2(num_components)
        is_small = size * vocab_size <= SMALL_LEAF and vocab_size <= SMALL_VOCAB
        self.one_launch = is_small if one_launch is None else one_launch
        tile = TILE if self.one_launch else BLOCKED_TILE
        block = min(triton.next_power_of_2(vocab_size), max(MIN_BLOCK, tile // size))
        self.sizes = {"R": size, "DEPTH": depth}
        self.block, self.num_blocks = block, triton.cdiv(vocab_size, block)
        self.num_warps = 8 if size * block > BLOCKED_TILE else 4
        self.noise = {"NOISED_ARGMAX": noised_argmax, "USE_FP64": use_fp64}
        if not self.one_launch:
            self._allocate(max_batch, max_drafts, device, torch.float64 if use_fp64 else torch.float32)

    def _allocate(self, batch: int, drafts: int, device: torch.device, value_dtype: torch.dtype) -> None:
        """State of the circuits and what blocks hand on, between launches."""
        size, depth, blocks = self.sizes["R"], self.sizes["DEPTH"], self.num_blocks

        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.tops, self.totals = buffer(batch, drafts, blocks, size), buffer(batch, drafts, blocks, size)
        self.norms = buffer(batch, drafts, size)
        self.state = (buffer(batch, size), buffer(batch, depth, size), buffer(batch, dtype=torch.int32))
        self.values = buffer(batch, blocks, dtype=value_dtype)
        self.indices, self.moments = buffer(batch, blocks, dtype=torch.int32), buffer(batch, blocks, 3)

    def __call__(
        self,
        evidence: Tensor,
        leaf: Tensor,
        root: Tensor,
        inner: Tensor,
        *,
        slots: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        pos: Tensor,
        tokens: Tensor,
        confidences: Tensor,
        cache: Tensor | None = None,
        draw: bool = True,
    ) -> None:
        """Fills tokens and confidences [B, K] and, where not None, cache [slots, K or more, V] float32.

        evidence [B, r], leaf [B, K, r, V], root [B, r], inner [B, F, r, r] as in `naive.draft`; any float dtype.
        slots [B] int: where a request's temperature, seed and part of the cache are; -1: a padded row, drafted by
        argmax and not cached. pos [B]: keys the noise of the first draft, pos + k that of draft k. draw False: every
        draft is the argmax. cache[slot, k] is log q_k before temperature, the very numbers the noise was added to.
        """
        if not tokens.numel():
            return
        leaf = leaf if leaf.stride(3) == 1 else leaf.contiguous()
        evidence, root, inner = evidence.contiguous(), root.contiguous(), inner.contiguous()
        requests = (slots, temperature, seeds, pos)
        cached = (None, 0, 0) if cache is None else (cache, cache.stride(0), cache.stride(1))
        out = (tokens, tokens.stride(0), confidences, confidences.stride(0))
        launch = self._rows if self.one_launch else self._blocks
        launch((evidence, leaf, root, inner), requests, cached, out, draw)

    def _rows(self, params: tuple, requests: tuple, cached: tuple, out: tuple, draw: bool) -> None:
        evidence, leaf, root, inner = params
        batch, num_drafts, r, vocab_size = leaf.shape
        rows.draft_rows[(batch,)](
            evidence,
            leaf,
            *leaf.stride()[:3],
            root,
            inner,
            self.code,
            self.begins,
            *requests,
            *out,
            *cached,
            num_drafts,
            inner.shape[1],
            r,
            vocab_size,
            **self.noise,
            **self.sizes,
            DRAW=draw,
            BLOCK=self.block,
            BLOCKS=self.num_blocks,
            num_warps=self.num_warps,
        )

    def _blocks(self, params: tuple, requests: tuple, cached: tuple, out: tuple, draw: bool) -> None:
        evidence, leaf, root, inner = params
        batch, num_drafts, r, vocab_size = leaf.shape
        from_leaf = (leaf, *leaf.stride()[:3])
        code = (inner, self.code, self.begins)
        of_blocks = {"BLOCKS": triton.next_power_of_2(self.num_blocks)}
        tile = {"R": self.sizes["R"], "BLOCK": self.block, "num_warps": self.num_warps}
        blocked.leaf_blocks[(self.num_blocks, num_drafts, batch)](
            *from_leaf, self.tops, self.totals, num_drafts, r, vocab_size, **tile
        )
        blocked.start_rows[(num_drafts, batch)](
            evidence,
            root,
            *code,
            self.tops,
            self.totals,
            self.norms,
            *self.state,
            num_drafts,
            inner.shape[1],
            r,
            self.num_blocks,
            **self.sizes,
            CHUNK=max(1, BLOCKED_TILE // self.sizes["R"]),
        )
        per_block = (self.values, self.indices, self.moments)
        for k in range(num_drafts):
            blocked.draft_blocks[(self.num_blocks, batch)](
                *from_leaf,
                self.norms,
                self.state[0],
                *requests,
                *cached,
                *per_block,
                k,
                num_drafts,
                r,
                vocab_size,
                **self.noise,
                DRAW=draw,
                **tile,
            )
            blocked.choose[(batch,)](
                *from_leaf,
                *code,
                self.norms,
                *self.state,
                *requests[:2],
                *per_block,
                *out,
                k,
                num_drafts,
                inner.shape[1],
                r,
                self.num_blocks,
                DRAW=draw,
                **self.sizes,
                **of_blocks,
            )

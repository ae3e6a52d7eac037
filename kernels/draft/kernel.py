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
TILE = 8192  # elements of a leaf that one program instance has in registers: 32 per thread of 8 warps; 64 spill
SMALL_LEAF, SMALL_VOCAB = 4 * TILE, TILE  # up to these one instance drafts for a request
# One instance drafts for a request, so registers are there; ptxas would spill 16 bytes to have more instances at once.
REGISTERS = {} if torch.version.hip else {"maxnreg": 255}
BLOCKED_TILE = 4096  # beyond: many instances share a leaf
MIN_BLOCK = 64


class Drafter:
    """Drafts of batches of circuits of one program.

    noised_argmax is a jit function of one vector, (logits, keys, mask, seed, pos, temp, IS_DRAFTING, USE_FP64) ->
    (value, index): vLLM's `gumbel_noised_argmax`, from which alone a served draft has its noise. use_fp64: what it
    compares is float64. one_launch: which path; None chooses by the size of a leaf.
    """

    def __init__(
        self,
        program: Program,
        num_components: int,
        vocab_size: int,
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
        """Fills tokens and confidences [B, K] and, where not None, cache [slots, K or more, V] of any float dtype.

        evidence [B, r], leaf [B, K, r, V], root [B, r], inner [B, F, r, r] as in `naive.draft`; any float dtype.
        slots [B] int: where a request's temperature, seed and part of the cache are; -1: a padded row, drafted by
        argmax and not cached. pos [B]: keys the noise of the first draft, pos + k that of draft k; it says the
        stream too. draw False: every draft is the argmax. cache[slot, k] is log q_k before temperature, rounded to the
        dtype of the cache: the very numbers the noise was added to.
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
        from_leaf, unit = _strided(leaf)
        rows.draft_rows[(batch,)](
            evidence,
            *from_leaf,
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
            UNIT=unit,
            num_warps=self.num_warps,
            **REGISTERS,
        )

    def buffers(self, batch: int, drafts: int, device: torch.device) -> tuple[Any, ...]:
        """State of the circuits and what blocks hand on, between launches: as large as this batch needs."""
        size, depth, blocks = self.sizes["R"], self.sizes["DEPTH"], self.num_blocks

        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        of_leaves = (buffer(batch, drafts, blocks, size), buffer(batch, drafts, blocks, size))
        state = (buffer(batch, size), buffer(batch, depth, size), buffer(batch, dtype=torch.int32))
        values = buffer(batch, blocks, dtype=torch.float64 if self.noise["USE_FP64"] else torch.float32)
        per_block = (values, buffer(batch, blocks, dtype=torch.int32), buffer(batch, blocks, 3))
        return of_leaves, buffer(batch, drafts, size), state, per_block

    def _blocks(self, params: tuple, requests: tuple, cached: tuple, out: tuple, draw: bool) -> None:
        evidence, leaf, root, inner = params
        batch, num_drafts, r, vocab_size = leaf.shape
        from_leaf, unit = _strided(leaf)
        code = (inner, self.code, self.begins)
        of_blocks = {"BLOCKS": triton.next_power_of_2(self.num_blocks)}
        tile = {"R": self.sizes["R"], "BLOCK": self.block, "UNIT": unit, "num_warps": self.num_warps}
        blocks = self.num_blocks
        of_leaves, norms, state, per_block = self.buffers(batch, num_drafts, leaf.device)
        blocked.leaf_blocks[(blocks, num_drafts, batch)](*from_leaf, *of_leaves, num_drafts, r, vocab_size, **tile)
        blocked.start_rows[(num_drafts, batch)](
            evidence,
            root,
            *code,
            *of_leaves,
            norms,
            *state,
            num_drafts,
            inner.shape[1],
            r,
            blocks,
            **self.sizes,
            CHUNK=max(1, BLOCKED_TILE // self.sizes["R"]),
        )
        for k in range(num_drafts):
            blocked.draft_blocks[(blocks, batch)](
                *from_leaf,
                norms,
                state[0],
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
                norms,
                *state,
                *requests[:2],
                *per_block,
                *out,
                k,
                num_drafts,
                inner.shape[1],
                r,
                blocks,
                DRAW=draw,
                UNIT=unit,
                **self.sizes,
                **of_blocks,
            )


def _strided(leaf: Tensor) -> tuple[tuple[Any, ...], int]:
    """The leaf, its strides in multiples of a unit, and the unit: 16 where rows are aligned, so that loads are wide.

    Strides may depend on the batch and on K; whether all of them are multiples of 16 depends on the vocabulary alone.
    What is compiled therefore does not change while serving.
    """
    strides = leaf.stride()[:3]
    unit = 16 if all(stride % 16 == 0 for stride in strides) else 1
    return (leaf, *(stride // unit for stride in strides)), unit

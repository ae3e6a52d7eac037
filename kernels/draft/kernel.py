"""`naive.draft` in Triton: drafts, their conditionals in a cache like vLLM's `draft_logits`, and confidences.

Two paths, alike in what they store (README.md): one launch for all drafts where a leaf is small (`rows.py`), else
blocks of the vocabulary, two launches before the first draft and two for each (`blocked.py`). The ranks that a
vocabulary is divided over take the second, and meet once before the first draft, at every draft, and at the end.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from vllm_mtpc.kernels.draft import TILE, blocked, is_small, rows
from vllm_mtpc.kernels.filter import MAX_COMPONENTS, machine
from vllm_mtpc.kernels.filter.program import Program
from vllm_mtpc.kernels.shard import Shard

# Sizes are reasoned, not measured: README.md says what they rest on.
# One instance drafts for a request, so registers are there; ptxas would spill 16 bytes to have more instances at once.
REGISTERS = {} if torch.version.hip else {"maxnreg": 255}
BLOCKED_TILE = 4096  # beyond: many instances share a leaf
MIN_BLOCK = 64
RECORD = 5  # numbers that a rank hands in for a draft, beside one for each component


class Drafter:
    """Drafts of batches of circuits of one program.

    noised_argmax is a jit function of one vector, (logits, keys, mask, seed, pos, temp, IS_DRAFTING, USE_FP64) ->
    (value, index): vLLM's `gumbel_noised_argmax`, from which alone a served draft has its noise. use_fp64: what it
    compares is float64. one_launch: which path; None chooses by the size of a leaf. shard: leaves are this rank's
    columns [B, K, r, shard.rows], tokens and the cache those of the vocabulary.
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
        shard: Shard | None = None,
    ) -> None:
        if not 1 <= num_components <= MAX_COMPONENTS:
            raise ValueError(
                f"num_components={num_components}: the kernel takes 1 to {MAX_COMPONENTS}; use naive.draft"
            )
        self.code, self.begins, depth = machine.encode(program, device)
        size = triton.next_power_of_2(num_components)
        small = shard is None and is_small(num_components, vocab_size)
        self.one_launch, self.shard = small if one_launch is None else one_launch, shard
        vocab_size = vocab_size if shard is None else shard.rows
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

    def buffers(
        self, batch: int, drafts: int, device: torch.device, cache_dtype: torch.dtype | None = None
    ) -> tuple[Any, ...]:
        """State of the circuits and what blocks hand on, between launches: as large as this batch needs.

        The last one: this rank's columns of the conditionals, where there are ranks and a cache.
        """
        size, depth, blocks = self.sizes["R"], self.sizes["DEPTH"], self.num_blocks

        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        of_leaves = (buffer(batch, drafts, blocks, size), buffer(batch, drafts, blocks, size))
        state = (buffer(batch, size), buffer(batch, depth, size), buffer(batch, dtype=torch.int32))
        values = buffer(batch, blocks, dtype=torch.float64 if self.noise["USE_FP64"] else torch.float32)
        per_block = (values, buffer(batch, blocks, dtype=torch.int32), buffer(batch, blocks, 3))
        has_columns = self.shard is not None and cache_dtype is not None
        # rows of a multiple of 16: strides that K decides are then not specialised
        columns = buffer(batch, drafts, -(-self.shard.rows // 16) * 16, dtype=cache_dtype) if has_columns else None
        return of_leaves, buffer(batch, drafts, size), state, per_block, columns

    def _blocks(self, params: tuple, requests: tuple, cached: tuple, out: tuple, draw: bool) -> None:
        evidence, leaf, root, inner = params
        batch, num_drafts, r, vocab_size = leaf.shape
        shard, begin, cache = self.shard, None, cached[0]
        if shard is not None:
            vocab_size, begin = shard.stop - shard.start, shard.start
        from_leaf, unit = _strided(leaf)
        code = (inner, self.code, self.begins)
        of_blocks = {"BLOCKS": triton.next_power_of_2(self.num_blocks)}
        tile = {"R": self.sizes["R"], "BLOCK": self.block, "UNIT": unit, "num_warps": self.num_warps}
        blocks = self.num_blocks
        of_leaves, norms, state, per_block, columns = self.buffers(
            batch, num_drafts, leaf.device, None if cache is None else cache.dtype
        )
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
        if shard is not None:
            norms = shard.normalisers(norms)
            cached = cached if columns is None else (columns, columns.stride(0), columns.stride(1))
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
                begin,
                **self.noise,
                DRAW=draw,
                **tile,
            )
            if shard is not None:
                self._elect(k, leaf, norms, per_block, inner, state, requests, out, draw)
                continue
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
        if columns is not None:
            blocked.spread[(blocks * shard.size, num_drafts, batch)](
                shard.gather(columns.flatten(1)),
                requests[0],
                cache,
                cache.stride(0),
                cache.stride(1),
                num_drafts,
                shard.rows,
                columns.shape[2],
                cache.shape[2],
                BLOCK=self.block,
            )

    def _elect(
        self,
        k: int,
        leaf: Tensor,
        norms: Tensor,
        per_block: tuple,
        inner: Tensor,
        state: tuple,
        requests: tuple,
        out: tuple,
        draw: bool,
    ) -> None:
        """Draft k from the candidates of all ranks, in the place of `choose`."""
        batch, num_drafts, r, _ = leaf.shape
        from_leaf, unit = _strided(leaf)
        record = per_block[0].new_empty(batch, RECORD + self.sizes["R"])
        blocked.nominate[(batch,)](
            *from_leaf,
            norms,
            *per_block,
            record,
            self.shard.start,
            k,
            num_drafts,
            r,
            self.num_blocks,
            R=self.sizes["R"],
            BLOCKS=triton.next_power_of_2(self.num_blocks),
            UNIT=unit,
        )
        blocked.elect[(batch,)](
            self.shard.gather(record),
            inner,
            self.code,
            self.begins,
            *state,
            *requests[:2],
            *out,
            k,
            num_drafts,
            inner.shape[1],
            r,
            self.shard.size,
            DRAW=draw,
            **self.sizes,
            RANKS=triton.next_power_of_2(self.shard.size),
        )


def _strided(leaf: Tensor) -> tuple[tuple[Any, ...], int]:
    """The leaf, its strides in multiples of a unit, and the unit: 16 where rows are aligned, so that loads are wide.

    Strides may depend on the batch and on K; whether all of them are multiples of 16 depends on the vocabulary alone.
    What is compiled therefore does not change while serving.
    """
    strides = leaf.stride()[:3]
    unit = 16 if all(stride % 16 == 0 for stride in strides) else 1
    return (leaf, *(stride // unit for stride in strides)), unit

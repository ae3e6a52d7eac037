"""`naive.draft` in Triton: drafts, their conditionals in a cache like vLLM's `draft_logits`, and confidences.

Two paths, alike in what they store (README.md): one launch for all drafts where a leaf is small, else blocks of the
vocabulary, two launches before the first draft and two for each; where leaves are conditioned on the token before, five
for each. The ranks that a vocabulary is divided over take the second, and meet once before the first draft (for
conditioned leaves at every draft), once more at every draft, and at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from vllm_mtpc.kernels.bigram import Bigram
from vllm_mtpc.kernels.draft import TILE, is_small, launches, rows
from vllm_mtpc.kernels.draft.bigram import token_bias
from vllm_mtpc.kernels.filter import MAX_COMPONENTS
from vllm_mtpc.kernels.filter.kernel import encode
from vllm_mtpc.kernels.filter.program import Program
from vllm_mtpc.kernels.shard import Shard

# Sizes are reasoned, not measured: README.md says what they rest on.
# One instance drafts for a request, so registers are there; ptxas would spill 16 bytes to have more instances at once.
REGISTERS = {} if torch.version.hip else {"maxnreg": 255}
BLOCKED_TILE = 4096  # beyond: many instances share a leaf
MIN_BLOCK = 64
BIAS = {"CHUNK": 64, "ROWS": 16, "BLOCK": 128}  # of `token_bias`: a product of tiles takes 16 rows and more


class Given(NamedTuple):
    """What the launches of one call are made of."""

    leaf: tuple  # the leaf, and its strides in units of tile["UNIT"]
    before: tuple  # x_1, the bigram and its strides; each None without
    circuit: tuple  # evidence, root, inner, program
    requests: tuple  # slots, temperature, seeds, pos
    out: tuple  # tokens and confidences, a stride behind each
    cached: tuple  # the cache and its strides; None, 0, 0 without
    tile: dict[str, int]
    draw: bool


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
        self.program, depth = encode(program, device)
        size = triton.next_power_of_2(num_components)
        small = shard is None and is_small(num_components, vocab_size)
        self.one_launch, self.shard = small if one_launch is None else one_launch, shard
        self.width = vocab_size = vocab_size if shard is None else shard.rows
        tile = TILE if self.one_launch else BLOCKED_TILE
        block = min(triton.next_power_of_2(vocab_size), max(MIN_BLOCK, tile // size))
        self.sizes = {"R": size, "DEPTH": depth}
        self.num_blocks = triton.cdiv(vocab_size, block)
        self.tile = {"R": size, "BLOCK": block, "num_warps": 8 if size * block > BLOCKED_TILE else 4}
        self.noise = {"NOISED_ARGMAX": noised_argmax, "USE_FP64": use_fp64}

    def __call__(
        self,
        evidence: Tensor,
        leaf: Tensor,
        root: Tensor,
        inner: Tensor,
        first: Tensor | None = None,
        bigram: Bigram | None = None,
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
        first [B] and bigram: as there; the bigram is the whole vocabulary's also with a shard.
        slots [B] int: where a request's temperature, seed and part of the cache are; -1: a padded row, drafted by
        argmax and not cached. pos [B]: keys the noise of the first draft, pos + k that of draft k; it says the
        stream too. draw False: every draft is the argmax. cache[slot, k] is log q_k before temperature, rounded to the
        dtype of the cache: the very numbers the noise was added to.
        """
        if not tokens.numel():
            return
        leaf = leaf if leaf.stride(3) == 1 else leaf.contiguous()
        # in units of 16 where rows are aligned, so that loads are wide; strides may depend on the batch and on K, but
        # whether all are multiples of 16 on the vocabulary alone: nothing is compiled again while serving
        strides = leaf.stride()[:3]
        unit = 16 if all(stride % 16 == 0 for stride in strides) else 1
        from_leaf = (leaf, *(stride // unit for stride in strides))
        circuit = (evidence.contiguous(), root.contiguous(), inner.contiguous(), self.program)
        before = (None,) * 5
        if bigram is not None:
            target = bigram.target if bigram.target.stride(2) == 1 else bigram.target.contiguous()
            if self.shard is not None:
                target = target[..., self.shard.start :]
            before = (first, bigram.source.contiguous(), target, *target.stride()[:2])
        requests = (slots, temperature, seeds, pos)
        cached = (None, 0, 0) if cache is None else (cache, cache.stride(0), cache.stride(1))
        out = (tokens, tokens.stride(0), confidences, confidences.stride(0))
        tile = {**self.tile, "UNIT": unit}
        launch = self._rows if self.one_launch else self._blocks
        launch(Given(from_leaf, before, circuit, requests, out, cached, tile, draw))

    def _rows(self, given: Given) -> None:
        leaf, source = given.leaf[0], given.before[1]
        batch, num_drafts, r, vocab_size = leaf.shape
        rank = 0 if source is None else source.shape[1]
        chunk = min(triton.next_power_of_2(rank), max(1, TILE // 2 // given.tile["BLOCK"])) if rank else 0
        options = {**self.noise, **self.sizes, **given.tile, "DRAW": given.draw, "BLOCKS": self.num_blocks, **REGISTERS}
        read = (*given.leaf, *given.before, *given.circuit, *given.requests)
        sizes = (num_drafts, given.circuit[2].shape[1], r, vocab_size)
        rows.draft_rows[(batch,)](*read, *given.out, *given.cached, *sizes, **options, RANK=rank, CHUNK=chunk)

    def buffers(
        self,
        batch: int,
        drafts: int,
        device: torch.device,
        cache_dtype: torch.dtype | None = None,
        has_bigram: bool = False,
    ) -> tuple[Any, ...]:
        """State of the circuits and what blocks hand on, between launches: as large as this batch needs.

        The last two: what the token before adds to the logits of a draft, where leaves are conditioned on it, which
        are then normalised draft by draft; this rank's columns of the conditionals, where there are ranks and a cache.
        """
        size, depth, blocks = self.sizes["R"], self.sizes["DEPTH"], self.num_blocks
        at_once = 1 if has_bigram else drafts
        width = -(-self.width // 16) * 16  # a stride that is specialised alike, whatever the batch and K

        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        of_leaves = (buffer(batch, at_once, blocks, size), buffer(batch, at_once, blocks, size))
        norms, state = buffer(batch, at_once, size), buffer(1 + depth, batch, size)
        of_record = torch.float64 if self.noise["USE_FP64"] else torch.float32
        records = buffer(blocks, batch, launches.RECORD.value + size, dtype=of_record)
        bias = buffer(batch, width) if has_bigram else None
        columns = None if self.shard is None or cache_dtype is None else buffer(batch, drafts, width, dtype=cache_dtype)
        return of_leaves, norms, state, records, bias, columns

    def _blocks(self, given: Given) -> None:
        from_leaf, before, circuit, requests, out, cached, tile, draw = given
        leaf, inner, cache, shard, blocks = from_leaf[0], circuit[2], cached[0], self.shard, self.num_blocks
        batch, num_drafts, r, vocab_size = leaf.shape
        begin = None
        if shard is not None:
            vocab_size, begin = shard.stop - shard.start, shard.start
        of_leaves, norms, state, records, bias, columns = self.buffers(
            batch, num_drafts, leaf.device, None if cache is None else cache.dtype, before[0] is not None
        )
        added = (None, 0) if bias is None else (bias, bias.shape[1])
        at_once = norms.shape[1]  # leaves that are normalised together
        chunk = max(1, BLOCKED_TILE // self.sizes["R"])
        if columns is not None:
            cached = (columns, columns.stride(0), columns.stride(1))
        for k in range(num_drafts):
            if bias is not None:
                self._add(before, k, out[0], bias, vocab_size)
            if k % at_once == 0:
                read = (*from_leaf, *added, k, *of_leaves, at_once, r, vocab_size)
                launches.leaf_blocks[(blocks, at_once, batch)](*read, **tile)
                read = (*circuit, *of_leaves, norms, state, at_once, inner.shape[1], r, blocks)
                launches.start_rows[(at_once, batch)](*read, **self.sizes, CHUNK=chunk, START=k == 0)
                normalisers = norms if shard is None else shard.normalisers(norms)
            read = (*from_leaf, *added, normalisers, state, *requests, *cached, records)
            sizes = (k, num_drafts, r, vocab_size, begin)
            launches.draft_blocks[(blocks, batch)](*read, *sizes, **self.noise, **tile, DRAW=draw)
            found, count = records, blocks
            if shard is not None:
                nominee = records.new_empty(batch, records.shape[2])
                launches.nominate[(batch,)](
                    records, nominee, blocks, R=tile["R"], BLOCKS=triton.next_power_of_2(blocks)
                )
                found, count = shard.gather(nominee), shard.size
            read = (found, *circuit[2:], state, *requests[:2], *out, k, num_drafts, inner.shape[1], r, count)
            launches.choose[(batch,)](*read, **self.sizes, DRAW=draw, COUNT=triton.next_power_of_2(count))
        if columns is not None and shard is not None:
            to_cache = (requests[0], cache, cache.stride(0), cache.stride(1))
            shape = (num_drafts, shard.rows, columns.shape[2], cache.shape[2])
            whole = shard.gather(columns.flatten(1))
            launches.spread[(blocks * shard.size, num_drafts, batch)](whole, *to_cache, *shape, BLOCK=tile["BLOCK"])

    def _add(self, before: tuple, k: int, tokens: Tensor, bias: Tensor, vocab_size: int) -> None:
        """Fills bias [B, width] with what the token before draft k, of tokens [B, K] or the first, adds to it."""
        first, source, *target = before
        last = first if k == 0 else tokens[:, k - 1]
        (batch, width), rank = bias.shape, source.shape[1]
        options = {**BIAS, "CHUNK": min(BIAS["CHUNK"], max(16, triton.next_power_of_2(rank))), "RANK": rank}
        given = (last, last.stride(0), source, *target, bias, width, k, batch, vocab_size)
        token_bias[(triton.cdiv(batch, BIAS["ROWS"]), triton.cdiv(width, BIAS["BLOCK"]))](*given, **options)

"""`naive.draft` in Triton, on two paths (README.md): drafts, conditionals as in `draft_logits`, and confidences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from vllm_mtpc.kernels.bigram import Bigram
from vllm_mtpc.kernels.draft import TILE, is_small, launches
from vllm_mtpc.kernels.filter.kernel import encode
from vllm_mtpc.kernels.filter.program import Program
from vllm_mtpc.kernels.low_rank import LowRank
from vllm_mtpc.kernels.shard import Shard

# Sizes are derived from registers (README.md), not measured.
REGISTERS = {} if torch.version.hip else {"maxnreg": 128}  # of `draft_rows`: 2 instances of 8 warps at once, 4 of 4
MIN_BLOCK = 64

LEAF_STRIDES = ("leaf_stride", "k_stride", "z_stride")
ROWS_ARGUMENTS = ("leaf_ptr", "UNIT", *LEAF_STRIDES)  # of a leaf, in `draft_rows`
LOW_POINTERS, LOW_STRIDES = ("low_ptr", "out_ptr"), ("low_stride", "low_k_stride", "out_k_stride", "out_stride")

# Requests of a program instance: they share the first columns of the components' differences, or the product of tiles
# of their biases, which takes 16 rows and more.
LOW_ROWS, BIAS_ROWS = 4, 16

Arguments = dict[str, Any]  # of a kernel, by name


@dataclass(frozen=True)
class Batch:
    """The arguments of one call: B requests, K drafts, r components, V columns of a leaf, F inner sums."""

    shape: tuple[int, int, int, int]  # B, K, r, V
    leaf: Arguments  # logits [B, K, r or 1, V] and their strides, in units, and the differences of components
    given: Arguments  # the same of x_1, [B, 1, r or 1, V]; empty: its evidence is known
    circuit: Arguments  # evidence [B, r], root [B, r], inner [B, F, r, r], the program and F
    requests: Arguments  # slots [B], temperature [slots], seeds [slots], pos [B], allowed [B, K, words] or None
    outputs: Arguments  # tokens and confidences [B, K], with the stride of a row
    cache: Arguments  # conditionals [slots, K, V] or None, with the strides of a slot and of a draft
    first: Tensor | None  # [B] int64, x_1
    bigram: Bigram | None  # its target [K, rank, V] from this rank's first column on
    draw: bool


class Drafter:
    """Drafts of batches of circuits of one program.

    Args:
        program: of the circuit (`filter/program.py`).
        num_components: r, at most 128.
        vocab_size: V.
        device: of all tensors.
        noised_argmax: jit function (logits, keys, mask, seed, pos, temp, IS_DRAFTING, USE_FP64) -> (value, index) of
            one vector: vLLM's `gumbel_noised_argmax`, the only source of noise.
        use_fp64: whether noised values are compared in float64.
        one_launch: which path; None chooses by the size of a leaf.
        shard: of a divided vocabulary; leaves are then this rank's columns [B, K, r, shard.rows], while tokens and
            cache are those of the whole vocabulary.
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
        self.program, depth = encode(program, device)
        size = triton.next_power_of_2(num_components)
        small = shard is None and is_small(num_components, vocab_size)
        self.one_launch, self.shard = small if one_launch is None else one_launch, shard
        self.width = vocab_size if shard is None else shard.rows
        self.sizes = {"R": size, "DEPTH": depth}
        self.noise = {"NOISED_ARGMAX": noised_argmax, "USE_FP64": use_fp64}

    def __call__(
        self,
        evidence: Tensor | None,
        leaf: Tensor,
        root: Tensor,
        inner: Tensor,
        first: Tensor | None = None,
        bigram: Bigram | None = None,
        low: LowRank | None = None,
        *,
        slots: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        pos: Tensor,
        tokens: Tensor,
        confidences: Tensor,
        cache: Tensor | None = None,
        allowed: Tensor | None = None,
        draw: bool = True,
    ) -> None:
        """Write K drafts of every request to `tokens`, with their confidences and conditionals.

        Args:
            evidence: [B, r], log p(x_1 | z); this and the next three in any float dtype. None, on the path of blocks:
                the leaves begin with that of x_1.
            leaf: [B, K, r, V], logits of x_2 .. x_(1+K).
            root: [B, r], logits.
            inner: [B, F, r, r], logits.
            first: [B] int64, x_1; needed with a bigram and without evidence.
            bigram: of K positions, over the whole vocabulary also with a shard.
            low: differences of the components, of the positions of `leaf`, which then is [B, K, 1, V]; in blocks only.
            slots: [B] int, index of a request into temperature, seeds and cache; -1: a padded row, drafted by argmax
                and not cached.
            temperature: [slots]; 0: the draft is the argmax.
            seeds: [slots] int64.
            pos: [B] int64; pos + k keys the noise of draft k, and its value selects the noise stream.
            tokens: [B, K] int64, written.
            confidences: [B, K] float32, written.
            cache: [slots, K or more, V] of any float dtype, or None. cache[slot, k] becomes log q_k before temperature,
                rounded to the dtype of the cache: the values that the noise was added to.
            allowed: [B, K, ceil(V / 32)] int32, a bit for every token, V that of the whole vocabulary; or None. Where
                it is 0, log q_k is -inf; the others are not normalised again.
            draw: False drafts the argmax for every request.
        """
        if not tokens.numel():
            return
        leaf = leaf if leaf.stride(3) == 1 else leaf.contiguous()
        given = {}
        if evidence is None:
            given = _leaf_arguments(leaf[:, :1], low and low.positions(0, 1))
            leaf, low = leaf[:, 1:], low and low.positions(1)
        if bigram is not None:
            target = bigram.target if bigram.target.stride(2) == 1 else bigram.target.contiguous()
            target = target if self.shard is None else target[..., self.shard.start :]
            bigram = Bigram(bigram.source.contiguous(), target)
        batch = Batch(
            shape=(len(leaf), leaf.shape[1], root.shape[1], leaf.shape[3]),
            leaf=_leaf_arguments(leaf, low),
            given=given,
            circuit={
                "evidence_ptr": None if evidence is None else evidence.contiguous(), "root_ptr": root.contiguous(),
                "inner_ptr": inner.contiguous(), "program_ptr": self.program, "num_inner": inner.shape[1],
            },
            requests={
                "slot_ptr": slots, "temperature_ptr": temperature, "seed_ptr": seeds, "pos_ptr": pos,
                "allowed_ptr": allowed, "words": 0 if allowed is None else allowed.shape[2],
            },
            outputs={
                "token_ptr": tokens, "token_stride": tokens.stride(0),
                "confidence_ptr": confidences, "confidence_stride": confidences.stride(0),
            },
            cache=_cache_arguments(cache),
            first=None if bigram is None and evidence is not None else first, bigram=bigram, draw=draw,
        )  # fmt: skip
        (self._draft_rows if self.one_launch else self._draft_blocks)(batch)

    def _tile(self, rows: int) -> tuple[Arguments, int]:
        """Return the sizes of a tile of `rows` rows, and the number of blocks of a leaf."""
        block, warps = triton.next_power_of_2(self.width), 4
        if rows * block > TILE:
            block = min(block, max(MIN_BLOCK, TILE // (2 * rows if self.one_launch else rows)))
            warps = 8 if self.one_launch or rows * block > TILE else 4
        return {"R": self.sizes["R"], "BLOCK": block, "num_warps": warps}, triton.cdiv(self.width, block)

    def _draft_rows(self, batch: Batch) -> None:
        """The path of one launch."""
        num_reqs, num_drafts, r, vocab_size = batch.shape
        tile, blocks = self._tile(self.sizes["R"])
        bigram = _bigram_arguments(batch.bigram)
        chunk = min(triton.next_power_of_2(bigram["RANK"]), max(1, TILE // tile["BLOCK"]))
        launches.draft_rows[(num_reqs,)](
            **{name: batch.leaf[name] for name in ROWS_ARGUMENTS},
            first_ptr=batch.first, **bigram, **batch.circuit, **batch.requests, **batch.outputs, **batch.cache,
            num_drafts=num_drafts, r=r, vocab_size=vocab_size, **self.noise, DRAW=batch.draw, **tile,
            DEPTH=self.sizes["DEPTH"], BLOCKS=blocks, CHUNK=chunk, **REGISTERS,
        )  # fmt: skip

    def _draft_blocks(self, batch: Batch) -> None:
        """The path in blocks of the vocabulary; R: r rounded up to a power of two."""
        num_reqs, num_drafts, r, vocab_size = batch.shape
        shard, size, bigram = self.shard, self.sizes["R"], _bigram_arguments(batch.bigram)
        has_bias = bigram["RANK"] > 0
        tile, blocks = self._tile(max(size, BIAS_ROWS) if has_bias else size)
        begin, cache, columns, written = None, batch.cache["cache_ptr"], None, batch.cache
        leaves = 1 if has_bias else num_drafts  # normalised together
        rows = BIAS_ROWS if has_bias else LOW_ROWS if batch.leaf["LOW"] else 1
        width = -(-self.width // 16) * 16  # a stride that is specialised alike, whatever the batch and K
        buffer = partial(torch.empty, dtype=torch.float32, device=batch.leaf["leaf_ptr"].device)
        tops, totals = (buffer(num_reqs, leaves, blocks, size) for _ in range(2))
        norms = buffer(num_reqs, leaves, size)
        state = buffer(1 + self.sizes["DEPTH"], num_reqs, size)
        record_dtype = torch.float64 if self.noise["USE_FP64"] else torch.float32
        records, count = buffer(blocks, num_reqs, launches.RECORD.value + size, dtype=record_dtype), blocks
        if shard is not None:
            vocab_size, begin, count = shard.stop - shard.start, shard.start, shard.size
            if cache is not None:  # this rank's conditionals
                columns = buffer(num_reqs, num_drafts, width, dtype=cache.dtype)
                written = _cache_arguments(columns)
        shared = {"r": r, **self.sizes, "num_warps": 16 if size > 64 else 4}

        def normalise(leaf: Arguments, count: int, k: int, bias: Arguments, start: bool) -> None:
            launches.leaf_blocks[(triton.cdiv(num_reqs, rows), blocks, count)](
                **leaf, **bias, draft=k, top_ptr=tops, total_ptr=totals,
                num_drafts=count, batch=num_reqs, r=r, vocab_size=vocab_size, **tile, ROWS=rows,
                num_stages=2,  # 3 spill with a token_rank of 256
            )  # fmt: skip
            launches.start_rows[(count, num_reqs)](
                **leaf, **batch.circuit, first_ptr=batch.first, top_ptr=tops, total_ptr=totals, norm_ptr=norms,
                state_ptr=state, num_drafts=count, num_blocks=blocks, **shared,
                CHUNK=max(1, TILE // size), START=start,
            )  # fmt: skip

        if batch.given:
            normalise(batch.given, 1, 0, _before(None) | _bigram_arguments(None), True)
        for k in range(num_drafts):
            before = batch.first if k == 0 else batch.outputs["token_ptr"][:, k - 1]
            bias = _before(before if has_bias else None) | bigram
            if k % leaves == 0:
                normalise(batch.leaf, leaves, k, bias, k == 0 and not batch.given)
                whole_norms = norms if shard is None else shard.normalisers(norms)
            launches.draft_blocks[(triton.cdiv(num_reqs, rows), blocks)](
                **batch.leaf, **bias, norm_ptr=whole_norms, state_ptr=state, **batch.requests, **written,
                record_ptr=records, k=k, num_drafts=num_drafts, batch=num_reqs, r=r, vocab_size=vocab_size,
                begin=begin, **self.noise, DRAW=batch.draw, **tile, ROWS=rows,
            )  # fmt: skip
            launches.choose[(num_reqs,)](
                record_ptr=records if shard is None else shard.gather(self._nominate(records)),
                inner_ptr=batch.circuit["inner_ptr"], program_ptr=self.program, state_ptr=state,
                slot_ptr=batch.requests["slot_ptr"], temperature_ptr=batch.requests["temperature_ptr"], **batch.outputs,
                k=k, num_drafts=num_drafts, num_inner=batch.circuit["num_inner"], count=count, **shared,
                DRAW=batch.draw, COUNT=triton.next_power_of_2(count),
            )  # fmt: skip
        if shard is not None and columns is not None:
            launches.spread[(blocks * shard.size, num_drafts, num_reqs)](
                log_q_ptr=shard.gather(columns.flatten(1)), slot_ptr=batch.requests["slot_ptr"], **batch.cache,
                num_drafts=num_drafts, rows=shard.rows, width=width, vocab_size=cache.shape[2],
                BLOCK=tile["BLOCK"],
            )  # fmt: skip

    def _nominate(self, records: Tensor) -> Tensor:
        """Return this rank's record [B, RECORD + R] of a draft, from those of its blocks [blocks, B, RECORD + R]."""
        blocks, num_reqs, size = records.shape
        nominee = records.new_empty(num_reqs, size)
        sizes = {"num_blocks": blocks, "R": self.sizes["R"], "BLOCKS": triton.next_power_of_2(blocks)}
        launches.nominate[(num_reqs,)](record_ptr=records, nominee_ptr=nominee, **sizes)
        return nominee


def _leaf_arguments(leaf: Tensor, low: LowRank | None) -> Arguments:
    # in units of 16 where rows are aligned, so that loads are wide; strides may depend on the batch and on K, but
    # whether all are multiples of 16 on the vocabulary alone: nothing is compiled again while serving
    strides = leaf.stride()[:3]
    unit = 16 if all(stride % 16 == 0 for stride in strides) else 1
    made = {
        "leaf_ptr": leaf,
        "UNIT": unit,
        **dict(zip(LEAF_STRIDES, (stride // unit for stride in strides), strict=True)),
    }
    if low is None:
        return made | dict.fromkeys(LOW_POINTERS) | dict.fromkeys(LOW_STRIDES, 0) | {"LOW": 0}
    strides, rank = (*low.low.stride()[:2], *low.out.stride()[:2]), low.out.shape[1]
    made |= {"low_ptr": low.low, "out_ptr": low.out, **dict(zip(LOW_STRIDES, strides, strict=True))}
    return made | {"LOW": rank}


def _cache_arguments(cache: Tensor | None) -> Arguments:
    if cache is None:
        return {"cache_ptr": None, "cache_stride": 0, "cache_k_stride": 0}
    return {"cache_ptr": cache, "cache_stride": cache.stride(0), "cache_k_stride": cache.stride(1)}


def _bigram_arguments(bigram: Bigram | None) -> Arguments:
    if bigram is None:
        return {"source_ptr": None, "target_ptr": None, "target_k_stride": 0, "target_stride": 0, "RANK": 0}
    source, target = bigram
    strides = {"target_k_stride": target.stride(0), "target_stride": target.stride(1)}
    return {"source_ptr": source, "target_ptr": target, **strides, "RANK": target.shape[1]}


def _before(tokens: Tensor | None) -> Arguments:
    return {"before_ptr": tokens, "before_stride": 0 if tokens is None else tokens.stride(0)}

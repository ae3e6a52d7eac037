"""`naive.draft` in Triton: drafts, their conditionals in a cache like vLLM's `draft_logits`, and confidences.

Two paths store the same (README.md): one launch for all drafts of small leaves, and blocks of the vocabulary for large
ones, in two launches before the first draft and two for each draft, or in five for each draft where leaves are
conditioned on the token before. The ranks of a divided vocabulary take the second path. They exchange normalisers
before the first draft (conditioned leaves: at every draft), one record per draft, and the conditionals at the end.
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

# Sizes are derived from registers (README.md), not measured.
# One instance drafts for a request and may use all registers; ptxas would spill 16 bytes to run more instances at once.
REGISTERS = {} if torch.version.hip else {"maxnreg": 255}
BLOCKED_TILE = 4096  # for larger leaves: many instances share a leaf
MIN_BLOCK = 64
BIAS_CHUNK, BIAS_ROWS, BIAS_BLOCK = 64, 16, 128  # of `token_bias`: a product of tiles takes 16 rows and more

Arguments = dict[str, Any]  # of kernels, by name


class Buffers(NamedTuple):
    """State of the circuits and partial results between launches; R: r rounded up to a power of two."""

    tops: Tensor  # [B, leaves, blocks, R], maximum of every component in every block
    totals: Tensor  # [B, leaves, blocks, R], sum of exp(logit - maximum)
    norms: Tensor  # [B, leaves, R]; leaves: all K, or 1 where each is normalised after the draft before it
    state: Tensor  # [1 + DEPTH, B, R]
    records: Tensor  # [blocks, B, RECORD + R]
    bias: Tensor | None  # [B, width], of the token before a draft
    columns: Tensor | None  # [B, K, width], this rank's conditionals


class Drafter:
    """Drafts of batches of circuits of one program.

    Args:
        program: of the circuit (`filter/program.py`).
        num_components: r, 1 to MAX_COMPONENTS.
        vocab_size: V.
        device: of all tensors.
        noised_argmax: jit function (logits, keys, mask, seed, pos, temp, IS_DRAFTING, USE_FP64) -> (value, index) of
            one vector: vLLM's `gumbel_noised_argmax`, the only source of noise.
        use_fp64: whether noised values are compared in float64.
        one_launch: which path; None chooses by the size of a leaf.
        shard: of a divided vocabulary; leaves are then this rank's columns [B, K, r, shard.rows], while tokens and
            cache are those of the whole vocabulary.

    Raises:
        ValueError: the circuit has more components than the kernel takes.
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
        self.width = vocab_size if shard is None else shard.rows
        tile = TILE if self.one_launch else BLOCKED_TILE
        block = min(triton.next_power_of_2(self.width), max(MIN_BLOCK, tile // size))
        self.sizes = {"R": size, "DEPTH": depth, "BLOCK": block}
        self.num_blocks = triton.cdiv(self.width, block)
        self.num_warps = 8 if size * block > BLOCKED_TILE else 4  # of kernels with a tile [R, BLOCK]
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
        """Write K drafts of every request to `tokens`, with their confidences and conditionals.

        Args:
            evidence: [B, r], log p(x_1 | z); this and the next three in any float dtype.
            leaf: [B, K, r, V], logits of x_2 .. x_(1+K).
            root: [B, r], logits.
            inner: [B, F, r, r], logits.
            first: [B] int64, x_1; needed with a bigram.
            bigram: of K positions, over the whole vocabulary also with a shard.
            slots: [B] int, index of a request into temperature, seeds and cache; -1: a padded row, drafted by argmax
                and not cached.
            temperature: [slots]; 0: the draft is the argmax.
            seeds: [slots] int64.
            pos: [B] int64; pos + k keys the noise of draft k, and its value selects the noise stream.
            tokens: [B, K] int64, written.
            confidences: [B, K] float32, written.
            cache: [slots, K or more, V] of any float dtype, or None. cache[slot, k] becomes log q_k before temperature,
                rounded to the dtype of the cache: the values that the noise was added to.
            draw: False drafts the argmax for every request.
        """
        if not tokens.numel():
            return
        leaf = leaf if leaf.stride(3) == 1 else leaf.contiguous()
        # in units of 16 where rows are aligned, so that loads are wide; strides may depend on the batch and on K, but
        # whether all are multiples of 16 on the vocabulary alone: nothing is compiled again while serving
        strides = leaf.stride()[:3]
        unit = 16 if all(stride % 16 == 0 for stride in strides) else 1
        arguments = {"leaf_ptr": leaf, "num_drafts": leaf.shape[1], "r": leaf.shape[2], "UNIT": unit, "DRAW": draw}
        arguments |= dict(zip(("leaf_stride", "k_stride", "z_stride"), (x // unit for x in strides), strict=True))
        arguments |= {"evidence_ptr": evidence.contiguous(), "root_ptr": root.contiguous()}
        arguments |= {"inner_ptr": inner.contiguous(), "num_inner": inner.shape[1], "program_ptr": self.program}
        arguments |= {"slot_ptr": slots, "temperature_ptr": temperature, "seed_ptr": seeds, "pos_ptr": pos}
        arguments |= {"token_ptr": tokens, "token_stride": tokens.stride(0)}
        arguments |= {"confidence_ptr": confidences, "confidence_stride": confidences.stride(0)}
        arguments |= {**_cache_arguments(cache), **self.sizes, **self.noise}
        source = target = None
        if bigram is not None:
            source = bigram.source.contiguous()
            target = bigram.target if bigram.target.stride(2) == 1 else bigram.target.contiguous()
            target = target if self.shard is None else target[..., self.shard.start :]
        k_stride, stride = (None, None) if target is None else target.stride()[:2]
        arguments |= {"first_ptr": None if bigram is None else first, "source_ptr": source, "target_ptr": target}
        arguments |= {"target_k_stride": k_stride, "target_stride": stride}
        arguments["RANK"] = 0 if source is None else source.shape[1]
        if self.one_launch:
            self._draft_rows(arguments)
        else:
            self._draft_blocks(arguments)

    def _draft_rows(self, arguments: Arguments) -> None:
        """The path of one launch."""
        num_reqs, *_, vocab_size = arguments["leaf_ptr"].shape
        rank = arguments["RANK"]
        _launch(
            rows.draft_rows,
            (num_reqs,),
            arguments,
            vocab_size=vocab_size,
            BLOCKS=self.num_blocks,
            CHUNK=min(triton.next_power_of_2(rank), max(1, TILE // 2 // self.sizes["BLOCK"])) if rank else 0,
            num_warps=self.num_warps,
            **REGISTERS,
        )

    def buffers(
        self,
        batch: int,
        drafts: int,
        device: torch.device,
        cache_dtype: torch.dtype | None = None,
        bigram: bool = False,
    ) -> Buffers:
        """Allocate the buffers of the path in blocks for B requests and K drafts; cache_dtype None: without a cache."""
        size, depth, blocks = self.sizes["R"], self.sizes["DEPTH"], self.num_blocks
        leaves = 1 if bigram else drafts
        width = -(-self.width // 16) * 16  # a stride that is specialised alike, whatever the batch and K

        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        record_dtype = torch.float64 if self.noise["USE_FP64"] else torch.float32
        is_cached_apart = self.shard is not None and cache_dtype is not None
        return Buffers(
            tops=buffer(batch, leaves, blocks, size),
            totals=buffer(batch, leaves, blocks, size),
            norms=buffer(batch, leaves, size),
            state=buffer(1 + depth, batch, size),
            records=buffer(blocks, batch, launches.RECORD.value + size, dtype=record_dtype),
            bias=buffer(batch, width) if bigram else None,
            columns=buffer(batch, drafts, width, dtype=cache_dtype) if is_cached_apart else None,
        )

    def _draft_blocks(self, arguments: Arguments) -> None:
        """The path in blocks of the vocabulary."""
        leaf, cache, shard, blocks = arguments["leaf_ptr"], arguments["cache_ptr"], self.shard, self.num_blocks
        num_reqs, num_drafts, _, vocab_size = leaf.shape
        begin = None
        if shard is not None:
            vocab_size, begin = shard.stop - shard.start, shard.start
        cache_dtype = None if cache is None else cache.dtype
        held = self.buffers(num_reqs, num_drafts, leaf.device, cache_dtype, arguments["source_ptr"] is not None)
        leaves = held.norms.shape[1]  # normalised together
        arguments |= {"vocab_size": vocab_size, "begin": begin, "num_blocks": blocks}
        arguments |= {"bias_ptr": held.bias, "bias_stride": 0 if held.bias is None else held.bias.shape[1]}
        arguments |= {"top_ptr": held.tops, "total_ptr": held.totals, "norm_ptr": held.norms, "state_ptr": held.state}
        arguments["record_ptr"] = held.records
        written = {} if held.columns is None else _cache_arguments(held.columns)
        for k in range(num_drafts):
            if held.bias is not None:
                self._add_bias(arguments, k, held.bias)
            if k % leaves == 0:
                grid, normalised = (blocks, leaves, num_reqs), {"num_drafts": leaves}
                _launch(launches.leaf_blocks, grid, arguments, draft=k, num_warps=self.num_warps, **normalised)
                chunk = max(1, BLOCKED_TILE // self.sizes["R"])
                _launch(launches.start_rows, (leaves, num_reqs), arguments, CHUNK=chunk, START=k == 0, **normalised)
                norms = held.norms if shard is None else shard.normalisers(held.norms)
            options = {**written, "norm_ptr": norms, "num_warps": self.num_warps}
            _launch(launches.draft_blocks, (blocks, num_reqs), arguments, k=k, **options)
            records, count = held.records, blocks
            if shard is not None:
                records, count = shard.gather(self._nominate(arguments)), shard.size
            options = {"record_ptr": records, "count": count, "COUNT": triton.next_power_of_2(count)}
            _launch(launches.choose, (num_reqs,), arguments, k=k, **options)
        if shard is not None and held.columns is not None:
            columns = {"log_q_ptr": shard.gather(held.columns.flatten(1)), "width": held.columns.shape[2]}
            grid, sizes = (
                (blocks * shard.size, num_drafts, num_reqs),
                {"rows": shard.rows, "vocab_size": cache.shape[2]},
            )
            _launch(launches.spread, grid, arguments, **columns, **sizes)

    def _nominate(self, arguments: Arguments) -> Tensor:
        """This rank's record [B, RECORD + R] of a draft, from those of its blocks."""
        blocks, num_reqs, size = arguments["record_ptr"].shape
        nominee = arguments["record_ptr"].new_empty(num_reqs, size)
        options = {"nominee_ptr": nominee, "BLOCKS": triton.next_power_of_2(blocks)}
        _launch(launches.nominate, (num_reqs,), arguments, **options)
        return nominee

    def _add_bias(self, arguments: Arguments, k: int, bias: Tensor) -> None:
        """Write the bias of the token before draft k to `bias` [B, width]."""
        before = arguments["first_ptr"] if k == 0 else arguments["token_ptr"][:, k - 1]
        (num_reqs, width), rank = bias.shape, arguments["RANK"]
        _launch(
            token_bias,
            (triton.cdiv(num_reqs, BIAS_ROWS), triton.cdiv(width, BIAS_BLOCK)),
            arguments,
            before_ptr=before,
            before_stride=before.stride(0),
            width=width,
            k=k,
            batch=num_reqs,
            CHUNK=min(BIAS_CHUNK, max(16, triton.next_power_of_2(rank))),
            ROWS=BIAS_ROWS,
            BLOCK=BIAS_BLOCK,
        )


def _launch(kernel: Any, grid: tuple[int, ...], arguments: Arguments, **others: Any) -> None:
    """Launch a kernel with those of `arguments` that it takes, and with all others, which come first."""
    kernel[grid](**{name: value for name, value in arguments.items() if name in kernel.arg_names} | others)


def _cache_arguments(cache: Tensor | None) -> Arguments:
    if cache is None:
        return {"cache_ptr": None, "cache_stride": 0, "cache_k_stride": 0}
    return {"cache_ptr": cache, "cache_stride": cache.stride(0), "cache_k_stride": cache.stride(1)}

"""Drafts that a request's grammar allows: the conditionals are masked with the grammar's state while drafting.

A matcher of each grammar, compiled by vLLM's own backend, reads the emitted tokens. While drafts are sampled it masks
log q(x_k | x_<k), accepts the sampled draft, and is rolled back after the last one. The rejection sampler receives the
masked distribution.

On Model Runner V2 the whole batch is drafted first, without masks. Then the host reads emitted tokens and drafts of
structured requests. Grammars follow these drafts up to the first that they forbid, and all K are drawn again by the
draft kernel, with the masks on this path and the same noise. An allowed draft stays: the largest noised value is the
largest of every part that has it. This is repeated until no mask is missing, and gives the same drafts as masks one by
one. The host waits for the device twice where all first drafts are allowed, and once more for each that is not.

vLLM prunes drafts from the first forbidden one and takes the token there from the target, which biases the output: the
token must come from max(p - q, 0). A masked draft is never pruned. Where drafts are not masked (`mask_drafts`, a
reasoning parser, a refused token), both runners keep the output distribution (v1/proposer.py: set_one_hot,
v2/verification.py). Tensor-parallel ranks exchange which grammars are compiled: they must draft the same tokens.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group, model_parallel_is_initialized
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from vllm_mtpc.kernels.draft.naive import Pick
from vllm_mtpc.proposers.options.switches import logger


@dataclass
class Follower:
    """The grammar of one request, and how far it has read the output."""

    grammar: Any  # a StructuredOutputGrammar; None while it is compiled, or if it cannot be followed
    num_read: int = 0  # output tokens that it has read
    compiling: Any = None  # the StructuredOutputRequest that is being compiled, or None

    def read(self, request_id: str, tokens: list[int]) -> None:
        """Advance the grammar to the end of the request's output."""
        if self.grammar is not None and len(tokens) > self.num_read:
            if not self.grammar.accept_tokens(request_id, tokens[self.num_read :]):
                self.grammar = None
            self.num_read = len(tokens)


@dataclass
class Masks:
    """The grammars of one step's batch."""

    bitmask: Tensor | None  # [max_num_seqs, ceil(V / 32)] int32, one bit per token; None before the first grammar
    rows: dict[int, Follower] = field(default_factory=dict)  # by row of the batch
    unmasked: list[int] = field(default_factory=list)  # rows of structured requests without a follower
    lengths: dict[int, int] = field(default_factory=dict)  # drafts by row, for rows whose grammar ends
    _paths: defaultdict[int, list[int]] = field(default_factory=partial(defaultdict, list))  # drafts read, by row
    _bits: Tensor | None = None  # [S, K, words], of all drafts

    def around(self, pick: Pick, ids: Tensor | None = None) -> Pick:
        """Return `pick` of masked and normalised conditionals; grammars advance by the picked drafts.

        ids: tokens of the columns of log q, or None. A row's drafts end where its grammar allows none of them.
        """

        def masked(log_q: Tensor, k: int) -> Tensor:
            for row in (row for row in self.rows if row not in self.lengths):
                if not self._fill_bits(row, ids):
                    self.lengths[row] = k
            open_rows = [row for row in self.rows if row not in self.lengths]
            drafts = pick(self._mask(log_q, open_rows, ids) if open_rows else log_q, k)
            tokens = (drafts if ids is None else ids[drafts]).tolist() if open_rows else []  # waits for the device
            for row in open_rows:
                grammar = self.rows[row].grammar
                if grammar.accept_tokens("draft", [tokens[row]]):
                    self._paths[row].append(tokens[row])
                if grammar.is_terminated():
                    self.lengths[row] = k + 1
            return drafts

        return masked if self.rows else pick

    def _fill_bits(self, row: int, ids: Tensor | None) -> bool:
        """Fill the bits of a row; returns whether its grammar allows one of ids (None: all tokens)."""
        assert self.bitmask is not None  # allocated with the first compiled grammar
        self.rows[row].grammar.fill_bitmask(self.bitmask, row)
        if ids is None:
            return True
        bits, ids = self.bitmask[row], ids.cpu()
        ids = ids[ids < 32 * len(bits)]
        return bool((bits[ids // 32] >> ids % 32 & 1).any())

    def _mask(self, log_q: Tensor, open_rows: list[int], ids: Tensor | None) -> Tensor:
        """Return log q [B, V or len(ids)], masked by the bits and normalised in these rows, without waiting for it."""
        assert self.bitmask is not None
        # -1: every token is allowed; the last word is that of the tokens which a grammar has no bits for
        bits = torch.full((len(log_q), self.bitmask.shape[1] + 1), -1, dtype=torch.int32)
        bits[open_rows] = functional.pad(self.bitmask[open_rows], (0, 1))
        bits, tokens = async_tensor_h2d(bits, log_q.device), torch.arange(log_q.shape[1], device=log_q.device)
        tokens = tokens if ids is None else ids
        words = (tokens // 32).clamp(max=bits.shape[1] - 1)
        allowed, is_other = bits[:, words] >> (tokens % 32).int() & 1 != 0, bits[:, -1:] != 0
        return torch.where(is_other, log_q, log_q.masked_fill(~allowed, -torch.inf).log_softmax(dim=-1))

    def follow(self, drafts: list[list[int]], vocab_size: int, ids: Tensor | None = None) -> Tensor | None:
        """Return masks [S, K, ceil(V / 32)] along drafts [S, K], or None: the last ones are those of these drafts.

        ids: tokens that are drafted, on the host, or None: all. Where a grammar allows none of them all are allowed, so
        that the draft has a distribution; it is verified and rejected.
        """
        assert self.bitmask is not None
        is_new, words = False, -(-vocab_size // 32)
        if self._bits is None:
            self._bits = torch.full((len(drafts), len(drafts[0]), words), -1, dtype=torch.int32)  # all are allowed
        for row, follower in self.rows.items():
            grammar, is_first, path = follower.grammar, row not in self._paths, self._paths[row]
            same = next((k for k, token in enumerate(path) if token != drafts[row][k]), len(path))
            if same < len(path):  # masks after another draft
                grammar.rollback(len(path) - same)
                del path[same:]
                self._bits[row, same + 1 :] = -1
            for k, token in enumerate(drafts[row][same:], same):
                if grammar.is_terminated():
                    break
                mask = self._bits[row, k]
                if k > same or is_first:
                    is_some = self._fill_bits(row, ids)
                    bits = functional.pad(self.bitmask[row, :words], (0, max(0, words - self.bitmask.shape[1])))
                    mask[:] = bits if is_some else -1
                    is_new = True
                if not int(mask[token // 32]) >> token % 32 & 1 or not grammar.accept_tokens("draft", [token]):
                    break
                path.append(token)
        return self._bits if is_new else None

    def rewind(self) -> None:
        """Take the drafts back from the grammars."""
        for row, path in self._paths.items():
            self.rows[row].grammar.rollback(len(path))
        self._paths.clear()


class HeadStructuredOutputManager(StructuredOutputManager):
    """vLLM's, with grammars that read the tokens of a step one by one, as without drafts.

    llguidance refuses a list with a token after the end of text (`ignore_eos`), and vLLM 0.32 ends the request then.
    """

    def _create_grammar(self, request: Any) -> StructuredOutputGrammar:
        grammar = super()._create_grammar(request)
        accept = grammar.accept_tokens
        grammar.accept_tokens = lambda name, tokens: all(accept(name, [token]) for token in tokens)
        return grammar


class Grammars:
    """The grammars of all running requests; compiled in a thread."""

    def __init__(self, vllm_config: VllmConfig, is_masking: bool) -> None:
        given = vllm_config.structured_outputs_config
        self.vllm_config = vllm_config
        self.is_masking = is_masking and (given.enable_in_reasoning or not given.reasoning_parser)
        self.max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self.followers: dict[str, Follower] = {}
        self.manager: Any = None  # a HeadStructuredOutputManager, made with the first grammar: it loads a tokenizer
        self.bitmask: Tensor | None = None
        self.starter = ThreadPoolExecutor(1)  # starts the manager, whose own threads compile

    def start(self, name: str, params: SamplingParams | None) -> None:
        """Follow a new or restarted request if it is structured."""
        self.followers.pop(name, None)
        if (request := StructuredOutputRequest.from_sampling_params(params)) is not None:
            self.followers[name] = Follower(None, compiling=request if self.is_masking else None)
            if self.is_masking:
                self.starter.submit(self._compile, name, params, request)

    def masks(self, requests: dict[str, Any], request_ids: list[str], sampled_token_ids: list[list[int]]) -> Masks:
        """Return the masks of one step; sampled_token_ids: of the batch, [] for an unfinished prompt.

        requests: all running requests by id, with `sampling_params` and `output_token_ids`.
        """
        self.followers = {name: kept for name, kept in self.followers.items() if name in requests}
        rows = [row for row, name in enumerate(request_ids) if sampled_token_ids[row] and name in self.followers]
        for name in (request_ids[row] for row in rows):
            if len(requests[name].output_token_ids) < self.followers[name].num_read:  # the request was restarted
                self.start(name, requests[name].sampling_params)
        self._collect_compiled([one for row in rows if (one := self.followers[request_ids[row]]).compiling is not None])
        masks = Masks(self.bitmask)
        for row in rows:
            follower = self.followers[request_ids[row]]
            follower.read(request_ids[row], requests[request_ids[row]].output_token_ids)
            if follower.grammar is None:
                masks.unmasked.append(row)
            else:
                masks.rows[row] = follower
                if follower.grammar.is_terminated():
                    masks.lengths[row] = 0
        return masks

    def _collect_compiled(self, followers: list[Follower]) -> None:
        """Use the grammars that all tensor-parallel ranks have compiled; drop those that failed on one."""
        if not followers:
            return
        found = [follower.compiling.grammar for follower in followers]
        states = torch.tensor([-1 if isinstance(one, Exception) else int(one is not None) for one in found])
        if model_parallel_is_initialized() and (group := get_tp_group()).world_size > 1:
            torch.distributed.all_reduce(states, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        for follower, grammar, state in zip(followers, found, states.tolist(), strict=True):
            if state:
                follower.compiling, follower.grammar = None, grammar if state > 0 else None
            if state > 0 and self.bitmask is None:
                self.bitmask = self.manager.backend.allocate_token_bitmask(self.max_num_seqs)

    def _compile(self, name: str, params: SamplingParams, request: StructuredOutputRequest) -> None:
        """Compile the grammar of a request with the scheduler's backend, which caches grammars."""
        try:
            if self.manager is None:
                self.manager = HeadStructuredOutputManager(self.vllm_config)
            given = {"request_id": name, "sampling_params": params, "structured_output_request": request}
            self.manager.grammar_init(SimpleNamespace(**given))
        except Exception as error:
            logger.warning("Drafts of structured requests are not masked with their grammar: %s", error)
            request.grammar = error


@dataclass
class Structured:
    """A structured request on Model Runner V2."""

    sampling_params: SamplingParams
    prompt_len: int
    output_token_ids: list[int]  # that the host has read


class StructuredRequests:
    """Structured requests on Model Runner V2, whose output is on the device."""

    def __init__(self, vllm_config: VllmConfig, states: RequestState) -> None:
        self.grammars = Grammars(vllm_config, is_masking=True)
        self.states = states
        self.requests: dict[str, Structured] = {}

    def add(self, scheduled_new_reqs: list[Any]) -> None:
        """Register new requests that vLLM's states hold; a preempted one returns with the output that it has kept."""
        self.requests = {name: kept for name, kept in self.requests.items() if name in self.states.req_id_to_index}
        for new in scheduled_new_reqs:
            self.requests.pop(new.req_id, None)
            self.grammars.start(new.req_id, new.sampling_params)
            if StructuredOutputRequest.from_sampling_params(new.sampling_params) is not None:
                output = new.prefill_token_ids[new.prompt_len :]
                self.requests[new.req_id] = Structured(new.sampling_params, new.prompt_len, output)

    def rows(self, input_batch: InputBatch) -> list[int]:
        """Return the rows of structured requests in a batch."""
        return [row for row, name in enumerate(input_batch.req_ids) if name in self.requests] if self.requests else []

    def masks(
        self, req_ids: list[str], slots: Tensor, num_sampled: Tensor, drafts: Tensor
    ) -> tuple[Masks, list[list[int]]]:
        """Return the masks of S requests, in slots [S] and with num_sampled [S] tokens, and drafts [S, K] as lists.

        Waits for the device once, or twice after steps without drafts, which leave more than K + 1 tokens to read.
        """
        lengths, width = self.states.total_len.gpu[slots].long(), drafts.shape[1] + 1
        last = self._last_tokens(slots, lengths, width)
        rows = torch.cat([lengths[:, None], num_sampled[:, None], last, drafts], dim=1).tolist()
        requests, tokens = [self.requests[name] for name in req_ids], [row[2 : 2 + width] for row in rows]
        unread = [
            row[0] - request.prompt_len - len(request.output_token_ids)
            for request, row in zip(requests, rows, strict=True)
        ]
        if (most := max(unread)) > width:
            tokens = self._last_tokens(slots, lengths, most).tolist()
        for request, count, row in zip(requests, unread, tokens, strict=True):
            request.output_token_ids += row[len(row) - count :] if count else []
        masks = self.grammars.masks(self.requests, req_ids, [[0] * row[1] for row in rows])
        return masks, [row[2 + width :] for row in rows]

    def _last_tokens(self, slots: Tensor, lengths: Tensor, width: int) -> Tensor:
        """Return the last tokens [S, width] of texts with lengths [S], int64."""
        at = lengths[:, None] - torch.arange(width, 0, -1, device=lengths.device)
        return self.states.all_token_ids.gpu[slots[:, None], at.clamp(min=0)].long()

"""Drafts that a request's grammar allows: the conditionals are masked with the grammar's state while filtering.

Algorithm (per structured request, on either model runner): a matcher of the grammar, compiled here once more by vLLM's
own backend, follows the tokens the request has emitted. While drafts are drawn it masks log q(x_k | x_<k) with what may
come next, follows the draft that was picked, and is rolled back when the last draft is there. The verifier gets the
masked distribution: what is drawn is what is scored.

The scheduler's grammars see drafts only when they are made. vLLM cuts them at the first forbidden one and takes the
token there from the target. That loses what follows, and biases the output: a draft that fails because the target gives
it no probability must be replaced from the residual distribution, max(p - q, 0). A masked draft is never cut.

Every draft waits for the host; steps without structured requests do not. Where no matcher can follow (a reasoning
parser decides when the grammar begins, the matcher refuses a token) or `mask_drafts` is off, drafts are not masked, and
each runner keeps the distribution in its own way (`as_point` in v1/proposer.py, `v2/verification.py`).

Grammars are compiled in threads, from the step on in which a worker gets a request, and no step waits for one: until it
is compiled on every tensor-parallel rank, drafts of its request are not masked. Ranks must draft the same tokens, since
each feeds the target its own drafts (V2) or scores them with its own distribution (V1). So in steps with a grammar that
is not in use yet, and in no others, they exchange which ones they have compiled.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group, model_parallel_is_initialized
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest

from vllm_mtpc.kernels.draft.naive import Pick
from vllm_mtpc.proposers.config.switches import logger


@dataclass
class Follower:
    """A request's grammar and how many of its output tokens it has read.

    grammar: None while it is compiled, which is `asked` for, and where it cannot be followed.
    """

    grammar: Any  # a StructuredOutputGrammar
    num_read: int = 0
    asked: Any = None  # a StructuredOutputRequest

    def read(self, request_id: str, tokens: list[int]) -> None:
        """Read the rest of a request's output tokens."""
        if self.grammar is not None and len(tokens) > self.num_read:
            if not self.grammar.accept_tokens(request_id, tokens[self.num_read :]):
                self.grammar = None
            self.num_read = len(tokens)


@dataclass
class Masks:
    """The structured requests of one step: what their drafts may be.

    rows: a follower by row of the batch. unmasked: rows of structured requests that have none. lengths: how many
    drafts of a row make sense, where a draft may be the grammar's last token.
    """

    bitmask: Tensor | None  # None: no grammar yet; [max_num_seqs, ceil(V / 32)] int32, one bit per token
    rows: dict[int, Follower] = field(default_factory=dict)
    unmasked: list[int] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    _advanced: Counter[int] = field(default_factory=Counter)

    def around(self, pick: Pick) -> Pick:
        """`pick` from masked conditionals."""

        def masked(log_q: Tensor, k: int) -> Tensor:
            open_rows = [row for row in self.rows if row not in self.lengths]
            for row in open_rows:
                self.rows[row].grammar.fill_bitmask(self.bitmask, row)
            if open_rows and self.bitmask is not None:
                forbidden = _is_zero(self.bitmask[open_rows].to(log_q.device), log_q.shape[1])
                own = log_q[open_rows].masked_fill_(forbidden, -torch.inf)
                log_q[open_rows] = own.log_softmax(dim=-1)  # survival reads probabilities
            drafts = pick(log_q, k)
            for row, token in zip(open_rows, drafts[open_rows].tolist(), strict=True):
                grammar = self.rows[row].grammar
                if grammar.accept_tokens("draft", [token]):
                    self._advanced[row] += 1
                if grammar.is_terminated():  # a row ends with its grammar
                    self.lengths[row] = k + 1
            return drafts

        return masked if self.rows else pick

    def rewind(self) -> None:
        """Take the grammars back to the tokens that were emitted."""
        for row, count in self._advanced.items():
            self.rows[row].grammar.rollback(count)
        self._advanced.clear()


class HeadStructuredOutputManager(StructuredOutputManager):
    """vLLM's, whose grammars read the tokens of a step one by one, as they do without drafts.

    A request that ignores the end of text continues after the end of its grammar. llguidance refuses a step that holds
    the end and a token after it, and vLLM 0.32 then ends the request with an error.
    """

    def _create_grammar(self, request: Any) -> StructuredOutputGrammar:
        grammar = super()._create_grammar(request)
        accept = grammar.accept_tokens
        grammar.accept_tokens = lambda name, tokens: all(accept(name, [token]) for token in tokens)
        return grammar


def _is_zero(bits: Tensor, vocab_size: int) -> Tensor:
    """[S, V] bool: which bits [S, W] int32 are 0, missing ones too. Operations of PyTorch, which compile nothing."""
    each = 1 << torch.arange(32, dtype=torch.int32, device=bits.device)
    is_zero = (bits[:, :, None] & each == 0).flatten(1)[:, :vocab_size]
    return torch.nn.functional.pad(is_zero, (0, vocab_size - is_zero.shape[1]), value=True)


class Grammars:
    """The followers of all running structured requests, kept from step to step."""

    def __init__(self, vllm_config: VllmConfig, is_masking: bool) -> None:
        given = vllm_config.structured_outputs_config
        self.vllm_config = vllm_config
        self.is_masking = is_masking and (given.enable_in_reasoning or not given.reasoning_parser)
        self.max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self.followers: dict[str, Follower] = {}
        self.manager: Any = None  # a HeadStructuredOutputManager, made when it is first needed: it loads a tokenizer
        self.bitmask: Tensor | None = None
        self.starter = ThreadPoolExecutor(1)  # of the manager, whose own threads compile

    def start(self, name: str, params: SamplingParams | None) -> None:
        """Begin to follow a request that has a grammar, which is compiled in a thread."""
        self.followers.pop(name, None)
        if (asked := StructuredOutputRequest.from_sampling_params(params)) is not None:
            self.followers[name] = Follower(None, asked=asked if self.is_masking else None)
            if self.is_masking:
                self.starter.submit(self._compile, name, params, asked)

    def masks(self, requests: dict[str, Any], request_ids: list[str], sampled_token_ids: list[list[int]]) -> Masks:
        """Masks of one step; request_ids: the batch's; [] is sampled where a prompt is not read to its end.

        requests, all that are running, by name: `sampling_params` and the `output_token_ids` so far.
        """
        self.followers = {name: kept for name, kept in self.followers.items() if name in requests}
        rows = [row for row, name in enumerate(request_ids) if sampled_token_ids[row] and name in self.followers]
        for name in (request_ids[row] for row in rows):
            if len(requests[name].output_token_ids) < self.followers[name].num_read:  # it was started over
                self.start(name, requests[name].sampling_params)
        self._take_compiled([one for row in rows if (one := self.followers[request_ids[row]]).asked is not None])
        masks = Masks(self.bitmask)
        for row in rows:
            follower = self.followers[request_ids[row]]
            follower.read(request_ids[row], requests[request_ids[row]].output_token_ids)
            if follower.grammar is None:
                masks.unmasked.append(row)
                continue
            masks.rows[row] = follower
            if follower.grammar.is_terminated():
                masks.lengths[row] = 0
        return masks

    def _take_compiled(self, followers: list[Follower]) -> None:
        """Take the grammars that are compiled on all tensor-parallel ranks, and give up those that failed on one."""
        if not followers:
            return
        found = [follower.asked.grammar for follower in followers]
        states = torch.tensor([-1 if isinstance(one, Exception) else int(one is not None) for one in found])
        if model_parallel_is_initialized() and (group := get_tp_group()).world_size > 1:
            torch.distributed.all_reduce(states, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        for follower, grammar, state in zip(followers, found, states.tolist(), strict=True):
            if state:
                follower.asked, follower.grammar = None, grammar if state > 0 else None
            if state > 0 and self.bitmask is None:
                self.bitmask = self.manager.backend.allocate_token_bitmask(self.max_num_seqs)

    def _compile(self, name: str, params: SamplingParams, asked: StructuredOutputRequest) -> None:
        """Have the grammar of a request compiled by the backend that the scheduler uses, which keeps what it has."""
        try:
            if self.manager is None:
                self.manager = HeadStructuredOutputManager(self.vllm_config)
            given = {"request_id": name, "sampling_params": params, "structured_output_request": asked}
            self.manager.grammar_init(SimpleNamespace(**given))
        except Exception as error:
            logger.warning("Drafts of structured requests are not masked with their grammar: %s", error)
            asked.grammar = error

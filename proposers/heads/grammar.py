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
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import xgrammar
from torch import Tensor
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest, get_structured_output_key

from vllm_mtpc.kernels.draft.naive import Pick


@dataclass
class Follower:
    """A request's grammar and how many of its output tokens it has read; None: it cannot be followed."""

    grammar: Any  # a StructuredOutputGrammar
    num_read: int = 0

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
                bits = self.bitmask[: len(log_q)].to(log_q.device)
                xgrammar.apply_token_bitmask_inplace(log_q, bits, indices=open_rows)
                # of a head's support nothing may be allowed: then all tokens that are, each as likely as the others
                is_empty = log_q[open_rows].amax(dim=-1) == -torch.inf
                if empty := [row for row, nothing in zip(open_rows, is_empty.tolist(), strict=True) if nothing]:
                    log_q[empty] = 0.0
                    xgrammar.apply_token_bitmask_inplace(log_q, bits, indices=empty)
                log_q[open_rows] = log_q[open_rows].log_softmax(dim=-1)  # survival reads probabilities
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


class Grammars:
    """The followers of all running structured requests, kept from step to step."""

    def __init__(self, vllm_config: VllmConfig, is_masking: bool) -> None:
        self.vllm_config, self.is_masking = vllm_config, is_masking
        self.max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self.followers: dict[str, Follower] = {}
        self.manager: StructuredOutputManager | None = None  # made when it is first needed: it loads a tokenizer
        self.bitmask: Tensor | None = None

    def masks(self, requests: dict[str, Any], request_ids: list[str], sampled_token_ids: list[list[int]]) -> Masks:
        """Masks of one step; request_ids: the batch's; [] is sampled where a prompt is not read to its end.

        requests, all that are running, by name: `sampling_params` and the `output_token_ids` so far.
        """
        self.followers = {name: kept for name, kept in self.followers.items() if name in requests}
        masks = Masks(self.bitmask)
        for row, (name, tokens) in enumerate(zip(request_ids, sampled_token_ids, strict=True)):
            params = requests[name].sampling_params
            if not tokens or StructuredOutputRequest.from_sampling_params(params) is None:
                continue
            follower = self._follower(name, params, requests[name].output_token_ids)
            if follower.grammar is None:
                masks.unmasked.append(row)
                continue
            masks.rows[row] = follower
            if follower.grammar.is_terminated():
                masks.lengths[row] = 0
        masks.bitmask = self.bitmask  # made with the first grammar
        return masks

    def _follower(self, name: str, params: SamplingParams, output: list[int]) -> Follower:
        follower = self.followers.get(name)
        if follower is None or len(output) < follower.num_read:  # new, or its output was started over
            follower = self.followers[name] = Follower(self._compile(params) if self.is_masking else None)
        follower.read(name, output)
        return follower

    def _compile(self, params: SamplingParams) -> StructuredOutputGrammar | None:
        """The grammar of a request at its start, from the backend that the scheduler uses; None: see above.

        Waits for it, so that all ranks and all runs draft alike; the backend keeps what it has compiled.
        """
        if self.manager is None:
            self.manager = StructuredOutputManager(self.vllm_config)
        if self.manager.reasoner_cls is not None and not self.manager.enable_in_reasoning:
            return None
        asked = SimpleNamespace(structured_output_key=get_structured_output_key(params.structured_outputs))
        self.manager.grammar_init(SimpleNamespace(structured_output_request=asked, sampling_params=params))
        if self.bitmask is None:
            self.bitmask = self.manager.backend.allocate_token_bitmask(self.max_num_seqs)
        return asked.grammar.result()

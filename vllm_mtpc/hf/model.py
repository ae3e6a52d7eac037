"""A target on transformers: config, tokenizer, backbone, lm_head, and a session with a key-value cache.

Training and evaluation use it; serving uses vLLM's model. Code in a model's repository is never run.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mtpc.errors import UsageError, first_line
from vllm_mtpc.heads.head import Head
from vllm_mtpc.hf.attention import IMPLEMENTATIONS, choose_attention, packed_arguments
from vllm_mtpc.models.registration import register_with_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NO_REMOTE_CODE = {"trust_remote_code": False}  # unset, transformers asks on the terminal
CACHED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass
class Target:
    """A frozen causal language model in eval mode.

    `rows_at_once`: rows of one call of `hidden_with`. `states`: what computes them. `drafter`: vLLM's
    `speculative_config` of the drafter whose states are read, too.
    """

    rows_at_once: ClassVar[int] = 8
    states: ClassVar[str] = "transformers"
    drafter: ClassVar[Any] = None
    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    backbone: nn.Module  # input ids -> hidden states that the lm_head reads
    lm_head: nn.Module
    attention: str  # "torch" or "xformers"

    @property
    def config(self) -> Any:
        """The config of the language model, also inside a composite model."""
        return self.model.config.get_text_config()

    @property
    def vocab_size(self) -> int:
        return self.lm_head.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.lm_head.weight.shape[1]

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def stop_ids(self) -> set[int]:
        """Tokens at which a server ends a text: the end-of-text ids of model and tokenizer."""
        found: set[int] = set()
        for source in (getattr(self.model, "generation_config", None), self.config, self.tokenizer):
            ids = getattr(source, "eos_token_id", None)
            found |= set(ids) if isinstance(ids, (list, tuple)) else set() if ids is None else {ids}
        return found

    @torch.no_grad()
    def hidden(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return post-final-norm states [B, S, D] of tokens[B, S]; state t depends on its document up to token t.

        documents[B, S] numbers the document of each token (-1: padding); neither attention nor positions cross one.
        """
        tokens = tokens.to(self.device, torch.long)
        return self.backbone(input_ids=tokens, use_cache=False, **self.packed(documents)).last_hidden_state

    @torch.no_grad()
    def hidden_with(self, layers: Sequence[int], tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the residual stream after the first `layers` decoder layers and `hidden`, [B, S, (m + 1) D].

        For each of m layers, in this order, the input of the next one (all layers: of the final norm; 0: the
        embeddings); the post-final-norm states are last. One forward pass.
        """
        modules, taken = [*self.backbone.layers, self.backbone.norm] if layers else [], {}

        def take(number: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            taken[number] = args[0] if args else kwargs["hidden_states"]

        with ExitStack() as hooks:
            for at in layers:
                hooks.enter_context(modules[at].register_forward_pre_hook(partial(take, at), with_kwargs=True))
            final = self.hidden(tokens, documents)
        return torch.cat([*(taken[layer] for layer in layers), final], -1)

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embeddings [..., D] of tokens[...]."""
        return self.model.get_input_embeddings()(tokens.to(self.device))

    def packed(self, documents: Tensor | None) -> dict[str, Any]:
        """Return arguments of the backbone for packed rows; empty for one document per row."""
        return {} if documents is None else packed_arguments(documents.to(self.device), self.attention)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return next-token logits [..., V] of hidden[..., D], float32, with the model's scale and soft cap."""
        return logits_of(self.model, hidden.to(self.dtype), self.lm_head).float()

    @torch.no_grad()
    def logits_for(self, ids: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Return `logits` of these ids [I] alone, by their rows of the lm_head where nothing follows the product."""
        if ids is None:
            return self.logits
        ids = ids.to(self.device)
        rows, probe = self.lm_head.weight[ids], torch.linspace(-1, 1, self.hidden_size).to(self.lm_head.weight)
        tolerance = 8 * torch.finfo(self.dtype).eps  # of products that are summed in another order
        wanted, found = self.logits(probe)[ids], (rows @ probe).float()
        if (wanted - found).abs().max() > tolerance * wanted.abs().max():
            return lambda hidden: self.logits(hidden)[..., ids]

        def logits(hidden: Tensor) -> Tensor:  # as one matrix: a view of several dimensions becomes many small products
            flat = F.linear(hidden.to(rows.dtype).reshape(-1, rows.shape[1]), rows)
            return flat.view(*hidden.shape[:-1], len(rows)).float()

        return logits


class States(tuple[Tensor]):
    """The output of a backbone of any class that computes these states: all its other fields are None."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def find_backbone(model: nn.Module) -> Any:
    """Return the part of a causal language model of transformers that computes states; None: there is not one."""
    parts = [child for child in model.children() if hasattr(child, "base_model_prefix")]
    return parts[0] if len(parts) == 1 else None


def logits_of(model: Any, states: Tensor, lm_head: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the logits [..., V] by the forward of a model in which another lm_head reads states[..., D]."""
    flat, shell = States([states.reshape(1, -1, states.shape[-1])]), copy.copy(model)
    forwards = {find_backbone(model): lambda *args, **kwargs: flat}
    forwards[model.get_output_embeddings()] = lambda *args: lm_head(flat[0])
    shell.__dict__["_modules"] = {**model._modules}
    for name, module in model._modules.items():
        if module in forwards:
            shell._modules[name] = view = copy.copy(module)
            view.__dict__ |= {"forward": forwards[module], "_forward_hooks": {}, "_forward_pre_hooks": {}}
            view.__dict__["_modules"] = {**module._modules, "decoder": view}  # OPT calls its backbone's decoder
    tokens = torch.zeros(flat[0].shape[:2], dtype=torch.long, device=states.device)
    logits = shell(input_ids=tokens, use_cache=False).logits
    return logits.view(*states.shape[:-1], logits.shape[-1])


def bind(head: Head, target: Target) -> None:
    """Give a head access to the target's lm_head and embeddings where it uses them."""
    if head.leaves.needs_lm_head:
        head.leaves.bind_lm_head(target.logits_for(head.vocabulary and head.vocabulary.ids))
    if head.trunk.needs_embedding:
        head.trunk.bind_embedding(target.embed)


def load_target(
    name: str | Path, dtype: torch.dtype | str = "auto", device: torch.device | str = "cpu", attention: str = "auto"
) -> Target:
    """Load the target in a folder or hub repository. Raises UsageError where it cannot verify drafts."""
    from transformers import AutoModelForCausalLM

    name, attention, config = str(name), choose_attention(attention, device), target_config(name)
    # transformers' SDPA attention omits the soft cap of attention logits (Gemma 2); its eager attention does not
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    # nor has it attention sinks or ALiBi: some models have their own attention alone
    code = AutoModelForCausalLM._model_mapping.get(type(config), None)
    eager = capped or not getattr(code, "_supports_sdpa", True)
    if eager or not getattr(code, "_supports_attention_backend", True):
        attention = "torch"
    implementation = "eager" if eager else IMPLEMENTATIONS[attention]
    with _reading(name, "not a causal language model that transformers can load", "one"):
        model, found = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, attn_implementation=implementation, output_loading_info=True, **NO_REMOTE_CODE
        )
    kind, missing, lm_head = type(model).__name__, sorted(found["missing_keys"]), model.get_output_embeddings()
    if lm_head is None or find_backbone(model) is None or missing:  # transformers draws missing weights at random
        tensors = f"its files have no {missing[0]} ({len(missing)} tensors of {kind} are missing)" if missing else ""
        raise UsageError(
            f"target {name}: {tensors or f'{kind} has no lm_head'}, so it cannot verify drafts; name a causal language "
            "model (…ForCausalLM) with all its weights"
        )
    model = model.to(device).eval().requires_grad_(False)
    if getattr(config, "num_pred_heads", 1) > 1:  # the first one predicts the next token
        rows = lm_head.weight[: config.vocab_size]
        lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
        lm_head.weight = nn.Parameter(rows, requires_grad=False)
    _match_model(target := Target(name, model, tokenizer_if_any(name), find_backbone(model), lm_head, attention))
    return target


@torch.no_grad()
def _match_model(target: Target) -> None:
    """Let `hidden` return what the lm_head reads, as vLLM does. Raises UsageError if `logits` are not the model's."""
    tokens = torch.arange(8, device=target.device)[None] % target.vocab_size
    expected = target.model(input_ids=tokens, use_cache=False).logits.float()
    with suppress(AttributeError, IndexError, RuntimeError, TypeError):  # other parts than backbone, norm and lm_head
        logits = target.logits(target.hidden(tokens))
        scale = float((logits * expected).sum() / logits.square().sum())
        if abs(scale - 1) > 0.01:  # of states before the lm_head (MiniCPM3)
            target.backbone.norm.register_forward_hook(lambda _module, _args, states: states * scale)
            logits = target.logits(target.hidden(tokens))
        if (logits - expected).norm() <= 0.02 * expected.norm():  # bfloat16, experts
            return
    raise UsageError(
        f"target {target.name}: the logits of {type(target.model).__name__} are not those of its lm_head, scaled and "
        "capped; train with --states vllm, or name another target"
    )


def target_config(name: str | Path) -> Any:
    """Return the whole config of a target. Raises UsageError where transformers cannot read one."""
    from transformers import AutoConfig

    register_with_transformers()
    with _reading(name, "no config that transformers can read", "a causal language model"):
        return AutoConfig.from_pretrained(name, **NO_REMOTE_CODE)


def target_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a target. Raises UsageError where transformers has none."""
    from transformers import AutoTokenizer

    register_with_transformers()
    with _reading(name, "no tokenizer that transformers can load", "a target with a tokenizer that transformers has"):
        return AutoTokenizer.from_pretrained(name, **NO_REMOTE_CODE)


def tokenizer_if_any(name: str | Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a target, or None: token ids need none."""
    try:
        return target_tokenizer(name)
    except UsageError:
        return None


@contextmanager
def _reading(name: str | Path, problem: str, expected: str) -> Iterator[None]:
    """Turn the errors of transformers for a target that it cannot read into one UsageError."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError) as error:  # all of them on bad input
        needs_code = "trust_remote_code" in str(error)
        reason = "it needs Python code of its repository, which is never run here" if needs_code else first_line(error)
        advice = f"name the folder or hub repository of {expected}"
        raise UsageError(f"target {name}: {problem} ({reason}); {advice}") from None


def choose_device(name: str) -> torch.device:
    """Return the device of a name; `auto` is CUDA if available. Raises UsageError for an unavailable device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", name):
        raise UsageError(f"--device {name}: allowed are auto, cpu, cuda and cuda:N; type --device auto")
    device, found = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        raise UsageError(f"--device {name}: torch sees {found} CUDA device(s), counted from 0; type --device auto")
    return device


def check_length(name: str, config: Any, tokens: Sequence[Sequence[int] | Tensor], new_tokens: int, flag: str) -> None:
    """Raise UsageError where a text would exceed the positions of the target with this name and text config."""
    limit, longest = getattr(config, "max_position_embeddings", None), max(map(len, tokens))
    if limit is not None and longest + new_tokens > limit:
        raise UsageError(
            f"a prompt of {longest} tokens and {new_tokens} new ones (drafts past the end included) are more than the "
            f"{limit} positions of target {name}; lower {flag}"
        )


class Session:
    """A target with a key-value cache that reads a batch of texts in pieces, padded at the left."""

    def __init__(self, target: Target) -> None:
        from transformers import DynamicCache

        kinds = set(getattr(target.config, "layer_types", None) or ()) - CACHED_LAYERS
        if kinds:
            raise UsageError(
                f"target {target.name} has layers of kind {', '.join(sorted(kinds))}; generation here needs attention "
                "layers only; measure this head with vLLM instead"
            )
        self.target, self.logits = target, target.logits
        self.cache = DynamicCache()  # without the model's config every layer keeps all tokens
        self.mask: Tensor | None = None  # [B, tokens so far] where texts are padded

    def start(self, prompts: Sequence[Tensor]) -> Tensor:
        """Read prompts (1-D, not empty); return their states [B, P, D], padded at the left."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        if not lengths.all():
            raise UsageError("an empty prompt has no hidden state to draft from; give it a token or more")
        longest = int(lengths.max())
        if (lengths < longest).any():
            self.mask = (torch.arange(longest) >= longest - lengths[:, None]).long().to(self.target.device)
        return self._forward(nn.utils.rnn.pad_sequence(list(prompts), True, padding_side="left"))

    def read(self, tokens: Tensor) -> Tensor:
        """Append tokens[B, m]; return the post-final-norm states [B, m, D] after each of them."""
        if self.mask is not None:
            self.mask = torch.cat([self.mask, torch.ones_like(tokens).to(self.mask)], 1)
        return self._forward(tokens)

    @torch.inference_mode()
    def _forward(self, tokens: Tensor) -> Tensor:
        padded = {}
        if self.mask is not None:
            positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            padded = {"attention_mask": self.mask, "position_ids": positions}
        tokens = tokens.to(self.target.device, torch.long)
        output = self.target.backbone(input_ids=tokens, past_key_values=self.cache, use_cache=True, **padded)
        return output.last_hidden_state

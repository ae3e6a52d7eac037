"""A `vllm_mtpc.hf.Target` whose states vLLM computes: the served model, quantised, hybrid or divided over GPUs.

Only the embeddings and the lm_head are read from the checkpoint, dequantised.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vllm_mtpc.checkpoint.load import Shards
from vllm_mtpc.checkpoint.locate import download
from vllm_mtpc.engine.recording import RecordedText, RecordingEngine
from vllm_mtpc.errors import UsageError
from vllm_mtpc.hf.model import Target, logits_of, target_config, tokenizer_if_any

LM_HEADS = ("lm_head", "embed_out")  # names in checkpoints
EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "word_embeddings", "embeddings")
RECURRENT = ("linear_attention", "mamba", "mamba2", "conv", "recurrent")  # kinds of layers in `layer_types`


class ServedModel(nn.Module):
    """Configs, embeddings [V, D] and lm_head [V, D] of a target."""

    def __init__(self, config: Any, generation_config: Any, embedding: Tensor, lm_head: Tensor) -> None:
        super().__init__()
        self.config, self.generation_config = config, generation_config
        self.embedding = nn.Embedding.from_pretrained(embedding)
        self.lm_head = nn.Linear(*reversed(lm_head.shape), bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(lm_head, requires_grad=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


@dataclass
class ServedTarget(Target):
    """A target that vLLM runs; `recorder` returns its states."""

    rows_at_once = 256
    states = "vllm"
    recorder: RecordingEngine
    kept_bytes: int = 0  # most bytes of `kept`
    kept: dict[bytes, Tensor] = field(default_factory=dict)  # states [T - 1, W] of responses, in files, by their text
    code: Any = None  # the model whose forward computes logits; None: they are those of the lm_head alone
    is_checked: bool = False  # logits are vLLM's

    @property
    def drafter(self) -> dict[str, Any] | None:
        return self.recorder.drafter

    def hidden(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.hidden_with((), tokens, documents)

    @torch.no_grad()
    def hidden_with(self, layers: Sequence[int], tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """As of `Target`; the state after the last token of a document, which predicts nothing in it, is zero."""
        documents = torch.zeros_like(tokens) if documents is None else documents
        width = (len(layers) + 1) * self.hidden_size
        states = torch.zeros(*tokens.shape, width, dtype=self.dtype, device=self.device)
        places, texts, missing = [], [], []
        for row, (ids, numbers) in enumerate(zip(tokens.tolist(), documents.tolist(), strict=True)):
            for number, run in itertools.groupby(range(len(ids)), numbers.__getitem__):
                at = list(run)
                if number >= 0 and len(at) > 1:
                    places.append((row, slice(at[0], at[-1])))
                    texts.append(ids[at[0] : at[-1] + 1])
                    missing += [texts[-1]] if layers or text_key(texts[-1]) not in self.kept else []
        computed = self.recorder.record(missing, layers=layers)
        for place, text in zip(places, texts, strict=True):
            found = None if layers else self.kept.get(text_key(text))
            found = self.columns(next(computed).states, layers) if found is None else found
            states[place] = found.to(states)
        if texts and not self.is_checked:
            self.check_logits(texts[0][:-1], states[places[0]][-1, -self.hidden_size :])
        return states

    def respond(
        self, prompts: Sequence[list[int]], sampling: Mapping[str, Any], seeds: Sequence[int]
    ) -> Iterator[RecordedText]:
        """Yield the responses to prompts in their order; up to `kept_bytes` of their states are kept for `hidden`."""
        ends = self.stop_ids.union(sampling.get("stop_token_ids", ()))  # the engine has no tokenizer
        stops = {} if sampling.get("ignore_eos") else {"stop_token_ids": sorted(ends)}
        for found in self.recorder.record(prompts, {**sampling, **stops}, seeds):
            if found.finish_reason and (left := self.kept_bytes - found.states.nbytes) >= 0:
                self.kept_bytes, self.kept[text_key(found.tokens)] = left, self.columns(found.states, ())
            yield found

    def logits(self, hidden: Tensor) -> Tensor:
        hidden = hidden.to(self.dtype)
        return (logits_of(self.code, hidden, self.lm_head) if self.code else self.lm_head(hidden)).float()

    def check_logits(self, text: list[int], state: Tensor) -> None:
        """Raise UsageError unless the logits of the state [D] after a text are vLLM's."""
        logits, theirs = self.logits(state).cpu(), self.recorder.log_probs(text)
        off = max(abs(float(logits.log_softmax(-1)[token]) - expected) for token, expected in theirs.items())
        if off > 0.01 + float(logits.abs().max()) / 64:  # rounding of bfloat16 and of quantised products
            raise UsageError(
                f"target {self.name}: log-probabilities of vLLM differ by {off:.2g} from those of its states and the "
                "lm_head of the checkpoint; type --states transformers, or name another target"
            )
        self.is_checked = True

    def columns(self, states: Tensor, layers: Sequence[int]) -> Tensor:
        """Return the states of `layers` and the final ones of recorded states, which may have more layers."""
        parts = states.split(self.hidden_size, -1)
        own = [parts[self.recorder.layers.index(layer)] for layer in layers]
        return torch.cat([*own, parts[-1]], -1) if layers else parts[-1]


def text_key(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def load_served_target(
    name: str | Path,
    dtype: torch.dtype | str,
    device: torch.device | str,
    engine: Mapping[str, Any],
    drafter: dict[str, Any] | None = None,
) -> ServedTarget:
    """Return a target whose engine starts with its first text.

    Args:
        name: folder or hub name.
        dtype: of states, embeddings and lm_head; auto: that of the checkpoint.
        device: of the trainer.
        engine: options of `vllm serve`.
        drafter: vLLM's `speculative_config` of the drafter whose states layer DRAFTER names.

    Raises:
        UsageError, CheckpointError: the config, or the embeddings and the lm_head, cannot be read.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    name, config = str(name), target_config(name)
    shards, text = Shards(Path(name) if Path(name).is_dir() else download(name, "target")), config.get_text_config()
    embedding = read_weight(shards, EMBEDDINGS)
    lm_head = embedding if text.tie_word_embeddings else read_weight(shards, LM_HEADS)
    has_more = any(shards.find_suffix(f"{one}.bias") for one in LM_HEADS) or getattr(text, "num_pred_heads", 1) > 1
    if embedding is None or lm_head is None or has_more:
        raise UsageError(
            f"target {name}: allowed with states of vLLM are embeddings and one lm_head without bias, in float or in "
            "int8 by row; name such a checkpoint, or type --states transformers"
        )
    if not isinstance(dtype, torch.dtype):
        dtype = text.dtype or embedding.dtype if dtype == "auto" else getattr(torch, dtype)
    generation = None  # it may have more end-of-text tokens than the config
    with suppress(OSError):
        generation = GenerationConfig.from_pretrained(name)
    weights = (weight.to(device, dtype) for weight in (embedding, lm_head))
    model = ServedModel(config, generation, *weights).requires_grad_(False)
    options = {"dtype": str(dtype).removeprefix("torch."), **engine}
    options.pop("speculative_config", None)
    recorder = RecordingEngine(name, options, torch.device(device).type == "cuda", drafter)
    served = ServedTarget(name, model, tokenizer_if_any(name), nn.Module(), model.lm_head, "vllm", recorder)
    with suppress(Exception), torch.device("meta"):  # transformers has no such class: `check_logits` decides
        served.code = AutoModelForCausalLM.from_config(text)
    return served


def read_weight(shards: Shards, names: Sequence[str]) -> Tensor | None:
    """Return the weight of the first module of these names that the checkpoint has once, dequantised; None: none."""
    for name in names:
        if found := shards.find_suffix(f"{name}.weight"):
            scale = shards.find_suffix(f"{name}.weight_scale")
            if scale is None:
                return shards.read(found)
            return shards.read(found, dtypes=(torch.int8,)) * shards.read(scale)
    return None


def must_be_served(config: Any, engine: Mapping[str, Any]) -> bool:
    """Return whether a target of this config is quantised, has recurrent layers, or is divided over GPUs."""
    text = config.get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())}
    kinds |= {"mamba"} if any(name.startswith("mamba_") for name in vars(text)) else set()
    is_divided = any(int(engine.get(f"{kind}_parallel_size", 1)) > 1 for kind in ("tensor", "pipeline"))
    return is_divided or getattr(config, "quantization_config", None) is not None or not kinds.isdisjoint(RECURRENT)

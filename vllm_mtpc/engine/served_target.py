"""A `vllm_mtpc.hf.Target` whose states vLLM computes: the served model, quantised, hybrid or divided over GPUs.

Only the embeddings and the lm_head are read from the checkpoint, dequantised. The engine is `vllm serve` in a child
process with `proposers/recorder.py` in its worker, which returns the hidden states of given text and of text that it
generates; they come back in memory-mapped files. An engine that ends is started again and receives the same texts, at
most ATTEMPTS times.
"""

from __future__ import annotations

import atexit
import itertools
import json
import shutil
import sys
import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vllm_mtpc.checkpoint.load import Shards
from vllm_mtpc.checkpoint.locate import download
from vllm_mtpc.engine.served import OWN_SAMPLING
from vllm_mtpc.engine.server import ON_CPU, PROGRAM, VllmServer, serve_arguments
from vllm_mtpc.errors import EngineFailed, UsageError
from vllm_mtpc.heads.trunk.drafter import DRAFTER
from vllm_mtpc.hf.model import Target, logits_of, target_config, tokenizer_if_any

ATTEMPTS = 3
IN_FLIGHT = 256  # requests at the engine
WAVE = 64  # texts of a file
RECORDER = {
    "worker_extension_cls": "vllm_mtpc.proposers.recorder.Recorder",
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,  # texts are token ids
}
SHARED_GPU = {"gpu_memory_utilization": 0.5}  # the head is trained on the same device
NO_STATES = torch.zeros(0, 0)
LM_HEADS = ("lm_head", "embed_out")  # names in checkpoints
EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "word_embeddings", "embeddings")
RECURRENT = ("linear_attention", "mamba", "mamba2", "conv", "recurrent")  # kinds of layers in `layer_types`


class RecordedText(NamedTuple):
    tokens: list[int]  # prompt and response
    states: Tensor  # [len(tokens) - 1, (layers + 1) D], on the CPU; row t after tokens[: t + 1]
    finish_reason: str = ""  # of the response; empty: the engine has no room for one


class RecordingEngine:
    """One engine, started by the first call of `record`.

    `options` of `vllm serve` take precedence; `drafter`: its `speculative_config` for texts with states of DRAFTER.
    """

    def __init__(
        self, target: str, options: dict[str, Any], on_cuda: bool, drafter: dict[str, Any] | None = None
    ) -> None:
        defaults = SHARED_GPU if on_cuda else {**ON_CPU, "enable_chunked_prefill": False}
        self.options = {"model": target, **OWN_SAMPLING, **defaults, **options, **RECORDER}
        self.layers: tuple[int, ...] = ()
        self.server: VllmServer | None = None
        self.drafter, self.has_failed, self.numbers = drafter, False, itertools.count()
        self.folder = Path(tempfile.mkdtemp(prefix="vllm_mtpc-states-"))
        self.log = self.folder.with_suffix(".log")  # stays after a failure
        atexit.register(self.close)

    def record(
        self,
        prompts: Sequence[list[int]],
        sampling: Mapping[str, Any] | None = None,
        seeds: Sequence[int] = (),
        layers: Sequence[int] = (),
    ) -> Iterator[RecordedText]:
        """Yield the prompts in their order and, with `sampling`, the target's responses, with their states.

        A prompt alone needs two token ids or more, and its last one is not computed. `sampling`: body of a completion
        request with `max_tokens`; `layers`: as of `Target.hidden_with`. Raises UsageError if the engine does not start,
        or ended ATTEMPTS times without an answer.
        """
        done, attempts = 0, ATTEMPTS
        while done < len(prompts):
            try:
                server = self._start(layers, may_draft=sampling is None)
                for found in self._record(server, prompts[done:], sampling, seeds[done:]):
                    yield found
                    done, attempts = done + 1, ATTEMPTS
            except EngineFailed as error:
                is_running, attempts = self.server is not None, attempts - 1
                self.stop()
                if not is_running or not attempts:
                    self.has_failed, name = True, self.options["model"]
                    reason = f"vLLM cannot compute its states: {error.reason}; its log is {self.log}"
                    raise UsageError(f"target {name}: {reason}") from None

    def log_probs(self, prompt: list[int]) -> dict[int, float]:
        """Return the log-probabilities of the likeliest next tokens, by token."""
        body = {"model": self.options["model"], "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
        body |= {"logprobs": 3, "return_tokens_as_token_ids": True}
        (choice,) = self._start((), may_draft=True).choices(body)
        return {int(name[9:]): value for name, value in choice["logprobs"]["top_logprobs"][0].items()}  # token_id:N

    def stop(self) -> None:
        """End the engine; the next call of `record` starts one."""
        if self.server is not None:
            self.server.stop()
            self.server = None

    def close(self) -> None:
        """End the engine and remove its files."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        if not self.has_failed:
            self.log.unlink(missing_ok=True)

    @property
    def drafts(self) -> bool:
        return DRAFTER in self.layers

    def _start(self, layers: Sequence[int], may_draft: bool) -> VllmServer:
        if self.server is not None and set(layers) <= set(self.layers) and (may_draft or not self.drafts):
            return self.server
        self.stop()
        kept = self.layers if may_draft else ()
        self.layers = tuple(sorted({*kept, *layers}))
        options = self.options | ({"enforce_eager": True} if self.layers else {})
        if self.drafts:
            options["speculative_config"] = self.drafter
        environment = {"VLLM_SERVER_DEV_MODE": "1"}  # the mode has collective_rpc
        print(f"vLLM starts, for the states of {options['model']}", file=sys.stderr)
        server = VllmServer(serve_arguments(options), environment, PROGRAM, self.log)
        server.start()
        self.server = server
        self.limit = server.model_card()["max_model_len"]
        _call(server, "start_recording", json.dumps(self.layers))
        return server

    def _record(
        self, server: VllmServer, prompts: Sequence[list[int]], sampling: Mapping[str, Any] | None, seeds: Sequence[int]
    ) -> Iterator[RecordedText]:
        limit = self.limit
        if sampling is None and (longest := max(map(len, prompts)) + self.drafts) > limit:
            raise UsageError(f"a text of {longest} tokens, vLLM reads {limit}; lower seq_len, or raise max_model_len")

        def ask(place: int) -> tuple[str, RecordedText]:
            name, prompt = f"states-{next(self.numbers)}", prompts[place]
            read = prompt if self.drafts else prompt[:-1]  # a drafter's last state is conditioned on the last token
            body: dict[str, Any] = {"prompt": read, "max_tokens": 1, "temperature": 0.0}
            if sampling is not None:
                body = {**sampling, "prompt": prompt, "seed": seeds[place]}
                body["max_tokens"] = min(body["max_tokens"], limit - len(prompt))
                if body["max_tokens"] < 1:
                    return "", RecordedText(prompt, NO_STATES)
            (choice,) = server.choices({**body, "request_id": name, "model": self.options["model"]})
            response = choice["token_ids"] if sampling is not None else []
            return f"cmpl-{name}-0", RecordedText([*prompt, *response], NO_STATES, choice["finish_reason"])

        pool, last = ThreadPoolExecutor(IN_FLIGHT), None
        try:
            answers = pool.map(ask, range(len(prompts)))
            while wave := list(itertools.islice(answers, WAVE)):
                path = self.folder / f"{next(self.numbers)}.safetensors"
                rows = [(name, len(found.tokens) - 1) for name, found in wave if name]
                _call(server, "write_states", str(path), json.dumps(rows))  # the last one is complete then
                yield from _read(*last) if last else ()
                last = path, [found for _, found in wave]
            _call(server, "write_states", "", "[]")
            yield from _read(*last) if last else ()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _call(server: VllmServer, method: str, *arguments: str) -> None:
    answer = server.send("/collective_rpc", {"method": method, "args": arguments})
    if answer.status_code != 200:
        server.check_running()
        raise EngineFailed(f"{method} returned {answer.status_code}: {answer.text[:500]}")


def _read(path: Path, texts: list[RecordedText]) -> list[RecordedText]:
    """Return texts with the states of a file, which stays mapped after its name is removed."""
    sizes = [len(found.tokens) - 1 if found.finish_reason else 0 for found in texts]
    states = load_file(path)["states"] if any(sizes) else NO_STATES
    path.unlink(missing_ok=True)
    return [found._replace(states=part) for found, part in zip(texts, states.split(sizes), strict=True)]


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
    """Return a target whose engine, with these options of `vllm serve`, starts with its first text.

    `dtype`: of states, embeddings and lm_head; auto: that of the checkpoint. `device`: of the trainer. `drafter`:
    vLLM's `speculative_config` of the drafter whose states layer DRAFTER names. Raises MtpcError if the config, or the
    embeddings and the lm_head, cannot be read.
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

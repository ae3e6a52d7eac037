"""`MtpcSpeculator` without an engine around it, for functions that run in forks of "v2" (tests/support/forks.py)."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tests.support.configs import engine_config, write_head
from tests.support.models import make_target
from vllm_mtpc.proposers.options import draft_memory as memory

CPU = torch.device("cpu")


@dataclass
class Setting:
    """A folder with `target` and `head`; `logits_bytes` in the place of memory.LOGITS_BYTES."""

    place: Path
    max_num_seqs: int
    schedule: list[tuple[int, int, int]] | str = "off"
    options: dict[str, Any] | None = None
    logits_bytes: int = memory.LOGITS_BYTES


def made_heads(folder: Path, vocab_size: int, heads: dict[str, dict[str, Any]]) -> dict[str, Path]:
    """By name a folder with `target` and `head`, of these settings; all have one target."""
    target = make_target(folder / "target", vocab_size=vocab_size, seed=0).config.to_dict()
    for name, settings in heads.items():
        (folder / name).mkdir()
        (folder / name / "target").symlink_to(folder / "target")
        write_head(folder / name / "head", target, **settings)
    return {name: folder / name for name in heads}


class Target(nn.Module):
    """The modules of vLLM's model that a head shares."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        weight = torch.randn(vocab_size, hidden_size, generator=generator)
        weight = nn.functional.pad(weight, (0, 0, 0, -vocab_size % 64))
        self.weight, self.vocab_size = nn.Parameter(weight, requires_grad=False), vocab_size

    def embed_input_ids(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]

    def compute_logits(self, states: Tensor) -> Tensor:
        return (states @ self.weight.T)[:, : self.vocab_size]


@contextmanager
def speculator(setting: Setting) -> Any:
    """A speculator with its head loaded, on the CPU."""
    from vllm_mtpc.proposers.v2 import speculator as module

    given = {
        "method": "mtpc",
        "model": str(setting.place / "head"),
        "num_speculative_tokens_per_batch_size": setting.schedule,
    }
    config = engine_config(
        setting.place / "target", {**given, **(setting.options or {})}, max_num_seqs=setting.max_num_seqs
    )
    config.compilation_config.cudagraph_capture_sizes = []
    config.compilation_config.max_cudagraph_capture_size = 0
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(memory, "LOGITS_BYTES", setting.logits_bytes))
        stack.enter_context(mock.patch.object(module, "resolve_model_state_cls", lambda *args: object))
        made = module.MtpcSpeculator(config, CPU)
        head = config.speculative_config.head
        made.model = made.load_draft_model(Target(head.vocab_size, head.hidden_size), set())
        yield made


def batch(made: Any, num_reqs: int, seed: int = 0) -> dict[str, Any]:
    """Arguments of `propose` for requests in slots from the last one down, with one row each and one at T=0."""
    generator = torch.Generator().manual_seed(seed)
    slots = made.max_num_reqs
    temperature = torch.rand(slots, generator=generator) + 0.5
    temperature[-1] = 0
    return {
        "input_batch": SimpleNamespace(
            num_reqs=num_reqs,
            idx_mapping=torch.arange(slots - 1, slots - 1 - num_reqs, -1, dtype=torch.int32),
            query_start_loc=torch.arange(num_reqs + 1, dtype=torch.int32),
            positions=torch.randint(40, (num_reqs,), generator=generator),
        ),
        "attn_metadata": None,
        "slot_mappings": None,
        "last_hidden_states": torch.randn(num_reqs, made.hidden_size, generator=generator),
        "aux_hidden_states": None,
        "num_sampled": torch.ones(num_reqs, dtype=torch.int32),
        "num_rejected": torch.zeros(num_reqs, dtype=torch.int32),
        "last_sampled": torch.randint(made.vocab_size, (slots, 1), generator=generator),
        "next_prefill_tokens": torch.zeros(1, slots, dtype=torch.int32),
        "temperature": temperature,
        "seeds": torch.randint(2**40, (slots,), generator=generator),
    }


def drafted(made: Any, num_reqs: int, num_drafts: int, seed: int = 0) -> list[Tensor]:
    """Tokens and confidences [R, K] of a step, and all conditionals [slots, K, V]."""
    made.propose(**batch(made, num_reqs, seed), num_speculative_tokens=num_drafts)
    mine = slice(num_reqs), slice(num_drafts)
    return [
        part.clone() for part in (made.draft_tokens[mine], made.draft_token_confidence_probs[mine], made.draft_logits)
    ]


class Recorder:
    """In the place of CUDA's graphs: what would be captured is called again for every replay."""

    def __init__(self) -> None:
        self.forward: Any = None
        self.captured: list[Any] = []
        self.replayed: list[Any] = []

    @contextmanager
    def in_place(self) -> Any:
        from vllm.v1.worker.gpu import cudagraph_utils as module

        recorder, capture = self, module.CudaGraphManager.capture

        class Graph:
            def replay(self) -> None:
                recorder.replayed.append(self.desc)
                self.forward(None)

        @contextmanager
        def graph(made: Graph, *args: Any, **kwargs: Any) -> Any:
            made.desc, made.forward = recorder.forward
            yield
            recorder.captured.append(made.desc)

        def noting(manager: Any, create_forward_fn: Any, *args: Any) -> None:
            def create(desc: Any, warmup: bool) -> Any:
                recorder.forward = desc, create_forward_fn(desc, warmup)
                return recorder.forward[1]

            capture(manager, create, *args)

        group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
        replaced = {
            "get_pp_group": lambda: group,
            "graph_capture": lambda **kwargs: nullcontext(),
            "capture_pool": lambda *args: nullcontext(),
            "current_stream": lambda: None,
            "is_global_first_rank": lambda: False,
            "current_platform": SimpleNamespace(get_global_graph_pool=lambda: None),
        }
        with ExitStack() as stack:
            stack.enter_context(mock.patch.multiple(module, **replaced))
            stack.enter_context(mock.patch.object(module.CudaGraphManager, "capture", noting))
            stack.enter_context(mock.patch.multiple(torch.cuda, CUDAGraph=Graph, graph=graph))
            yield

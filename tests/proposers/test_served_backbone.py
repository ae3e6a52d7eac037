"""The served backbone: the context of all layers at once, and the attention metadata of replayed drafts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.config.compilation import CompilationMode
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear
from vllm.model_executor.models import qwen3_dflash

from tests.support.configs import engine_config
from tests.support.operations import Operations
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads import build_head
from vllm_mtpc.proposers.v2.backbone_speculator import BackboneSpeculator, ServedBackbone
from vllm_mtpc.proposers.v2.speculator import replace_attributes

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
TARGET = {"vocab_size": 32, "hidden_size": 64}
STATES = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
POSITIONS = torch.arange(3, 9)


def serve(made: Path, layers: int, ranks: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> ServedBackbone:
    """A random backbone as one of `ranks` serves it."""
    for module in (linear, parameter, qwen3_dflash):
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank, raising=False)
    sizes = {"backbone_layers": layers, "backbone_heads": HEADS, "backbone_kv_heads": KV_HEADS}
    sizes |= {"backbone_head_dim": HEAD_DIM, "backbone_width": 96, "aux_hidden_state_layer_ids": [1, 2]}
    head = HeadConfig.create(
        head="backbone", circuit="ff", num_components=1, window=4, target=TARGET, verifier="-", **sizes
    )
    torch.manual_seed(0)
    definition = build_head(head).backbone
    for name, weight in definition.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    config = engine_config(made / "target", None)
    compilation = replace_attributes(config.compilation_config, mode=CompilationMode.NONE, custom_ops=["all"])
    config = replace_attributes(config, compilation_config=compilation)
    with set_current_vllm_config(config):
        served = ServedBackbone(head, config)
        served.load_weights(definition.state_dict())
    return served


def write(served: ServedBackbone, slots: list[Tensor] | None) -> tuple[list[tuple[Tensor, ...]], list[str]]:
    """Write STATES; returns keys, values and slots by layer, and the other operations."""
    inserted: list[tuple[Tensor, ...]] = []
    for layer in served.layers:

        def insert(at: Any, keys: Tensor, values: Tensor, cache: Tensor, slot: Tensor, attn: Any) -> None:
            assert at is attn and cache is attn.kv_cache
            inserted.append((keys, values, slot))

        attn = layer.self_attn.attn
        attn.impl = SimpleNamespace(do_kv_cache_update=partial(insert, attn=attn))
    with torch.inference_mode(), Operations() as counted:
        served.write_context(STATES, POSITIONS, slots)
    return inserted, counted.names


@pytest.mark.parametrize("ranks, rank", [(1, 0), (2, 1)])
def test_context_of_all_layers_equals_that_of_one_layer_at_a_time(
    made: Path, ranks: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, slots = serve(made, 3, ranks, rank, monkeypatch), list(torch.arange(3 * len(STATES)).chunk(3))
    states, shape = served.hidden_norm(STATES), (len(STATES), KV_HEADS // ranks, HEAD_DIM)
    found, _ = write(served, slots)
    for layer, slot, (keys, values, written) in zip(served.layers, slots, found, strict=True):
        own = layer.self_attn
        rows, expected = F.linear(states, own.qkv_proj.weight[own.q_size :]).split(own.kv_size, dim=-1)
        rows = own.rotary_emb(POSITIONS, own.k_norm(rows.reshape(shape)).flatten(1))[0]
        torch.testing.assert_close(keys, rows.view(shape))
        torch.testing.assert_close(values, expected.view(shape))
        assert written is slot
    assert write(served, None)[0] == []


def test_context_of_more_layers_takes_one_insert_more_for_each(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for layers in (1, 5):
        inserted, operations = write(serve(made, layers, 1, 0, monkeypatch), [POSITIONS] * layers)
        assert len(inserted) == layers
        assert len(operations) == 5, operations  # norm, product; norm, its weights, rotary positions of keys


@pytest.mark.parametrize("is_supported", [True, False])
def test_replayed_draft_rebuilds_metadata_where_its_graph_does_not_update_it(
    is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[str, Any]] = []

    def build(self: Any, groups: Any, num_rows: int, upper: Tensor, **given: Any) -> None:
        self.metadata = {"upper": upper.tolist()}
        called.append(("build", upper.tolist()))

    for name in ("_place_queries", "_write_context", "_generate_draft"):
        monkeypatch.setattr(BackboneSpeculator, name, lambda *args: None)
    monkeypatch.setattr(BackboneSpeculator, "_build_metadata", build)
    monkeypatch.setattr(BackboneSpeculator, "max_model_len", 16, raising=False)  # vLLM 0.33: a property
    group = SimpleNamespace(update_draft_decode_metadata=lambda metadata: called.append(("update", metadata["upper"])))
    made, rows = object.__new__(BackboneSpeculator), torch.zeros(9, dtype=torch.int32)
    tables = SimpleNamespace(slot_mappings=rows, input_block_tables=[rows])
    vars(made).update(supports_decode_metadata_update=is_supported, attn_groups=[[], [group]], block_tables=tables)
    vars(made).update(idx_mapping=rows, ends=rows, starts=rows, draft_is_prefilling=rows, unwritten=0)
    vars(made).update(num_queries=3, num_speculative_steps=2, aux=torch.zeros(64, 2))
    replay = made._prepare_capture(4, 2)
    batch = SimpleNamespace(num_reqs=2, seq_lens_cpu_upper_bound=torch.tensor([5, 15, 1]))
    made._prepare_inputs(batch, None)
    made._prepare_inputs(batch, SimpleNamespace(num_reqs=4))
    replay()
    captured, padded = [16] * 4, [8, 16, 3, 3]
    after = [("update", captured)] if is_supported else [("build", padded)]
    assert called == [("build", captured), ("build", padded[:2]), *after]

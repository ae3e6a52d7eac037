"""States and logits of a target are those of its model's own code, in every way in which models compute them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from benchmarks.tiny_targets import FAMILIES, GROUPED, HYBRIDS, SIZES, make_random
from vllm_mtpc.engine.served_target import load_served_target
from vllm_mtpc.errors import UsageError
from vllm_mtpc.hf import load_target
from vllm_mtpc.hf.attention import check_packing

WINDOWED = GROUPED | {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = WINDOWED | {"num_local_experts": 2, "num_experts_per_tok": 1}
GPT = {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
OPT = {"vocab_size": 48, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_attention_heads": 2}
# config, sizes, whether transformers keeps packed documents apart
MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    **{name: (*FAMILIES[name], True) for name in ("Llama", "Gemma2", "HyperCLOVAX", "MiniCPM3")},
    "Granite": ("GraniteConfig", GROUPED | {"logits_scaling": 4.0}, True),
    "Cohere": ("CohereConfig", GROUPED | {"logit_scale": 0.25}, True),
    "FalconH1": ("FalconH1Config", HYBRIDS["FalconH1"][1] | {"lm_head_multiplier": 0.5}, False),
    # no attention by PyTorch's kernel
    "GPTOss": ("GptOssConfig", EXPERTS, False),
    "GPTJ": ("GPTJConfig", GPT | {"rotary_dim": 8}, True),
    "Bloom": ("BloomConfig", {"vocab_size": 48, "hidden_size": 32, "n_layer": 2, "n_head": 2}, False),
    "MPT": ("MptConfig", {"vocab_size": 48, "d_model": 32, "n_layers": 2, "n_heads": 2}, False),
    "XGLM": ("XGLMConfig", {"vocab_size": 48, "d_model": 32, "num_layers": 2, "attention_heads": 2}, False),
    # a prefix of another class
    "Llama4": ("Llama4TextConfig", EXPERTS | {"intermediate_size_mlp": 64, "layer_types": None}, True),
    # own masks
    "Falcon": ("FalconConfig", SIZES, False),
    "OPT": ("OPTConfig", OPT, False),
    "AFMoE": ("AfmoeConfig", EXPERTS | {"num_experts": 2, "moe_intermediate_size": 32, "num_dense_layers": 1}, False),
}
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 3], [1, 40, 41, 2, 2, 47]])


@pytest.mark.parametrize("name", MODELS)
def test_states_and_logits_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    config, sizes, keeps_apart = MODELS[name]
    make_random(config, sizes, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    read: list[Tensor] = []  # by its lm_head
    model.get_output_embeddings().register_forward_pre_hook(lambda module, args: read.append(args[0]))
    with torch.no_grad():
        logits = model.eval()(input_ids=TOKENS, use_cache=False).logits
    target = load_target(tmp_path, torch.float32)
    hidden = target.hidden(TOKENS)
    torch.testing.assert_close(hidden, read[0], rtol=1e-4, atol=1e-5)  # float32: another attention function
    torch.testing.assert_close(target.logits(hidden), logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(target.logits(hidden[0, 2]), target.logits(hidden[:1, 2:3])[0, 0])  # of any shape
    if keeps_apart:
        check_packing(target.backbone, target.attention)
    else:
        with pytest.raises(UsageError, match=r"does not keep the documents of a packed row apart.*type --states vllm"):
            check_packing(target.backbone, target.attention)
        served = load_served_target(tmp_path, torch.float32, "cpu", {})  # the advice can be followed
        torch.testing.assert_close(served.logits(hidden), logits, rtol=1e-4, atol=1e-5)


def test_logits_that_depend_on_more_than_states_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_random(*FAMILIES["Llama"], tmp_path)
    forward = transformers.LlamaForCausalLM.forward

    def with_tokens(model: Any, input_ids: Tensor, **more: Any) -> Any:
        output = forward(model, input_ids=input_ids, **more)
        output.logits = output.logits + input_ids[..., None] * output.logits
        return output

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", with_tokens)
    with pytest.raises(UsageError, match=r"logits of LlamaForCausalLM are not those of its lm_head.*--states vllm"):
        load_target(tmp_path)

"""Write the head that a conversion gives."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_mtpc.checkpoint.load import check_shapes, shapes_of
from vllm_mtpc.checkpoint.locate import CONFIG_FILE, hub_name
from vllm_mtpc.checkpoint.metadata import card_data
from vllm_mtpc.checkpoint.save import save_head
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads.adapters import Adapters
from vllm_mtpc.heads.head import build_head


def save_converted(
    out: Path,
    config: HeadConfig,
    tensors: Mapping[str, Tensor],
    title: str,
    record: dict[str, Any],
    adapters: Adapters | None = None,
) -> None:
    """Write an MtPC head, in the narrowest dtype that stores all of its tensors exactly (float64: float32).

    Args:
        out: Folder of the head.
        config: Of the head.
        tensors: Its state dict; CheckpointError for other names or shapes than the config's.
        title: Of its card.
        record: Its provenance; "from" is the name of the checkpoint.
        adapters: Of its draft layers.
    """
    with torch.device("meta"):
        head = build_head(config)
    check_shapes(out, shapes_of(tensors), shapes_of(head.state_dict()), f"{CONFIG_FILE} and the target")
    head.load_state_dict(tensors, assign=True)
    dtype = reduce(torch.promote_types, {tensor.dtype for tensor in tensors.values()} or {torch.float16})
    dtype = dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32
    target = config.speculators_config.verifier.name_or_path
    data = card_data(["mtpc", "speculative-decoding"], hub_name(target))
    card = (
        f"---\n{data.to_yaml()}\n---\n\n# {title}\n\nConverted from `{record['from']}` by `vllm-mtpc convert`; target "
        f"`{target}`. Drafts do not change the target's output distribution.\n"
    )
    save_head(out, config, head, {"converted": record}, card, dtype, adapters)

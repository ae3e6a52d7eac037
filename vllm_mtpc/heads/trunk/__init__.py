"""Trunks: what the target computed, and x_1, to the states that leaves and sums read. One file and one line each."""

from vllm_mtpc.heads.sections import Table

TRUNKS = Table(
    "trunk",
    {
        "none": "vllm_mtpc.heads.trunk.base:NoTrunk",
        "mlp": "vllm_mtpc.heads.trunk.mlp:MlpTrunk",
        "lora": "vllm_mtpc.heads.trunk.lora:LoraTrunk",
        "backbone": "vllm_mtpc.heads.trunk.backbone:BackboneTrunk",
        "drafter": "vllm_mtpc.heads.trunk.drafter:DrafterTrunk",
    },
)

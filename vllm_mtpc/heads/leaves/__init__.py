"""Leaves: states to log-probabilities by position and component. One file and one line each."""

from vllm_mtpc.heads.sections import Table

LEAVES = Table(
    "leaves",
    {
        "own": "vllm_mtpc.heads.leaves.own:OwnLeaves",
        "lm_head": "vllm_mtpc.heads.leaves.lm_head:LmHeadLeaves",
    },
)

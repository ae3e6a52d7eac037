"""Families of heads by their method, the name in vLLM's `speculative_config`.

An entry names objects as "module:name", which are imported on first use:
`FAMILIES[config.speculators_model_type].check(folder, config)`. Other modules never compare the method of a head. This
module imports nothing of the package, so that every package can import it.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any


class Family:
    """Objects of one family, as attributes.

    config: pydantic model of `config.json`, a subclass of `vllm_mtpc.config.base.AnyHeadConfig`
    check: (folder, config) -> Adapters | None; raises CheckpointError for tensors that do not fit the config
    evaluator: the Evaluator of `vllm-mtpc eval` and `doctor`
    trainer: the Trainer of `vllm-mtpc train`
    serving: the class of vLLM's speculative config, which names its speculator
    """

    def __init__(self, **places: str) -> None:
        self._places = places

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._places:
            raise AttributeError(f"a family has no {name!r}")
        return resolve_name(self._places[name])


FAMILIES = {
    "mtpc": Family(
        config="vllm_mtpc.config.mtpc_config:HeadConfig",
        check="vllm_mtpc.checkpoint.load:check_head",
        evaluator="vllm_mtpc.eval.circuit_evaluator:MtpcEvaluator",
        trainer="vllm_mtpc.train.circuit_trainer:CircuitTrainer",
        serving="vllm_mtpc.proposers.options.circuit_options:MtpcSpeculativeConfig",
    ),
    "ptp": Family(
        config="vllm_mtpc.config.ptp_config:PtpConfig",
        check="vllm_mtpc.checkpoint.ptp_head:check_ptp",
        evaluator="vllm_mtpc.eval.ptp_evaluator:PtpEvaluator",
        trainer="vllm_mtpc.train.ptp.ptp_trainer:PtpTrainer",
        serving="vllm_mtpc.proposers.options.ptp_options:PtpSpeculativeConfig",
    ),
}

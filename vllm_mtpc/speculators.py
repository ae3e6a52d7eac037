"""Heads as configs of the `speculators` library: after `import vllm_mtpc.speculators`, `from_pretrained` reads them."""

from __future__ import annotations

from typing import Literal

from speculators import SpeculatorModelConfig


@SpeculatorModelConfig.register("mtpc")
class MtpcSpeculatorConfig(SpeculatorModelConfig):
    """An MtPC head; its own fields are those of `vllm_mtpc.config.mtpc_config.HeadConfig`."""

    speculators_model_type: Literal["mtpc"] = "mtpc"


@SpeculatorModelConfig.register("ptp")
class PtpSpeculatorConfig(SpeculatorModelConfig):
    """A PTP head; its own fields are those of `vllm_mtpc.config.ptp_config.PtpConfig`."""

    speculators_model_type: Literal["ptp"] = "ptp"


SpeculatorModelConfig.reload_schema()

"""The config classes of `speculators` 0.9.0, as far as they say what a config.json may hold.

Written from its published fields, because the package is no requirement of the tests: it holds datasets (<= 5.1.0) and
transformers (<= 5.19.0) back behind the releases that are tested here, needs Python 3.11, and brings torchvision and
torchaudio in builds that need not load next to a CPU's torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class GreedyTokenProposalConfig(BaseModel):
    """Registered as "greedy", the only proposal type there is."""

    proposal_type: Literal["greedy"] = "greedy"
    speculative_tokens: int = Field(default=5, ge=1)
    verifier_accept_k: int = Field(default=1, ge=1)
    accept_tolerance: float = Field(default=0.0, ge=0.0)


class VerifierConfig(BaseModel):
    name_or_path: str | None
    architectures: list[str]


class SpeculatorsConfig(BaseModel):
    algorithm: str
    proposal_methods: list[GreedyTokenProposalConfig]
    default_proposal_method: str
    verifier: VerifierConfig

    @model_validator(mode="after")
    def check_default_proposal_method(self) -> SpeculatorsConfig:
        if self.default_proposal_method not in [method.proposal_type for method in self.proposal_methods]:
            raise ValueError("default_proposal_method must match the proposal_type of one of proposal_methods")
        return self


class SpeculatorModelConfig(BaseModel):
    """What a class of a model type adds its own fields to; others are kept."""

    model_config = ConfigDict(extra="allow")

    speculators_model_type: str = ""
    speculators_version: str = ""
    speculators_config: SpeculatorsConfig

"""The policy of a part of a model has what the whole one says of the part."""

from __future__ import annotations

from torch import nn

from fxamp.integrations.parts import policy_of_part
from passes.contract.policy import Policy


def test_a_part_of_a_model_has_the_overrides_of_its_paths_and_types() -> None:
    part = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    asked = Policy(
        "O2", dtype="bf16", modules={"body.0": "fp32", "head.*": "fp32", nn.LayerNorm: "low", "*.1": "keep"},
        ops={"softmax": "low", "body.0/linear#0": "fp32", "head.0/linear#0": "fp32"},
    )  # fmt: skip
    found = policy_of_part(asked, "body", part)
    assert str(found) == (
        "O2,dtype=bf16,modules.0=fp32,modules.1=keep,modules.torch.nn.LayerNorm=low,ops.0/linear#0=fp32,"
        "ops.softmax=low,output_dtype=autocast"
    )
    covered = policy_of_part(Policy(modules={"body": "fp32", nn.LayerNorm: "low", "body.1": "low"}), "body", part)
    assert dict(covered.modules) == {"torch.nn.Sequential": "fp32", "1": "low"}
    assert not policy_of_part(Policy(modules={"head": "fp32"}), "body.up", part).modules

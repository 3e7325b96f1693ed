"""`fxamp.tune` of a compiled step: what it stores in 16 bits moves fewer bytes within an error, and is replayed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

import fxamp
from passes.contract.plan import CERTIFICATE
from tests.fxamp.train.test_at_rest import IDS, blocks, language_model

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of a module that torch imports
BATCHES = [(ids, ids) for ids in torch.randint(50, (3, 128), generator=torch.Generator().manual_seed(2))]


def step_of(model: nn.Module | None = None, policy: str = "O2,dtype=bf16", **settings: Any) -> fxamp.TrainStep:
    model = blocks() if model is None else model
    settings = {"compile": {"dynamic": False}, **settings}
    return fxamp.TrainStep(fxamp.convert(model, policy=policy), F.cross_entropy, AdamW(model.parameters()), **settings)


def losses(step: fxamp.TrainStep) -> list[Tensor]:
    return [step(*batch).loss for batch in BATCHES]


def said(plan: fxamp.Plan) -> list[str]:
    return [note.removeprefix(f"{CERTIFICATE}: ") for note in plan.notes if note.startswith(CERTIFICATE)]


@pytest.mark.slow  # builds the kernels of four graphs
def test_a_step_is_tuned_and_is_as_it_was_and_its_plan_is_stored_so_again() -> None:
    step, twin = step_of(), step_of()
    assert all(map(torch.equal, losses(step), losses(twin)))
    random, planned = torch.get_rng_state(), step.plan()
    plan = fxamp.tune(step, batches=BATCHES)
    assert torch.equal(random, torch.get_rng_state())
    assert step.plan() == planned
    assert (step.windows, step.position) == (twin.windows, 0)
    assert all(map(torch.equal, losses(step), losses(twin)))  # weights, optimizer and low copies are as they were

    found = plan.certificate
    assert found["tolerance"] == pytest.approx(1.25 * found["autocast"])
    assert found["measured"] <= found["tolerance"]
    assert found["predicted"] == pytest.approx(found["measured"], rel=0.1)
    assert plan.policy.level == "O2"
    assert {each.part for each in plan.stored} == {"saved", "backward"}
    assert said(plan)[0].startswith("saved and backward in 16 bits moves ")
    again = step_of()
    again.switch(plan)
    again(*BATCHES[0])
    assert again.plan().stored == plan.stored
    assert again.compiled is not None
    assert again.compiled.counts is not None
    for key in ("moved_bytes", "saved_bytes", "kernels", "cast_kernels"):
        assert getattr(again.compiled.counts, key) == found[key], key

    # With less room for an error less is stored: what is measured here is what was compared there.
    errors = dict(_pairs(said(plan)[1]))
    assert set(errors) == {"nothing", "saved", "backward", "saved and backward"}
    room = sorted(errors.values())
    least = fxamp.tune(step_of(), batches=BATCHES, tolerance=errors["saved"] * 1.001)
    assert {each.part for each in least.stored} <= {"saved", "backward"}
    assert least.certificate["measured"] <= errors["saved"] * 1.001
    assert len(least.stored) < len(plan.stored)
    with pytest.raises(
        fxamp.PolicyError, match=r"nothing keeps a tolerance of .*: the nearest is (O1|saved in 16 bits), 0"
    ):
        fxamp.tune(step_of(), batches=BATCHES, tolerance=room[0] * 0.9)


@pytest.mark.slow  # builds the kernels of five graphs
def test_between_the_parts_as_much_of_backward_is_stored_as_the_tolerance_has_room_for() -> None:
    step = step_of(blocks(4))
    every = fxamp.tune(step, batches=BATCHES)
    errors = dict(_pairs(said(every)[1]))
    tolerance = (errors["saved"] + errors["saved and backward"]) / 2
    plan = fxamp.tune(step, batches=BATCHES, tolerance=tolerance)
    assert said(plan)[0].startswith("saved and the last ")
    assert plan.certificate["measured"] <= tolerance
    assert plan.certificate["predicted"] == pytest.approx(plan.certificate["measured"], rel=0.1)
    left_out = [each for each in every.stored if each not in plan.stored]
    assert 0 < len(left_out) < 4
    assert left_out == [each for each in every.stored if each.part == "backward"][: len(left_out)]
    assert plan.certificate["moved_bytes"] > every.certificate["moved_bytes"]


def small_model(name: str) -> tuple[nn.Module, list[Any]]:
    """Return a model of width 128, trained for a few steps, and batches of it."""
    if name in ("bert", "gpt2"):
        return language_model(name)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids, images = (torch.rand(6, 2, 64) ** 3 * 1000).long(), torch.randn(6, 4, 3, 32, 32)
    if name == "llama":
        sizes |= {"vocab_size": 1000, "intermediate_size": 384, "num_key_value_heads": 2, "use_cache": False}
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes))
        batches: list[Any] = [{"input_ids": batch, "labels": batch} for batch in ids]
    else:
        dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        sizes |= {"intermediate_size": 512, "image_size": 32, "patch_size": 4, "num_labels": 50}
        model = ViTForImageClassification(ViTConfig(**sizes, **dropouts))
        batches = [{"pixel_values": batch, "labels": torch.randint(50, (4,))} for batch in images]
    optimizer = AdamW(model.parameters(), lr=3e-4)
    for batch in batches[3:]:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, batches[:3]


@pytest.mark.slow  # builds the kernels of four graphs of a model
@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "llama"])
def test_the_error_of_each_choice_is_predicted(name: str) -> None:
    model, batches = small_model(name)
    view = fxamp.convert(model, policy="O2,dtype=bf16")
    step = fxamp.TrainStep(view, None, AdamW(model.parameters()), compile={"dynamic": False})
    torch.compiler.reset()
    compared, predicted = (dict(_pairs(line)) for line in said(fxamp.tune(step, batches=batches))[1:3])
    print(name, compared, predicted)
    assert set(predicted) == set(compared) == {"nothing", "saved", "backward", "saved and backward"}
    for choice, error in predicted.items():
        assert error == pytest.approx(compared[choice], rel=0.1), choice
    # What storing adds is told from the rest: where backward stores, errors grow as they do.
    grows = [found["saved and backward"] / found["nothing"] for found in (compared, predicted)]
    assert grows[1] == pytest.approx(grows[0], rel=0.1)


def _pairs(line: str) -> Iterator[tuple[str, float]]:
    for part in line.partition(": ")[2].split(", "):
        name, error = part.partition(" at ")[0].rsplit(" ", 1)
        yield name, float(error)


@pytest.mark.slow  # builds the kernels of several graphs
def test_where_nothing_is_worth_storing_o1_stays() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))  # below what is worth a cast
    plan = fxamp.tune(step_of(model), torch.randn(16, 8), torch.randint(4, (16,)))
    assert (plan.policy.level, plan.stored) == ("O1", ())
    assert said(plan)[0] == "O1 stays: it stores nothing in FP32 that 16 bits are considered for"


@pytest.mark.slow  # builds the kernels of several graphs
def test_a_model_that_draws_random_numbers_is_measured_beside_o1() -> None:
    model = blocks()
    model[3] = nn.Sequential(nn.Dropout(0.1), model[3])
    plan = fxamp.tune(step_of(model), batches=BATCHES)
    assert plan.certificate["measured"] <= plan.certificate["tolerance"] < 0.05  # other draws would be an error of 1
    assert any("draws random numbers" in note for note in said(plan))
    assert plan.stored


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        ("O1,dtype=bf16", {}, "this step follows O1: what a compiled step stores in 16 bits is chosen at O2"),
        ("O3,dtype=bf16", {}, "this step follows O3"),
        ("O2,dtype=fp16", {}, "FP16 does not have the range"),
        ("O2,dtype=bf16", {"compile": "aot_eager"}, "what Inductor stores .*'aot_eager' is asked to compile"),
    ],
)
def test_a_step_that_stores_nothing_so_is_refused(policy: str, settings: Any, message: str) -> None:
    step = step_of(policy=policy, **settings)
    with pytest.raises(fxamp.PolicyError, match=message):
        fxamp.tune(step, IDS, IDS)
    assert step.windows == 0


def test_what_tune_cannot_look_at_is_refused() -> None:
    model = blocks()
    unconverted = fxamp.TrainStep(model, F.cross_entropy, SGD(model.parameters(), lr=0.1), compile=True)
    with pytest.raises(fxamp.PolicyError, match="Sequential is not converted"):
        fxamp.tune(unconverted, IDS, IDS)
    with pytest.raises(fxamp.PolicyError, match="leave out policies="):
        fxamp.tune(step_of(), IDS, IDS, policies="O2")
    with pytest.raises(fxamp.PolicyError, match="tolerance is"):
        fxamp.tune(step_of(), IDS, IDS, tolerance=0)
    step = step_of(accumulate_steps=2, compile="eager")
    step(IDS, IDS)
    with pytest.raises(fxamp.PolicyError, match=r"a window of this TrainStep is open: call flush\(\)"):
        fxamp.tune(step, IDS, IDS)
    assert step.position == 1


def test_an_uncompiled_step_is_tuned_as_its_model() -> None:
    plan = fxamp.tune(step_of(compile=False), batches=BATCHES)
    assert not plan.stored
    assert "cast_bytes" in plan.certificate

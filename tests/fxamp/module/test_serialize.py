"""Copies and saved modules keep graph, plan, containers and the training flag that they follow."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.module.serialize import graph_from_data, graph_to_data
from passes._torch import temporary_operators
from tests.fxamp.module.test_module import Net
from tests.support.helpers import FRONT_ENDS, Two, assert_same, example, o0
from tests.support.processes import in_another_process


def dictionary(self: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
    with torch.no_grad():
        y = self.l(batch["x"])
    return {"out": self.m(y)[:, 1:3], "rows": batch["x"].shape[0], "none": None}


@pytest.fixture(scope="module", params=FRONT_ENDS)
def converted(request: pytest.FixtureRequest) -> fxamp.ConvertedModule:
    torch.manual_seed(0)
    return fxamp.convert(Net(), (example(),), policy="O1,dtype=bf16", capture=request.param)


def seeded(module: nn.Module, training: bool) -> Any:
    torch.manual_seed(0)
    return module.train(training)(example())


def loaded(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("again", [copy.deepcopy, loaded])
def test_a_copy_follows_both_modes_and_shares_nothing(converted: Any, again: Any, training: bool) -> None:
    converted.train(training)
    made = again(again(converted))
    assert type(made) is not type(converted)
    assert isinstance(made, fxamp.ConvertedModule)
    assert made.training is training
    assert fxamp.plan_of(made) == fxamp.plan_of(converted)
    assert list(made.state_dict()) == list(converted.state_dict())
    assert made.m.weight is made.tied.weight
    for mode in (True, False):
        converted.get_buffer("seen").zero_()
        made.load_state_dict(converted.state_dict())
        expected = seeded(converted, mode)
        made.load_state_dict({**made.state_dict(), **{k: v for k, v in converted.state_dict().items() if k == "seen"}})
        assert_same(seeded(made, mode), expected)
    before = converted.l.weight.detach().clone()
    with torch.no_grad():
        made.l.weight.zero_()
    assert torch.equal(converted.l.weight, before)
    with pytest.raises(AttributeError, match="forward of Net"):
        _ = made.config


def test_a_shallow_copy_shares_the_parameters(converted: Any) -> None:
    assert copy.copy(converted).l.weight is converted.l.weight


def test_a_deep_copy_inside_a_larger_module_keeps_ties() -> None:
    model = Two()
    made = copy.deepcopy(nn.ModuleList([o0(model), model]))
    assert made[0].l.weight is made[1].l.weight  # type: ignore[union-attr]


def test_hooks_of_a_copy_are_its_own() -> None:
    converted, seen = o0(Two()), list[int]()
    converted.register_forward_hook(lambda *_: seen.append(1))
    made = copy.deepcopy(converted)
    made(example())
    assert seen == [1]


LOADS = """
import pathlib, torch, fxamp
for folder in pathlib.Path({folders!r}).iterdir():
    module = torch.load(folder / "module.pt", weights_only=False)
    training, (train, evaluation), x, plan = torch.load(folder / "expected.pt", weights_only=False)
    assert module.training == training, folder
    state = {{k: v.clone() for k, v in module.state_dict().items()}}
    for mode, expected in ((True, train), (False, evaluation)):
        module.load_state_dict(state)
        torch.manual_seed(0)
        assert torch.equal(module.train(mode)(x), expected), (folder, mode)
    assert fxamp.plan_of(module).to_json() == plan, folder
"""


def test_a_new_process_loads_what_every_front_end_made_in_either_mode(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    for front_end in FRONT_ENDS:
        module = fxamp.convert(model, (example(),), policy="O1,dtype=bf16", capture=front_end)
        for training in (True, False):
            folder = tmp_path / f"{front_end}-{training}"
            folder.mkdir()
            torch.save(module.train(training), folder / "module.pt")
            expected = [seeded(copy.deepcopy(module), mode) for mode in (True, False)]
            torch.save((training, expected, example(), fxamp.plan_of(module).to_json()), folder / "expected.pt")
    in_another_process(exec, LOADS.format(folders=str(tmp_path)))  # where the model's class is not imported


def test_containers_regions_and_slices_survive() -> None:
    batch = {"x": example()}
    converted = o0(Two(dictionary), (batch,))
    assert_same(loaded(converted)(batch), converted(batch))


def test_guards_survive() -> None:
    made = loaded(o0(Two(), dynamic_shapes={"x": {0: torch.export.Dim("rows", max=5)}}))
    with pytest.raises(fxamp.CaptureError, match="captured for sizes"):
        made(example(9))


def test_every_state_survives() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.l(x) if self.training else self.m(self.l(x))

    model = Two(forward)
    made = loaded(o0(model))
    for training in (True, False):
        assert torch.equal(made.train(training)(example()), model.train(training)(example()))


def kept(**changed: Any) -> fxamp.ConvertedModule:
    """Return a converted container as one is loaded that was saved with other entries in its record."""
    load, (tree, graphs, data), _ = o0(nn.Sequential(nn.Linear(6, 6))).__reduce__()
    made: fxamp.ConvertedModule = load(tree, graphs, changed.get("instead", data | changed))
    return made


def test_a_module_that_was_saved_before_its_record_had_names_loads() -> None:
    converted = o0(nn.Sequential(nn.Linear(6, 6)))
    _, (_, _, data), _ = converted.__reduce__()
    names = ("plan", "device_type", "original", "missing", "reads", "container")
    made = kept(instead=tuple(data[name] for name in names))
    assert (made.plan, made.original, made.device_type) == (converted.plan, "Sequential", "cpu")
    assert len(made) == 1
    assert kept(instead={"plan": data["plan"]}).original == "the original model"


def test_what_a_newer_fxamp_keeps_of_a_module_is_refused_by_name() -> None:
    with pytest.raises(fxamp.PlanError, match=r"keeps tuned, which .*does not know.*Upgrade fxamp, or convert"):
        kept(tuned=True)


def test_graph_data_is_plain_and_round_trips(converted: Any) -> None:
    data = graph_to_data(converted.graph)
    again = graph_from_data(pickle.loads(pickle.dumps(data)))
    assert str(again) == str(converted.graph)
    assert graph_to_data(again) == data


def test_a_missing_operator_is_named() -> None:
    with temporary_operators("fxamp_test_serialize") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        graph = torch.fx.Graph()
        graph.output((graph.call_function(torch.ops.fxamp_test_serialize.twice.default, (graph.placeholder("x"),)),))
        data = graph_to_data(graph)
        assert str(graph_from_data(data)) == str(graph)
    missing = [
        (*n[:2], n[2]._replace(name="fxamp_gone::twice") if n[0] == "call_function" else n[2], *n[3:]) for n in data
    ]
    with pytest.raises(fxamp.PlanError, match=r"fxamp_gone::twice.*Import the library"):
        graph_from_data(missing)

"""A graph of Dynamo's is told by the module that was compiled: paths, overrides, and models that share code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from tests.support.front_ends import FRESH
from tests.support.helpers import OLD_DYNAMO, example

pytestmark = FRESH


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return self.out(y if y.sum() > 0 else -y)  # where Dynamo breaks off


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = Encoder(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.encoder(x))


def _in_place(model: Nested, policy: str) -> Any:
    model.compile(backend="fxamp", options={"policy": policy, "backend": "eager"})
    return model


WAYS: dict[str, Any] = {
    "fxamp.compile": lambda model, policy: fxamp.compile(model, policy=policy, backend="eager"),
    "backend": lambda model, policy: torch.compile(model, backend=fxamp.backend(policy, "eager")),
    "in place": _in_place,
}


@pytest.mark.parametrize("way", WAYS)
def test_paths_count_from_the_compiled_module_wherever_it_breaks(way: str) -> None:
    module = WAYS[way](Nested(), "O1,modules.encoder.fc=fp32")
    module(example())
    colours = {d.module_path: d.colour for d in fxamp.plan_of(module).decisions if d.op == "linear"}
    assert colours == {"encoder.fc": "float32", "encoder.out": "bfloat16", "head": "bfloat16"}


@pytest.mark.parametrize("way", WAYS)
def test_a_module_override_that_matches_nothing_is_an_error(way: str) -> None:
    with pytest.raises(Exception, match=r"modules.encoder.fx=fp32 matches no module .* 'encoder.fc'") as caught:
        WAYS[way](Nested(), "O1,modules.encoder.fx=fp32")(example())
    chain = [caught.value, caught.value.__cause__, caught.value.__context__]
    assert any(isinstance(e, fxamp.PolicyError) for e in chain)


@pytest.mark.parametrize("way", ["fxamp.compile", "backend"])
def test_a_second_model_of_the_same_code_has_its_plan_too(way: str) -> None:
    first, second = (WAYS[way](Nested(), "O1") for _ in range(2))
    first(example())
    second(example())
    assert fxamp.plan_of(first).decisions == fxamp.plan_of(second).decisions
    assert len(fxamp.graphs(first)) == len(fxamp.graphs(second))
    second.head.weight.data.zero_()
    assert torch.equal(second(example()), second.head.bias.bfloat16().float().expand(4, 6))


class Twins(nn.Module):
    """Dynamo captures the forward of the first encoder, and runs that graph for the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # by which both take the same branch
        self.encoder, self.decoder = Encoder(), Encoder()

    def forward(self, x: Tensor) -> Any:
        return self.decoder(self.encoder(x))


@pytest.mark.parametrize("which", ["encoder", "decoder"])
def test_an_override_by_path_is_refused_where_two_modules_share_a_graph(which: str) -> None:
    module = WAYS["fxamp.compile"](Twins(), f"O1,modules.{which}.out=fp32")
    with pytest.raises(fxamp.PolicyError, match=f"modules.{which}.out=fp32 cannot hold for only one of them"):
        module(example())


@pytest.mark.parametrize("which", ["encoder", "decoder"])
def test_an_override_by_path_holds_where_each_module_has_a_graph(which: str) -> None:
    module = WAYS["fxamp.compile"](Twins(), f"O1,modules.{which}.fc=fp32")
    module(example())
    colours = {d.module_path: d.colour for d in fxamp.plan_of(module).decisions if d.op == "linear"}
    assert {path for path, colour in colours.items() if colour == "float32"} == {f"{which}.fc"}


@pytest.mark.parametrize("override", ["modules.*.fc=fp32", "modules.torch.nn.Linear=fp32", "ops.linear=fp32"])
def test_an_override_of_both_is_not(override: str) -> None:
    module = WAYS["fxamp.compile"](Twins(), f"O1,{override}")
    module(example())
    colours = {d.module_path: d.colour for d in fxamp.plan_of(module).decisions if d.op == "linear"}
    assert colours["encoder.fc"] == colours["decoder.fc"] == "float32"
    assert colours["encoder.out"] == colours["decoder.out"]


def test_graphs_come_in_the_order_of_capture_and_without_parameters_too() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.last, self.first = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            y = y.exp() if y.sum() > 0 else y.cos()
            y = y.tanh() if y.sum() > 0 else y.sin()
            return self.last(y)

    module = WAYS["backend"](Model(), "O1")
    module(example())
    found = fxamp.plan_of(module).decisions
    assert [d.module_path for d in found if d.op == "linear"] == ["first", "last"]
    assert {d.op for d in found if not d.module_path} > {"sum", "gt"}
    assert len(fxamp.graphs(module)) == max(d.graph for d in found) + 1 == 3


def test_the_parts_that_torch_makes_for_distributed_data_parallel(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))  # a megabyte each, and so a bucket

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, x = Wide(), torch.randn(2, 512)
        parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
        module = WAYS["backend"](parallel, "O1,modules.module.net.1=fp32")
        got = module(x)
        got.sum().backward()
        found = fxamp.plan_of(module).decisions
    finally:
        torch.distributed.destroy_process_group()
    assert [d.graph for d in found] == [0, 1, 2]
    assert [d.module_path for d in found] == [f"module.net.{i}" for i in range(3)]
    assert [d.colour for d in found] == ["bfloat16", "float32", "bfloat16"]
    first, second, third = model.net
    with torch.autocast("cpu"):
        low = first(x)
    middle = second(low.float())
    with torch.autocast("cpu"):
        assert torch.equal(got, third(middle).float())


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_part_that_autocast_told_low_inputs_takes_wider_ones(tmp_path: Path, inner: str) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, x = Wide(), torch.randn(2, 512)
        module = fxamp.compile(model, policy="O1,modules.net.1=fp32", backend=inner)
        got = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1)(x)
        got.sum().backward()
        assert len(fxamp.graphs(module)) == (1 if inner == "eager" else 3)  # only compiled graphs are split
    finally:
        torch.distributed.destroy_process_group()
    first, second, third = model.net
    with torch.autocast("cpu"):
        low = first(x)
    middle = second(low.float())
    with torch.autocast("cpu"):
        assert torch.equal(got, third(middle).float())


@pytest.mark.parametrize("ambient", [False, True], ids=["fxamp.compile", "backend"])
def test_what_moves_shards_follows_its_operand(ambient: bool, tmp_path: Path) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), example()
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        module = WAYS["backend" if ambient else "fxamp.compile"](model, "O1")
        with torch.autocast("cpu"):
            expected = model(x)
        with torch.autocast("cpu", enabled=ambient):
            got = module(x)
        assert torch.equal(got.float(), expected.float())
        found = {d.op: (d.colour, d.kind) for d in fxamp.plan_of(module).decisions}
        if not OLD_DYNAMO:  # whose ops have no names of their own, and keep FP32
            assert found["redistribute"] == found["to_local"] == ("bfloat16", "follow")
        got.sum().backward()
    finally:
        torch.distributed.destroy_process_group()


def test_parameters_that_are_swapped_at_every_call_leave_one_graph() -> None:
    module = WAYS["backend"](Nested(), "O1")
    module(example())
    count = len(fxamp.graphs(module))
    for _ in range(3):
        swapped: dict[str, Tensor] = {name: nn.Parameter(p.detach().clone()) for name, p in module.named_parameters()}
        torch.func.functional_call(module, swapped, (example(),))
    assert len(fxamp.graphs(module)) == count

"""A view beside other views, compilations, threads, hooks and writes of the same process."""

import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from tests.support.helpers import Two

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
O1 = "O1,dtype=bf16"


class Broken(nn.Module):
    """Two layers and a break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        torch._dynamo.graph_break()
        return self.b(h)


def compiled_entries() -> int:
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(Broken.forward.__code__)
    return sum(entry.code is not None for entry in entries)


def graphs_captured() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_a_view_that_is_gone_leaves_nothing_in_the_caches_of_its_class() -> None:
    torch._dynamo.reset()
    model, other = Broken(), fxamp.convert(nn.Linear(6, 6), (X,), policy=O1)
    for _ in range(4):
        view = fxamp.convert(model, (X,), policy=O1)
        view(X)
        assert compiled_entries() > 0
        del view
        gc.collect()
        other(X)  # where Dynamo looks nothing up; Python's collector may run in the middle of its look-up
        assert compiled_entries() == 0


def test_a_view_may_be_collected_while_torch_compiles_another_model_of_its_class() -> None:
    torch._dynamo.reset()
    views, other = [fxamp.convert(Broken(), (X,), policy=O1)], fxamp.convert(nn.Linear(6, 6), (X,), policy=O1)
    views[0](X)

    def backend(gm: Any, inputs: Any) -> Any:  # Dynamo goes on with what it knows of the code that it compiles
        views.clear()
        gc.collect()
        other(X)
        return gm.forward

    model = Broken()
    compiled = torch.compile(model, backend=backend)
    assert torch.equal(compiled(X), model(X))
    other(X)
    assert compiled_entries() == 1, "torch.compile's"
    assert torch.equal(compiled(X), model(X))


def test_a_view_that_the_collector_finds_in_a_look_up_leaves_its_list_alone() -> None:
    """Dynamo reads the list of a class's code in C; what it reads may not be freed by a collection meanwhile."""
    torch._dynamo.reset()
    view = fxamp.convert(Broken(), (X,), policy=O1)
    view(X)
    entries = compiled_entries()
    assert entries > 0
    del view
    gc.collect()
    assert compiled_entries() == entries


def test_what_one_view_captures_again_no_other_does() -> None:
    first, second = (fxamp.convert(Broken(), (X,), policy=O1) for _ in range(2))
    plain = torch.compile(Broken(), backend="eager")
    calls: tuple[Callable[[Tensor], Any], ...] = (first, second, plain)
    for call in calls:
        call(X)
    before = graphs_captured()
    first.a.register_forward_hook(lambda *_: None)
    first(X)
    assert graphs_captured() > before
    before = graphs_captured()
    second(X)
    plain(X)
    assert graphs_captured() == before


@pytest.mark.parametrize("way", ["swap_tensors", "to", "load_state_dict"])
def test_parameters_can_be_swapped(way: str) -> None:
    model = nn.Linear(6, 6)
    view = fxamp.convert(model, (X,), policy=O1)
    view(X)
    other = nn.Linear(6, 6)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        if way == "swap_tensors":
            torch.utils.swap_tensors(model.weight, nn.Parameter(other.weight.detach().clone()))
            torch.utils.swap_tensors(model.bias, nn.Parameter(other.bias.detach().clone()))
        elif way == "to":
            other = model
            view.to(torch.float64).to(torch.float32)
        else:
            view.load_state_dict({name: t.clone() for name, t in other.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    with torch.autocast("cpu", torch.bfloat16):
        expected = other(X)
    assert torch.equal(view(X), expected.float())


def test_parameters_that_are_replaced_make_no_further_graph() -> None:
    view = fxamp.convert(Broken(), (X,), policy=O1)
    for _ in range(10):
        fresh: dict[str, Tensor] = {name: nn.Parameter(p.detach().clone()) for name, p in view.named_parameters()}
        torch.func.functional_call(view, fresh, (X,))
    for _ in range(10):
        view.load_state_dict({name: t.clone() for name, t in view.state_dict().items()}, assign=True)
        view(X)
    assert "2 graphs" in repr(view)


def test_code_that_another_compilation_has_given_up_is_named() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(6, 6)

        def step(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.f(x))
            return x / 2 if x.abs().max() > 1e4 else x

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = self.step(x).relu() * 2
            return x

    model = Loop()
    torch.compile(model, backend="eager")(X)  # Dynamo skips the frame of a loop round a break, for good
    view = fxamp.convert(model, (X,), policy=O1)
    assert not fxamp.plan_of(view).complete
    assert any("Loop.forward" in note for note in fxamp.plan_of(view).notes)


def test_two_first_calls_may_wait_for_each_other() -> None:
    barrier = threading.Barrier(2)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def meet() -> None:
        barrier.wait(timeout=60)

    def forward(self: Any, x: Tensor) -> Any:
        h = self.l(x)
        meet()
        return self.m(h)

    view, found = fxamp.convert(Two(forward), policy=O1), list[Tensor]()
    threads = [threading.Thread(target=lambda: found.append(view(X))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert torch.equal(*found)


def test_a_hook_elsewhere_costs_a_call_no_walk_over_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    view = fxamp.convert(Two(), (X,), policy=O1)
    view(X)
    walks: list[None] = []
    kept = nn.Module.modules

    def modules(self: nn.Module, remove_duplicate: bool = True) -> Any:
        walks.append(None)
        return kept(self, remove_duplicate)

    monkeypatch.setattr(nn.Module, "modules", modules)
    tensor = torch.zeros(2, requires_grad=True)
    for _ in range(3):
        tensor.register_hook(lambda g: None).remove()
        view(X)
    assert walks == []
    seen: list[None] = []
    view.l.register_forward_hook(lambda *_: seen.append(None))
    view(X)
    assert len(seen) == 1


def drawn(self: Any, x: Tensor, generator: torch.Generator | None = None) -> Any:
    """Dynamo traces this call with a size that is a number alone."""
    h = self.l(x)
    return h + torch.randn((h.shape[0], 6), generator=generator)


def test_what_cannot_be_traced_with_a_symbol_is_traced_with_the_size(caplog: pytest.LogCaptureFixture) -> None:
    model = Two(drawn)
    view = fxamp.convert(model, (X,), policy=O1)
    with caplog.at_level(logging.WARNING):
        for rows in (4, 3, 4, 5, 4):
            x = torch.randn(rows, 6)
            torch.manual_seed(0)
            got = view(x)
            torch.manual_seed(0)
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(got, model(x).float())
    assert "did not run" not in caplog.text
    assert {d.module_path for d in fxamp.plan_of(view).decisions} >= {"l"}


class Island(nn.Module):
    """An author's own island, by the idiom of its kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(6, 6), nn.Linear(6, 6), kind

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        device = {"device": h.device.type, "is_cuda": "cuda" if h.is_cuda else "cpu", "cuda": "cuda"}[self.kind]
        with torch.autocast(device_type=device, enabled=False):
            return self.b(h.float())


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("kind", ["device", "is_cuda", "cuda"])
def test_an_island_is_one_in_a_plan_for_an_absent_device(kind: str) -> None:
    plan = fxamp.plan(Island(kind), (X,), policy="O1,device=cuda,dtype=fp16")
    colours = {d.module_path: d.colour for d in plan.decisions if d.op == "linear"}
    assert colours == {"a": "float16", "b": "float32"}
    assert any("reads is_cuda" in note for note in plan.notes)


def test_what_forward_makes_on_the_cpu_is_planned_as_there_for_an_absent_device() -> None:
    """As in DebertaV2: a scale that names no device stays on the CPU, where CUDA's autocast casts nothing."""

    def forward(self: Any, x: Tensor) -> Any:
        scale = torch.log(torch.tensor(8.0) * 2)
        here = torch.log(torch.tensor(8.0, device=x.device) * 3)
        left, _ = self.l(x).chunk(2, dim=-1)
        scale = scale + torch.log(left.sum())
        back, to = torch.log(self.l(x).cpu()), torch.log(self.l(x).to("cpu"))
        return self.m(x * scale * here), torch.log(self.l(x).mean() + scale), back, to

    plan = fxamp.plan(Two(forward), (X,), policy="O1,device=cuda,dtype=fp16")
    logs = [str(d.reason) for d in plan.decisions if d.op == "log"]
    there = ["autocast casts nothing on its device" in reason for reason in logs]
    assert there == [True, False, False, True, True, False]


READS: dict[str, Callable[[Tensor], Any]] = {
    "is_autocast_enabled": lambda h: torch.is_autocast_enabled(),
    "is_autocast_enabled of cuda": lambda h: torch.is_autocast_enabled("cuda"),
    "is_autocast_enabled of its device": lambda h: torch.is_autocast_enabled(h.device.type),
    "get_autocast_dtype": lambda h: torch.get_autocast_dtype("cuda") == torch.float16,
    "get_autocast_dtype of its device": lambda h: torch.get_autocast_dtype(h.device.type) == torch.float16,
}


@pytest.mark.parametrize("read", list(READS))
def test_code_reads_the_autocast_of_the_device_that_the_plan_is_for(read: str) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        h = self.l(x)
        return self.m(h.sin() if READS[read](h) else h.cos())

    plan = fxamp.plan(Two(forward), (X,), policy="O1,device=cuda,dtype=fp16")
    assert "sin" in {d.op for d in plan.decisions}
    assert not torch.is_autocast_enabled("cuda")
    assert torch.get_autocast_dtype("cuda") == torch.float16


@pytest.mark.parametrize("what", ["lstm", "fft"])
def test_a_plan_for_an_absent_device_runs_no_kernel_in_its_dtype(what: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.r, self.a, self.o = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            h = self.r(x)[0] if what == "lstm" else torch.fft.rfft(self.a(x)).abs()
            if h.isnan().any():
                raise FloatingPointError
            return self.o(nn.functional.pad(h, (0, 8 - h.shape[-1])))

    plan = fxamp.plan(Net(), (torch.randn(2, 3, 8),), policy="O1,device=cuda,dtype=fp16")
    assert plan.complete
    assert {d.module_path for d in plan.decisions} >= {"o"}


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def test_a_parametrization_of_a_view_is_followed_and_its_removal_too() -> None:
    layer = nn.Linear(6, 6)
    view = fxamp.convert(layer, (X,), policy=O1)
    for _ in range(2):
        nn.utils.parametrize.register_parametrization(view, "weight", Doubled())
        nn.utils.parametrize.register_parametrization(view, "bias", Doubled())
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                expected = nn.functional.linear(X, view.weight, view.bias)
            assert torch.equal(view(X), expected.float())
        nn.utils.parametrize.remove_parametrizations(view, "weight")
        nn.utils.parametrize.remove_parametrizations(view, "bias")
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(view(X), layer(X).float())


def test_a_method_of_the_class_that_is_replaced_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Encoder(Two):
        def encode(self, x: Tensor) -> Any:
            return self.l(x)

    view = fxamp.convert(Encoder(), (X,), policy="O2,dtype=bf16")
    assert view.encode(X).dtype == torch.bfloat16
    monkeypatch.setattr(Encoder, "encode", lambda self, x: self.l(x) * 100)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(view.encode(X), view.l(X) * 100)


def test_a_method_without_tensors_is_not_said_to_run_under_autocast(caplog: pytest.LogCaptureFixture) -> None:
    class Encoder(Two):
        def encode(self, x: Tensor) -> Any:
            return self.l(x)

        def count(self) -> int:
            return sum(p.numel() for p in self.parameters())

    view = fxamp.convert(Encoder(), (X,), policy="O2,dtype=bf16")
    with caplog.at_level(logging.WARNING):
        view.count()
        assert "count" not in caplog.text
        view.encode(X)
    assert "Encoder.encode runs under autocast, not captured" in caplog.text

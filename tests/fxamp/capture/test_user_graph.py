"""The pure pass: a graph in, a graph out, which prints, pickles, copies, exports and runs without fxamp."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx import GraphModule, Tracer, symbolic_trace

import fxamp
from passes._torch import pytree
from passes.graph.notes import is_inserted
from tests.support.front_ends import FRESH, assert_trains_as_autocast, equal, under_autocast
from tests.support.helpers import Layers, Two, assert_same, autocast_runs_lstms, example, in_turns, saved

pytestmark = [*FRESH, pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")]
X = example()
AT = torch.tensor([[1, 2, 3], [4, 3, 2]])
ROWS = ({0: torch.export.Dim("rows")},)


def layers(self: Any, x: Tensor) -> Any:
    return self.m(F.layer_norm(F.gelu(self.l(x)), (6,)))


def regions(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", enabled=False):
        y = self.l(x)
    with torch.no_grad():
        z = self.m(y)
    with torch.autocast("cpu", torch.bfloat16):
        return y + self.m(z).float()


def seeded(module: nn.Module) -> Tensor:
    torch.manual_seed(1)
    made: Tensor = module(X)
    return made


def noise(self: Any, x: Tensor) -> Any:
    return self.m(self.l(x) + torch.rand(6))


def branch(self: Any, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda t: self.m(t), lambda t: t * 2, (self.l(x),))


def containers(self: Any, batch: dict[str, Tensor], scale: float = 2.0) -> Any:
    y = self.l(batch["x"]) * scale
    return {"y": y, "rows": [y[:, 1:3], None, 3]}


def model_of(forward: Callable[..., Any]) -> Two:
    torch.manual_seed(0)
    return Two(forward).requires_grad_(forward is not branch)


def export(model: nn.Module, *args: Any, **settings: Any) -> torch.export.ExportedProgram:
    return torch.export.export(model, args or (X,), strict=False, **settings)


def by_mode(self: Any, x: Tensor) -> Any:
    return self.l(x) if self.training else self.m(self.l(x))


WAYS: dict[str, Callable[[GraphModule], Any]] = {
    "deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "torch.save": saved, "export": lambda g: torch.export.export(g, (X,), strict=False).module(),
    "torch.compile": lambda g: torch.compile(g, backend="aot_eager", fullgraph=True),
}  # fmt: skip
KINDS: dict[str, Callable[..., Any]] = {"layers": layers, "regions": regions, "a branch": branch, "noise": noise}


GIVEN = [("layers", "fx"), *((kind, "export") for kind in KINDS)]  # symbolic tracing does not record the others


@pytest.mark.parametrize(("given_by", "level"), in_turns(GIVEN, ["O0", "O1", "O2", "O3"]))
def test_a_graph_stays_a_graph_whatever_is_done_with_it(given_by: tuple[str, str], level: str) -> None:
    kind, how = given_by
    forward = KINDS[kind]
    # An autocast region is kept at O0; from O1 on its casts are in the graph.
    impossible = {"export"} if (kind, level) == ("regions", "O0") else set()
    model = model_of(forward)
    given: Any = export(model) if how == "export" else symbolic_trace(model)
    before = str(given.graph)
    graph = fxamp.convert(given, (X,), policy=f"{level},dtype=bf16")
    expected = seeded(graph)
    for way in WAYS.keys() - impossible:
        assert torch.equal(seeded(WAYS[way](graph)), expected), way
    for way in {"deepcopy", "pickle", "torch.save"} - impossible:
        assert fxamp.plan_of(WAYS[way](graph)) == fxamp.plan_of(graph)
    assert isinstance(graph, GraphModule)
    assert fxamp.graphs(graph) == (graph,)
    assert ("bfloat16" in graph.print_readable(print_output=False)) is (level != "O0" or kind == "regions")
    assert not [n for n in graph.graph.nodes if str(getattr(n.target, "__module__", "")).startswith("fxamp")]
    assert str(given.graph) == before
    assert list(graph.state_dict()) == list(model.state_dict())
    assert all(graph.get_parameter(name) is p for name, p in model.named_parameters())
    if level == "O0":
        assert torch.equal(expected, seeded(model))
    if level == "O1" and kind == "layers":
        assert torch.equal(expected, under_autocast(model, (X,)).float())


@pytest.mark.parametrize("forward", [layers, regions])
def test_gradients_and_modes_are_those_of_the_model(forward: Callable[..., Any]) -> None:
    model = model_of(forward)
    graph = fxamp.convert(export(model), policy="O0")
    found = []
    for module in (model, graph):
        output = module(X)
        output.square().sum().backward()
        found.append((output.detach(), [p.grad for p in model.parameters()]))
        model.zero_grad()
    assert_same(found[1], found[0])
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_containers_go_in_and_out_and_calls_are_those_of_the_model() -> None:
    model = model_of(containers)
    graph = fxamp.convert(export(model, {"x": X}), policy="O0")
    for module in (graph, pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph)):
        assert_same(module({"x": X}), model({"x": X}))
        assert_same(module(batch={"x": X}), model({"x": X}))
    plain = fxamp.convert(export(model_of(layers)))
    for args, kwargs in (((), {}), ((X, X), {}), ((X,), {"y": X})):
        with pytest.raises(TypeError):
            plain(*args, **kwargs)


# Sizes.

SIZES: dict[str, tuple[Any, int, str]] = {
    "fixed": (None, 9, "dimension 0 of input 'x' has size 9, and was exported with 4: export with dynamic_shapes"),
    "too many": (({0: torch.export.Dim("rows", min=3, max=5)},), 9, "has size 9, and was exported for sizes 3 to 5"),
    "too few": (({0: torch.export.Dim("rows", min=3, max=5)},), 2, "has size 2, and was exported for sizes 3 to 5"),
}


@pytest.mark.parametrize("what", SIZES)
def test_other_sizes_than_a_program_was_exported_for_are_refused_by_name(what: str) -> None:
    shapes, rows, said = SIZES[what]
    graph = fxamp.convert(export(model_of(layers), dynamic_shapes=shapes))
    for module in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        with pytest.raises(fxamp.CaptureError, match=said):
            module(example(rows))
    with pytest.raises(fxamp.CaptureError, match="'x' has 3 dimensions, and was exported with 2"):
        graph(X[None])


def test_sizes_that_vary_or_that_a_trace_knows_nothing_of_are_taken() -> None:
    model = model_of(layers)
    graphs = fxamp.convert(export(model, dynamic_shapes=ROWS)), fxamp.convert(symbolic_trace(model), (X,))
    for graph in graphs:
        for rows in (9, 2, 1):
            assert torch.equal(graph(example(rows)), under_autocast(model, (example(rows),)).float())

    def two(self: Any, x: Tensor, y: Tensor) -> Any:
        return self.l(x) + y

    shared = torch.export.Dim("rows")
    graph = fxamp.convert(export(Two(two), X, X, dynamic_shapes=({0: shared}, {0: shared})))
    with pytest.raises(fxamp.CaptureError, match="size 5, and was exported with that of dimension 0 of input 'x', 7"):
        graph(example(7), example(5))


# Modes, dtypes and autocast around a graph.


def test_a_norm_that_is_split_beyond_autocast_is_read_from_a_pickle() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)), torch.randn(4, 8)
    view = fxamp.convert(model, (x,), policy="O2,dtype=bf16")
    assert fxamp.plan_of(view).edits["split-norms/norm"] == 1
    (graph,) = fxamp.graphs(view)
    made = pickle.loads(pickle.dumps(graph))
    assert [n.target for n in made.graph.nodes] == [n.target for n in graph.graph.nodes]
    torch.testing.assert_close(made(x), graph(x), rtol=0, atol=0)


def test_a_graph_keeps_its_mode_and_says_so_when_another_is_asked_for() -> None:
    def drops(self: Any, x: Tensor) -> Any:
        return F.dropout(self.l(x), training=self.training)

    model = model_of(drops)
    by_view = fxamp.convert(model, (X,))
    for graph in (fxamp.convert(export(model)), fxamp.convert(symbolic_trace(model), (X,)), *fxamp.graphs(by_view)):
        for made in (graph, copy.copy(graph), copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
            made.train()
            with pytest.warns(UserWarning, match="captured in train mode and keeps it, dropout of '' .* For eval mode"):
                made.eval()
    graph = fxamp.convert(export(model.eval()))
    graph.eval()
    with pytest.warns(UserWarning, match="captured in eval mode"):
        graph.train()
    fxamp.convert(export(model_of(layers))).eval()  # without an op that has a mode, nothing is said


@pytest.mark.parametrize("way", ["graph", "graph of a view", "pickle", "torch.compile"])
def test_under_ambient_autocast_a_graph_computes_what_its_plan_says(way: str) -> None:
    model = model_of(layers)
    graph = fxamp.convert(export(model), policy="O1,dtype=bf16,modules.m=fp32")
    run: Any = graph
    if way == "graph of a view":
        run = fxamp.graphs(fxamp.convert(model, (X,), policy="O1,dtype=bf16,modules.m=fp32"))[0]
    elif way != "graph":
        run = WAYS[way](graph)
    plain, *_ = pytree.tree_leaves(run(X))
    with torch.autocast("cpu", torch.bfloat16):
        ambient, *_ = pytree.tree_leaves(run(X))
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(ambient, plain)
    assert not torch.equal(plain, fxamp.convert(export(model), policy="O1,dtype=bf16")(X))


def test_other_floating_point_dtypes_than_a_program_was_exported_for_are_refused_by_name() -> None:
    graph = fxamp.convert(export(model_of(layers)))
    for module in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        with pytest.raises(fxamp.CaptureError, match=r"'x' is .*float64, and was exported as .*float32"):
            module(X.double())
    embeds = fxamp.convert(export(nn.Embedding(5, 3), AT))
    assert torch.equal(embeds(AT.int()), embeds(AT))


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_an_error_in_a_region_of_a_graph_leaves_no_mode_switched(level: str) -> None:
    def fails(self: Any, at: Tensor) -> Any:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return self.l(self.table(at))

    model = Two(fails, table=nn.Embedding(5, 6))
    view = fxamp.convert(model, (AT,), policy=f"{level},dtype=bf16")
    for run in (fxamp.convert(export(model, AT), policy=f"{level},dtype=bf16"), *fxamp.graphs(view), view):
        with pytest.raises(IndexError):
            run(AT + 5)
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()
        assert torch.autocast_increment_nesting() == 1
        torch.autocast_decrement_nesting()


# Bad input.

BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "without shapes": (
        lambda: fxamp.convert(symbolic_trace(Two())), fxamp.CaptureError,
        r"'x' first, have no shapes and dtypes \(meta\['val'\]\): give example inputs, fxamp\.convert\(graph, args",
    ),
    "rejected": (
        lambda: fxamp.convert(symbolic_trace(Two()), (torch.zeros(2, 5),)), fxamp.CaptureError,
        "the graph rejects the example inputs: RuntimeError: .*same reduction dim",
    ),
    "too many": (lambda: fxamp.convert(symbolic_trace(Two()), (X, X)), fxamp.CaptureError, "it takes fewer inputs"),
    "too few": (lambda: fxamp.convert(symbolic_trace(Two()), ()), fxamp.CaptureError, "it lacks 'x'"),
    "a wrong name": (
        lambda: fxamp.convert(symbolic_trace(Two()), (X,), {"y": X}), fxamp.CaptureError, "does not take 'y'",
    ),
    "converted already": (lambda: fxamp.convert(fxamp.convert(export(Two()))), fxamp.CaptureError, "converted already"),
    "a module's argument": (
        lambda: fxamp.convert(export(Two()), backend="inductor"), fxamp.PolicyError, "backend= is for a module; a Exp",
    ),
    "methods": (lambda: fxamp.convert(export(Two()), methods=("f",)), fxamp.PolicyError, "methods= is for a module"),
    "compiled": (lambda: fxamp.compile(symbolic_trace(Two()), (X,)), fxamp.PolicyError, "backend= is for a module"),
    "weights": (lambda: fxamp.convert(export(Two()), weights="half"), fxamp.PolicyError, "'fp32' or 'low', not 'half'"),
    "low weights": (
        lambda: fxamp.convert(export(Two().bfloat16(), X.bfloat16())), fxamp.PolicyError, r"'l\.weight' \(bfloat16\)",
    ),
    "another graph's plan": (
        lambda: fxamp.convert(export(Two()), plan=fxamp.plan(export(model_of(layers)))), fxamp.PlanError,
        "does not fit this model",
    ),
    "a plan of states": (
        lambda: fxamp.convert(export(Two()), plan=fxamp.plan(Two(by_mode), (X,))), fxamp.PlanError,
        "the plan has 2 states of a model, and a graph has one",
    ),
    "a module": (lambda: fxamp.convert(export(Two()), policy="O1,modules.k=fp32"), fxamp.PolicyError, "matches no mod"),
    "an op": (lambda: fxamp.convert(export(Two()), policy="O1,ops.lineer=fp32"), fxamp.PolicyError, "name is 'linear'"),
    "cost": (
        lambda: fxamp.convert(export(Two()), policy="O2,cost=measured"), fxamp.PolicyError, "give example inputs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_converted_is_refused_by_name(what: str) -> None:
    call, error, said = BAD[what]
    with pytest.raises(error, match=said):
        call()


def test_frozen_low_weights_and_shapes_alone_are_taken() -> None:
    low = Two().bfloat16().requires_grad_(False)
    assert fxamp.convert(export(low, X.bfloat16()))(X.bfloat16()).dtype == torch.bfloat16
    meta = fxamp.convert(export(model_of(layers).to("meta"), X.to("meta")))(X.to("meta"))
    assert (meta.device.type, meta.shape) == ("meta", (4, 6))
    plan = fxamp.plan(export(model_of(layers)), policy="O1,device=cuda")
    assert [d.colour for d in plan.decisions] == ["float16", "float16", "float32", "float16"]


def test_a_plan_is_replayed_and_is_that_of_the_view() -> None:
    model = model_of(layers)
    program = export(model)
    plan = fxamp.plan(program, policy="O2,modules.m=fp32")
    assert fxamp.plan_of(fxamp.convert(program, plan=plan)) == plan
    of_view = fxamp.plan(model, (X,), policy="O2,modules.m=fp32")
    assert [(d.key, d.colour) for d in plan.decisions] == [(d.key, d.colour) for d in of_view.decisions]


# Symbolic traces.

CELLS = ("lstm", "rnn_tanh")


class Leaves(Tracer):
    """Leaves whatever is a recurrent layer whole, also one of a class of the user's."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.RNNBase) or super().is_leaf_module(m, module_qualified_name)


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells, self.out = kind(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.cells(x)[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN])
def test_a_recurrent_layer_of_a_trace_is_decided_as_in_a_view(kind: Any) -> None:
    model, x = Recurrent(kind), torch.randn(4, 7, 6)
    trace = symbolic_trace(model)
    assert torch.equal(fxamp.convert(trace, (x,), policy="O0")(x), model(x))
    for policy, colour in (("O1,dtype=bf16", "bfloat16"), ("O1,dtype=fp16,device=cuda", "float16")):
        graph = fxamp.convert(trace, (x,), policy=policy)
        decisions = [(d.key, d.colour) for d in fxamp.plan_of(graph).decisions]
        view = fxamp.plan(model, (x,), policy=policy)
        assert decisions == [(d.key, d.colour) for d in view.decisions if d.op in ("linear", *CELLS)]
        assert [c for _, c in decisions] == [colour, colour]
        assert graph.get_parameter("cells.weight_hh_l0") is model.cells.weight_hh_l0


@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN])
def test_a_recurrent_layer_of_a_trace_gives_what_autocast_gives(kind: Any) -> None:
    if kind is nn.LSTM and not autocast_runs_lstms():
        pytest.skip("torch.autocast cannot train it on this CPU")
    model, x = Recurrent(kind), torch.randn(4, 7, 6)
    trace = symbolic_trace(model)
    graph = fxamp.convert(trace, (x,), policy="O1,dtype=bf16")
    for value in (x, x[:2, :3]):  # of other sizes
        assert_trains_as_autocast(graph, model, value)
    for module in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert equal(module(x), graph(x))
    assert_trains_as_autocast(fxamp.convert(trace, (x[0],), policy="O1,dtype=bf16"), model, x[0])  # without a batch


def test_a_recurrent_layer_that_autocast_takes_apart_stays_whole_and_is_named() -> None:
    model, x = Recurrent(nn.GRU), torch.randn(4, 7, 6)
    graph = fxamp.convert(symbolic_trace(model), (x,), policy="O1,dtype=bf16")
    plan = fxamp.plan_of(graph)
    assert [(d.op, d.colour) for d in plan.decisions] == [("gru", "float32"), ("linear", "bfloat16")]
    assert [d.code for d in plan.deviations] == ["composite"]
    hidden = model.cells(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.out(hidden).float()
    for module in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert torch.equal(module(x), expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_with_a_hook_or_of_a_class_of_its_own_stays_whole(kind: Any) -> None:
    x = torch.randn(4, 7, 6)
    hooked, derived = Recurrent(kind), Recurrent(type("Derived", (kind,), {}))
    hooked.cells.register_forward_hook(lambda *_: None)
    for model in (hooked, derived):
        tracer = Leaves()
        trace = GraphModule(model, tracer.trace(model))
        graph = fxamp.convert(trace, (x,), policy="O1,dtype=bf16")
        assert [d.op for d in fxamp.plan_of(graph).decisions] == [f"module:{type(model.cells).__name__}", "linear"]
        assert graph.get_submodule("cells") is model.cells


def test_leaves_that_can_be_traced_are_coloured_inside_and_keep_their_paths() -> None:
    last = nn.Linear(16, 3)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(), last)
    x = torch.randn(2, 3, 4, 4)
    graph = fxamp.convert(symbolic_trace(model.eval()), (x,), policy="O1,dtype=bf16,modules.5=fp32")
    colours = {d.module_path: d.colour for d in fxamp.plan_of(graph).decisions}
    assert (colours["0"], colours["5"]) == ("bfloat16", "float32")
    assert not graph.graph.find_nodes(op="call_module")
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model[:5](x)
    assert torch.equal(graph(x), last(hidden.float()))


# Transforms, swapped parameters, training.


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_per_sample_gradients_and_swapped_parameters(level: str) -> None:
    model = model_of(layers)
    graph = fxamp.convert(export(model, dynamic_shapes=ROWS), policy=f"{level},dtype=bf16")
    values = {name: p.detach() for name, p in graph.named_parameters()}

    def loss(values: dict[str, Tensor], row: Tensor) -> Any:
        return functional_call(graph, values, (row[None],)).square().sum()

    together = vmap(grad(loss), in_dims=(None, 0))(values, X)
    for i, row in enumerate(X):
        for name, value in grad(loss)(values, row).items():
            assert (together[name][i] - value).norm() <= (1e-6 if level == "O0" else 2**-5) * value.norm()
    twice = functional_call(graph, {name: value * 2 for name, value in values.items()}, (X,))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    assert torch.equal(twice, graph(X))  # which reads the model's parameters


def test_an_optimizer_that_was_built_before_trains_the_model() -> None:
    model = model_of(layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    graph = fxamp.convert(export(model), policy="O1,dtype=bf16")
    before = graph(X)
    graph(X).sum().backward()
    optimizer.step()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert torch.equal(graph(X), under_autocast(model, (X,)).float())
    assert not torch.equal(graph(X), before)


# Low weights, and a process without fxamp.


class Tied(nn.Module):
    """An embedding tied to the head, two layers that share a weight, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.l, self.norm = nn.Embedding(10, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 10, bias=False)
        self.b.weight, self.head.weight = self.a.weight, self.emb.weight

    def forward(self, at: Tensor) -> Any:
        return self.head(self.b(self.a(self.norm(self.l(self.emb(at))))))


@pytest.mark.parametrize("how", ["export", "fx"])
def test_low_weights_are_those_that_are_read_low_only_and_stay_tied(how: str) -> None:
    model = Tied().eval()
    given: Any = export(model, AT) if how == "export" else symbolic_trace(model)
    full = fxamp.convert(given, (AT,), policy="O1,dtype=bf16")
    low = fxamp.convert(given, (AT,), policy="O1,dtype=bf16", weights="low")
    stored = {name: p.dtype for name, p in low.named_parameters(remove_duplicate=False)}
    read_in_fp32 = {"emb.weight", "head.weight", "norm.weight", "norm.bias"}
    assert stored == {n: torch.float32 if n in read_in_fp32 else torch.bfloat16 for n in stored}
    assert low.a.weight is low.b.weight
    assert low.head.weight is low.emb.weight is model.emb.weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    casts = [n for n in low.graph.nodes if is_inserted(n) and n.all_input_nodes[0].op == "get_attr"]
    assert {str(n.all_input_nodes[0].target) for n in casts} <= read_in_fp32
    for module in (full, low, copy.deepcopy(low), pickle.loads(pickle.dumps(low))):
        with torch.no_grad():
            assert torch.equal(module(AT), under_autocast(model, (AT,)).float())


def test_saved_programs_run_in_a_process_without_fxamp(tmp_path: Path) -> None:
    expected = {}
    for forward in (layers, regions, branch):
        for weights in ("fp32", "low"):
            model = model_of(forward).eval()
            with torch.no_grad():
                graph = fxamp.convert(export(model), policy="O1,dtype=bf16", weights=weights)
                expected[name := f"{forward.__name__}-{weights}.pt2"] = graph(X)
                torch.export.save(torch.export.export(graph, (X,), strict=False), tmp_path / name)
    assert (tmp_path / "layers-low.pt2").stat().st_size < (tmp_path / "layers-fp32.pt2").stat().st_size
    torch.save((X, expected), tmp_path / "expected.pt")
    script = """
import sys, torch
x, expected = torch.load("expected.pt")
for name, value in expected.items():
    assert torch.equal(torch.export.load(name).module()(x), value), name
assert not {"fxamp", "passes"} & set(sys.modules)
"""
    command = [sys.executable, "-I", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Shapes by example inputs, buffers and regions.


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, *, scale: Tensor, shift: Tensor) -> Tensor:
        return self.layer(x) * scale + shift


def _without_shapes() -> tuple[GraphModule, Tensor, dict[str, Any]]:
    x, named = torch.randn(4, 6), {"scale": torch.rand(6), "shift": torch.randn(6)}
    graph: Any = torch.export.export(_Scaled(), (x,), named, strict=False).module(check_guards=False)
    for node in graph.graph.nodes:
        node.meta.pop("val", None)
    return graph, x, named


def test_keyword_inputs_fill_in_the_shapes_of_an_exported_graph_in_any_order() -> None:
    graph, x, named = _without_shapes()
    backwards = dict(reversed(named.items()))
    converted = fxamp.convert(graph, (x,), backwards, policy="O1,dtype=bf16")
    with torch.autocast("cpu", torch.bfloat16):
        expected = graph(x, **named)
    assert torch.equal(converted(x, **named), expected)


def test_a_keyword_input_that_an_exported_graph_needs_and_is_not_given_is_named() -> None:
    graph, x, named = _without_shapes()
    del named["shift"]
    with pytest.raises(fxamp.CaptureError, match="the graph rejects the example inputs: KeyError: 'shift'"):
        fxamp.convert(graph, (x,), named)


def test_branches_of_a_graph_that_is_given_without_shapes_are_converted_too() -> None:
    model = model_of(branch)
    bare: Any = export(model).module(check_guards=False)
    for node in [n for part in bare.modules() if isinstance(part, GraphModule) for n in part.graph.nodes]:
        node.meta.pop("val", None)
    made, known = (fxamp.convert(given, (X,), policy="O1,dtype=bf16") for given in (bare, export(model)))
    colours, expected = ({d.key: d.colour for d in fxamp.plan_of(graph).decisions} for graph in (made, known))
    assert colours == expected
    assert (colours["l/linear#0"], colours["/linear#0"]) == ("bfloat16", "bfloat16")
    for x in (X, -X):
        assert torch.equal(made(x), known(x))


def test_modules_of_torch_in_a_traced_graph_write_their_buffers_when_it_runs_and_not_while_it_is_converted() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), torch.randn(2, 3, 5, 5)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    converted = fxamp.convert(symbolic_trace(model), (x,), policy="O1,dtype=bf16")
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    converted(x)
    assert model.get_buffer("1.num_batches_tracked") == 1
    assert not torch.equal(model.get_buffer("1.running_mean"), before["1.running_mean"])


def test_a_module_of_torch_is_inlined_though_an_argument_of_it_is_not_given() -> None:
    model, x = nn.Sequential(nn.ConvTranspose2d(3, 4, 3)), torch.randn(2, 3, 5, 5)
    converted = fxamp.convert(symbolic_trace(model), (x,), policy="O1,dtype=bf16")
    assert [(d.op, d.colour) for d in fxamp.plan_of(converted).decisions] == [("conv_transpose2d", "bfloat16")]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(converted(x), model(x).float())


def test_an_exported_region_that_switches_a_mode_needs_no_shapes() -> None:
    def regions(self: Any, x: Tensor) -> Any:
        with torch.no_grad():
            fixed = self.layer(x)
        with torch.autocast("cpu", enabled=False):
            return fixed, self.layer(x)

    layer, x = nn.Linear(6, 6), torch.randn(4, 6)
    model = Layers(regions, layer=layer)
    fixed, plain = fxamp.convert(torch.export.export(model, (x,), strict=False), policy="O1,dtype=bf16")(x)
    assert not fixed.requires_grad
    assert torch.equal(plain, layer(x))


def test_a_buffer_that_is_rebound_in_another_dtype_keeps_its_own() -> None:
    def mean(self: Any, x: Tensor, wide: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + wide.mean(0)  # which an exported graph copies into the buffer
        return self.layer(x)

    x, wide = torch.randn(4, 6), torch.randn(4, 6, dtype=torch.float64)
    model = Layers(mean, layer=nn.Linear(6, 6), mean=torch.zeros(6))
    converted = fxamp.convert(torch.export.export(model, (x, wide), strict=False), policy="O1,dtype=bf16")
    before = converted.mean.clone()
    converted(x, wide)
    assert converted.mean.dtype is torch.float32
    assert torch.equal(converted.mean, (before * 0.9 + wide.mean(0)).float())

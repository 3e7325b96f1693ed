"""What cannot be converted is refused by its name, with the way out, and the model is as it was."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

import fxamp
from tests.support.front_ends import FRESH, under_autocast
from tests.support.helpers import Layers, Two, assert_untouched, example, fingerprint

pytestmark = FRESH
X = example()


@pytest.mark.parametrize(
    ("bad", "said"),
    [(3, "not int"), (Two, "the class Two: make an instance"), (None, "not NoneType"), ("x", "not str")],
)
@pytest.mark.parametrize("convert", [fxamp.convert, fxamp.compile, fxamp.plan])
def test_what_is_no_module_is_refused(convert: Callable[..., Any], bad: Any, said: str) -> None:
    with pytest.raises(fxamp.NotAModuleError, match=said):
        convert(bad, (X,))


# Converted, compiled and wrapped models.


def in_place(module: nn.Module, backend: str = "fxamp") -> nn.Module:
    module.compile(backend=backend)
    return module


ALREADY: dict[str, tuple[Callable[[], Any], str]] = {
    "a view": (lambda: fxamp.convert(Two()), r"this Two is a view of fxamp: use it as it is, or convert the original"),
    "a view's copy": (lambda: copy.deepcopy(fxamp.convert(Two())), "this Two is a view of fxamp"),
    "a converted graph": (
        lambda: fxamp.convert(torch.fx.symbolic_trace(Two()), (X,)), r"converted already.*plan_of.*it was made of"
    ),
    "a view's graph": (lambda: fxamp.graphs(fxamp.convert(Two(), (X,)))[0], "converted already"),
    "torch.compile": (lambda: torch.compile(Two(), backend="eager"), r"what torch\.compile returned: convert the orig"),
    "in place, fxamp": (lambda: in_place(Two()), r"compiled in place, by its compile\(\).*copy\.deepcopy\(model\)"),
    "in place, another": (lambda: in_place(Two(), "eager"), r"compiled in place, by its compile\(\)"),
    "DataParallel": (lambda: nn.DataParallel(Two()), r"'\(root\)' \(DataParallel\) .*Convert the module inside it"),
    "DataParallel inside": (lambda: nn.Sequential(nn.DataParallel(Two())), r"module '0' \(DataParallel\)"),
    "TorchScript": (lambda: torch.jit.freeze(torch.jit.script(nn.Linear(6, 6).eval())), "TorchScript.*the original"),
}  # fmt: skip


@pytest.mark.parametrize("convert", [fxamp.convert, fxamp.plan])
@pytest.mark.parametrize("what", ALREADY)
def test_what_is_converted_compiled_or_wrapped_is_refused(what: str, convert: Callable[..., Any]) -> None:
    make, said = ALREADY[what]
    with pytest.raises(fxamp.CaptureError, match=said):
        convert(make(), (X,))


INSIDE: dict[str, Callable[[nn.Module], Any]] = {
    "a view": lambda m: fxamp.convert(m, policy="O1,dtype=bf16"),
    "torch.compile": lambda m: torch.compile(m, backend="eager"),
    "in place, another": lambda m: in_place(m, "eager"),
}


@pytest.mark.parametrize("what", INSIDE)
def test_a_part_that_is_converted_or_compiled_already_is_run_by_its_plan_or_captured(what: str) -> None:
    inner = Two()
    expected = under_autocast(nn.Sequential(nn.Tanh(), inner, nn.ReLU()), (X,)).float()
    model = nn.Sequential(nn.Tanh(), INSIDE[what](inner), nn.ReLU())
    view = fxamp.convert(model, (X,), policy="O1,dtype=bf16")
    assert torch.equal(view(X).float(), expected)


def test_a_part_with_another_policy_is_run_by_its_plan() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.a, self.inner = nn.Linear(6, 6), inner

        def forward(self, x: Tensor) -> Any:
            return F.softmax(self.inner(self.a(x)), -1)

    torch.manual_seed(0)
    inner = Two(lambda self, x: self.m(F.softmax(self.l(x) * 1.7, -1)))
    policy = "O1,dtype=bf16,modules.m=fp32"
    model = Outer(fxamp.convert(inner, policy=policy))
    view = fxamp.convert(model, (X,), policy="O1,dtype=bf16")
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.a(X)
        expected, plain = fxamp.convert(inner, policy=policy)(hidden).softmax(-1), inner(hidden).softmax(-1)
    assert torch.equal(view(X), expected.float())
    assert not torch.equal(expected.float(), plain.float())


def test_the_plan_of_a_model_has_the_plans_of_the_views_inside_it() -> None:
    def outer(self: Any, x: Tensor) -> Any:
        return F.softmax(self.inner(self.l(x)), -1)

    inner = fxamp.convert(Two(), policy="O1,dtype=bf16,modules.l=fp32,output_dtype=autocast")
    model = Two(outer, inner=inner)
    view = fxamp.convert(model, policy="O1,dtype=bf16")
    expected = view(X)
    plan = fxamp.plan_of(view)
    colours = [(d.module_path, d.op, d.colour) for d in plan.decisions]
    assert colours == [
        ("", "softmax", "bfloat16"), ("l", "linear", "bfloat16"), ("inner.l", "linear", "float32"),
        ("inner.m", "linear", "bfloat16"),
    ]  # fmt: skip
    assert not any("inner" in note for note in plan.notes)
    assert len(fxamp.graphs(view)) == plan.graphs == 3
    again = fxamp.convert(copy.deepcopy(model), (X,), plan=plan)
    assert torch.equal(again(X), expected)
    assert fxamp.plan_of(again).decisions == plan.decisions


def test_a_copy_of_a_model_that_is_compiled_in_place_is_converted() -> None:
    view = fxamp.convert(copy.deepcopy(in_place(Two())), (X,))
    assert len(fxamp.plan_of(view).decisions) == 2


# Inputs.


class OwnError(ValueError):
    """An author's."""


def raising(self: Any, x: Tensor) -> Any:
    self.calls = 1
    h = self.l(x)
    if x.shape[-1] == 6:
        raise OwnError("the author's words")
    return h


REJECTS = "rejects the example inputs: "
INPUTS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "the author's error": (raising, {"args": (X,)}, OwnError, r"^the author's words$"),
    "another width": (
        None,
        {"args": (torch.zeros(2, 5),)},
        fxamp.CaptureError,
        rf"{REJECTS}.*(same reduction|multiplied)",
    ),
    "too many": (None, {"args": (X, X)}, fxamp.CaptureError, rf"{REJECTS}TypeError: .* 2 .* but 3 were given"),
    "none": (None, {"args": ()}, fxamp.CaptureError, rf"{REJECTS}TypeError: .*missing 1 required .*: 'x'"),
    "an unknown keyword": (None, {"args": (X,), "kwargs": {"y": X}}, fxamp.CaptureError, rf"{REJECTS}.* argument 'y'"),
    "no tensor": (None, {"args": ("a",)}, fxamp.CaptureError, rf"{REJECTS}.*must be Tensor, not str"),
    "another device": (None, {"args": (X.to("meta"),)}, fxamp.CaptureError, f"{REJECTS}|same device"),
    "args a number": (None, {"args": 3}, fxamp.CaptureError, r"args is a tuple .*not int; write \(x,\)"),
    "args a dict": (None, {"args": {"x": X}}, fxamp.CaptureError, "not dict; pass kwargs="),
    "kwargs a list": (None, {"kwargs": [X]}, fxamp.CaptureError, "kwargs is a dict of example inputs, not list"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("what", INPUTS)
def test_inputs_that_the_model_refuses_raise_its_own_error_and_leave_it_alone(what: str) -> None:
    forward, given, error, said = INPUTS[what]
    model = Two(forward)
    before = fingerprint(model)
    with pytest.raises(error, match=said):
        fxamp.convert(model, **given)
    assert_untouched(model, before)
    if forward is None:  # the same model is converted afterwards
        assert torch.equal(fxamp.convert(model, (X,))(X), under_autocast(model, (X,)).float())


class Scattering(nn.Module):
    """Writes a product by an op that takes one dtype alone, which autocast does not know, after a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return torch.zeros(4, 6).scatter_(0, torch.zeros(4, 6, dtype=torch.long), self.l(x))


@pytest.mark.parametrize("given", [True, False])
def test_what_autocast_rejects_after_a_graph_break_is_said_to_be_of_its_dtypes(given: bool) -> None:
    x, way_out = torch.randn(4, 6), r"torch\.autocast\('cpu', enabled=False\)"
    if given:
        with pytest.raises(fxamp.CaptureError, match=way_out):
            fxamp.convert(Scattering(), (x,))
        return
    with pytest.raises(RuntimeError) as raised:
        fxamp.convert(Scattering())(x)
    if type(raised.value) is not RuntimeError and sys.version_info >= (3, 11):  # by torch 2.15 it is the op's own
        assert re.search(way_out, "".join(raised.value.__notes__))
    assert fxamp.convert(Scattering(), (x,), policy="O0")(x).shape == (4, 6)


def test_an_error_of_the_author_at_a_later_call_is_his_and_raised_once() -> None:
    ran: list[int] = []

    def sometimes(self: Any, x: Tensor) -> Any:
        h = self.l(x)
        torch._dynamo.graph_break()
        ran.append(1)
        if self.fail:
            raise OwnError("later")
        return self.m(h)

    model = Two(sometimes)
    model.fail = False  # type: ignore[assignment]
    view = fxamp.convert(model)
    expected = view(X)
    model.fail = True  # type: ignore[assignment]
    ran.clear()
    with pytest.raises(OwnError, match="later"):
        view(X)
    assert ran == [1]
    assert not torch.is_autocast_enabled("cpu")
    model.fail = False  # type: ignore[assignment]
    assert torch.equal(view(X), expected)


@pytest.mark.parametrize("rows", [torch.randn(1, 6), torch.randn(3, 5), torch.randn(6)])
@pytest.mark.parametrize("policy", ["O0", "O1,dtype=bf16"])
def test_an_error_that_an_op_raises_as_it_is_captured_again_is_the_models_own(rows: Tensor, policy: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    view = fxamp.convert(model, policy=policy)
    expected = view(torch.cat([X, X])).dtype
    with (
        pytest.raises((ValueError, RuntimeError)) as own,
        torch.autocast("cpu", torch.bfloat16, enabled=policy != "O0"),
    ):
        model(rows)
    with pytest.raises(own.type, match=re.escape(str(own.value))) as got:
        view(rows)
    assert got.type is own.type
    assert view(torch.cat([X, X, X])).dtype == expected
    assert len(fxamp.graphs(view)) == 1  # the batch is still of any size


def test_an_op_that_dynamo_cannot_trace_runs_under_autocast_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    @library.custom_op("fxamp_tests::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    @doubled.register_fake
    def _(x: Tensor) -> Tensor:
        raise ValueError("unknown")

    model = Two(lambda self, x: doubled(self.l(x)))
    view = fxamp.convert(model, policy="O1,dtype=bf16")
    assert torch.equal(view(X), under_autocast(model, (X,)).float())
    assert "Dynamo cannot trace" in caplog.text


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_error_inside_a_region_leaves_grad_mode_and_autocast_as_they_were(backend: str) -> None:
    def forward(self: Any, x: Tensor, index: Tensor) -> Any:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            row = self.l(x).index_select(0, index)
        return self.m(x) + row.float()

    view = fxamp.convert(Two(forward), (X, torch.tensor([1])), policy="O1,dtype=bf16", backend=backend)
    for context in (torch.enable_grad, torch.no_grad):
        with context():
            view(X, torch.tensor([1]))
            with pytest.raises((IndexError, RuntimeError), match="out of range"):
                view(X, torch.tensor([9]))
            assert torch.is_grad_enabled() is (context is torch.enable_grad)
            assert not torch.is_autocast_enabled("cpu")


def test_lazy_layers_get_their_shapes_at_the_first_call() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    view = fxamp.convert(model)
    assert view(X).shape == (4, 3)
    assert torch.equal(view(X), under_autocast(model, (X,)).float())


# Arguments.


def _saved(folder: Path) -> dict[str, Any]:
    (folder / "plan.json").write_text("{")
    return {"plan": folder / "plan.json"}


ARGUMENTS: dict[str, tuple[Any, type[Exception], str]] = {
    "policy": ({"policy": "O7"}, fxamp.PolicyError, "unknown level 'O7'; legal: O0, O1, O2, O3"),
    "a module": ({"policy": "O1,modules.k=fp32"}, fxamp.PolicyError, "modules.k=fp32 matches no module"),
    "an op": ({"policy": "O1,ops.lineer=fp32"}, fxamp.PolicyError, "matches no op of this model; the nearest name is"),
    "on_change": ({"on_change": "raise"}, fxamp.PolicyError, "'recompile' or 'error', not 'raise'"),
    "check": ({"check": "all"}, fxamp.PolicyError, "check is True, 'forward' or False, not 'all'"),
    "methods": ({"methods": ("encode",)}, fxamp.PolicyError, "Two has no method 'encode'"),
    "methods, a name": ({"methods": "forward"}, fxamp.PolicyError, r"write methods=\('forward',\)"),
    "weights": ({"weights": "low"}, fxamp.PolicyError, r"for graphs: export the model.*fxamp\.frozen\(view\)"),
    "backend": ({"backend": "inducter"}, fxamp.PolicyError, "no torch.compile backend 'inducter'; .* 'inductor'"),
    "backend, fxamp": ({"backend": "fxamp"}, fxamp.PolicyError, "inner backend of fxamp cannot be fxamp itself"),
    "backend, ours": ({"backend": fxamp.backend("O1")}, fxamp.PolicyError, "cannot be fxamp itself"),
    "backend, a number": ({"backend": 3}, fxamp.PolicyError, "a name or a callable, not int"),
    "options": ({"options": {"policy": "O2", "mode": "x"}}, fxamp.PolicyError, "'policy', 'mode' are arguments"),
    "plan and policy": (lambda _: {"plan": fxamp.plan(Two(), (X,)), "policy": "O1"}, fxamp.PolicyError, "not both"),
    "no plan": (lambda f: {"plan": f / "absent.json"}, fxamp.PlanError, "cannot read the plan .*No such file"),
    "a broken plan": (_saved, fxamp.PlanError, "plan.json"),
    "another model's plan": (
        lambda _: {"plan": fxamp.plan(nn.Sequential(nn.Linear(6, 6)), (X,))}, fxamp.PlanError,
        r"does not fit this model: .* does not have: 0/linear#0; 1 missing, 2 new",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ARGUMENTS)
def test_arguments_that_are_wrong_are_named(what: str, tmp_path: Path) -> None:
    made, error, said = ARGUMENTS[what]
    given = made(tmp_path) if callable(made) else made
    model = Two()
    before = fingerprint(model)
    with pytest.raises(error, match=said):
        fxamp.convert(model, (X,), **given)
    assert_untouched(model, before)


def test_the_plan_of_another_model_is_refused_at_a_first_call_too() -> None:
    view = fxamp.convert(Two(), plan=fxamp.plan(nn.Sequential(nn.Linear(6, 6)), (X,)))
    with pytest.raises(fxamp.PlanError, match="does not fit this model"):
        view(X)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: fxamp.plan(Two()), fxamp.CaptureError, "give those of Two as args and kwargs"),
        (lambda: fxamp.plan_of(Two()), fxamp.CaptureError, "Two was not converted by fxamp"),
        (lambda: fxamp.graphs(Two()), fxamp.CaptureError, "Two was not converted by fxamp"),
        (lambda: fxamp.plan_of(fxamp.convert(Two())), fxamp.CaptureError, "Two is captured at its first call, or when"),
        (lambda: fxamp.graphs(fxamp.convert(Two())), fxamp.CaptureError, "nothing was captured yet"),
        (lambda: fxamp.plan_of(3), fxamp.NotAModuleError, "a converted module is needed, not int"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_what_was_not_converted_or_not_captured_has_no_plan(
    call: Callable[[], Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        call()


# Names that torch.fx writes into code as they are.


class Named(nn.Module):
    """Two layers, the second under any name, beside one whose name is what fxamp would write for it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self._a_b = nn.Linear(6, 6)
        self.add_module(name, nn.Linear(6, 6))
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = getattr(self, self.name)(self._a_b(x))
        return out


@pytest.mark.parametrize("name", ["a\nb", "a\rb", 'a"b', "a\\b", "a\0b", "class"])
def test_a_name_that_no_code_holds_is_written_otherwise_or_refused(name: str) -> None:
    model = Named(name)
    exported, expected = torch.export.export(model, (X,)), under_autocast(model, (X,)).float()
    before = fingerprint(model)
    view = fxamp.convert(model, (X,), policy="O1,dtype=bf16")
    (graph,) = fxamp.graphs(view)
    assert torch.equal(view(X), expected)
    assert torch.equal(graph(X)[0], view(X))
    assert {d.module_path for d in fxamp.plan_of(view).decisions} == {"_a_b", name}
    assert fxamp.diff(view)
    assert "linear" in str(fxamp.report(view))
    with pytest.raises(fxamp.CaptureError, match=re.escape(repr(f"{name}.weight"))):
        fxamp.convert(exported)
    assert_untouched(model, before)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("modules.b=fp32", "the first name of that module, 'a'"),
        ("modules.mixes.out_proj=fp32", "nothing that it names"),
        ("ops.relu_=fp32", "written in place"), ("modules.act=fp32", "written in place"), ("modules.a=fp32", ""),
        ("ops.linear=fp32", ""), ("modules.torch.nn.Linear=keep", ""),
    ],
)  # fmt: skip
def test_an_override_that_decides_nothing_is_said_once(
    override: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The model has a module under two names, one that its parent reads for it, and one that writes in place."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.mixes(*[self.act(self.b(x))[None]] * 3, need_weights=False)[0]

    a, mixes = nn.Linear(6, 6), nn.MultiheadAttention(6, 2, batch_first=True)
    model = Layers(forward, a=a, b=a, mixes=mixes, act=nn.ReLU(inplace=True))
    view = fxamp.convert(model, (example(),), policy=f"O1,dtype=bf16,{override}")
    view(example())
    said = [r.message for r in caplog.records if "has decided nothing" in r.message]
    assert len(said) == bool(says)
    assert all(says in text and override in text for text in said)


def test_a_misspelt_op_is_said_at_the_first_call_of_a_view_without_examples(caplog: pytest.LogCaptureFixture) -> None:
    view = fxamp.convert(Two(lambda self, x: self.l(x)), policy="O1,dtype=bf16,ops.linaer=fp32")
    assert not caplog.records
    view(example())
    assert any("ops.linaer=fp32 has decided nothing" in r.message for r in caplog.records)


def test_what_an_override_changes_goes_on_behind_a_graph_break() -> None:
    def breaks(self: Any, x: Tensor) -> Tensor:
        h = self.l(x).relu()
        torch._dynamo.graph_break()
        out: Tensor = self.m(h).relu()
        return out

    policy = "O1,dtype=bf16,modules.l=fp32"
    planned = fxamp.plan(Two(breaks), (example(),), policy=policy).casts
    torch.compiler.reset()  # before torch 2.13 models of one code share what is compiled below a graph break
    view = fxamp.convert(Two(breaks), (example(),), policy=policy, on_change="error")
    view(example())
    assert planned == fxamp.plan_of(view).casts == 3
    assert len(fxamp.graphs(view)) == 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"plan": 5}, "plan= is a plan, or the path of one that was saved, not int"),
        ({"calibration": 5}, "calibration= is a calibration, or the path of one that was saved, not int"),
        ({"options": 5}, "options is a mapping of the backend's options, not int"),
        ({"dynamic": "x"}, "dynamic is True, False or None, not 'x'"),
    ],
    ids=["plan", "calibration", "options", "dynamic"],
)
def test_an_argument_of_another_kind_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(fxamp.FxampError, match=re.escape(says)):
        fxamp.convert(Two(lambda self, x: self.l(x)), (X,), **given)


def test_a_low_override_of_a_table_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 6))
    view = fxamp.convert(model, (torch.arange(3),), policy="O1,dtype=bf16,modules.0=low")
    assert fxamp.plan_of(view).decisions[0].colour == "float32"
    assert any("modules.0=low has decided nothing" in r.message for r in caplog.records)


def test_a_backend_that_was_not_called_and_a_graph_to_freeze_are_named() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(Exception, match=r"backend=fxamp\.backend\(\)"):
        torch.compile(model, backend=fxamp.backend)(x)
    graph = fxamp.convert(torch.export.export(model, (x,)))
    with pytest.raises(fxamp.NotAModuleError, match="weights='low'"), fxamp.frozen(graph):
        pass


def test_a_generator_among_the_inputs_is_as_it_was_after_a_conversion() -> None:
    class Drawing(nn.Linear):
        def forward(self, x: Tensor, generator: Any = None) -> Tensor:
            return super().forward(x) + torch.rand(2, 4, generator=generator)

    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    view = fxamp.convert(Drawing(4, 4), (torch.randn(2, 4), generator))
    assert torch.equal(generator.get_state(), before)
    view(torch.randn(2, 4), generator)
    assert not torch.equal(generator.get_state(), before)

"""What a call ran is known: every graph of it by the plan, or it says which code was left to Python, and why."""

from __future__ import annotations

import contextlib
import linecache
import logging
import sys
import threading
import types
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from fxamp._torch import dynamo_errors
from fxamp.capture.call import current
from tests.support.front_ends import BF16, F32, FP16, FRESH
from tests.support.helpers import Two, example

pytestmark = FRESH
PINNED = "O1,dtype=bf16,modules.m=fp32"


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("fxamp")]


def low_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x.to(BF16), layer.weight.to(BF16), layer.bias.to(BF16))


def planned(model: Any, x: Tensor) -> Tensor:
    """What the model gives by a plan that pins its second layer to FP32."""
    out: Tensor = model.m(low_linear(model.l, x).float())
    return out


# A guard that fails at each call.


def tagged(self: Any, x: Tensor) -> Any:
    h = self.l(x)
    torch._dynamo.graph_break()
    return (h if self.tag == "never" else self.m(h)), len(self.tag)


def tagged_view() -> tuple[Any, Tensor, Any]:
    """Return a model of which each tag makes another graph behind a break, an input, and its view."""
    torch.manual_seed(0)
    model = cast("Any", Two(tagged, tag=""))
    return model, example(), fxamp.convert(model, policy=PINNED)


def test_a_pinned_layer_behind_a_break_runs_as_planned_however_many_graphs_there_are() -> None:
    model, x, view = tagged_view()
    for i in range(40):
        model.tag = f"t{i}"
        assert torch.equal(view(x)[0], planned(model, x))
    assert fxamp.plan_of(view).complete


@pytest.mark.slow
def test_the_256th_graph_of_a_code_is_the_last_one_and_the_call_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model, x, view = tagged_view()
    for i in range(256):
        model.tag = f"t{i}"
        assert torch.equal(view(x)[0], planned(model, x))
    assert not any("left" in text or "did not run" in text for text in warned(caplog))
    model.tag = "another"
    got, _ = view(x)
    assert not torch.equal(got, planned(model, x))
    assert any("did not run all of its plan" in text and "256 graphs" in text for text in warned(caplog))
    model.tag = "t3"
    assert torch.equal(view(x)[0], planned(model, x))


def test_code_that_reaches_its_limit_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxamp.capture.frames.CEILING", 2)
    model, x = cast("Any", Two(tagged, tag="")), example()
    view = fxamp.convert(model, policy=PINNED)
    for i in range(3):
        model.tag = f"t{i}"
        view(x)
        assert fxamp.plan_of(view).complete is (i < 2)
    assert any("torch_dynamo_resume_in_tagged" in note for note in fxamp.plan_of(view).notes)
    said = [text for text in warned(caplog) if "did not run all of its plan" in text]
    assert len(said) == 1
    assert "recompile limit: 2 graphs" in said[0]
    assert "test_what_ran.py" in said[0]
    view(x)
    assert len([text for text in warned(caplog) if "did not run" in text]) == 1


# Control flow by data is no change of the model.


class Early(nn.Module):
    """Leaves early where it is confident, behind a break, or asks its data for each step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l, self.m, self.kind = nn.Linear(6, 6), nn.Linear(6, 6), kind

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def confident(self, h: Tensor) -> bool:
        return bool(h.sum() > 0)

    def forward(self, x: Tensor) -> Any:
        h = self.l(x)
        if self.kind == "method":
            return h if self.confident(h) else self.m(h)
        if self.kind == "item":
            return h if h.sum().item() > 0 else self.m(h)
        for _ in range(5):
            h = h + torch.relu(self.m(h))
            if self.confident(h):
                break
        return h


KINDS = ("method", "item", "loop")


def inputs_of(model: Any) -> tuple[Tensor, Tensor]:
    """Return inputs at which the model is confident, and is not."""
    candidates = [torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) * 3 for i in range(60)]
    sums = [(model.l(x).sum().item(), x) for x in candidates]
    return max(sums, key=lambda s: s[0])[1], min(sums, key=lambda s: s[0])[1]


@pytest.mark.parametrize("first", ["confident", "not"])
@pytest.mark.parametrize("on_change", ["recompile", "error"])
@pytest.mark.parametrize("kind", ["method", "item"])
def test_an_early_exit_says_nothing_and_the_rest_of_forward_runs_as_planned(
    kind: str, on_change: str, first: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Early(kind)
    confident, not_yet = inputs_of(model)
    view = fxamp.convert(model, policy=PINNED, on_change=on_change)
    for x in (confident, not_yet) if first == "confident" else (not_yet, confident):
        view(x)
    for _ in range(2):
        assert torch.equal(view(not_yet), planned(model, not_yet))
        assert torch.equal(view(confident), low_linear(model.l, confident).float())
    assert not [text for text in warned(caplog) if "decided nothing" not in text]
    assert fxamp.plan_of(view).complete


@torch.compiler.disable  # type: ignore[untyped-decorator]
def chosen(model: Any, x: Tensor) -> Tensor:
    return model.l(x).argmax(-1)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def boxed(model: Any, x: Tensor) -> Any:
    return types.SimpleNamespace(value=model.l(x))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def written(model: Any, x: Tensor) -> None:
    model.total.copy_(model.l(x).detach())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ready(_: Any, x: Tensor) -> bool:
    return x.shape[0] > 0


@pytest.mark.parametrize("what", [ready, chosen, boxed, written])
def test_a_first_call_that_leaves_early_says_so_where_something_was_computed_outside_of_graphs(
    what: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    def leaves(self: Any, x: Tensor) -> Any:
        given = what(self, x)
        return self.m(x) if given is False else x

    model, x = Two(leaves, total=torch.zeros(4, 6)), example()
    view = fxamp.convert(model, policy="O1,dtype=bf16")
    for _ in range(2):
        census = fxamp.census(view, x, loss=lambda y: y.sum() * torch.ones((), requires_grad=True))
        assert bool(census.differences) == (what is not ready)
    said = [text for text in warned(caplog) if "no op was captured" in text]
    assert len(said) == (what is not ready)


def test_fewer_turns_of_a_loop_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = Early("loop")
    view = fxamp.convert(model, policy="O1,dtype=bf16")
    for x in (*inputs_of(model), *inputs_of(model)):
        with torch.autocast("cpu", BF16):
            expected = model(x).float()
        assert torch.equal(view(x), expected)
    assert not [text for text in warned(caplog) if "graphs ran" in text]


# What Dynamo leaves to Python.


class Generating(nn.Module):
    """Has a layer in a generator, which Dynamo leaves to Python where a break is in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.m = nn.Linear(6, 6), nn.Linear(6, 6)

    def steps(self, h: Tensor) -> Any:
        for _ in range(2):
            torch._dynamo.graph_break()
            h = self.m(h)
            yield h

    def forward(self, x: Tensor) -> Any:
        total = self.l(x)
        for h in self.steps(total):
            total = total + h
        return total


def test_code_that_dynamo_refuses_is_named_with_its_place_once_and_the_plan_is_not_complete(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, x = Generating(), example()
    view = fxamp.convert(model, policy=PINNED)
    for _ in range(3):
        view(x)
    said = [text for text in warned(caplog) if "did not run" in text]
    assert len(said) == 1
    assert "test_what_ran.py" in said[0]
    assert not fxamp.census(view, x)
    with pytest.raises(fxamp.CaptureError, match="did not run"):
        fxamp.convert(model, policy=PINNED, on_change="error")(x)


class Installing(nn.Module):
    """Installs something in its first call under a lock, which Dynamo does not trace, as models of transformers do."""

    lock = threading.Lock()

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.l, self.m, self.deep, self.installed = nn.Linear(6, 6), nn.Linear(6, 6), deep, False

    def install(self) -> None:
        with self.lock:
            self.installed = True

    def inner(self, h: Tensor) -> Tensor:
        if not self.installed:
            self.install()
        return self.m(h.relu())

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        if self.deep:
            torch._dynamo.graph_break()
        return self.inner(h)


@pytest.mark.parametrize("deep", [False, True])
def test_what_a_first_call_alone_leaves_to_python_is_captured_in_the_second(
    deep: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Installing(deep), example()
    view = fxamp.convert(model, policy=PINNED)
    complete = []
    for _ in range(3):
        assert torch.equal(view(x), model.m(low_linear(model.l, x).float().relu()))
        complete.append(fxamp.plan_of(view).complete)
    assert complete == [False, True, True]
    assert len([text for text in warned(caplog) if "did not run all of its plan" in text]) == 1
    assert not fxamp.census(view, x).differences


@pytest.mark.parametrize("deep", [False, True])
def test_at_o0_gradients_of_such_calls_are_eager_pytorchs(deep: bool) -> None:
    def gradients(run: Callable[..., Any]) -> list[Any]:
        model.zero_grad()
        run(x).square().sum().backward()
        return [p.grad for p in model.parameters()]

    model, x = Installing(deep), example()
    expected = gradients(model)
    model.installed = False
    view = fxamp.convert(model, policy="O0")
    for _ in range(3):
        assert all(map(torch.equal, gradients(view), expected))


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("check", [False, True])
def test_a_plan_made_ahead_covers_what_a_first_call_alone_leaves_to_python(deep: bool, check: bool) -> None:
    x = example()
    model = Installing(deep)
    view = fxamp.convert(model, (x,), policy="O1,dtype=bf16", check=check)
    assert fxamp.plan_of(view).complete
    assert not model.installed
    assert fxamp.plan(Installing(deep), (x,), policy="O1,dtype=bf16").complete


def test_code_that_is_left_to_python_and_computes_nothing_is_no_difference_of_the_census() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            if torch.rand(()).item() >= 0.0:  # the break is in a loop, which Dynamo leaves to Python
                h = layer(h)
        return h

    layers = nn.ModuleList(Two(lambda self, x: self.m(self.l(x))) for _ in range(2))
    view = fxamp.convert(Two(forward, layers=layers), policy="O1,dtype=bf16")
    for _ in range(3):
        view(example())
    assert not fxamp.plan_of(view).complete
    assert not fxamp.census(view, example()).differences


def test_an_internal_error_of_dynamo_leaves_the_call_to_the_authors_code(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = dynamo_errors()

    def fails(*_: Any, **__: Any) -> Any:
        raise errors.InternalTorchDynamoError("planted")

    model, x = Two(), example()
    with torch.autocast("cpu", BF16):
        expected = model(x).float()
    view = fxamp.convert(model, policy="O1,dtype=bf16")
    monkeypatch.setattr("torch._dynamo.convert_frame._compile", fails)
    for _ in range(2):
        assert torch.equal(view(x), expected)
    said = [text for text in warned(caplog) if "planted" in text]
    assert len(said) == 1
    assert "helpers.py" in said[0]
    for strict in ({"fullgraph": True}, {"on_change": "error"}):
        with pytest.raises(fxamp.CaptureError, match="planted"):
            fxamp.convert(Two(), policy="O1,dtype=bf16", **strict)(x)


def test_what_the_inner_compiler_refuses_runs_node_by_node_by_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def third_fails(gm: Any, _: Any) -> Any:
        seen.append(len(seen))
        if len(seen) == 3:
            raise TypeError("no kernel here")
        return gm

    def three(self: Any, x: Tensor) -> Any:
        h = self.l(x)
        torch._dynamo.graph_break()
        h = self.m(h)
        torch._dynamo.graph_break()
        return self.l(h.relu())

    model, x = Two(three), example()
    expected = fxamp.convert(model, policy=PINNED)(x)
    view = fxamp.convert(model, policy=PINNED, backend=third_fails)
    for _ in range(2):
        assert torch.equal(view(x), expected)
    assert len(seen) == 3
    said = [text for text in warned(caplog) if "no kernel here" in text]
    assert len(said) == 1
    assert "by its plan" in said[0]
    assert fxamp.census(fxamp.convert(model, policy=PINNED, backend=third_fails), x)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def doubled(h: Tensor) -> Tensor:
    return h * 2


@torch.compiler.disable  # type: ignore[untyped-decorator]
def seen(h: Tensor) -> Tensor:
    return h


def behind_a_break(h: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return h * 2


def at_break(self: Any, x: Tensor) -> Any:
    h = self.l(x)
    return self.m(h + self.make(h))


def in_c() -> Any:
    return torch.jit.trace(nn.Linear(6, 6), example())


AT_BREAKS: dict[str, Callable[..., Any]] = {
    "a function kept from Dynamo": doubled, "an op of a size that depends on data": lambda h: h[h > 0].sum(),
    "code in C": in_c,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("on_change", ["recompile", "error"])
@pytest.mark.parametrize("what", AT_BREAKS)
def test_what_is_computed_at_a_break_itself_is_named_with_its_place(
    what: str, on_change: str, caplog: pytest.LogCaptureFixture
) -> None:
    make = AT_BREAKS[what]() if what == "code in C" else AT_BREAKS[what]
    model, x = Two(at_break, make=make), example()
    view = fxamp.convert(model, policy="O1,dtype=bf16", on_change=on_change)
    with torch.autocast("cpu", BF16):
        expected = model(x).float()
    for _ in range(2):
        if on_change == "error":
            with pytest.raises(fxamp.CaptureError, match="outside of graphs"):
                view(x)
        else:
            assert torch.equal(view(x), expected)
    said = [text for text in warned(caplog) if "did not run all of its plan" in text]
    assert len(said) == (on_change == "recompile")
    assert all("test_what_ran.py" in text for text in said)
    assert not fxamp.plan_of(view).complete


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("make", [seen, behind_a_break, lambda h: h.sum().item()], ids=["seen", "graph", "number"])
def test_where_nothing_is_computed_at_a_break_nothing_is_said(
    make: Any, check: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Two(at_break, make=make), example()
    view = fxamp.convert(model, (x,), policy="O1,dtype=bf16", check=check)
    view(x)
    assert not [text for text in warned(caplog) if "did not run" in text]
    assert fxamp.plan_of(view).complete


def test_a_tensor_that_the_model_holds_was_not_computed_at_a_break(caplog: pytest.LogCaptureFixture) -> None:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def table_of(model: Any) -> Any:
        return model.table

    x = example()
    model: Any = Two(lambda self, x: self.m(self.l(x) + table_of(self)))
    model.table = torch.ones(6)
    assert not list(model.buffers())
    view = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
    view(x)
    assert not [text for text in warned(caplog) if "did not run" in text]


def test_what_is_computed_at_a_break_is_said_by_the_first_call_behind_the_check(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = example()
    view = fxamp.convert(Two(at_break, make=doubled), (x,), policy="O1,dtype=bf16")
    assert not fxamp.plan_of(view).complete
    view(x)
    assert len([text for text in warned(caplog) if "outside of graphs" in text]) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_a_submodule_of_torchscript_runs(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Two(at_break, make=torch.jit.script(nn.Linear(6, 6))), example()
    with torch.autocast("cpu", BF16):
        expected = model(x).float()
    view = fxamp.convert(model, policy="O1,dtype=bf16")
    for _ in range(2):
        assert torch.equal(view(x), expected)
    assert len([text for text in warned(caplog) if "did not run its plan" in text and "torch.jit.script" in text]) == 1


# Autocast's state is the view's while its model is called, and the user's afterwards.


def state() -> tuple[Any, ...]:
    entered = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return (
        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled(), entered
    )  # fmt: skip


def broken(self: Any, x: Tensor) -> Any:
    h = torch.relu(self.l(x))
    torch._dynamo.graph_break()
    if self.raises is not None:
        raise self.raises
    return self.m(h)


AMBIENT: dict[str, Callable[[], Any]] = {
    "bf16": lambda: torch.autocast("cpu", BF16), "fp16": lambda: torch.autocast("cpu", FP16),
    "off": lambda: torch.autocast("cpu", enabled=False), "cuda": lambda: torch.autocast("cuda", enabled=False),
    "without cache": lambda: torch.autocast("cpu", BF16, cache_enabled=False),
}  # fmt: skip


@pytest.mark.parametrize("what", AMBIENT)
def test_ambient_autocast_changes_no_graph_and_is_as_before_after_a_call(what: str) -> None:
    model, x = Two(broken, raises=None), example()
    view = fxamp.convert(model, policy="O1,dtype=bf16")
    expected, graphs = view(x), len(fxamp.graphs(view))
    with AMBIENT[what]():
        before = state()
        got = view(x)
        assert state() == before
    assert torch.equal(got, expected)
    assert len(fxamp.graphs(view)) == graphs == 2


@pytest.mark.parametrize("error", [ValueError("a"), KeyboardInterrupt(), SystemExit(1)], ids=lambda e: type(e).__name__)
def test_an_error_behind_a_break_leaves_autocast_as_it_was(error: BaseException) -> None:
    model, x = Two(broken, raises=None), example()
    view = fxamp.convert(model, policy="O1,dtype=bf16")
    expected = view(x)
    for context in (torch.no_grad, partial(torch.autocast, "cpu", FP16)):
        with context():
            before, model.raises = state(), error  # type: ignore[assignment]
            with pytest.raises(type(error)):
                view(x)
            assert state() == before
    model.raises = None  # type: ignore[assignment]
    assert torch.equal(view(x), expected)


def interrupted_at(run: Callable[[], Any], line: int) -> bool:
    """Raise KeyboardInterrupt at one of the lines of a call that are of a view's runner; say if it has so many.

    Python handles signals where functions are called, so not at the lines that only begin a block.
    """
    left = line

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(("view/runner.py", "capture/modes.py", "capture/call.py")):
            return None
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not text.startswith(("try:", "except", "finally:")):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupt_at_any_line_of_a_call_leaves_autocast_as_it_was(fails: bool) -> None:
    model, x = Two(broken, raises=None), example()
    view = fxamp.convert(model, policy="O1,dtype=bf16")
    expected, before, line = view(x), state(), 0
    model.raises = ValueError("a") if fails else None  # type: ignore[assignment]

    def run() -> None:
        with contextlib.suppress(ValueError):
            view(x)

    while interrupted_at(run, line):
        assert (line, state(), torch.is_grad_enabled(), current()) == (line, before, True, None)
        line += 1
    assert line > 40
    model.raises = None  # type: ignore[assignment]
    assert torch.equal(view(x), expected)


def test_an_interrupt_while_it_captures_leaves_autocast_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    model, x, before = Two(), example(), state()
    view = fxamp.convert(model, policy="O1,dtype=bf16")
    with monkeypatch.context() as patch:
        patch.setattr("fxamp.view.function.rewrite", interrupted)
        with pytest.raises(KeyboardInterrupt):
            view(x)
    assert state() == before
    with torch.autocast("cpu", BF16):
        assert torch.equal(view(x), model(x).float())


def test_eight_threads_at_once_capture_once_and_have_one_result() -> None:
    model, x = Two(broken, raises=None), example()
    view, results = fxamp.convert(model, policy="O1,dtype=bf16"), list[Tensor]()

    def work() -> None:
        for _ in range(3):
            results.append(view(x))
        assert state() == (False, BF16, True, 1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 24
    assert all(torch.equal(results[0], other) for other in results)
    assert len(fxamp.graphs(view)) == 2


@pytest.mark.parametrize("first", [True, False])
def test_a_region_that_is_in_the_views_own_dtype_is_no_pin_whichever_call_is_first(first: bool) -> None:
    def inner(self: Any, x: Tensor) -> Any:
        h = self.l(x)
        torch._dynamo.graph_break()
        return self.l(h)

    def both(self: Any, x: Tensor) -> Any:
        before = self.inner(x) if first else None
        with torch.autocast("cpu", BF16):
            inside = self.inner(x)
        return (before if first else self.inner(x)), inside

    view = fxamp.convert(Two(both, inner=Two(inner)), policy="O1,dtype=bf16")
    outside, inside = view(example())
    assert (outside.dtype, inside.dtype) == (F32, F32)
    assert torch.equal(outside, inside)


def test_a_break_costs_no_graph_of_a_region_or_of_marks() -> None:
    captured: list[int] = []

    def counting(gm: Any, _: Any) -> Any:
        captured.append(sum(n.op.startswith("call") for n in gm.graph.nodes))
        return gm

    view = fxamp.convert(Two(broken, raises=None), policy="O1,dtype=bf16", backend=counting)
    view(example())
    assert len(captured) == len(fxamp.graphs(view)) == 2


def test_a_batch_in_a_container_is_of_any_size_from_the_start() -> None:
    view = fxamp.convert(Two(lambda self, batch: self.l(batch["x"]) + self.m(batch["y"][0])), policy="O1,dtype=bf16")
    for rows in (5, 3, 7, 9):
        view({"x": example(rows), "y": [example(rows)]})
    assert len(fxamp.graphs(view)) == 1


def test_to_capture_leaves_the_inputs_as_they_were_where_python_runs_the_model() -> None:
    def writes(self: Any, x: Tensor) -> Any:
        h = self.l(x)
        x.add_(1)
        return self.m(recursing(lambda: h, 300))

    model, x = Two(writes), example()
    before = x.clone()
    with torch.no_grad():
        view = fxamp.convert(model, (x,), policy="O0")
        assert torch.equal(x, before)
        view(x)
    assert torch.equal(x, before + 1)


def recursing(make: Callable[[], Tensor], depth: int) -> Tensor:
    return make() if not depth else recursing(make, depth - 1)


class Block(nn.Module):
    """Two layers and a break between them, of which Dynamo makes one pair of graphs for all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        torch._dynamo.graph_break()
        return self.b(h)


class Blocks(nn.Module):
    """Three blocks, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(), Block(), Block()

    def forward(self, x: Tensor) -> Any:
        return self.third(self.second(self.first(x)))


def test_a_graph_that_runs_for_several_layers_is_planned_for_each_ahead() -> None:
    model, x = Blocks(), example()
    view = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
    ahead = fxamp.plan_of(view)
    assert [d.module_path for d in ahead.decisions if d.op == "linear"] == [
        f"{block}.{layer}" for block in ("first", "second", "third") for layer in ("a", "b")
    ]
    assert ahead.complete
    count = len(fxamp.graphs(view))
    view(x)
    assert fxamp.plan_of(view) == ahead
    assert len(fxamp.graphs(view)) == count

"""What ran is what was planned; what did not is named, with its line and its cause."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, library, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fxamp
from fxamp.errors import NotAModuleError
from passes.contract.errors import CaptureError, PolicyError
from passes.graph.notes import is_inserted
from tests.support.exported import program_of
from tests.support.helpers import Layers
from tests.support.zoo import BY_NAME

O1, O2 = "O1,dtype=bf16", "O2,dtype=bf16"
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(self.drop(self.norm(self.first(x)).relu())))
        return out

    def between(self, x: Tensor) -> Tensor:
        return x

    def encode(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x)
        return out


X = torch.randn(6, 8)
Y = torch.tensor([0, 1, 2, 3, 0, 1])
CE = nn.functional.cross_entropy


def view_of(model: nn.Module, policy: str = O2, **more: Any) -> Any:
    return fxamp.convert(model, (X,), policy=policy, **more)


def said(found: Any) -> str:
    return "\n".join(map(str, found.differences))


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    tf = pytest.importorskip("transformers")
    config = tf.BertConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=100
    )
    ids = torch.randint(0, 100, (2, 8))
    return tf.BertForMaskedLM(config).train(), {"input_ids": ids, "labels": ids.clone()}


def resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    tf = pytest.importorskip("transformers")
    config = tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4)
    model = tf.ResNetForImageClassification(config).train()
    return model, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 2])}


class Counted(TorchDispatchMode):
    """Casts and their bytes, counted as the figures of the reports are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts = self.bytes = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        pair = None
        if func is torch.ops.aten._to_copy.default:
            pair = (args[0], out)
        if func is torch.ops.aten.copy_.default:
            pair = (args[1], args[0])
        if pair is not None and pair[1].is_floating_point() and pair[0].dtype != pair[1].dtype:
            self.casts += 1
            self.bytes += pair[0].nbytes + pair[1].nbytes
        return out


@pytest.mark.parametrize("recomputed", [1, 2])
def test_recomputation_casts_as_often_under_the_callers_autocast_as_in_a_loop(recomputed: int) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        inner = checkpoint(m.body, x, use_reentrant=False) if recomputed == 2 else m.body(x)
        out: Tensor = checkpoint(m.body, inner, use_reentrant=False)
        return out

    model = Layers(forward, body=nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))
    with Counted() as loop:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(X)
        out.float().square().mean().backward()
    with torch.autocast("cpu", torch.bfloat16):
        model(X)  # the cache of the caller's region holds casts of weights
        found = fxamp.census(model, X, loss=lambda out: out.float().square().mean())
        assert torch.is_autocast_enabled("cpu")
    assert (sum(r.casts for r in found.ran), sum(r.cast_bytes for r in found.ran)) == (loop.casts, loop.bytes)


# What is not changed runs as planned.

MORE = [pytest.param(make, policy, marks=pytest.mark.matrix) for make in (bert, resnet) for policy in (O1, O2)]


@pytest.mark.parametrize(("make", "policy"), [(bert, O1), *MORE])
def test_views_of_real_models_run_as_planned(make: Any, policy: str) -> None:
    model, batch = make()
    view = fxamp.convert(model, kwargs=batch, policy=policy)
    found = fxamp.census(view, batch)
    assert found, said(found)
    assert found.share == pytest.approx(1.0, abs=0.05)
    assert found.planned is not None
    decided = {d.key for d in fxamp.plan_of(view).decisions}
    assert decided <= {row.where for row in found.planned}
    assert {row.where for row in found.ran if row.graph >= 0 and row.product} <= decided
    with Counted() as counted:
        view(**batch).loss.backward()
    assert (sum(r.casts for r in found.ran), sum(r.cast_bytes for r in found.ran)) == (counted.casts, counted.bytes)
    casts_planned = sum(row.casts for row in found.planned)
    casts_ran = sum(r.casts for r in found.ran if r.phase == "forward" and r.graph >= 0)
    assert casts_planned == fxamp.plan_of(view).casts <= casts_ran


@pytest.mark.matrix
@pytest.mark.parametrize("policy", [O1, O2])
@pytest.mark.parametrize("name", BY_NAME)
def test_every_model_of_the_zoo_runs_as_planned(name: str, policy: str) -> None:
    entry = BY_NAME[name]
    args, kwargs = entry.inputs(2)
    view = fxamp.convert(entry.build().train(), policy=policy, check=False)
    found = fxamp.census(view, kwargs or args, loss=entry.loss)
    assert found, said(found)


@pytest.mark.parametrize(("make", "policy"), [(resnet, O2), *MORE])
def test_a_train_step_runs_as_planned_and_is_as_before(make: Any, policy: str) -> None:
    model, batch = make()
    view = fxamp.convert(model, kwargs=batch, policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    step = fxamp.TrainStep(view, None, optimizer)
    step(batch)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    moments = [v.clone() for s in optimizer.state.values() for v in s.values()]
    random = torch.get_rng_state()
    found = fxamp.census(step, batch)
    assert found, said(found)
    assert any(row.op.startswith("_foreach") or row.op.startswith("addc") for row in found.ran)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    after = [v for s in optimizer.state.values() for v in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    assert torch.equal(random, torch.get_rng_state())
    assert step.windows == 1


def test_a_converted_graph_runs_as_planned() -> None:
    graph = fxamp.convert(program_of(Net(), (X,)), policy=O2)
    found = fxamp.census(graph, X, Y, loss=CE)
    assert found, said(found)
    assert "forward" not in vars(graph)


def test_a_view_in_a_larger_model_runs_as_planned() -> None:
    model = Layers(lambda m, x: m.head(m.body(x)), body=fxamp.convert(Net(), policy=O2), head=nn.Linear(4, 2))
    found = fxamp.census(model, X)
    assert found, said(found)
    assert 0 < (found.share or 0) < 1


def test_a_model_compiled_in_place_runs_as_planned() -> None:
    model = Net()
    model.compile(backend="fxamp", options={"policy": O2, "backend": "eager"})
    found = fxamp.census(model, X)
    assert found, said(found)
    assert found.planned


def test_an_autocast_region_inside_a_graph_is_planned() -> None:
    class Region(Net):
        def between(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return x.float() @ torch.ones(16, 16)

    found = fxamp.census(view_of(Region()), X)
    assert found, said(found)
    assert any(row.product and row.dtype == "float32" for row in found.ran)


def test_what_another_compiler_ran_is_said() -> None:
    found = fxamp.census(view_of(Net(), backend="aot_eager"), X, Y, loss=CE)
    assert found, said(found)
    assert "compiled by aot_eager" in found.notes[0]
    assert any(row.product and row.where.startswith("(graph 0") for row in found.ran)


def test_what_inductor_compiled_is_compared_by_its_own_record() -> None:
    found = fxamp.census(view_of(Net(), backend="inductor"), X, Y, loss=CE)
    assert found, said(found)
    [compiled] = found.compiled
    assert compiled.stored + compiled.fused == compiled.nodes
    assert compiled.fused > 0
    assert compiled.products == 2
    assert {"bfloat16", "float32"} <= compiled.loads.keys() & compiled.stores.keys()
    assert "were fused away" in str(found)
    assert json.loads(found.to_json())["compiled"][0]["fused"] == compiled.fused


@pytest.mark.matrix
def test_what_inductor_stores_beside_the_value_of_a_node_is_no_difference() -> None:
    """Inductor makes kernels of several results: places of maxima, and statistics of attention."""

    def several(self: Any, x: Tensor) -> Tensor:
        tokens = nn.functional.max_pool2d(self.conv(x).relu(), 2).flatten(2).transpose(1, 2)[:, None].contiguous()
        return self.last(nn.functional.scaled_dot_product_attention(tokens, tokens, tokens).mean((1, 2)))

    x = torch.randn(6, 1, 8, 8)
    model = Layers(several, conv=nn.Conv2d(1, 8, 3, padding=1), last=nn.Linear(8, 4))
    found = fxamp.census(fxamp.convert(model, (x,), policy=O1, backend="inductor"), x, Y, loss=CE)
    assert found, said(found)
    [compiled] = found.compiled
    assert compiled.products >= 2


def test_what_inductor_compiles_otherwise_than_planned_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxamp._torch import inner_backend as own

    def wrong(*settings: Any) -> Any:
        def compile(graph: Any, inputs: Any) -> Any:
            flip(graph)
            graph.recompile()
            return own(*settings)(graph, inputs)

        return compile

    view = view_of(Net(), backend="inductor")
    monkeypatch.setattr("fxamp.capture.backend.inner_backend", wrong)
    found = fxamp.census(view, X, Y, loss=CE)
    assert "first/linear#0: planned bfloat16, ran float32" in said(found)
    assert "Inductor" in said(found)


# Ways in which a call of a view could miss its plan, and does not.


def recomputed_by_a_checkpoint() -> Any:
    class Recomputed(Net):
        def between(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(
                lambda x: torch.tanh(x @ torch.ones(16, 16, dtype=x.dtype)), x, use_reentrant=False
            )
            return out

    return fxamp.census(view_of(Recomputed()), X)


def custom_op_without_a_rule() -> Any:
    class Custom(Net):
        def between(self, x: Tensor) -> Tensor:
            out: Tensor = halved(x)
            return out

    return fxamp.census(view_of(Custom()), X)


@library.custom_op("test_census::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return x / 2


@halved.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


halved.register_autograd(lambda context, gradient: gradient / 2)


def module_replaced() -> Any:
    model = Net()
    view = view_of(model)
    view.last = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    found = fxamp.census(view, X)
    assert {row.where for row in found.ran if row.product and row.graph >= 0} >= {"last.0/linear#0", "last.1/linear#0"}
    return found


def functional_call_with_other_weights() -> Any:
    view = view_of(Net())
    other: dict[str, Tensor] = {name: nn.Parameter(p.detach() + 1) for name, p in view.named_parameters()}
    return fxamp.census(Layers(lambda m, x: torch.func.functional_call(m.body, other, (x,)), body=view), X)


def counted_at_its_first_call() -> Any:
    view = fxamp.convert(Net(), policy=O2)
    with FlopCounterMode(display=False):
        view(X)
    return fxamp.census(view, X)


def inside_another_compile() -> Any:
    outer = Layers(lambda m, x: m.body(x * 2) + 1, body=view_of(Net()))
    compiled: Any = torch.compile(outer, backend="eager")
    return fxamp.census(compiled, X)


def region_in_float32() -> Any:
    class Wide(Net):
        def between(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.float32):  # which torch takes for one that is off
                out: Tensor = x.float() @ torch.ones(16, 16)
            return out

    found = fxamp.census(view_of(Wide()), X)
    assert any(row.product and row.dtype == "float32" for row in found.ran)
    return found


AS_PLANNED = [
    recomputed_by_a_checkpoint, custom_op_without_a_rule, module_replaced, functional_call_with_other_weights,
    counted_at_its_first_call, inside_another_compile, region_in_float32,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("way", AS_PLANNED, ids=lambda way: way.__name__)
def test_what_runs_as_planned_all_the_same_has_no_difference(way: Callable[[], Any]) -> None:
    found = way()
    assert found, said(found)


def test_generation_is_in_the_plan() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=60, n_positions=32, n_embd=32, n_layer=1, n_head=2)
    view = fxamp.convert(transformers.GPT2LMHeadModel(config).eval(), policy=O1)
    ids = torch.randint(0, 60, (1, 4))

    def generated(out: Any) -> Tensor:
        view.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
        return out.logits.float().sum()

    found = fxamp.census(view, {"input_ids": ids}, loss=generated)
    assert found, said(found)


# Afterwards everything is as before.


@pytest.mark.default_case(policy="O1,dtype=bf16")
@pytest.mark.parametrize("policy", [None, O1, O2])
def test_a_census_leaves_everything_as_it_was(policy: str | None) -> None:
    model = Net()
    used = model if policy is None else view_of(model, policy)
    CE(model(X), Y).backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    values = {n: g.clone() for n, g in gradients.items() if g is not None}
    state = {n: t.clone() for n, t in model.state_dict().items()}
    attributes = dict(vars(model))
    random = torch.get_rng_state()
    fxamp.census(used, X, Y, loss=CE)
    assert all(p.grad is gradients[n] for n, p in model.named_parameters())
    assert all(g is not None and torch.equal(g, values[n]) for n, g in gradients.items())
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert vars(model) == attributes
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("census_first", [False, True])
@pytest.mark.parametrize("examples", [(), (X,)])
def test_a_hook_that_the_first_call_adds_is_there_once(census_first: bool, examples: tuple[Tensor, ...]) -> None:
    """A model adds a hook at its first call, and notes that it has, as those of transformers do."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not self.installed:
            self.fc.register_forward_hook(lambda module, args, out: 2 * out)
            self.installed = True
        return self.fc(x)

    model: Any = Layers(forward, fc=nn.Linear(8, 4), installed=False)
    view = fxamp.convert(model, examples or None, policy="O0", check=False)
    if census_first:
        assert bool(fxamp.census(view, X))
        assert not model.fc._forward_hooks
        assert not model.installed
    assert torch.equal(view(X), 2 * (X @ model.fc.weight.T + model.fc.bias))
    assert len(model.fc._forward_hooks) == 1


def test_a_step_that_raises_leaves_everything_as_it_was() -> None:
    model = Net()
    before = {n: t.clone() for n, t in model.state_dict().items()}

    def loss(out: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fxamp.census(view_of(model), X, loss=loss)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


# What does not run as planned is named.


class Breaks(Net):
    def between(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        out: Tensor = torch.compiler.disable(plain_product)(x)
        return out


def plain_product(x: Tensor) -> Tensor:
    return x @ torch.ones(16, 16, dtype=x.dtype)


class Region(Net):
    def between(self, x: Tensor) -> Tensor:
        out: Tensor = torch.compiler.disable(region)(x)
        return out


def region(x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return x.float() @ torch.ones(16, 16)


def break_in_plain_code() -> Any:
    return fxamp.census(view_of(Breaks()), X)


def region_outside_of_graphs() -> Any:
    return fxamp.census(view_of(Region()), X)


def submodule_by_hand() -> Any:
    view = view_of(Net())
    return fxamp.census(view, X, loss=lambda out: out.float().sum() + view.first(X).sum())


def functional_by_hand() -> Any:
    view = view_of(Net())
    return fxamp.census(view, X, loss=lambda out: nn.functional.linear(X, view.first.weight).sum())


def method_of_the_view() -> Any:
    view = view_of(Net())
    return fxamp.census(view, X, loss=lambda out: view.encode(X).float().sum())


def model_in_the_place_of_its_view() -> Any:
    model = Net()
    view = view_of(model)
    return fxamp.census(view, X, loss=lambda out: model(X).sum())


def computing_hook() -> Any:
    model = Net()
    model.norm.register_forward_hook(torch.compiler.disable(lambda m, i, out: out.float() @ torch.eye(16)))
    return fxamp.census(fxamp.convert(model, policy=O2), X)


def hook_in_backward() -> Any:
    model = Net()
    view = view_of(model)
    return fxamp.census(view, X, loss=lambda out: _hooked(out).sum())


def _hooked(out: Tensor) -> Tensor:
    out.register_hook(lambda g: g @ torch.eye(4))
    return out


def stance() -> Any:
    view = view_of(Net())
    with torch.compiler.set_stance("force_eager"):
        return fxamp.census(view, X)


def recompile_limit() -> Any:
    class Many(Net):
        n = 0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.n

    model = Many()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fxamp.capture.frames.CEILING", 2)
        view = view_of(model, check=False)
        for n in range(4):
            model.n = n
            view(X)
        return fxamp.census(view, X)


def view_that_is_not_called() -> Any:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            model = Net()
            self.body = view_of(model)
            self.__dict__["plain"] = model

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.__dict__["plain"](x)
            return out

    return fxamp.census(Outer(), X)


def step_of(policy: str, **more: Any) -> Any:
    model = nn.Linear(4, 2)
    view = fxamp.convert(model, (torch.randn(2, 4),), policy=policy)
    return fxamp.TrainStep(
        view, more.pop("loss", lambda out: out.sum()), torch.optim.SGD(model.parameters(), 0.1), **more
    )


@pytest.mark.filterwarnings("ignore:training in FP16")
def fp16_without_a_scaler() -> Any:
    return fxamp.census(step_of("O2,dtype=fp16", scaler=None), torch.randn(2, 4))


@pytest.mark.filterwarnings("ignore:training in FP16")
def fp16_with_a_disabled_scaler() -> Any:
    return fxamp.census(step_of("O2,dtype=fp16", scaler=fxamp.LossScaler(enabled=False)), torch.randn(2, 4))


def changed(change: Callable[[Any], None]) -> Any:
    graph = fxamp.convert(program_of(Net(), (X,)), policy=O2)
    change(graph)
    graph.recompile()
    return fxamp.census(graph, X, Y, loss=CE)


def flip(graph: Any) -> None:
    """Run the first product in FP32, and round its result."""
    linear = next(n for n in graph.graph.nodes if "linear" in n.name)
    for cast in linear.all_input_nodes:
        cast.args = (cast.args[0], torch.float32)
    with graph.graph.inserting_after(linear):
        back = graph.graph.call_function(torch.ops.aten.to.dtype, (linear, torch.bfloat16))
    linear.replace_all_uses_with(back, lambda user: user is not back)


def flipped_dtype() -> Any:
    return changed(flip)


def removed_cast() -> Any:
    def change(graph: Any) -> None:
        cast = next(n for n in reversed(graph.graph.nodes) if is_inserted(n) and n.op.startswith("call"))
        cast.replace_all_uses_with(cast.args[0])
        graph.graph.erase_node(cast)

    return changed(change)


def moved_out() -> Any:
    def change(graph: Any) -> None:
        linear = next(n for n in graph.graph.nodes if "linear" in n.name)
        x = graph.graph.find_nodes(op="placeholder")[0]
        with graph.graph.inserting_before(linear):
            made = graph.graph.call_function(by_hand, (x, *linear.args[1:]))
        linear.replace_all_uses_with(made)
        graph.graph.erase_node(linear)

    return changed(change)


def by_hand(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.linear(x, weight.float(), bias.float()).bfloat16()


PLANTED = [
    (break_in_plain_code, ("mm in", "test_census.py", "what it calls there computes outside of graphs")),
    (region_outside_of_graphs, ("mm in float32", "test_census.py", "autocast is off")),
    (submodule_by_hand, ("addmm in float32", "module first", "by hand")),
    (functional_by_hand, ("mm in float32", "by hand")),
    (method_of_the_view, ("addmm", "module first", "method of a view")),
    (model_in_the_place_of_its_view, ("addmm in float32", "module first", "module last", "by hand")),
    (computing_hook, ("mm in bfloat16", "test_census.py", "module norm", "computes outside of graphs")),
    (hook_in_backward, ("mm in float32", "hook")),
    (stance, ("a call without it", "force_eager")),
    (recompile_limit, ("recompile limit",)),
    (view_that_is_not_called, ("not called",)),
    (fp16_without_a_scaler, ("unscaled", "LossScaler")),
    (fp16_with_a_disabled_scaler, ("unscaled", "disabled")),
    (flipped_dtype, ("first/linear#0: planned bfloat16, ran float32", "mm in backward")),
    (removed_cast, ("planned 6 casts, ran 5 casts",)),
    (moved_out, ("first/linear#0", "did not run")),
]


@pytest.mark.filterwarnings("ignore:training in FP16")
@pytest.mark.filterwarnings("ignore:FP16 gradients without a loss scale")
@pytest.mark.parametrize(("plant", "words"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_what_does_not_run_as_planned_is_named(plant: Callable[[], Any], words: tuple[str, ...]) -> None:
    found = plant()
    assert not found
    assert all(word in said(found) for word in words), said(found)


def test_a_skipped_step_is_said_and_is_no_difference() -> None:
    """A scaler finds its scale by skipping steps."""
    found = fxamp.census(step_of("O2,dtype=fp16", loss=lambda out: out.sum() * 1e30), torch.randn(2, 4))
    assert found
    assert found.scaling.skipped
    assert "the step was skipped" in str(found)
    assert "gradients were unscaled 1 times" in str(found)


def test_attention_that_reads_its_statistics_in_fp32_runs_as_planned() -> None:
    class Attention(Net):
        def between(self, x: Tensor) -> Tensor:
            q = x.view(6, 2, 2, 4)
            return nn.functional.scaled_dot_product_attention(q, q, q).reshape(6, 16)

    found = fxamp.census(view_of(Attention().eval()), X)
    assert found, said(found)
    assert any("attention" in row.op and row.phase == "backward" for row in found.ran)


@pytest.mark.parametrize(("backend", "drawn"), [("eager", "bernoulli"), ("aot_eager", "dropout")])
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_draws_again_runs_as_planned(reentrant: bool, backend: str, drawn: str) -> None:
    class Recomputes(Net):
        def between(self, x: Tensor) -> Tensor:
            drop = partial(nn.functional.dropout, p=0.2)
            out: Tensor = checkpoint(lambda y: drop(torch.relu(y)) @ self.last.weight.T, x, use_reentrant=reentrant)
            return x + out.sum()

    found = fxamp.census(view_of(Recomputes(), O1, backend=backend), X, Y, loss=CE)
    assert found, said(found)
    assert any(drawn in row.op for row in found.ran), [row.op for row in found.ran]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_higher_order_op_is_seen_as_one() -> None:
    class Flex(Net):
        def between(self, x: Tensor) -> Tensor:
            q = x.view(1, 2, 3, 16)
            return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + i).view(6, 16)

    with torch.no_grad():
        found = fxamp.census(view_of(Flex().eval(), O1), X)
    assert found, said(found)
    assert any("flex_attention" in row.op for row in found.ran)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_attention_that_casts_inside_runs_as_planned_and_says_so(backend: str) -> None:
    """With dropout, attention on a CPU computes its products in FP32, and a compiler decomposes it."""

    class Attention(Net):
        def between(self, x: Tensor) -> Tensor:
            q = x.view(6, 2, 2, 4)
            return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1).reshape(6, 16)

    view = fxamp.convert(Attention(), policy="O2,dtype=bf16,output_dtype=autocast", backend=backend)
    found = fxamp.census(view, X, loss=lambda out: out.float().square().mean())
    assert found, said(found)
    assert any("attention" in n and "casts inside and computes products in float32" in n for n in found.notes)


def test_attention_that_casts_inside_a_checkpoint_is_named() -> None:
    class Attention(Net):
        def attend(self, x: Tensor) -> Tensor:
            q = x.view(6, 2, 2, 4)
            return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1).reshape(6, 16)

        def between(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.attend, x, use_reentrant=False)
            return out

    found = fxamp.census(fxamp.convert(Attention(), policy=O1), X, loss=lambda out: out.square().mean())
    assert found, said(found)
    notes = [n for n in found.notes if "casts inside" in n]
    assert len(notes) == 1
    assert notes[0].endswith("computes products in float32: /scaled_dot_product_attention#0")


def test_a_plan_is_not_read_aloud() -> None:
    """Without a change the graphs of the two tests above run as planned."""
    assert changed(lambda graph: None)


# A model that nobody converted.


def test_what_ran_in_a_model_that_nobody_converted_is_listed() -> None:
    model = Net()
    with torch.autocast("cpu", torch.bfloat16):
        found = fxamp.census(model, X)
    assert found.planned is None
    assert not found.differences
    assert {(row.module, row.dtype) for row in found.ran if row.product and row.phase == "forward"} == {
        ("first", "bfloat16"), ("last", "bfloat16")
    }  # fmt: skip
    assert {row.where for row in found.ran if row.product and row.phase == "backward"} == {"first", "last"}
    with pytest.raises(TypeError, match=r"\.differences"):
        bool(found)


def test_the_ops_that_ran_in_fp32_are_named_with_their_modules_and_lines() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(self.norm(x))

    model = nn.Sequential(*(Block() for _ in range(5)))
    with torch.autocast("cpu", torch.bfloat16):
        text = str(fxamp.census(model, X, Y, loss=CE))
    assert "ops in float32: native_layer_norm at 0.norm, 1.norm, 2.norm and 2 more" in text
    assert "ops in float32 and bfloat16: add at 0, 1, 2 and 2 more" in text
    assert "products in another dtype than most: none" in text


def test_a_layer_that_stays_fp32_under_autocast_is_named() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = fxamp.census(Region(), X)
    assert "mm in float32" in said(found)
    assert "test_census.py" in said(found)


def test_a_plain_fp32_model_has_no_differences() -> None:
    found = fxamp.census(Net(), X)
    assert found.differences == ()
    assert {row.dtype for row in found.ran if row.product} == {"float32"}
    assert not found.casts


def test_a_census_prints_and_is_json() -> None:
    found = fxamp.census(view_of(Net()), X, Y, loss=CE)
    assert "differences: none" in str(found)
    assert "as planned" in str(found)
    data = json.loads(found.to_json())
    assert data["differences"] == []
    assert data["share"] == pytest.approx(1.0)
    assert len(repr(found).splitlines()) == 1
    assert "differences: none" in found._repr_html_()
    difference = fxamp.diff(view_of(Net()))
    assert "linear" in difference._repr_html_()


# Bad input.


def test_bad_input_is_refused() -> None:
    view = view_of(Net())
    with pytest.raises(PolicyError, match="inputs is a tensor"):
        fxamp.census(view, 3)
    with pytest.raises(PolicyError, match="without loss"):
        fxamp.census(view, X, Y)
    with pytest.raises(NotAModuleError):
        fxamp.census(lambda x: x, X)
    with pytest.raises(CaptureError, match="meta"):
        fxamp.census(Net().to("meta"), X)
    with pytest.raises(PolicyError, match="no tensor of floats"):
        fxamp.census(nn.Flatten(), torch.tensor([[1]]))
    step = step_of(O2, accumulate_steps=2)
    step(torch.randn(2, 4))
    with pytest.raises(PolicyError, match="flush"):
        fxamp.census(step, torch.randn(2, 4))


def test_inputs_that_the_model_refuses_raise_its_own_error() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fxamp.census(Net(), torch.randn(6, 9))


# In a training step.


def test_a_training_step_watches_its_first_call_and_the_one_after_a_recompile() -> None:
    model = Net()
    view, optimizer = view_of(model), torch.optim.SGD(model.parameters(), 0.1)
    step = fxamp.TrainStep(view, CE, optimizer, census="error", accumulate_steps=2)
    assert step.census is not None
    seen = []
    for training in (True, True, True, False, False, False):
        model.train(training)
        step(X, Y)
        seen.append(id(step.census.last))
    assert [b != a for a, b in itertools.pairwise(seen)] == [False, False, False, True, False]


def test_a_training_step_warns_or_raises_where_what_runs_is_not_planned() -> None:
    def wrong(out: Tensor, y: Tensor) -> Tensor:
        return CE(out, y) + view.first(X).sum()

    model = Net()
    view, optimizer = view_of(model), torch.optim.SGD(model.parameters(), 0.1)
    with pytest.warns(UserWarning, match=r"module first.*by hand"):
        fxamp.TrainStep(view, wrong, optimizer, census="warn")(X, Y)
    with pytest.raises(fxamp.VerificationError, match=r"module first.*by hand"):
        fxamp.TrainStep(view, wrong, optimizer, census="error")(X, Y)
    with pytest.raises(PolicyError, match="census"):
        fxamp.TrainStep(view, CE, optimizer, census="always")  # type: ignore[arg-type]


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    tf = pytest.importorskip("transformers")
    config = tf.GPT2Config(
        n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=32, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0,
        bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    ids = torch.randint(64, (2, 16))
    return tf.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids.clone()}


TRIED = [(gpt2, "inductor", 1), (gpt2, "eager", 2), (bert, "aot_eager", 2)]
COMPILED = [
    pytest.param(make, how, steps, marks=() if (make, how, steps) in TRIED else pytest.mark.matrix)
    for make in (gpt2, bert) for how in ("eager", "aot_eager", "inductor") for steps in (1, 2)
]  # fmt: skip


@pytest.mark.parametrize(("make", "how", "accumulate_steps"), COMPILED)
def test_a_compiled_step_runs_as_planned(make: Any, how: str, accumulate_steps: int) -> None:
    model, batch = make()
    view = fxamp.convert(model, policy=O1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = fxamp.TrainStep(view, None, optimizer, compile=how, census="error", accumulate_steps=accumulate_steps)
    step(batch)
    assert step.census is not None
    assert step.census.last
    if accumulate_steps == 2:
        step(batch)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = fxamp.census(step, batch)
    assert found, said(found)
    assert found.share == pytest.approx(1.0, abs=0.05)
    assert found.planned
    assert bool(found.compiled) == (how == "inductor")
    if found.compiled:
        assert sum(c.products for c in found.compiled) > 5
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert step.windows == 1


def upcasting(op: Any) -> Any:
    """Return what makes Inductor compute the first of some products of a graph in FP32."""
    cast = torch.ops.prims.convert_element_type.default

    def change(graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=op):
            with graph.inserting_before(node):
                wide = [graph.call_function(cast, (a, torch.float32)) for a in node.args]
                product = graph.call_function(op, tuple(wide))
                low = graph.call_function(cast, (product, torch.bfloat16))
            for new, of in ((wide[0], node.args[0]), (wide[1], node.args[1]), (product, node), (low, node)):
                new.meta = {**of.meta, "val": of.meta["val"].float() if new is not low else of.meta["val"]}
            node.replace_all_uses_with(low)
            graph.erase_node(node)
            return

    return change


def test_a_compiled_step_names_the_product_that_the_compiler_upcasts() -> None:
    from torch._inductor import config

    model = Layers(lambda m, x: m.last(m.first(x).relu()), first=nn.Linear(8, 16, bias=False), last=nn.Linear(16, 4))
    view = fxamp.convert(model, policy=O1)
    step = fxamp.TrainStep(view, CE, torch.optim.SGD(model.parameters(), 0.1), compile=True, census="error")
    before = [p.detach().clone() for p in model.parameters()]
    upcast = config.patch(joint_custom_post_pass=upcasting(torch.ops.aten.mm.default))
    with upcast, pytest.raises(fxamp.VerificationError, match=r"first/linear#0.*float32"):
        step(X, Y)
    assert step.census is not None
    assert step.census.last is not None
    assert any(d.where == "first/linear#0" and "float32" in d.ran for d in step.census.last.differences)
    assert all(map(torch.equal, before, model.parameters()))
    assert (step.windows, step.position) == (0, 0)


def test_a_loss_with_products_of_its_own_is_no_difference_in_a_compiled_step() -> None:
    def contrastive(out: Tensor, y: Tensor) -> Tensor:
        return CE(out.float() @ out.float().T, y)

    model = Net()
    step = fxamp.TrainStep(view_of(model), contrastive, torch.optim.SGD(model.parameters(), 0.1), compile="aot_eager")
    found = fxamp.census(step, X, Y)
    assert found, said(found)


def test_a_census_that_raises_leaves_the_weights_as_they_were() -> None:
    def wrong(out: Tensor, y: Tensor) -> Tensor:
        return CE(out, y) + view.first(X).sum()

    model = Net()
    view = view_of(model)
    step = fxamp.TrainStep(view, wrong, torch.optim.SGD(model.parameters(), 0.1), census="error")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(fxamp.VerificationError, match=r"module first.*by hand"):
        step(X, Y)
    assert all(map(torch.equal, before, model.parameters()))
    assert (step.windows, step.position) == (0, 0)


def test_a_step_in_which_no_region_was_entered_says_so_and_no_other_does() -> None:
    said = "no torch.autocast region was entered"
    assert said in str(fxamp.census(Net(), X, Y, loss=CE))
    with torch.autocast("cpu", torch.bfloat16):
        assert said not in str(fxamp.census(Net(), X, Y, loss=CE))
    assert said not in str(fxamp.census(view_of(Net(), "O0"), X, Y, loss=CE))

    class Inside(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    assert said not in str(fxamp.census(Inside(), X, Y, loss=CE))

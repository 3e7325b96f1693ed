"""A view runs under autocast where it does not run its plan, and gives outputs in the dtypes of the model."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import pickle
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from passes._torch import pytree
from tests.support.front_ends import FRESH, compiled
from tests.support.helpers import Two, autocast_runs_lstms, example, in_turns

pytestmark = FRESH
BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32


def autocast(model: nn.Module, *args: Any, dtype: torch.dtype = BF16) -> Any:
    with torch.autocast("cpu", dtype=dtype):
        return model(*args)


def broken(self: Any, x: Tensor) -> Any:
    """What Dynamo captures in two graphs, with Python between them that makes numbers of its own."""
    h = self.l(x)
    scale = float((h * 0.3).sum().detach())
    return self.m(h + h * 0.3) * scale


# Values.


@pytest.mark.default_case(low=torch.bfloat16)
@pytest.mark.parametrize("low", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_python_between_graphs_is_autocasts(inner: str, low: torch.dtype) -> None:
    model, x = Two(broken), example()
    module = compiled(model, fxamp.Policy("O1", dtype=low), inner)
    got = module(x)
    assert len(fxamp.graphs(module)) == 2
    assert got.dtype == F32
    assert torch.equal(got, autocast(model, x, dtype=low).float())
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_layers_that_dynamo_leaves_to_python_are_autocasts(layer: Any) -> None:
    if layer is nn.LSTM and not autocast_runs_lstms():
        pytest.skip("torch.autocast cannot run it on this CPU")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.l, self.layer = nn.Linear(6, 6), layer(6, 6)

        def forward(self, x: Tensor) -> Any:
            return self.layer(self.l(x))[0]

    model, x = Model(), example()
    for module in (model, model.layer):
        got, expected = compiled(module)(x), autocast(module, x)
        got, expected = (t[0] if isinstance(t, tuple) else t for t in (got, expected))
        assert torch.equal(got, expected.float())
        assert not torch.equal(got, module(x)[0] if module is model.layer else module(x))


def test_a_transformer_with_masks_is_autocasts() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval()
    x, mask = torch.randn(2, 4, 8), nn.Transformer.generate_square_subsequent_mask(4)
    with torch.no_grad():
        got = compiled(model)(x, x, tgt_mask=mask)
        with torch.autocast("cpu"):
            expected = model(x, x, tgt_mask=mask)
    assert torch.equal(got, expected.float())


class Deep(nn.Module):
    """A model that needs another graph for every number of steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l, self.steps = nn.Linear(6, 6), 1

    def forward(self, x: Tensor) -> Any:
        for _ in range(self.steps):
            x = self.l(x) * 1.1
        return x


def test_calls_beyond_the_recompile_limit_are_autocasts(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Deep(), example()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fxamp.capture.frames.CEILING", 2)
        module = compiled(model, dynamic=False)
        for model.steps in range(1, 6):
            assert torch.equal(module(x), autocast(model, x).float())
    assert any("left to Python" in n and "recompile limit" in n for n in fxamp.plan_of(module).notes)
    [said] = [r.message for r in caplog.records if "did not run its plan" in r.message]
    assert "recompile limit" in said
    other = compiled(Deep())  # of the same code, with a limit of its own
    vars(other)["steps"] = 7
    assert torch.equal(other(x), autocast(other, x).float())
    assert len(fxamp.graphs(other)) == 1


def test_o0_is_captured_without_autocast_and_changes_nothing_under_it() -> None:
    model, x = Two(broken), example()
    module = compiled(model, "O0")
    with torch.autocast("cpu"):
        got = module(x)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(got, model(x))


def test_an_explicit_dtype_wins_over_the_ambient_one_and_that_over_none() -> None:
    model, x = Two(broken), example()
    with torch.autocast("cpu", dtype=BF16):
        explicit, ambient = compiled(model, "O1,dtype=fp16")(x), compiled(model)(x)
    assert torch.equal(explicit, autocast(model, x, dtype=FP16).float())
    torch._dynamo.reset()
    assert torch.equal(ambient, autocast(model, x, dtype=BF16).float())


def test_what_fails_under_autocast_fails_the_same_way_and_runs_once() -> None:
    ran = []

    def scatter(self: Two, x: Tensor) -> Any:
        index = torch.zeros(4, 6, dtype=torch.long)
        h = self.l(x)
        torch._dynamo.graph_break()
        ran.append(1)
        torch._dynamo.graph_break()
        return x.scatter_add(0, index, h)  # of two dtypes under autocast

    model, x = Two(scatter), example()
    with pytest.raises(RuntimeError):
        autocast(model, x)
    ran.clear()
    with pytest.raises(RuntimeError, match="dtype"):
        compiled(model)(x)
    assert ran == [1]


# Methods of the model.


class Generator(nn.Module):
    forward = broken

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l, self.m = nn.Linear(6, 6), nn.Linear(6, 6)

    def generate(self, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = self(x)
        return x

    def weights(self) -> Any:
        return self.l.weight


def test_a_method_that_calls_the_model_is_autocasts() -> None:
    model, x = Generator(), example()
    module = compiled(model)
    with torch.autocast("cpu"):
        expected = model.generate(x, 2)
    got = module.generate(x, 2)
    assert got.dtype == F32
    assert torch.equal(got, expected.float())
    assert module.weights() is model.l.weight
    assert torch.equal(compiled(model, "O0").generate(x, 2), model.generate(x, 2))


def test_that_a_policy_does_not_reach_between_graphs_is_said() -> None:
    module = compiled(Two(broken), "O1,modules.m=fp32")
    module(example())
    [said] = [n for n in fxamp.plan_of(module).notes if "between graphs" in n]
    assert "runs under autocast, as at O1 without overrides" in said


# What comes out.


@dataclasses.dataclass
class Output:
    first: Tensor
    rest: list[Any]


def test_outputs_have_the_dtypes_of_the_model_in_its_containers() -> None:
    def several(self: Two, x: Tensor) -> Any:
        h = self.l(x)
        return Output(h, [h, {"ids": h.argmax(-1), "low": h.bfloat16().half(), "x": x}])

    model, x = Two(several), example().requires_grad_()
    got, plain = compiled(model, "O1,dtype=fp16")(x), model(x)
    assert [got.first.dtype, *(t.dtype for t in got.rest[1].values())] == [F32, torch.int64, FP16, F32]
    assert plain.rest[1]["low"].dtype == FP16
    assert got.rest[0] is got.first
    assert got.rest[1]["x"] is x
    assert isinstance(got, Output)


def test_what_code_between_graphs_returns_has_the_dtype_of_the_model() -> None:
    def sparse(self: Two, x: Tensor) -> Any:  # Dynamo captures no conversion to a sparse tensor
        h = self.l(x)
        return h.to_sparse(), {"own": x.bfloat16().to_sparse(), "h": h}

    model, x = Two(sparse), example()
    module = compiled(model, "O1,dtype=fp16")
    got, plain = module(x), model(x)
    assert any("graph break" in note for note in fxamp.plan_of(module).notes)
    assert [got[0].dtype, got[1]["own"].dtype, got[1]["h"].dtype] == [F32, BF16, F32]
    assert plain[1]["own"].dtype == BF16
    with torch.autocast("cpu", FP16):
        assert torch.equal(got[0].to_dense(), model(x)[1]["h"].float())


class Holding(nn.Module):
    """Holds low tensors in all places, and returns them beside what it computes."""

    table: Tensor

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l, self.breaks = nn.Linear(6, 6), breaks
        self.register_buffer("table", torch.ones(4, 6, dtype=BF16))
        self.attribute: Tensor = torch.ones(4, 6, dtype=BF16)
        self.several = {"one": [torch.ones(6, dtype=BF16)]}

    def forward(self, x: Tensor, held: bool = True) -> Any:
        attribute, h = self.attribute, self.l(x)
        if self.breaks:
            torch._dynamo.graph_break()
        low = (self.table, attribute, self.several["one"][0], x) if held else (h, h, h[0], x)
        return h, {"sum": self.attribute * 2, "first": attribute[:1]}, *low


@pytest.mark.parametrize(("breaks", "train", "policy"), in_turns([False, True], [False, True], ["O0", "O1", "O2"]))
def test_what_the_model_holds_is_returned_as_it_is(breaks: bool, train: bool, policy: str) -> None:
    model, x = Holding(breaks).train(train), example()
    view = compiled(model, f"{policy},dtype=bf16")
    for held in (True, False, True):  # of the same dtypes, so that what runs behind the break is the same graph
        got, plain = view(x, held), model(x, held)
        assert [t.dtype for t in pytree.tree_leaves(got)] == [t.dtype for t in pytree.tree_leaves(plain)]
        if held:
            assert [*map(id, got[2:])] == [*map(id, plain[2:])]


def test_a_value_that_the_model_keeps_in_a_call_is_no_more_its_own_than_others() -> None:
    def keeping(self: Any, x: Tensor) -> Any:
        self.last = self.l(x)
        torch._dynamo.graph_break()
        return self.last, self.last * 2

    def keeping_what_no_graph_makes(self: Any, x: Tensor) -> Any:
        self.last = self.l(x).to_sparse()
        return self.last, x

    for forward in (keeping, keeping_what_no_graph_makes):
        view = compiled(Two(forward), "O1,dtype=bf16")
        first = BF16 if forward is keeping else F32  # it crosses the break, and is read behind it
        assert [t.dtype for t in view(example())] == [first, F32]


def test_outputs_have_the_dtypes_of_the_model_where_dynamo_captures_nothing() -> None:
    model, x = Holding(breaks=False), example()
    view = compiled(model, "O1,dtype=bf16")
    with torch.compiler.set_stance("force_eager"):
        got = view(x)
    assert [t.dtype for t in got[2:]] == [BF16, BF16, BF16, F32]
    assert got[0].dtype == F32
    assert got[2] is model.table


@pytest.mark.default_case(level="O3")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_complex_numbers_of_16_bits_leave_as_they_are_in_the_model(level: str) -> None:
    model, x = Two(lambda self, x: (torch.complex(x, x), self.l(x.float()))), example().half()
    got, plain = compiled(model, f"{level},dtype=fp16")(x), model(x)
    assert [t.dtype for t in got] == [t.dtype for t in plain] == [torch.complex32, F32]
    assert torch.equal(torch.view_as_real(got[0]), torch.view_as_real(plain[0]))


def test_low_outputs_stay_low_where_the_policy_says_so() -> None:
    assert compiled(Two(broken), "O1,output_dtype=low")(example()).dtype == BF16


def test_gradients_arrive_in_fp32_on_the_weights() -> None:
    model = Two(broken)
    compiled(model)(example()).sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {F32}  # type: ignore[union-attr]


# It is a view.


def test_it_has_the_class_the_keys_and_the_attributes_of_the_model() -> None:
    model = Two()
    module = compiled(model)
    assert isinstance(module, Two)
    assert type(module).__name__ == type(model).__name__
    assert list(module.state_dict()) == list(model.state_dict())
    assert not [name for name in vars(model) if "fxamp" in name]
    setattr(module, "note", 3)  # noqa: B010  (mypy takes it for a module)
    assert vars(model)["note"] == 3


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_runs_under_autocast_too(way: Any) -> None:
    x = example()
    model = Picklable()
    module = compiled(model)
    module(x)
    copied = way(module)
    with torch.no_grad():
        copied.l.weight.mul_(2)
    twice = Picklable()
    twice.load_state_dict(copied.state_dict())
    assert torch.equal(copied(x), autocast(twice, x).float())
    assert not torch.equal(copied(x), module(x))


class Picklable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        h = self.l(x)
        torch._dynamo.graph_break()
        return h + h * 0.3


def test_what_the_model_makes_low_stays_low_across_a_break_when_it_is_captured_ahead_of_a_call() -> None:
    class Low(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.l = nn.Linear(6, 6)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            low = self.l(x).bfloat16()
            torch._dynamo.graph_break()
            return low + ids.sum()

    model, x, ids = Low(), example(), torch.tensor([1, 2])
    view = fxamp.convert(model, (x, ids), policy="O1,dtype=bf16")
    assert len(fxamp.graphs(view)) == 2
    got = view(x, ids)
    assert len(fxamp.graphs(view)) == 2
    assert got.dtype == BF16
    assert torch.equal(got, autocast(model, x, ids))


def test_inside_another_compiled_module_it_is_autocasts() -> None:
    torch.manual_seed(0)
    block, x = Two(), example()
    outer: Any = torch.compile(nn.Sequential(compiled(block), nn.ReLU()), backend="eager")
    assert torch.equal(outer(x), autocast(block, x).float().relu())


def test_threads_call_one_module_at_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    model, x = Two(broken), example()
    module = compiled(model)
    expected = module(x)
    with ThreadPoolExecutor(8) as pool:
        assert all(torch.equal(got, expected) for got in pool.map(lambda _: module(x), range(64)))
    assert not torch.is_autocast_enabled("cpu")


# What is wrong.


def test_an_error_of_ours_comes_as_it_is() -> None:
    with pytest.raises(fxamp.PolicyError, match="matches no module"):
        compiled(Two(), "O1,modules.x=fp32")(example())
    low = Two().to(BF16)
    with pytest.raises(fxamp.FxampError, match="are low already"):
        compiled(low)(example().to(BF16))


def test_arguments_given_as_options_are_named() -> None:
    with pytest.raises(fxamp.PolicyError, match=r"'policy' are arguments: write fxamp.compile"):
        compiled(Two(), options={"policy": "O2"})


def test_options_of_the_backend_stay_where_torch_compile_gives_a_mode() -> None:
    seen: dict[str, Any] = {}

    def noting(gm: Any, inputs: Any, **given: Any) -> Any:
        seen.update(given)
        return gm

    backend = fxamp.backend("O1", noting, options={"depth": 3})
    torch.compile(Two(), backend=backend, mode="max-autotune")(example())
    assert seen == {"mode": "max-autotune", "options": {"depth": 3}}


# One plan, however often a graph was captured.


def test_a_graph_counts_once_however_often_it_is_compiled() -> None:
    model = Two(lambda self, x: self.m(F.relu(self.l(x))))
    module = compiled(model, dynamic=False)
    for rows in (2, 3, 4):
        module(example(rows))
    torch._dynamo.reset()
    module(example(5))
    assert len(fxamp.graphs(module)) == 1
    assert [d.op for d in fxamp.plan_of(module).decisions] == ["linear", "relu", "linear"]


class Selecting(nn.Module):
    """Selects low rows by a mask, which breaks the graph, and sums them."""

    def forward(self, x: Tensor, low: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = low[mask]
        return rows.sum(), rows, x.exp()


@pytest.mark.parametrize(("output_dtype", "made"), [("original", F32), ("autocast", BF16)])
def test_low_values_made_between_graphs_of_low_inputs_come_out_in_fp32(output_dtype: str, made: torch.dtype) -> None:
    """The model gives them in 16 bits; that is not known, and in FP32 they have the same values."""
    given = torch.randn(4, 6), torch.randn(4, 6).bfloat16(), torch.tensor([True, False, True, True])
    model = Selecting()
    got = fxamp.convert(model, policy=fxamp.Policy("O1", output_dtype=output_dtype))(*given)
    torch.testing.assert_close(got, model(*given), check_dtype=False, rtol=1e-2, atol=0.0)
    assert got[1].dtype == made
    if output_dtype == "autocast":
        assert [t.dtype for t in got] == [t.dtype for t in autocast(model, *given)]


class Casting(nn.Module):
    """Casts a product to the dtype of a low input by Python code between graphs, which may return the same tensor."""

    def __init__(self, detaches: bool) -> None:
        super().__init__()
        self.layer, self.detaches = nn.Linear(6, 6), detaches

    def forward(self, x: Tensor, low: Tensor) -> Tensor:
        cast = self.layer(x).to(torch.result_type(low, low))
        return cast.detach() if self.detaches else cast


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")  # torch's, once a process
@pytest.mark.parametrize("detaches", [True, False])
def test_a_cast_between_graphs_to_the_dtype_of_autocast_is_taken_for_autocasts(detaches: bool) -> None:
    view, x = fxamp.convert(model := Casting(detaches), policy="O1,dtype=bf16"), torch.randn(4, 6)
    for low in (torch.randn(4, 6).bfloat16(), torch.randn(4, 6)):
        assert view(x, low).dtype == torch.float32
        assert torch.equal(view(x, low), autocast(model, x, low).float())


class Frozen(nn.Module):
    """Holds low weights, and brings what they give to a dtype that it reads off a product."""

    def __init__(self, head: bool) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(6, 6).bfloat16().requires_grad_(False), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3).bfloat16().requires_grad_(False) if head else None

    def forward(self, x: Tensor) -> Tensor:
        base = self.base(x.bfloat16()).float()
        returned: Tensor = base.to(self.adapter(x).dtype)
        return returned if self.head is None else self.head(base.to(self.head.weight.dtype))


@pytest.mark.parametrize("head", [False, True])
def test_an_output_of_a_model_with_low_weights_has_the_dtype_that_the_model_gives(head: bool) -> None:
    """The dtype of the adapter's result is autocast's where Dynamo traces, and so may be one that the code names."""
    model, x = Frozen(head), torch.randn(4, 6)
    got = fxamp.convert(model, policy="O1,dtype=bf16")(x)
    assert got.dtype == model(x).dtype == (BF16 if head else F32)
    assert torch.equal(got, autocast(model, x).to(got.dtype))


def test_where_the_dtypes_without_autocast_are_not_known_what_is_low_stays_low_and_the_plan_says_so() -> None:
    def breaking(self: Frozen, x: Tensor) -> Tensor:
        h = self.base(x.to(self.base.weight.dtype))
        torch._dynamo.graph_break()
        return h.sin()

    model, x = Frozen(head=False), torch.randn(4, 6)
    model.forward = types.MethodType(breaking, model)  # type: ignore[method-assign]
    view = fxamp.convert(model, policy="O1,dtype=bf16")
    assert view(x).dtype == model(x).dtype == BF16
    assert any("weights in 16 bits" in note and "graph break" in note for note in fxamp.plan_of(view).notes)


class Streaming(nn.Module):
    """Computes in a property, a generator, a coroutine and an asynchronous generator."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.l(x)
        return out

    @property
    def norm(self) -> torch.dtype:
        """The dtype of a product."""
        return self.l(torch.ones(1, 4)).dtype

    def stream(self, x: Tensor) -> Any:
        sent = None
        try:
            while sent != "end":
                sent = yield self.l(x).dtype, sent
        except KeyError:
            yield self.l(x).dtype, "thrown"
        return "returned"

    async def answer(self, x: Tensor) -> torch.dtype:
        await asyncio.sleep(0)
        return self.l(x).dtype

    async def answers(self, x: Tensor) -> Any:
        for _ in range(2):
            await asyncio.sleep(0)
            yield self.l(x).dtype


def test_generators_coroutines_and_properties_run_in_autocasts_state_and_their_caller_in_its_own() -> None:
    view, x = fxamp.convert(Streaming(), policy="O1,dtype=bf16"), torch.randn(2, 4)
    assert view.norm == BF16
    stream = view.stream(x)
    assert next(stream) == (BF16, None)
    assert not torch.is_autocast_enabled("cpu")
    assert stream.send("sent") == (BF16, "sent")
    assert stream.throw(KeyError()) == (BF16, "thrown")
    with pytest.raises(StopIteration) as end:
        next(stream)
    assert end.value.value == "returned"

    async def told() -> list[Any]:
        found = [await view.answer(x)]
        async for dtype in view.answers(x):
            found += [dtype, torch.is_autocast_enabled("cpu")]
        return found

    assert asyncio.run(told()) == [BF16, BF16, False, BF16, False]
    for name in ("stream", "answer", "answers"):
        kinds = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
        assert [is_kind(getattr(view, name)) for is_kind in kinds] == [
            is_kind(getattr(Streaming, name)) for is_kind in kinds
        ]
    assert not torch.is_autocast_enabled("cpu")


def test_an_output_that_is_returned_twice_beside_a_buffer_that_is_written_has_the_models_dtypes() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x: Tensor, half: Tensor) -> Any:
            self.mean: Tensor = self.mean * 0.9 + half.detach().mean(0) * 0.1
            product = half @ half.t()
            return product, x @ x.t(), product

    x, half = torch.randn(4, 6), torch.randn(4, 6).half()
    view = fxamp.convert(Twice(), policy="O1,dtype=bf16")
    assert [t.dtype for t in view(x, half)] == [t.dtype for t in Twice()(x, half)]

"""What a model's code may contain, by a view and by the pass over its export: kept to the bit at O0, in both modes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from tests.support.exported import program_of
from tests.support.front_ends import FRESH, under_autocast
from tests.support.helpers import OLD_DYNAMO, TimesHundred, Two, assert_is_eager, assert_same, example, in_turns

pytestmark = FRESH


class DecoratedNoGrad(Two):
    @torch.no_grad()
    def target(self, x: Tensor) -> Any:
        return self.l(x)

    def forward(self, x: Tensor) -> Any:
        return self.m(self.target(x))


def no_grad_region(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = self.l(x)
    return self.m(y) + y


def cast_by_operator(self: Any, x: Tensor) -> Any:
    y = torch.ops.aten.to.dtype(self.l(x), torch.bfloat16, False, True, torch.contiguous_format)
    return self.m(torch.ops.aten.to.dtype(y, torch.float32))


def set_grad(self: Any, x: Tensor) -> Any:
    torch.set_grad_enabled(False)
    y = self.l(x)
    torch.set_grad_enabled(True)
    return self.m(y)


def enable_grad(self: Any, x: Tensor) -> Any:
    with torch.no_grad(), torch.enable_grad():
        return self.m(self.l(x))


def inference_region(self: Any, x: Tensor) -> Any:
    with torch.inference_mode():
        y = self.l(x)
    return self.m(y.clone())


def inference_and_again(self: Any, x: Tensor) -> Any:
    """Read a value and a weight in inference mode, and once more outside of it, where gradients flow."""
    with torch.inference_mode():
        y = self.l(x)
    with torch.inference_mode(), torch.inference_mode(False):
        z = self.m(x)
    return self.l(x + y.clone()) + z


def jvp_inside(self: Any, x: Tensor) -> Any:
    made: Any = torch.func.jvp(lambda t: self.m(torch.tanh(t)), (x,), (x * 2,))
    return made[0] + made[1]


def autocast_on(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = self.l(x)
        with torch.autocast("cpu", enabled=False):
            y = self.m(y.float())
    return self.m(y)


def saved_tensors(self: Any, x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return self.m(self.l(x))


def guarded_dropout(self: Any, x: Tensor) -> Any:
    y = F.dropout(F.dropout(self.l(x), 0.3, self.training), 0.2, True)
    if self.training:
        y = F.dropout(y, 0.4)
    return self.m(y)


def attention_dropout(self: Any, x: Tensor) -> Any:
    q, k = self.l(x)[None, None], self.m(x)[None, None]
    return F.scaled_dot_product_attention(q, k, x[None, None], dropout_p=0.4 if self.training else 0.0)


def data_dependent(self: Any, x: Tensor) -> Any:
    return self.l(x) if x.sum() > 0 else self.m(x)


def in_place(self: Any, x: Tensor) -> Any:
    y = self.l(x) * 1
    y.mul_(self.m(x)).add_(1)
    y += 1
    y[0] = 1.0
    y[1:, :2] = self.m(x)[1:, :2]
    return self.m(y)


def on_a_view(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    v = y[:, :3]
    v += 1
    v -= x[:, 3:]
    v *= 2
    v /= 3
    w = y.T
    w[0] = 1
    w.mT.add_(1)
    return self.m(y)


def on_bits(self: Any, x: Tensor) -> Any:
    y = (x * 100).to(torch.int64)
    v = y.view(-1)
    v **= 2
    v //= 3
    v %= 4096
    v &= 63
    v |= 4
    v ^= 3
    v <<= 2
    v >>= 1
    return self.l(x) + y


def on_numbers(self: Any, x: Tensor) -> Any:
    n = x.shape[1]
    n += 3
    n *= 5
    n //= 2
    n %= 7
    n **= 2
    n <<= 3
    n |= 8
    n ^= 1
    m = k = x.shape[0]
    k += 1
    return self.l(x) * (n + 1) * m


def tensor_hook(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    y.register_hook(lambda g: g * 3)
    return self.m(y)


def data_assignment(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    y.data = x * 2
    return self.m(y)


def factories(self: Any, x: Tensor) -> Any:
    made = torch.zeros(x.shape[0], 6) + torch.arange(6) + torch.full((x.shape[0], 1), 2.0) + torch.rand(6)
    return self.l(x) + made + torch.tensor([1.0, 2, 3, 4, 5, 6])


def out_argument(self: Any, x: Tensor) -> Any:
    held = torch.empty_like(x)
    torch.mul(x, 2.0, out=held)
    return self.l(held)


def several_outputs(self: Any, x: Tensor) -> Any:
    a, b = self.l(x).chunk(2, dim=1)
    values, indices = torch.max(a, dim=1)
    pieces = b.split(1, dim=1)
    return values, indices, pieces[2], pieces[0]


def decayed(self: Any, x: Tensor) -> Any:
    return self.l(x).sum() + sum(p.square().sum() for p in self.parameters())


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.cells, self.out = kind(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.cells(x)[0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)


def tied() -> nn.Module:
    model = Two()
    model.m.weight = model.l.weight
    return model


def parametrized() -> nn.Module:
    model = Two()
    nn.utils.parametrizations.weight_norm(model.l)
    return model


def weight_hooked() -> nn.Module:
    model = Two()
    model.l.weight.register_hook(lambda g: g * 3)
    return model


def one() -> tuple[Tensor, ...]:
    return (example(),)


def pair() -> tuple[Tensor, ...]:
    return example(), example() * 2


def sequence() -> tuple[Tensor, ...]:
    return (torch.randn(4, 7, 6, generator=torch.Generator().manual_seed(0)),)


def norms(**settings: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, **settings), nn.Dropout(), nn.Linear(6, 6))


# Autograd functions of the author.


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class ProductAndSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return x @ weight.t(), x.sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return 3 * (g @ weight) + h, g.t() @ x


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return (g * 2).clamp(-100, 100)


class AddOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class MinusMaximum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x -= x.amax(-1, keepdim=True)  # without mark_dirty, as in the sparsemax of many libraries
        return x.exp()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


class OfAList(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: list[Tensor]) -> Tensor:
        return x[0] * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return None


times_hundred: Any = TimesHundred.apply  # as PyTorch's documentation advises


def several(self: Any, x: Tensor) -> Any:
    product, total = ProductAndSum.apply(self.l(x), self.m.weight)  # type: ignore[no-untyped-call]
    return product * total


def function_without_gradient(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = times_hundred(x, 0.5)
    return self.m(self.l(y))


def marked_dirty(self: Any, x: Tensor) -> Any:
    return self.m(AddOne.apply(self.l(x)))  # type: ignore[no-untyped-call]


def written_inside(self: Any, x: Tensor) -> Any:
    y = self.l(x) * 2
    z = MinusMaximum.apply(y)  # type: ignore[no-untyped-call]
    return self.m(y) + z


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "a function": lambda self, x: self.m(TimesHundred.apply(self.l(x), 0.5)),  # type: ignore[no-untyped-call]
    "bound early": lambda self, x: self.m(times_hundred(self.l(x), 0.5)),
    "a view of its input": lambda self, x: self.m(Reversed.apply(self.l(x))),  # type: ignore[no-untyped-call]
    "several outputs of it": several,
    "called twice": lambda self, x: times_hundred(self.m(times_hundred(self.l(x), 0.5)), 2.0),
    "a backward that clips": lambda self, x: self.m(Clipped.apply(self.l(x))) * 1e4,  # type: ignore[no-untyped-call]
    "without gradient": function_without_gradient,
    "marked dirty": marked_dirty,
    "written inside": written_inside,
    "of a list": lambda self, x: self.m(OfAList.apply([self.l(x)])) + self.l(x),  # type: ignore[no-untyped-call]
}

Build = Callable[[], nn.Module]
Inputs = Callable[[], tuple[Tensor, ...]]
CONSTRUCTS: dict[str, tuple[Build, Inputs]] = {
    "no_grad": (partial(Two, no_grad_region), one),
    "no_grad decorator": (DecoratedNoGrad, one),
    "set_grad_enabled": (partial(Two, set_grad), one),
    "a cast by an operator, with a memory format": (partial(Two, cast_by_operator), one),
    "enable_grad": (partial(Two, enable_grad), one),
    "inference_mode": (partial(Two, inference_region), one),
    "inference_mode and again": (partial(Two, inference_and_again), one),
    "jvp": (partial(Two, jvp_inside), one),
    "autocast": (partial(Two, autocast_on), one),
    "checkpoint": (partial(Two, lambda self, x: checkpoint(self.m, self.l(x), use_reentrant=False)), one),
    "saved-tensor hooks": (partial(Two, saved_tensors), one),
    "dropout": (partial(Two, guarded_dropout), one),
    "dropout of attention": (partial(Two, attention_dropout), one),
    "a literal of the mode": (partial(Two, lambda self, x: self.l(x) * (2.0 if self.training else 1.0)), one),
    "a structure of the mode": (partial(Two, lambda self, x: self.l(x) if self.training else self.m(self.l(x))), one),
    "a return of the mode": (partial(Two, lambda self, x: {"y": self.l(x)} if self.training else (self.l(x),)), one),
    "batch norm": (norms, one),
    "batch norm without statistics": (partial(norms, track_running_stats=False), one),
    "batch norm without weights": (partial(norms, affine=False), one),
    "cumulative batch norm": (partial(norms, momentum=None), one),
    "mask=None": (partial(Two, lambda self, x, mask=None: self.l(x) if mask is None else self.l(x) * mask), one),
    "mask given": (partial(Two, lambda self, x, mask=None: self.l(x) if mask is None else self.l(x) * mask), pair),
    "isinstance": (partial(Two, lambda self, x: self.l(x) if isinstance(x, Tensor) else self.l(x) * 2), one),
    "is_tensor": (partial(Two, lambda self, x: self.l(x) if torch.is_tensor(x) else self.l(x) * 2), one),
    "x.to(x.dtype)": (partial(Two, lambda self, x: self.l(x).float().to(x.dtype)), one),
    "finfo": (partial(Two, lambda self, x: self.l(x).masked_fill(x > 0, torch.finfo(x.dtype).min)), one),
    "a branch on a dtype": (
        partial(Two, lambda self, x: self.l(x) * 2 if x.dtype == torch.float16 else self.l(x)), one,
    ),
    "a branch on data": (partial(Two, data_dependent), one),
    "x[x > 0]": (partial(Two, lambda self, x: self.l(x)[x > 0]), one),
    "in place": (partial(Two, in_place), one),
    "operators in place on a view": (partial(Two, on_a_view), one),
    "operators in place on bits": (partial(Two, on_bits), one),
    "operators in place on numbers": (partial(Two, on_numbers), one),
    "tensor hook": (partial(Two, tensor_hook), one),
    "y.data = v": (partial(Two, data_assignment), one),
    "factories": (partial(Two, factories), one),
    "out=": (partial(Two, out_argument), one),
    "a shared module": (partial(Two, lambda self, x: self.l(torch.relu(self.l(x)))), one),
    "several outputs": (partial(Two, several_outputs), one),
    "outputs twice": (partial(Two, lambda self, x: (y := self.l(x), y, self.l.weight, [None, y * 2])), one),
    "parameters in a loop": (partial(Two, decayed), one),
    "tied weights": (tied, one),
    "a parametrized weight": (parametrized, one),
    "a hook of a weight": (weight_hooked, one),
    "nn.LSTM": (partial(Recurrent, nn.LSTM), sequence),
    "nn.GRU": (partial(Recurrent, nn.GRU), sequence),
    "nn.RNN": (partial(Recurrent, nn.RNN), sequence),
    "nn.MultiheadAttention": (Attention, sequence),
    **{name: (partial(Two, forward), one) for name, forward in FUNCTIONS.items()},
}  # fmt: skip

# What torch.export itself refuses, loses, or computes otherwise than the model.
NOT_EXPORTED = {
    "inference_mode", "inference_mode and again", "checkpoint", "saved-tensor hooks", "cumulative batch norm",
    "a branch on data", "tensor hook", "y.data = v", "nn.LSTM", "a hook of a weight", *FUNCTIONS,
    *(["jvp"] if OLD_DYNAMO else []),
}  # fmt: skip


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_a_view_keeps_it(construct: str) -> None:
    build, inputs = CONSTRUCTS[construct]
    torch.manual_seed(0)
    model, args = build(), inputs()
    view = fxamp.convert(model, args, policy="O0")
    for training in (True, False):
        model.train(training)
        assert_is_eager(view, model, *args)


EXPORTED = [name for name in CONSTRUCTS if name not in NOT_EXPORTED]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("construct", "training"),
    [
        *in_turns(EXPORTED[::2], [True, False]),
        *(pytest.param(name, on, marks=pytest.mark.matrix) for name in EXPORTED[1::2] for on in (True, False)),
    ],
)
def test_the_pass_over_an_export_keeps_it(construct: str, training: bool) -> None:
    build, inputs = CONSTRUCTS[construct]
    torch.manual_seed(0)
    model, args = build().train(training), inputs()
    converted = fxamp.convert(program_of(model, args), policy="O0")
    assert_is_eager(converted, model, *args)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_the_author_runs_as_under_autocast(name: str) -> None:
    torch.manual_seed(0)
    model, x = Two(FUNCTIONS[name]), example()
    view = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
    with torch.autocast("cpu", torch.bfloat16):
        expected = copy.deepcopy(model)(x)
    assert torch.equal(view(x), expected.float())
    assert not fxamp.plan_of(view).deviations


def test_what_inference_mode_reads_has_gradients_outside_of_it() -> None:
    torch.manual_seed(0)
    model, x = Two(inference_and_again), example()
    view = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    expected.float().square().sum().backward()
    wanted: list[Any] = [p.grad for p in model.parameters()]
    assert all(g is not None for g in wanted)
    model.zero_grad(set_to_none=True)
    output = view(x)
    assert torch.equal(output, expected.float())
    output.square().sum().backward()
    found: list[Any] = [p.grad for p in model.parameters()]
    assert all(map(torch.equal, found, wanted))


def test_a_jvp_inside_is_autocasts() -> None:
    torch.manual_seed(0)
    model, x = Two(lambda self, x: torch.func.jvp(lambda t: self.m(torch.tanh(t)), (x,), (x * 2,))), example()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    got = fxamp.convert(model, policy="O1,dtype=bf16")(x)
    assert all(torch.equal(a, b.float()) for a, b in zip(got, expected, strict=True))


# Tensors beside the parameters, and the state of the program.

PROGRAM = torch.ones(6)


class Stateful(Two):
    """Holds a tensor in an attribute and in containers, and a buffer in a list too."""

    count: Tensor

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.__class__ = type("Stateful", (Stateful,), {"forward": forward})
        self.register_buffer("count", torch.ones(6))
        self.plain = torch.ones(6)
        self.listed = [torch.ones(6)]
        self.nested = {"a": (torch.ones(6),)}
        self.buffers_too = [self.count]
        self.last: Any = None
        self.losses: list[Tensor] = []

    def contents(self) -> list[Tensor]:
        return [t.detach().clone() for t in (self.count, self.plain, self.listed[0], self.nested["a"][0], PROGRAM)]


def by_operator(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    self.plain += y.detach().mean(0)
    return y * self.plain


def by_item(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    self.plain[:] = y[0].detach()
    self.plain[0] = 3.0
    return y * self.plain


def assigned(self: Any, x: Tensor) -> Any:
    y = self.l(x) * self.plain
    self.plain = self.plain * 0.5
    self.count = self.count + 1
    return y


def kept_loss(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    self.last = y.square().mean() + (0 if self.last is None else self.last)
    self.losses.append(y.sum())
    return y


def made_once(self: Any, x: Tensor) -> Any:
    if not self.losses:
        self.losses.append(self.m.weight.square().sum().detach())
    return self.l(x) * self.losses[0]


def scratch(self: Any, x: Tensor) -> Any:
    y = self.plain.clone()
    y.mul_(3)
    y[0] = 2
    return self.l(x) * y


def in_containers(self: Any, x: Tensor) -> Any:
    self.nested["a"][0][:3].add_(1)
    return self.l(x) * self.nested["a"][0]


def registered(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    self.register_buffer("late", y.detach().mean(0))
    return y


STATE: dict[str, Callable[..., Any]] = {
    "an attribute": lambda self, x: (self.plain.mul_(0.5), self.l(x) + self.plain)[1],
    "an attribute's data": lambda self, x: (self.plain.data.mul_(0.5), self.l(x) + self.plain)[1],
    "in a list": lambda self, x: (self.listed[0].add_(1), self.l(x) * self.listed[0])[1],
    "in containers, through a view": in_containers,
    "a buffer by another name": lambda self, x: (self.buffers_too[0].add_(1), self.l(x) * self.count)[1],
    "of the program": lambda self, x: (PROGRAM.add_(1), self.l(x) * PROGRAM)[1],
    "by an operator": by_operator,
    "by an item": by_item,
    "assigned": assigned,
    "a loss that is kept": kept_loss,
    "made once": made_once,
    "a copy": scratch,
    "a buffer that forward registers": registered,
}  # fmt: skip


@pytest.fixture
def program() -> Any:
    yield
    PROGRAM.fill_(1)


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize(("what", "with_inputs"), in_turns(STATE, [True, False]))
def test_a_write_is_kept_and_conversion_leaves_the_state_alone(what: str, with_inputs: bool) -> None:
    found = []
    for converted in (False, True):
        PROGRAM.fill_(1)
        torch.manual_seed(0)
        model = Stateful(STATE[what])
        before = model.contents()
        module = fxamp.convert(model, one() if with_inputs else None, policy="O0") if converted else model
        if what != "of the program":  # the twins of the check write to it too
            assert_same(model.contents(), before)
        PROGRAM.fill_(1)
        outputs = [module(example()) for _ in range(3)]
        (outputs[-1].sum() + sum(model.losses, torch.zeros(()))).backward()
        gradients = [p.grad for p in model.parameters()]
        found.append((outputs, model.contents(), model.last, len(model.losses), gradients, sorted(model.state_dict())))
    assert_same(found[1], found[0])


def test_a_loss_that_is_kept_trains_as_under_autocast() -> None:
    torch.manual_seed(0)
    model = Stateful(kept_loss)
    expected = copy.deepcopy(model)
    fxamp.convert(model, one(), policy="O1,dtype=bf16")(example())
    with torch.autocast("cpu", torch.bfloat16):
        expected(example())
    assert torch.equal(model.last, expected.last)
    model.last.backward()
    expected.last.backward()
    assert_same(model.l.weight.grad, expected.l.weight.grad)


# Where a decision comes from.


def activated(x: Tensor) -> Tensor:
    return x.exp()  # the line of the function


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)

    def attend(self, x: Tensor) -> Any:
        weights = x @ x.mT  # the line of the product
        return weights @ self.l(x)  # the line of the layer

    def forward(self, x: Tensor) -> Any:
        return activated(self.attend(x))


def test_a_decision_names_the_line_of_the_method_or_function_that_made_the_node() -> None:
    plan = fxamp.plan(Attends(), one(), policy="O1,dtype=bf16")
    said = {d.key: d.source.rpartition("# the line of the ")[2] for d in plan.decisions}
    assert said["/matmul#0"] == "product"
    assert said["l/linear#0"] == said["/matmul#1"] == "layer"
    assert said["/exp#0"] == "function"


def test_what_autocast_would_give_is_given_in_both_modes() -> None:
    model = norms()
    view = fxamp.convert(model, one(), policy="O1,dtype=bf16").eval()
    assert torch.equal(view(example()), under_autocast(model, one()).float())


NOWHERE = """
import torch
SCALE = 2.0
def doubled(x):
    return x * SCALE
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.l = torch.nn.Linear(6, 6)
    def forward(self, x):
        return doubled(self.l(x)) + SCALE
"""


@pytest.mark.parametrize("name", ["nowhere_to_be_found", "json", None])
def test_a_model_of_a_module_that_python_cannot_import_reads_its_own_globals(name: str | None) -> None:
    scope: dict[str, Any] = {} if name is None else {"__name__": name}
    exec(NOWHERE, scope)
    model, x = scope["Model"](), example()
    view = fxamp.convert(model, (x,), policy="O0")
    assert torch.equal(view(x), model(x))
    scope["SCALE"] = 3.0
    assert torch.equal(view(x), model(x))


class Tables(nn.Module):
    """Has a tensor in a plain attribute, as old code has positions and masks, in itself and in a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l, self.places = nn.Linear(6, 6), torch.arange(6.0)
        self.l.table = torch.ones(6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.l(x) * self.l.table + self.places
        return out


def test_tensors_in_plain_attributes_are_attributes_of_the_graph_which_is_called_with_the_inputs_alone() -> None:
    x = torch.randn(4, 6)
    view = fxamp.convert(Tables(), (x,), policy="O1,dtype=bf16")
    (graph,) = fxamp.graphs(view)
    read = {str(n.target) for n in graph.graph.nodes if n.op == "get_attr"}
    assert read == {"l.weight", "l.bias", "l.table", "places"}
    assert torch.equal(graph(x)[0], view(x))
    assert not fxamp.diff(fxamp.convert(Tables(), (x,), policy="O1,dtype=bf16"), view)
    assert "places" not in view.state_dict()
    assert str(fxamp.report(view))

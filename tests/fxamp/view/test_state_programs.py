"""Programs whose Python state changes between calls: a view follows each of them, or refuses where that is asked.

Each program is a model and a change; its conversion is called before and after the change, captured with inputs or at
the first call. At O0 what it gives is what the model gives, bit for bit.
"""

from __future__ import annotations

import contextvars
import copy
import itertools
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fxamp
from tests.support.front_ends import FRESH
from tests.support.helpers import OLD_DYNAMO, Layers, in_turns

pytestmark = FRESH

X = torch.linspace(-1, 1, 24).view(4, 6)
GLOBAL = 2.0
TABLE = {"scale": 2.0}
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=2.0)
LOCAL = threading.local()
LOCAL.scale = 2.0


class Kind(Enum):
    SUM = 1
    MEAN = 2


@dataclass
class Config:
    scale: float = 2.0
    inner: dict[str, list[float]] = field(default_factory=lambda: {"scales": [2.0, 3.0]})


class Slots:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


# What is computed, what the model holds, and what changes between two calls.
Program = tuple[Callable[[Any, Tensor], Tensor], dict[str, Any], Callable[[Any], None]]


class Model(nn.Module):
    """A layer whose output a program changes by what it reads."""

    shared = 2.0  # of the class

    def __init__(self, program: Callable[[Any, Tensor], Tensor], **state: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(6, 6)
        self.program = program
        self.__dict__.update(state)

    def forward(self, x: Tensor) -> Any:
        return self.program(self, self.l(x))


def _closure() -> Program:
    scale = 2.0

    def program(self: Any, h: Tensor) -> Tensor:
        return h * scale

    def change(_: Any) -> None:
        nonlocal scale
        scale = 5.0

    return program, {}, change


def _counting_closure() -> Callable[[Any, Tensor], Tensor]:
    calls = 0

    def program(self: Any, h: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return h * calls

    return program


def every_fifth(self: Any, h: Tensor) -> Tensor:
    self.calls += 1
    return h.relu() if self.calls % 5 == 0 else h


def counter_in(get: Callable[[Any], Any], name: str) -> Callable[[Any, Tensor], Tensor]:
    def program(self: Any, h: Tensor) -> Tensor:
        holder = get(self)
        setattr(holder, name, getattr(holder, name) + 1)
        return h * getattr(holder, name)

    return program


def counter_in_array(self: Any, h: Tensor) -> Tensor:
    self.array[0] += 1
    return h * float(self.array[0])


def in_eval(self: Any, h: Tensor) -> Tensor:
    if not self.training:
        self.calls += 1
    return h * (self.calls + 1)


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        *before, last = path.split(".")
        for name in before:
            model = getattr(model, name)
        setattr(model, last, value)

    return change


def _nothing(_: Any) -> None: ...


def _do(call: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda model: (call(model), None)[1]


def _global(model: Any) -> None:
    globals()["GLOBAL"] = 5.0


def _with_hook(kind: str) -> Callable[[Any], None]:
    hooks: dict[str, Callable[[Any], Any]] = {
        "forward": lambda m: m.l.register_forward_hook(lambda m, a, o: o * 3),
        "pre": lambda m: m.l.register_forward_pre_hook(lambda m, a: (a[0] * 3,)),
        "root": lambda m: m.register_forward_hook(lambda m, a, o: o * 3),
        "kwargs": lambda m: m.l.register_forward_hook(lambda m, a, k, o: o * 3, with_kwargs=True),
    }
    return _do(hooks[kind])


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


_HELD = Config()
REGISTRY = weakref.WeakValueDictionary[str, Config](config=_HELD)

# Made anew for each run, where the state is not the model's.
PROGRAMS: dict[str, Program | Callable[[], Program]] = {
    # The sixteen of the review.
    "every fifth call": (every_fifth, {"calls": 0}, lambda m: None),
    "a counter in eval": (in_eval, {"calls": 0}, lambda m: m.eval()),
    "a nested config": (
        lambda s, h: h * s.config.inner["scales"][0], {"config": Config()},
        lambda m: m.config.inner["scales"].insert(0, 7.0)
    ),
    "a namespace": (lambda s, h: h * s.n.scale, {"n": types.SimpleNamespace(scale=2.0)}, _set("n.scale", 5.0)),
    "slots": (lambda s, h: h * s.slots.scale, {"slots": Slots(2.0)}, _set("slots.scale", 5.0)),
    "a list of objects": (
        lambda s, h: h * s.many[1].scale, {"many": [Config(), Config()]}, lambda m: setattr(m.many[1], "scale", 5.0)
    ),
    "a numpy array": (
        lambda s, h: h * float(s.array[0]), {"array": np.array([2.0])}, lambda m: m.array.__setitem__(0, 5.0)
    ),
    "a global number": (lambda s, h: h * GLOBAL, {}, _global),
    "a counter in a namespace": (counter_in(lambda s: s.n, "calls"), {"n": types.SimpleNamespace(calls=0)}, _nothing),
    "a counter in slots": (counter_in(lambda s: s.slots, "scale"), {"slots": Slots(0.0)}, lambda m: None),
    "itertools.count": lambda: (
        lambda s, h: h * next(s.numbers), {"numbers": itertools.count(1)}, lambda m: None
    ),
    "a counter in an array": (counter_in_array, {"array": np.zeros(1)}, lambda m: None),
    "a counter in a closure": lambda: (_counting_closure(), {}, lambda m: None),
    "a parent's flag in a child": (
        lambda s, h: h * s.children_[0].parent().scale, {"scale": 2.0, "children_": []}, _set("scale", 5.0)
    ),
    # Containers.
    "an item of a dictionary": (lambda s, h: h * s.d["a"], {"d": {"a": 2.0}}, lambda m: m.d.update(a=5.0)),
    "a key of a dictionary": (lambda s, h: h * len(s.d), {"d": {"a": 2.0}}, lambda m: m.d.update(b=5.0)),
    "the order of a dictionary": (
        lambda s, h: h * next(iter(s.d.values())), {"d": OrderedDict(a=2.0, b=5.0)}, lambda m: m.d.move_to_end("a")
    ),
    "a default dictionary": (lambda s, h: h * s.d["a"], {"d": defaultdict(lambda: 2.0)}, lambda m: m.d.update(a=5.0)),
    "a deque": (lambda s, h: h * s.d[0], {"d": deque([2.0, 5.0])}, lambda m: m.d.rotate(1)),
    "a set": (lambda s, h: h * 2 if "a" in s.d else h, {"d": {"b"}}, lambda m: m.d.add("a")),
    "a tuple": (lambda s, h: h * s.d[0], {"d": (2.0,)}, _set("d", (5.0,))),
    "a slice": (lambda s, h: h[:, s.at], {"at": slice(0, 4)}, _set("at", slice(1, 3))),
    "a string": (lambda s, h: getattr(h, s.name)(), {"name": "relu"}, _set("name", "tanh")),
    "an enum": (lambda s, h: h.sum() if s.kind is Kind.SUM else h.mean(), {"kind": Kind.SUM}, _set("kind", Kind.MEAN)),
    "a dtype": (lambda s, h: h.to(s.dtype), {"dtype": torch.float32}, _set("dtype", torch.float64)),
    "a bool": (lambda s, h: h.relu() if s.flag else h, {"flag": False}, _set("flag", True)),
    "None": (lambda s, h: h if s.none is None else h * s.none, {"none": None}, _set("none", 5.0)),
    "a tensor attribute": (lambda s, h: h * s.t, {"t": torch.tensor(2.0)}, _set("t", torch.tensor(5.0))),
    "a tensor written in place": (lambda s, h: h * s.t, {"t": torch.tensor(2.0)}, lambda m: m.t.mul_(3)),
    "a tensor in a list": (
        lambda s, h: h * s.t[0], {"t": [torch.tensor(2.0)]}, lambda m: m.t.__setitem__(0, torch.tensor(5.0))
    ),
    "a numpy number": (lambda s, h: h * s.n, {"n": np.float32(2.0)}, _set("n", np.float32(5.0))),
    # Elsewhere.
    "a closure": _closure,
    "a global dictionary": (lambda s, h: h * TABLE["scale"], {}, lambda m: TABLE.update(scale=5.0)),
    "a class attribute": (lambda s, h: h * s.shared, {}, lambda m: setattr(Model, "shared", 5.0)),
    "an attribute over a class's": (lambda s, h: h * s.shared, {}, _set("shared", 7.0)),
    "a context variable": (lambda s, h: h * CONTEXT.get(), {}, _do(lambda m: CONTEXT.set(5.0))),
    "a thread's own": (lambda s, h: h * LOCAL.scale, {}, lambda m: setattr(LOCAL, "scale", 5.0)),
    "a weak dictionary": (lambda s, h: h * REGISTRY["config"].scale, {}, lambda m: setattr(_HELD, "scale", 5.0)),
    "a function": (lambda s, h: s.f(h), {"f": torch.relu}, _set("f", torch.tanh)),
    "a method of another class": (lambda s, h: s.f(h), {"f": Doubled().forward}, lambda m: setattr(m, "f", torch.neg)),
    "a partial": (lambda s, h: s.f(h), {"f": lambda h: h * 2}, lambda m: setattr(m, "f", lambda h: h * 5)),
    "the default of a function": lambda: (
        lambda s, h: s.f(h), {"f": (lambda h, scale=2.0: h * scale)}, lambda m: setattr(m.f, "__defaults__", (5.0,))
    ),
    # torch's own.
    "a layer replaced": (lambda s, h: s.l(h), {}, lambda m: setattr(m, "l", nn.Linear(6, 6))),
    "a layer's flag": (lambda s, h: h, {}, lambda m: m.l.register_parameter("bias", None)),
    "a parametrization": (
        lambda s, h: h, {}, _do(lambda m: parametrize.register_parametrization(m.l, "weight", Doubled()))
    ),
    "the mode": (lambda s, h: h if s.training else h * 3, {}, lambda m: m.eval()),
    "the mode of a child": (lambda s, h: h if s.l.training else h * 3, {}, lambda m: m.l.eval()),
    "grad mode": (lambda s, h: h if torch.is_grad_enabled() else h * 3, {}, lambda m: None),
    "a frozen parameter": (
        lambda s, h: h if s.l.weight.requires_grad else h * 3, {}, lambda m: m.requires_grad_(False)
    ),
    "a parameter written": (lambda s, h: h, {}, lambda m: m.l.weight.data.mul_(2)),
    "a state loaded": (lambda s, h: h, {}, lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()})),
    "a state assigned": (
        lambda s, h: h, {}, lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True)
    ),
    **{f"a {kind} hook": (lambda s, h: h, {}, _with_hook(kind)) for kind in ("forward", "pre", "root", "kwargs")},
}  # fmt: skip


# Those whose state the twins of the check would advance too, since it is not copied with the model.
OUTSIDE = {"a counter in a closure", "itertools.count", "a parent's flag in a child"}
# Those that torch.compile alone does not follow: Dynamo does not guard the order of an OrderedDict.
NOT_DYNAMOS = {"the order of a dictionary", *(["a counter in a closure", "a frozen parameter"] if OLD_DYNAMO else ())}


def _reset() -> None:
    globals()["GLOBAL"] = TABLE["scale"] = LOCAL.scale = _HELD.scale = Model.shared = 2.0
    CONTEXT.set(2.0)


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    """Put back what programs change outside of their models."""
    _reset()
    yield
    _reset()


def _outputs(name: str, convert: Callable[[Model], Any]) -> list[Tensor]:
    """Call a converted model three times, change the model itself, and call three times again."""
    _reset()
    torch.manual_seed(1)
    made = PROGRAMS[name]
    program, state, change = made() if callable(made) else made
    held = {k: v if isinstance(v, types.FunctionType) else copy.deepcopy(v) for k, v in state.items()}
    model = Model(program, **held)
    if "children_" in held:
        model.__dict__["children_"] = [types.SimpleNamespace(parent=weakref.ref(model))]
    module = convert(model)
    outputs = [module(X).detach().clone() for _ in range(3)]
    with torch.no_grad():
        change(model)
    with torch.set_grad_enabled(name != "grad mode"):
        return [*outputs, *(module(X).detach().clone() for _ in range(3))]


@pytest.mark.parametrize(
    ("name", "with_inputs"),
    [
        *in_turns([*PROGRAMS][::2], [False, True]),
        *(pytest.param(name, given, marks=pytest.mark.matrix) for name in [*PROGRAMS][1::2] for given in (False, True)),
    ],
)
def test_a_view_follows_it(name: str, with_inputs: bool) -> None:
    expected = _outputs(name, lambda model: model)
    inputs = (X,) if with_inputs else None
    settings: Any = {"policy": "O0", "backend": "eager", "check": name not in OUTSIDE}
    got = _outputs(name, lambda model: fxamp.compile(model, inputs, **settings))
    equal = [torch.equal(a, b) for a, b in zip(got, expected, strict=True)]
    if name in NOT_DYNAMOS:
        alone = _outputs(name, lambda model: torch.compile(model, backend="eager"))
        assert [torch.equal(a, b) for a, b in zip(alone, expected, strict=True)] == equal
        return
    assert equal == [True] * 6


def test_a_change_is_refused_where_that_is_asked() -> None:
    model = Model(lambda s, h: h * s.config.inner["scales"][0], config=(config := Config()))
    view = fxamp.compile(model, (X,), policy="O0", backend="eager", on_change="error")
    expected = view(X)
    model.eval()  # another state is no change of the program
    view(X)
    model.train()
    assert torch.equal(view(X), expected)
    config.inner["scales"].insert(0, 7.0)
    with pytest.raises(fxamp.CaptureError, match=r"has changed, and on_change='error'.*scales"):
        view(X)


class Drawing(nn.Module):
    """Masks by NumPy's random numbers, and chooses by them."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.l(x)
        if np.random.rand() < 0.5:
            h = h * 2
        return h * torch.from_numpy(np.random.rand(4) < 0.5)


@pytest.mark.parametrize("kind", [Drawing, lambda: Layers(Drawing.forward, l=nn.Linear(4, 4))], ids=["own", "other"])
def test_random_numbers_of_numpy_are_drawn_from_numpy(kind: Callable[[], nn.Module]) -> None:
    def run(call: Any) -> tuple[list[Tensor], Any, Tensor]:
        np.random.seed(0)
        torch.manual_seed(0)
        return [call(x) for _ in range(5)], str(np.random.get_state()), torch.get_rng_state()

    model, x = kind(), torch.randn(2, 4)
    expected, *states = run(model)
    got, *ours = run(fxamp.convert(model, policy="O0"))
    assert all(map(torch.equal, expected, got))
    assert states[0] == ours[0]
    assert torch.equal(states[1], ours[1])

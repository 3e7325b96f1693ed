"""What is done with a view and with its model afterwards: moved, loaded, copied, saved, hooked, called in all modes."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.view.view import runner_of
from tests.support.front_ends import FRESH
from tests.support.helpers import Layers, TimesHundred, Two, assert_same, example, in_turns, matrix, saved

pytestmark = FRESH
BF16 = "O1,dtype=bf16"
OTHER = "O1,dtype=bf16,modules.m=fp32"  # which autocast does not give


class Net(nn.Module):
    """A model with batch norm, dropout, tied weights, buffers that are saved or not, and a layer that is not read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.m = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.m.weight
        self.unused = nn.Sequential(nn.Linear(2, 2))
        self.scale: Tensor
        self.seen: Tensor
        self.register_buffer("scale", torch.ones(6), persistent=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.seen.add_(1)
        return self.tied(self.m(self.drop(self.norm(self.l(x))))) * self.scale


def run(module: nn.Module, model: nn.Module, x: Tensor, autocast: bool) -> tuple[Any, ...]:
    """Return the output of a call, gradients and buffers; the buffers are put back."""
    kept = [(b, b.clone()) for b in model.buffers()]
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = module(x).float()
    leaves = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(output.square().sum(), leaves, allow_unused=True) if output.requires_grad else ()
    buffers = [b.clone() for b, _ in kept]
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value)
    return output.detach(), gradients, buffers


def follows(view: nn.Module, model: nn.Module, x: Tensor | None = None) -> None:
    """Check a view against its model under autocast, in train and in eval mode, and that its plan ran."""
    x = example() if x is None else x
    for training in (True, False):
        model.train(training)
        assert view.training is training
        assert_same(run(view, model, x, False), run(model, model, x, True))


def made() -> tuple[Net, Any]:
    """Return a model and a view of it that has been called."""
    model = Net()
    view = fxamp.convert(model, policy=BF16)
    assert_same(run(view, model, example(), False), run(model, model, example(), True))
    return model, view


# It is the model.


def test_a_view_has_the_keys_objects_flags_and_signature_of_the_model() -> None:
    model, view = made()
    assert list(view.state_dict()) == list(model.state_dict())
    assert [(n, id(p)) for n, p in view.named_parameters()] == [(n, id(p)) for n, p in model.named_parameters()]
    assert [(n, id(b)) for n, b in view.named_buffers()] == [(n, id(b)) for n, b in model.named_buffers()]
    assert [n for n, m in view.named_modules() if isinstance(m, nn.BatchNorm1d)] == ["norm"]
    assert inspect.signature(view.forward) == inspect.signature(model.forward)
    view.eval()
    assert not model.drop.training
    model.norm.train()
    assert view.norm.training
    assert_same(run(view, model, example(), False), run(model, model, example(), True))


def test_a_sequence_is_indexed_as_the_model_is() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    for view in (fxamp.convert(model), copy.deepcopy(fxamp.convert(model))):
        assert [type(m) for m in view] == [nn.Linear, nn.ReLU, nn.Linear]
        assert (len(view), type(view[-1]), type(view[:1])) == (3, nn.Linear, nn.Sequential)
        first = F.linear(example(), view[0].weight, view[0].bias)
        assert torch.equal(view[0](example()), first)
        assert torch.equal(view[:1](example()), first)


def test_the_class_of_a_view_makes_new_models() -> None:
    class Scaled(Two):
        made = 0

        def __init__(self, scale: float = 1.0) -> None:
            super().__init__()
            Scaled.made += 1
            self.scale = scale

        def forward(self, x: Tensor) -> Any:
            return self.l(x) * self.scale

        @classmethod
        def load(cls, scale: float) -> Scaled:
            return cls(scale)

    view = fxamp.convert(Scaled(), (example(),))
    for new in (type(view)(3.0), view.__class__(scale=3.0), view.load(3.0), type(copy.deepcopy(view))(3.0)):
        assert type(new) is Scaled
        assert torch.equal(new(example()), new.l(example()) * 3.0)
    assert Scaled.made == 5


def optional(self: Any, x: Tensor, y: Tensor | None = None, *more: Tensor, scale: float = 2.0, **rest: Tensor) -> Any:
    out = self.l(x) * scale
    for given in ([] if y is None else [y], more, rest.values()):
        for value in given:
            out = out + value
    return out


def test_every_way_to_call_it_is_the_models() -> None:
    model, x = Two(optional), example()
    view = fxamp.convert(model, (x,), {"scale": 3.0}, policy="O0")
    for args, kwargs in (
        ((x,), {}), ((), {"x": x}), ((x, x), {}), ((x,), {"y": x, "scale": 0.5}), ((x, x, x, x), {"z": x}),
        ((x, None), {"scale": 3}), ((x, x), {"scale": -1.0}),
    ):  # fmt: skip
        assert torch.equal(view(*args, **kwargs), model(*args, **kwargs))
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'x'"):
        view()
    for args, kwargs in (((x,), {"x": x}), ((x, x), {"z": x, "y": x})):
        for module in (model, view):
            with pytest.raises(TypeError, match=rf"optional\(\) got multiple values for argument '{list(kwargs)[-1]}'"):
                module(*args, **kwargs)


# Moved, loaded, tied, frozen, parametrized.


def _assigned(model: nn.Module, view: nn.Module) -> None:
    view.load_state_dict({k: torch.full_like(v, 0.5) for k, v in model.state_dict().items()}, assign=True)


def _loaded(model: nn.Module, view: nn.Module) -> None:
    view.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})


def _old_checkpoint(model: nn.Module, view: nn.Module) -> None:
    state = model.state_dict()
    del state["norm.num_batches_tracked"]
    state._metadata["norm"] = {"version": 1}  # type: ignore[attr-defined]
    view.load_state_dict(state)


def _there_and_back(model: nn.Module, view: nn.Module) -> None:
    view.to("meta")
    assert model.get_parameter("l.weight").is_meta
    assert view(example().to("meta")).is_meta
    view.to_empty(device="cpu")
    model.load_state_dict(Net().state_dict())
    model.get_buffer("scale").fill_(1)


def _double_and_back(model: nn.Module, view: nn.Module) -> None:
    view.double()
    assert torch.equal(view.eval()(example().double()), model(example().double()))
    model.float()


def _low_and_back(model: nn.Module, view: nn.Module) -> None:
    view.half().train()
    with pytest.raises(fxamp.PolicyError, match=r"trainable parameter\(s\) are low already: 'l\.weight' \(float16\)"):
        view(example().half())
    view.float()


def _untied(model: Any, view: nn.Module) -> None:
    model.tied.weight = nn.Parameter(model.m.weight.detach() * 2)


def _retied(model: Any, view: nn.Module) -> None:
    model.l.weight = model.m.weight
    model.requires_grad_(False)  # of a weight that is tied afterwards gradients are summed in another order


def _frozen(model: Any, view: nn.Module) -> None:
    view.get_submodule("l").requires_grad_(False)
    assert not model.l.weight.requires_grad


def _replaced(model: Any, view: nn.Module) -> None:
    model.l = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))


def _momentum(model: Any, view: nn.Module) -> None:
    model.norm.momentum, model.drop.p = 0.5, 0.25


class Trebled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 3


def _weight_norm_of_old(model: Any, view: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model.l)
    model.l.weight_g.data.mul_(2)


def _spectral_norm(model: Any, view: nn.Module) -> None:
    parametrizations.spectral_norm(model.l)
    model.l.eval()


def _norm_and_none(model: Any, view: nn.Module) -> None:
    parametrizations.weight_norm(model.l)
    view(example())
    parametrize.remove_parametrizations(view.get_submodule("l"), "weight")


def _statistics(model: nn.Module, view: nn.Module) -> None:
    torch.optim.swa_utils.update_bn([example(8)], view)


CHANGES: dict[str, Callable[[nn.Module, nn.Module], Any]] = {
    "nothing": lambda m, v: None,
    "a state is loaded": _loaded,
    "a state is assigned": _assigned,
    "an old checkpoint is loaded": _old_checkpoint,
    "moved to meta and back": _there_and_back,
    "double and back": _double_and_back,
    "low and back": _low_and_back,
    "channels last": lambda m, v: v.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "shared memory": lambda m, v: v.share_memory(),
    "weights untied": _untied,
    "weights tied": _retied,
    "a layer frozen": _frozen,
    "all frozen": lambda m, v: v.requires_grad_(False),
    "a layer replaced": _replaced,
    "attributes of layers": _momentum,
    "a parametrization": lambda m, v: parametrize.register_parametrization(v.get_submodule("l"), "weight", Trebled()),
    "weight norm": lambda m, v: parametrizations.weight_norm(m.get_submodule("l")),
    "weight norm of old": _weight_norm_of_old,
    "spectral norm": _spectral_norm,
    "weight norm added and removed": _norm_and_none,
    "statistics anew": _statistics,
    "a written weight": lambda m, v: m.get_parameter("l.weight").data.mul_(2),
}  # fmt: skip
LIKE = (  # each is like another of them
    "all frozen", "double and back", "spectral norm", "weight norm of old", "weight norm added and removed",
    "channels last", "a written weight",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*is_sparse:UserWarning")
@pytest.mark.parametrize("change", [*(c for c in CHANGES if c not in LIKE), *matrix(*LIKE)])
def test_a_view_follows_what_is_done_to_it_or_its_model(change: str) -> None:
    model, view = made()
    CHANGES[change](model, view)
    follows(view, model)
    assert list(view.state_dict()) == list(model.state_dict())


def test_a_parametrization_of_the_root_is_registered_on_the_model() -> None:
    model = Layers(lambda m, x: x @ m.w, w=nn.Parameter(torch.eye(6)))
    view = fxamp.convert(model, (example(),), policy=BF16)
    before = view(example())
    parametrize.register_parametrization(model, "w", Trebled())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(view(example()), model(example()).float())
    assert not torch.equal(view(example()), before)


def test_an_optimizer_that_was_built_before_trains_the_model() -> None:
    models = [Net(), Net()]
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in models]
    view = fxamp.convert(models[0], (example(),), policy=BF16)
    for call, optimizer, autocast in ((view, optimizers[0], False), (models[1], optimizers[1], True)):
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = call(example()).float()
            output.square().mean().backward()
            optimizer.step()
    assert_same(dict(models[0].state_dict()), dict(models[1].state_dict()))
    assert {p.grad.dtype for p in models[0].parameters() if p.grad is not None} == {torch.float32}


# Copied and saved.


AGAIN: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy, "torch.save": saved, "pickle": lambda v: pickle.loads(pickle.dumps(v)),
    "twice": lambda v: saved(copy.deepcopy(v)), "in a list": lambda v: copy.deepcopy(nn.ModuleList([v]))[0],
}  # fmt: skip


MADE_OF_OTHERS = ("twice", "in a list")


@pytest.mark.parametrize(
    ("how", "policy"),
    [
        *in_turns([how for how in AGAIN if how not in MADE_OF_OTHERS], [OTHER, BF16]),
        *(pytest.param(how, policy, marks=pytest.mark.matrix) for how in MADE_OF_OTHERS for policy in (OTHER, BF16)),
    ],
)
def test_a_copy_is_a_view_of_a_copy_and_shares_nothing(how: str, policy: str) -> None:
    model = Net()
    view = fxamp.convert(model, (example(),), policy=policy)
    view.note = "mine"
    view.register_forward_hook(doubled)
    view.eval()
    expected = view(example())
    again = AGAIN[how](view)
    assert isinstance(again, Net)
    assert not again.training
    assert torch.equal(again(example()), expected)
    assert again.m.weight is again.tied.weight
    assert vars(again)["note"] == "mine"
    assert list(again.state_dict()) == list(view.state_dict())
    assert [(d.key, d.colour) for d in fxamp.plan_of(again).decisions] == [
        (d.key, d.colour) for d in fxamp.graphs(view)[-1].meta["fxamp"]["plan"].decisions
    ]
    before = model.l.weight.detach().clone()
    with torch.no_grad():
        again.l.weight.zero_()
    assert torch.equal(model.l.weight, before)
    assert not torch.equal(again(example()), expected)
    again.train()
    assert not model.training


def doubled(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2


def test_a_shallow_copy_shares_the_parameters_and_copies_keep_ties_with_the_model() -> None:
    model, view = made()
    shallow = copy.copy(view)
    assert shallow.l.weight is model.l.weight
    follows(shallow, runner_of(shallow).model)
    both: Any = copy.deepcopy(nn.ModuleList([view, model]))
    assert both[0].l.weight is both[1].l.weight
    assert runner_of(both[0]).model is both[1]


def test_a_replayed_plan_goes_with_a_copy() -> None:
    plan = fxamp.plan(Two(), (example(),), policy=OTHER)
    view = fxamp.convert(Two(), plan=plan)
    again = saved(view)
    assert torch.equal(again(example()), view(example()))
    assert [d.colour for d in fxamp.plan_of(again).decisions] == ["bfloat16", "float32"]


def with_regions(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", enabled=False):
        y = self.l(x)
    with torch.no_grad():
        z = self.m(y)
    return y + self.m(z)


def with_a_branch(self: Any, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda t: self.m(t), lambda t: t * 2, (self.l(x),))


def with_a_function(self: Any, x: Tensor) -> Any:
    return self.m(TimesHundred.apply(self.l(x), 0.5))  # type: ignore[no-untyped-call]


def with_a_checkpoint(self: Any, x: Tensor) -> Any:
    return self.m(checkpoint(self.l, x, use_reentrant=False))


ALL = ("pickle", "deepcopy", "export")
GRAPHS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {  # torch exports no checkpoint
    "layers": (lambda self, x: self.m(F.layer_norm(F.gelu(self.l(x)), (6,))), ALL),
    "regions": (with_regions, ALL),
    "a branch": (with_a_branch, ALL),
    "a function": (with_a_function, ("pickle", "deepcopy")),
    "a checkpoint": (with_a_checkpoint, ("pickle", "deepcopy")),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("what", "policy"), in_turns(GRAPHS, [OTHER, BF16]))
def test_a_graph_of_a_view_is_called_pickled_copied_exported_and_printed(what: str, policy: str) -> None:
    forward, ways = GRAPHS[what]
    torch.manual_seed(0)
    model, x = Two(forward).requires_grad_(what != "a branch"), example()
    view = fxamp.convert(model, (x,), policy=policy)
    expected = view(x)
    [graph] = fxamp.graphs(view)
    rows = ({0: torch.export.Dim.DYNAMIC},)  # torch cannot export a branch that is given a number
    again: dict[str, Callable[[], Any]] = {
        "pickle": lambda: pickle.loads(pickle.dumps(graph)), "deepcopy": lambda: copy.deepcopy(graph),
        "export": lambda: torch.export.export(graph, (x,), dynamic_shapes=rows, strict=False).module(),
    }  # fmt: skip
    for module in (graph, *(again[way]() for way in ways)):
        assert torch.equal(module(x)[0], expected)
    for way in {"pickle", "deepcopy"} & set(ways):
        assert fxamp.plan_of(again[way]()) == fxamp.plan_of(view)
    assert dict(graph.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert "linear" in graph.print_readable(print_output=False)


# Hooks.

KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "forward": (nn.Module.register_forward_hook, nn.modules.module.register_module_forward_hook),
    "forward pre": (nn.Module.register_forward_pre_hook, nn.modules.module.register_module_forward_pre_hook),
    "backward": (nn.Module.register_full_backward_hook, nn.modules.module.register_module_full_backward_hook),
    "backward pre": (
        nn.Module.register_full_backward_pre_hook, nn.modules.module.register_module_full_backward_pre_hook,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "when", "whose"), in_turns(KINDS, ["before", "later"], ["root", "child", "view", "all"])
)
def test_a_hook_fires_at_each_call_until_it_is_removed(kind: str, when: str, whose: str) -> None:
    model, x, seen = Two(), example(), list[int]()
    view = fxamp.convert(model, policy=BF16)
    if when == "later":
        view(x).sum().backward()
    on, on_all = KINDS[kind]
    hook = lambda *_: seen.append(1)  # noqa: E731
    handle = on_all(hook) if whose == "all" else on({"root": model, "child": model.l, "view": view}[whose], hook)
    try:
        counts = []
        for module in (view, view, model):
            seen.clear()
            module(x.clone().requires_grad_()).sum().backward()
            counts.append(len(seen))
    finally:
        handle.remove()
    more = (
        1 if whose == "all" and kind.startswith("backward") else 0
    )  # what Dynamo inlines of Python's own module calls
    assert counts[0] == counts[1]
    assert counts[2] <= counts[0] <= counts[2] + more
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x).float()
    seen.clear()
    assert torch.equal(view(x), expected)
    assert not seen


def test_a_hook_with_keywords_changes_inputs_and_output() -> None:
    model, x = Two(), example()
    view = fxamp.convert(model, (x,), policy=BF16)
    view(x)
    view.register_forward_pre_hook(lambda m, args, kwargs: (tuple(a * 3 for a in args), kwargs), with_kwargs=True)
    view.register_forward_hook(lambda m, args, kwargs, output: output * 2, with_kwargs=True, always_call=True)
    model.l.weight.register_hook(lambda g: g * 5)
    assert_same(run(view, model, x, False), run(model, model, x, True))


# Modes.


def by_mode(self: Any, x: Tensor) -> Any:
    h = self.l(x) if self.training else self.m(x)
    return h * 2 if torch.is_grad_enabled() else h.relu()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_every_state_has_its_graph_and_its_kind_of_output(backend: str) -> None:
    model, x = Two(by_mode), example()
    view = fxamp.convert(model, (x,), policy=BF16, backend=backend)
    for _ in range(2):
        for training in (True, False):
            for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                view.train(training)
                with context():
                    got = view(x)
                    with torch.autocast("cpu", torch.bfloat16):
                        expected = model(x).float()
                assert torch.equal(got, expected)
                assert (got.requires_grad, got.is_inference()) == (expected.requires_grad, expected.is_inference())
    states = [str(graph.meta["fxamp"]["state"]) for graph in fxamp.graphs(view)]
    assert (len(states), states[0]) == (len(set(states)), "train, grad")


def test_after_inference_mode_a_call_has_gradients_and_other_inputs_are_taken() -> None:
    model, x = Two(), example()
    view = fxamp.convert(model, policy=BF16)
    with torch.inference_mode():
        expected, made_inside = view(x), x * 1
    got = view(x)
    got.sum().backward()
    assert torch.equal(got, expected)
    with torch.no_grad():
        assert torch.equal(view(made_inside), expected)


def test_transforms_and_swapped_parameters() -> None:
    torch.manual_seed(0)
    model, x = Two(lambda self, x: self.m(F.layer_norm(F.gelu(self.l(x)), (6,)))), example()
    view = fxamp.convert(model, (x,), policy=BF16)
    values = {name: p.detach() for name, p in view.named_parameters()}

    def loss(module: nn.Module) -> Callable[..., Any]:
        return lambda values, row: functional_call(module, values, (row[None],)).float().square().sum()

    got = vmap(grad(loss(view)), in_dims=(None, 0))(values, x)
    twice = functional_call(view, {name: value * 2 for name, value in values.items()}, (x,))
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(got, vmap(grad(loss(model)), in_dims=(None, 0))(values, x))
        assert torch.equal(twice, functional_call(model, {n: v * 2 for n, v in values.items()}, (x,)).float())
        assert torch.equal(view(x), model(x).float())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_round_a_view_has_its_gradients_and_draws_the_same_mask(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 6))
    view = fxamp.convert(model, (example(),), policy=OTHER.replace("modules.m", "modules.2"))
    found = []
    for call in (view, lambda x: checkpoint(view, x, use_reentrant=reentrant)):
        torch.manual_seed(3)
        x = example().requires_grad_()
        output = call(x)
        output.square().sum().backward()
        found.append((output.detach(), x.grad, [p.grad for p in model.parameters()]))
        model.zero_grad()
    assert_same(found[0], found[1])


# Sizes.


def by_size(self: Any, x: Tensor, y: Tensor) -> Any:
    return self.l(x) * 2 + y if x.shape[0] > 3 else self.l(x)


def sizes(self: Any, x: Tensor, y: Tensor) -> Any:
    return self.l(x), torch.broadcast_shapes(x.shape, (1, 6)), [x.shape, (x.shape[0], "rows"), x.shape[0] * 2]


def pooled() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)


def tensors(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) for shape in shapes)


# The model, shapes of inputs, and how many graphs there are afterwards.
SIZES: dict[str, tuple[Callable[[], nn.Module], list[tuple[tuple[int, ...], ...]], int]] = {
    "batches": (Two, [((4, 6),), ((2, 6),), ((9, 6),), ((1, 6),), ((0, 6),), ((3, 6),)], 3),
    "two that share a size": (lambda: Two(by_size), [((r, 6), (r, 6)) for r in (4, 6, 2, 3, 1, 5)], 3),
    "two that do not": (lambda: Two(by_size), [((2, 6), (5, 6)), ((3, 6), (4, 6)), ((2, 6), (2, 6))], 3),
    "sizes returned": (lambda: Two(sizes), [((r, 6), (r, 6)) for r in (4, 7, 1)], 2),
    "images": (pooled, [((2, 3, 9, 11),), ((5, 3, 9, 11),), ((5, 3, 12, 8),), ((1, 3, 7, 7),)], 3),
    "lengths": (encoder, [((2, 5, 6),), ((3, 8, 6),), ((3, 9, 6),), ((1, 1, 6),)], 3),
}  # fmt: skip


@pytest.mark.parametrize("what", SIZES)
def test_other_sizes_are_taken_with_few_graphs(what: str) -> None:
    torch.manual_seed(0)
    build, shapes, most = SIZES[what]
    model = build()
    view = fxamp.convert(model, tensors(*shapes[0]), policy="O0")
    for given in shapes:
        got, expected = view(*tensors(*given)), model(*tensors(*given))
        assert_same(got, expected)
        if what == "sizes returned":
            assert [type(v) for v in (got[1], got[2][0])] == [torch.Size] * 2
    assert len(runner_of(view).graphs) <= most


@pytest.mark.parametrize(("dynamic", "graphs"), [(None, 1), (True, 1), (False, 3)])
def test_dynamic_says_what_another_batch_costs(dynamic: bool | None, graphs: int) -> None:
    view = fxamp.convert(Two(), (example(),), policy=BF16, dynamic=dynamic)
    for rows in (4, 2, 3):
        assert view(example(rows)).shape == (rows, 6)
    assert len(runner_of(view).graphs) == graphs


def test_what_marks_a_batch_is_gone_after_a_call_and_a_mark_of_the_users_stays() -> None:
    x, marked = example(), example()
    torch._dynamo.maybe_mark_dynamic(marked, 1)
    before = copy.deepcopy(marked.__dict__)
    view = fxamp.convert(Two(), (x,), policy=BF16)
    for given in (x, example(3), x, example(5)):
        view(given)
        assert not given.__dict__
    assert len(runner_of(view).graphs) == 1
    fxamp.convert(Two(), (marked,), policy=BF16)(marked)
    assert marked.__dict__ == before


def test_a_batch_of_one_has_no_variance_to_normalise_by() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    view = fxamp.convert(model, (example(),), policy=BF16)
    own = copy.deepcopy(model)
    for call in (own, view):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            call(example(1))
    assert_same(dict(model.named_buffers()), dict(own.named_buffers()))  # the batch is counted before the op raises
    follows(view, model)


class Broken(nn.Module):
    """Two layers, with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l, self.m = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        torch._dynamo.graph_break()
        out: Tensor = self.m(h)
        return out


def test_hooks_registered_later_are_followed_below_a_graph_break() -> None:
    model, x = Broken(), example()
    view = fxamp.convert(model, policy=BF16)

    def equal() -> bool:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.equal(model(x).float(), view(x))

    assert equal()
    handle = model.m.register_forward_hook(lambda module, args, output: output * 2)
    assert equal()
    handle.remove()
    assert equal()
    model.l.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert equal()


@pytest.mark.parametrize(
    "hook",
    [lambda g: g * 2, lambda g: None, lambda g: torch.tanh(g.float()).to(g.dtype)],
    ids=["changes", "looks", "casts"],
)
@pytest.mark.parametrize("way", ["O0", BF16])
def test_a_hook_on_a_value_inside_forward_runs(way: str, hook: Callable[[Tensor], Any]) -> None:
    def hooks(self: Any, x: Tensor) -> Tensor:
        h: Tensor = self.l(x)
        h.register_hook(hook)
        out: Tensor = self.m(h)
        return out

    model, x = Two(hooks), example()
    with torch.autocast("cpu", torch.bfloat16, enabled=way != "O0"):
        output = model(x)
    output.float().sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    fxamp.convert(model, policy=way)(x).sum().backward()
    assert_same([p.grad for p in model.parameters()], expected)


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_hook_that_broke_the_graph_leaves_nothing_broken_when_it_is_removed(everywhere: bool) -> None:
    model, x = Two(), example().requires_grad_()
    view = fxamp.convert(model, policy=OTHER)
    expected = view(x)

    def hook(*_: Any) -> None:
        pass

    on_all = nn.modules.module.register_module_full_backward_hook
    handle = on_all(hook) if everywhere else model.m.register_full_backward_hook(hook)
    try:
        view(x).sum().backward()
    finally:
        handle.remove()
    for _ in range(2):
        assert torch.equal(view(x), expected)
    assert fxamp.census(view, x)


def test_a_view_compiles_by_the_arguments_of_torch_and_refuses_what_there_is_not() -> None:
    model, x = Two(), example()
    view = fxamp.convert(model, (x,), policy=OTHER)
    expected = view(x)
    for settings in ({"fullgraph": True}, {"dynamic": True}, {"disable": True}, {"dynamic": False, "mode": None}):
        view.compile(**{"backend": "aot_eager", **settings})
        assert torch.equal(view(x), expected)
    for backend in ("nonsense", "fxamp"):
        with pytest.raises(fxamp.PolicyError, match=backend):
            view.compile(backend=backend)
    with pytest.raises(TypeError, match="nonsense"):
        view.compile(nonsense=True)
    assert torch.equal(view(x), expected)


def test_training_and_evaluation_in_turns_warn_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    view = fxamp.convert(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), policy="O1,dtype=bf16")
    with caplog.at_level("INFO", logger="fxamp"):
        for rows in (4, 6, 3, 5):
            view(torch.randn(rows, 8)).sum().backward()
            with torch.no_grad():
                view(torch.randn(rows + 7, 8))
    said = [record.getMessage() for record in caplog.records if "another graph now" in record.getMessage()]
    assert said
    assert not [r for r in caplog.records if r.levelname == "WARNING" or "grad_mode" in r.getMessage()]

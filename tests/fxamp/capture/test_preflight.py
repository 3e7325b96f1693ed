"""Every construct that a front end is known to lose is kept to the bit or refused by name, with file and line."""

from __future__ import annotations

import copy
import re
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from passes.contract.errors import NotFaithfulError
from tests.support.front_ends import WARNINGS, assert_eager, convert, fresh
from tests.support.helpers import (
    FRONT_ENDS,
    Two,
    assert_is_eager,
    assert_untouched,
    convert_fixed,
    example,
    fingerprint,
    o0,
)

pytestmark = WARNINGS
__all__ = ["fresh"]


def no_grad_region(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.l(x)
    return self.m(y) + y


class DecoratedNoGrad(Two):
    @torch.no_grad()
    def target(self, x: Tensor) -> Tensor:
        return self.l(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.m(self.target(x))


def set_grad(self: Any, x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    y = self.l(x)
    torch.set_grad_enabled(True)
    return self.m(y)


def enable_grad(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad(), torch.enable_grad():
        return self.m(self.l(x))


def inference_region(self: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = self.l(x)
    return self.m(y.clone())


def autocast_off(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y = self.l(x.float())
    return self.m(y)


def autocast_on(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = self.l(x)
        with torch.autocast("cpu", enabled=False):
            y = self.m(y.float())
    return self.m(y)


class TimesHundred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 100


def function(self: Any, x: Tensor) -> Tensor:
    return TimesHundred.apply(self.l(x))  # type: ignore[no-untyped-call]


times_hundred_in_c = super(torch.autograd.Function, TimesHundred).apply  # as `TimesHundred.apply` is from torch 2.15 on


def function_bound_early(self: Any, x: Tensor) -> Tensor:
    return times_hundred_in_c(self.l(x))  # type: ignore[no-untyped-call]


def checkpointed(self: Any, x: Tensor) -> Tensor:
    return checkpoint(self.m, self.l(x), use_reentrant=False)


def checkpointed_reentrant(self: Any, x: Tensor) -> Tensor:
    return checkpoint(self.m, self.l(x), use_reentrant=True)


def checkpointed_by_path(self: Any, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(self.m, self.l(x), use_reentrant=False)


def saved_tensors(self: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return self.m(self.l(x))


def functional_dropout(self: Any, x: Tensor) -> Tensor:
    return F.dropout(self.l(x), 0.3, self.training)


def optional_mask(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    y = self.l(x)
    return y if mask is None else y * mask


def torch_is_tensor(self: Any, x: Any) -> Tensor:
    return self.l(x) if torch.is_tensor(x) else self.l(x) * 2


def set_storage(self: Any, x: Tensor) -> Tensor:
    self.k.running_mean.set_(self.l(x).detach())
    return self.m(self.k.running_mean)


def is_tensor(self: Any, x: Any) -> Tensor:
    return self.l(x) if isinstance(x, Tensor) else self.l(x) * 2


def relative_cast(self: Any, x: Tensor) -> Tensor:
    return self.l(x).float().to(x.dtype)


def finfo_min(self: Any, x: Tensor) -> Tensor:
    return self.l(x).masked_fill(x > 0, torch.finfo(x.dtype).min)


def dtype_branch(self: Any, x: Tensor) -> Tensor:
    return self.l(x) * 2 if x.dtype == torch.float16 else self.l(x)


def literal_cast(self: Any, x: Tensor) -> Tensor:
    return self.l(x.float()).float()


def data_dependent(self: Any, x: Tensor) -> Tensor:
    return self.l(x) if x.sum() > 0 else self.m(x)


def boolean_index(self: Any, x: Tensor) -> Tensor:
    return self.l(x)[x > 0]


def in_place(self: Any, x: Tensor) -> Tensor:
    y = self.l(x) * 1
    y.mul_(self.m(x)).add_(1)
    y += 1
    return y


def set_item(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    y[0] = 1.0
    y[1:, :2] = self.m(x)[1:, :2]
    return self.m(y)


def tensor_hook(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    y.register_hook(lambda g: g * 3)
    return self.m(y)


def data_assignment(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    y.data = x * 2
    return self.m(y)


def factories(self: Any, x: Tensor) -> Tensor:
    return self.l(x) + torch.zeros(x.shape[0], 6) + torch.arange(6) + torch.full((x.shape[0], 1), 2.0) + torch.rand(6)


def literal_tensor(self: Any, x: Tensor) -> Tensor:
    return self.l(x) + torch.tensor([1.0, 2, 3, 4, 5, 6])


def out_argument(self: Any, x: Tensor) -> Tensor:
    held = torch.empty_like(x)
    torch.mul(x, 2.0, out=held)
    return self.l(held)


def shared_twice(self: Any, x: Tensor) -> Tensor:
    return self.l(torch.relu(self.l(x)))


def several_outputs(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    a, b = self.l(x).chunk(2, dim=1)
    values, indices = torch.max(a, dim=1)
    pieces = b.split(1, dim=1)
    return values, indices, pieces[2], pieces[0]


def tied() -> nn.Module:
    model = Two()
    model.m.weight = model.l.weight
    return model


def parametrized() -> nn.Module:
    model = Two()
    nn.utils.parametrizations.weight_norm(model.l)
    return model


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.cells = kind(6, 5, batch_first=True, **options)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x)[0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)


def sequence() -> tuple[Tensor]:
    return (torch.randn(4, 7, 6, generator=torch.Generator().manual_seed(0)),)


def one() -> tuple[Tensor]:
    return (example(),)


def pair() -> tuple[Tensor, Tensor]:
    return example(), example() * 2


# (model, inputs, what fx says, what export says); None: it is kept.
TABLE: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]], str | None, str | None]] = {
    "no_grad": (partial(Two, no_grad_region), one, "a torch.no_grad region at", None),
    "no_grad decorator": (DecoratedNoGrad, one, "a torch.no_grad region at", None),
    "set_grad_enabled": (partial(Two, set_grad), one, "torch.set_grad_enabled at", None),
    "enable_grad": (partial(Two, enable_grad), one, "region at", None),
    "inference_mode": (
        partial(Two, inference_region), one, "a torch.inference_mode region", "a torch.inference_mode region",
    ),
    "autocast off": (partial(Two, autocast_off), one, "a torch.autocast region at", None),
    "autocast on": (partial(Two, autocast_on), one, "a torch.autocast region at", None),
    "autograd.Function": (partial(Two, function), one, "'TimesHundred'.*backward", None),
    "autograd.Function bound early": (
        partial(Two, function_bound_early), one, "'TimesHundred'.*backward", "'TimesHundred'.*backward",
    ),
    "checkpoint": (partial(Two, checkpointed), one, "checkpoint.checkpoint at", "checkpoint.checkpoint at"),
    "reentrant checkpoint": (
        partial(Two, checkpointed_reentrant), one, "checkpoint.checkpoint at", "checkpoint.checkpoint at",
    ),
    "checkpoint by path": (
        partial(Two, checkpointed_by_path), one, "checkpoint.checkpoint at", "checkpoint.checkpoint at",
    ),
    "saved-tensor hooks": (partial(Two, saved_tensors), one, "saved_tensors_hooks at", "saved_tensors_hooks at"),
    "F.dropout": (partial(Two, functional_dropout), one, None, None),
    "nn.Dropout, nn.BatchNorm": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout()), one, None, None,
    ),
    "mask=None": (partial(Two, optional_mask), one, None, None),
    "mask given": (partial(Two, optional_mask), pair, None, None),
    "isinstance": (partial(Two, is_tensor), one, r"isinstance\(\) on a traced value at", None),
    "torch.is_tensor": (partial(Two, torch_is_tensor), one, r"is_tensor\(\) on a traced value at", None),
    "Tensor.set_": (lambda: Two(set_storage, k=nn.BatchNorm1d(6)), one, "Tensor.set_ at", None),
    "x.to(x.dtype)": (partial(Two, relative_cast), one, None, None),
    "torch.finfo(x.dtype)": (partial(Two, finfo_min), one, "torch.finfo on the dtype of .*test_preflight", None),
    "if x.dtype == float16": (partial(Two, dtype_branch), one, "control flow", None),
    ".float()": (partial(Two, literal_cast), one, None, None),
    "data-dependent if": (partial(Two, data_dependent), one, "control flow", "data-dependent"),
    "x[x > 0]": (partial(Two, boolean_index), one, None, None),
    "in-place": (partial(Two, in_place), one, None, None),
    "y[0] = v": (partial(Two, set_item), one, None, None),
    "tensor hook": (partial(Two, tensor_hook), one, "would not call it", "Tensor.register_hook at"),
    "y.data = v": (partial(Two, data_assignment), one, "assigns .data", "."),
    "factories": (partial(Two, factories), one, None, None),
    "literal tensor": (partial(Two, literal_tensor), one, None, None),
    "out=": (partial(Two, out_argument), one, None, None),
    "shared module": (partial(Two, shared_twice), one, None, None),
    "several outputs": (partial(Two, several_outputs), one, None, None),
    "tied weights": (tied, one, None, None),
    "parametrized": (parametrized, one, None, None),
    "nn.LSTM": (partial(Recurrent, nn.LSTM), sequence, None, None),
    "nn.RNN": (partial(Recurrent, nn.RNN), sequence, None, None),
    "nn.GRU": (partial(Recurrent, nn.GRU), sequence, None, None),
    "nn.MultiheadAttention": (Attention, sequence, None, None),
}  # fmt: skip


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("construct", TABLE)
def test_a_construct_is_kept_or_refused_by_name(construct: str, front_end: str) -> None:
    build, inputs, fx, export = TABLE[construct]
    torch.manual_seed(0)
    model, args = build(), inputs()
    before = fingerprint(model)
    refusal = fx if front_end == "fx" else export
    if refusal is not None:
        with pytest.raises(fxamp.CaptureError, match=refusal) as raised:
            o0(model, args, front_end=front_end)
        assert "fxamp.compile(model)" in str(raised.value) or "fxamp.convert(model, args)" in str(raised.value)
        if refusal != ".":
            assert f"{__file__}:" in str(raised.value)
        assert_untouched(model, before)
        return
    converted = o0(model, args, front_end=front_end)
    assert_untouched(model, before)
    for training in (True, False):
        model.train(training)
        converted.train(training)
        with fused_attention_off():
            assert_is_eager(converted, model, *args)


# torch.autograd.grad does not reach into a reentrant checkpoint: test_control_flow.py compares its gradients.
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("construct", [
    c if TABLE[c][2] or TABLE[c][3] else pytest.param(c, marks=pytest.mark.matrix)
    for c in TABLE if c != "reentrant checkpoint"
])  # fmt: skip
def test_a_construct_is_kept_at_the_first_call(construct: str) -> None:
    build, inputs, _, _ = TABLE[construct]
    torch.manual_seed(0)
    model, args = build(), inputs()
    for training in (True, False):
        model.train(training)
        assert_eager(convert(model, args, "jit", "O0"), model, args)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # that it is deprecated
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_old_spelling_of_an_autocast_region_is_no_way_round(device: str) -> None:
    def region(self: Any, x: Tensor) -> Tensor:
        with getattr(torch, device).amp.autocast(enabled=False):
            return self.m(self.l(x).float())

    with pytest.raises(fxamp.CaptureError, match=r"a torch.autocast region at .*test_preflight"):
        o0(Two(region), front_end="fx")


def test_code_without_a_file_is_the_users() -> None:
    code = """def forward(self, x):
    with torch.no_grad():
        y = self.l(x)
    return self.m(y) if isinstance(y, torch.Tensor) else y"""
    for name in ("<stdin>", "<string>", "<ipython-input-1-0>", "<command-1>"):
        for without, what in (("with", "isinstance()"), ("isinstance", "a torch.no_grad region")):
            kept = code.replace("    with torch.no_grad():\n        y", "    y") if without == "with" else code
            made: dict[str, Any] = {"torch": torch}
            exec(compile(kept, name, "exec"), made)
            with pytest.raises(fxamp.CaptureError, match=f"{re.escape(what)}.* at {name}:"):
                o0(Two(made["forward"]), front_end="fx")


def test_parameters_that_forward_iterates_over_are_not_baked() -> None:
    def decayed(self: Any, x: Tensor) -> Tensor:
        return self.l(x).sum() + sum(p.square().sum() for p in self.parameters())

    with pytest.raises(fxamp.CaptureError, match=r"self.parameters\(\).*test_preflight.py:\d+.*capture='export'"):
        o0(Two(decayed), front_end="fx")
    model = Two(decayed)
    assert_is_eager(o0(model), model)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_hook_of_all_modules_is_refused(front_end: str) -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        with pytest.raises(NotFaithfulError, match="hook of all modules"):
            o0(Two(lambda self, x: self.l(x)), front_end=front_end)
    finally:
        handle.remove()


class fused_attention_off:  # noqa: N801 - a context manager
    """Turn off the kernel that eager attention uses in eval mode alone, which rounds differently."""

    def __enter__(self) -> None:
        torch.backends.mha.set_fastpath_enabled(False)

    def __exit__(self, *exc: Any) -> None:
        torch.backends.mha.set_fastpath_enabled(True)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward hook": lambda m: m.register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda m: m.register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda m: m.register_full_backward_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("kind", HOOKS)
def test_a_module_hook_is_refused_by_kind_and_module(kind: str, front_end: str) -> None:
    inner = Two()
    model = nn.Sequential(inner, nn.ReLU())
    HOOKS[kind](inner.l)
    with pytest.raises(fxamp.CaptureError, match=rf"module '0\.l' \(Linear\) has a {kind} \(.*remove the hook"):
        o0(model, front_end=front_end)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_hook_of_a_parameter_goes_on_firing(front_end: str) -> None:
    model = Two()
    model.l.weight.register_hook(lambda g: g * 3)
    assert_is_eager(o0(model, front_end=front_end), model)


@pytest.mark.parametrize("root", [True, False])
def test_the_old_weight_norm_is_refused_and_the_new_one_named(root: bool) -> None:
    layer = nn.Linear(6, 6)
    model = layer if root else Two(lambda self, x: self.k(x), k=layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(layer)
    with pytest.raises(fxamp.CaptureError, match=r"WeightNorm.*torch\.nn\.utils\.parametrizations"):
        o0(model)


def test_a_train_override_is_refused() -> None:
    class Frozen(Two):
        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.m.eval()
            return self

    with pytest.raises(fxamp.CaptureError, match=r"'\(root\)' \(Frozen\) overrides train\(\)"):
        o0(Frozen())


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_train_override_that_sets_every_flag_is_none_while_it_does(front_end: str, frozen: bool) -> None:
    class MayBeFrozen(Two):
        def train(self, mode: bool = True) -> MayBeFrozen:
            for name, child in self.named_children():
                child.train(mode and not (frozen and name == "m"))
            self.training = mode
            return self

    model = MayBeFrozen()
    if frozen:
        with pytest.raises(fxamp.CaptureError, match=r"\(MayBeFrozen\) overrides train\(\)"):
            o0(model, front_end=front_end)
        return
    converted = o0(model, front_end=front_end)
    assert model.training
    assert_is_eager(converted.eval(), model.eval())
    assert_is_eager(converted.train(), model.train())


class Counts(Two):
    """Keeps a state of its own, has some layers frozen whatever the mode, and names its weights otherwise in files."""

    seen = 3

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state

    def train(self, mode: bool = True) -> Counts:
        super().train(mode)
        self.m.eval()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in [n for n in state_dict if n.startswith(f"{prefix}old.")]:
            state_dict[name.replace("old", "l")] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_extra_state_of_the_whole_is_refused() -> None:
    with pytest.raises(fxamp.CaptureError, match=r"'\(root\)' \(Counts\) overrides .*which the converted"):
        o0(Counts())


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_model_that_loads_older_files_loads_its_own_and_names_the_original_for_others(front_end: str) -> None:
    class Renamed(Two):
        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            return super().load_state_dict({k.replace("old", "l"): v for k, v in state_dict.items()}, *args, **kwargs)

    model = Renamed()
    converted = o0(model, front_end=front_end)
    assert converted.load_state_dict(converted.state_dict()).missing_keys == []
    older = {k.replace("l.", "old."): torch.zeros_like(v) for k, v in model.state_dict().items()}
    for copied in (converted, copy.deepcopy(converted)):
        with pytest.raises(fxamp.CaptureError, match=r"Renamed has its own code to load.*original model"):
            copied.load_state_dict(older)
        with pytest.raises(fxamp.CaptureError, match="Renamed has its own code"):
            nn.Sequential(copied).load_state_dict({f"0.{k}": v for k, v in older.items()})
    model.load_state_dict(older)
    assert not converted.l.weight.any()


def test_a_model_whose_loader_asks_for_the_version_of_a_state_is_converted() -> None:
    class Versioned(Two):
        _version = 2

        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
            if metadata.get("version") != 2:
                raise ValueError("a state of another version")
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    model = Versioned()
    assert_is_eager(o0(model), model)


def test_a_model_that_changes_what_it_loads_is_refused_and_left_as_it_was() -> None:
    class Doubled(Two):
        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            return super().load_state_dict({k: 2 * v for k, v in state_dict.items()}, *args, **kwargs)

    model = Doubled()
    before = fingerprint(model)
    with pytest.raises(fxamp.CaptureError, match=r"\(Doubled\) overrides load_state_dict\(\)"):
        o0(model)
    assert_untouched(model, before)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_what_the_author_of_a_part_says_of_modes_and_files_is_kept(front_end: str) -> None:
    model: Any = nn.Sequential(Counts(), nn.ReLU())
    converted: Any = o0(model, front_end=front_end)
    for module in (model, converted):
        module.train()
        assert [m.training for m in module[0].children()] == [True, False]
    state = converted.state_dict()
    assert state["0._extra_state"] == 3
    state["0._extra_state"], state["0.old.weight"] = 4, torch.ones(6, 6)
    del state["0.l.weight"]
    converted.load_state_dict(state)
    assert converted.state_dict()["0._extra_state"] == 4
    assert torch.equal(model[0].l.weight, torch.ones(6, 6))
    assert_is_eager(converted, model)


class Norm(nn.BatchNorm1d):
    """A norm of torch's with an activation, as libraries of vision models have it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def test_what_torch_says_of_the_files_of_its_layers_is_kept_for_subclasses_of_them() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Norm(6))
    converted = convert_fixed(model, (example(),), policy="O0")
    assert isinstance(converted, fxamp.ConvertedModule)
    assert_is_eager(converted, model)


def test_hooks_of_a_state_dict_run(tmp_path: Any) -> None:
    model = Two()
    model.register_state_dict_post_hook(lambda m, state, *_: state.update(mark=torch.ones(1)))  # type: ignore[no-untyped-call]
    model.l.register_state_dict_post_hook(lambda m, state, *_: state.update(inner=torch.ones(1)))
    assert {"mark", "inner"} <= o0(model).state_dict().keys()


def test_wrappers_are_refused_with_the_order_to_use() -> None:
    with pytest.raises(fxamp.CaptureError, match="Convert the module inside"):
        o0(nn.DataParallel(Two()))
    with pytest.raises(fxamp.CaptureError, match=r"torch\.compile returned"):
        o0(torch.compile(Two(), backend="eager"))  # type: ignore[arg-type]
    with pytest.raises(fxamp.CaptureError, match="without a shape yet"):
        o0(nn.Sequential(nn.LazyLinear(3)))


def test_constructs_of_other_threads_are_left_alone_while_capturing() -> None:
    inside, done = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def pausing(self: Any, x: Tensor) -> Tensor:
        inside.set()
        done.wait(10)
        return self.l(x)

    def other() -> None:
        inside.wait(10)
        try:
            checkpoint(torch.tanh, example().requires_grad_(), use_reentrant=False).sum().backward()
        except BaseException as e:  # whatever it is, the main thread asserts on it
            errors.append(e)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    o0(Two(pausing), front_end="fx")
    thread.join()
    assert not errors


def test_what_forward_leaves_in_attributes_is_undone_and_noted() -> None:
    class Counting(Two):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.seen: list[Any] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = self.l(x)
            self.seen = [y.detach()]
            return y

    for front_end in FRONT_ENDS:
        model = Counting()
        converted = o0(model, front_end=front_end)
        assert model.calls == 0
        assert model.seen == []
        assert [n for n in converted.plan.notes if "'calls'" in n]
        assert [n for n in converted.plan.notes if "'seen'" in n]


class HooksAtFirstCall(Two):
    """Installs a hook of its own when it is first called, as models of `transformers` do."""

    installed = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.installed:
            self.l.register_forward_hook(lambda *_: None)
            self.installed = True
        return self.m(self.l(x))


def test_a_hook_that_forward_installs_is_gone_after_capture() -> None:
    model = HooksAtFirstCall()
    converted = o0(model)
    assert not model.l._forward_hooks
    assert not model.installed
    model(example())  # it is there now, as it was while the model was captured
    assert torch.equal(converted(example()), model(example()))

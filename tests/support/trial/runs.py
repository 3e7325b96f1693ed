"""One call of a model and its backward, all that it leaves behind, and how two such calls differ."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp.observe.snapshot import preserved, same_attributes
from fxamp.view.check import GRADIENT_TOLERANCE
from passes._torch import pytree

# A fraction of the norm of all gradients together. A gradient that is zero up to rounding, such as that of the bias of
# attention keys, keeps no digit when its sum is reordered.
GRADIENT_NOISE = torch.finfo(torch.float32).eps
# How much further from FP32 than autocast, or than one rounding an op, a result may be; and at O3, which sums in low.
FACTOR, FACTOR_OF_O3 = 4.0, 8.0
TRIES = (3, 20)  # how often a model is run with noise; more often where that did not explain a difference


@dataclass(frozen=True)
class Run:
    """What one call gave and left behind.

    Attributes:
        outputs: the leaves of the output.
        spec: its containers.
        shared: for each tensor of the output, which inputs and earlier outputs have its memory.
        inputs: the tensors given, afterwards.
        state: the model's buffers, afterwards.
        gradients: of inputs and parameters; None where nothing requires any, text where the backward raises.
        random: the state of the generator afterwards.
    """

    outputs: list[Any]
    spec: Any
    shared: list[list[int]]
    inputs: list[Tensor]
    state: dict[str, Tensor]
    gradients: list[Tensor | None] | str | None
    random: Tensor

    @property
    def floats(self) -> list[Tensor]:
        """Return all that may be rounded: outputs, what was written into inputs and buffers."""
        tensors = [*self.outputs, *self.inputs, *self.state.values()]
        return [t for t in tensors if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())]


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a value."""
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


@contextlib.contextmanager
def without_fused_layers() -> Iterator[None]:
    """Keep attention layers from calling their fused kernel in eval mode: it rounds differently."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def run(
    module: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any = None, *, context: Any = None,
    noise: Noise | None = None, backward: bool = True,
) -> Run:  # fmt: skip
    """Call a module that has the parameters of a model, from seed 0, on copies of the inputs; the model is unchanged.

    `context` is what the forward runs in, `noise` what the backward runs in too, and what changes the inputs: they may
    be cast. The backward is that of a fixed weighted sum of all outputs.
    """
    args, kwargs = copy.deepcopy((args, kwargs or {}))
    given = tensors((args, kwargs))
    if noise is not None:
        for t in given:
            with contextlib.suppress(RuntimeError):  # one that overlaps itself is left as it is
                noise.round(t)
    mode = torch.set_grad_enabled(torch.is_grad_enabled())  # a graph that raises in a no_grad region leaves it open
    with mode, same_attributes(model), preserved(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        with context or contextlib.nullcontext(), noise or contextlib.nullcontext():
            output = module(*args, **kwargs)
        random = torch.get_rng_state()
        leaves, spec = pytree.tree_flatten(output)
        state = {name: b.detach().clone() for name, b in model.named_buffers()}
        inputs = [t.detach().clone() for t in given]
        shared = _shared(given, tensors(output))
        kept = [t.detach().clone() if isinstance(t, Tensor) else t for t in leaves]
        with noise or contextlib.nullcontext():
            gradients = _gradients(leaves, [*given, *model.parameters()]) if backward else None
    return Run(kept, spec, shared, inputs, state, gradients, random)


def _shared(given: list[Tensor], made: list[Tensor]) -> list[list[int]]:
    values = [*given, *made]
    place = [t.untyped_storage().data_ptr() if t.layout is torch.strided else i for i, t in enumerate(values)]
    return [[j for j in range(i) if place[j] == place[i] and place[i]] for i in range(len(given), len(values))]


def _gradients(leaves: list[Any], sources: list[Tensor]) -> list[Tensor | None] | str | None:
    wanted = [t for t in sources if t.requires_grad]
    ends = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad and t.layout is torch.strided]
    if not wanted or not ends:
        return None
    ends = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in ends]
    try:
        total = sum((t.double() * torch.linspace(0.5, 1.5, t.numel()).view(t.shape)).sum() for t in ends)
        return list(torch.autograd.grad(total, wanted, allow_unused=True))  # type: ignore[arg-type]
    except RuntimeError as e:
        return str(e)


# Comparison.


def changed(got: Run, expected: Run) -> str:
    """Say what of a run is not another's to the bit, gradients within what a reordered sum explains; "" if nothing."""
    return (
        values_differ(got, expected)
        or _dtypes_differ(got, expected)
        or (f"output shares memory {got.shared}, not {expected.shared}" if got.shared != expected.shared else "")
        or ("another random state" if not torch.equal(got.random, expected.random) else "")
        or gradients_differ(got, expected)
    )


def values_differ(got: Run, expected: Run) -> str:
    """Say what differs in value, whatever it is stored in: containers, outputs, inputs, buffers; "" if nothing."""
    if got.spec != expected.spec:
        return f"output has the structure {got.spec}, not {expected.spec}"
    for i, (a, b) in enumerate(zip(got.outputs, expected.outputs, strict=True)):
        if not same(a, b):
            return f"output {i} differs{_by(a, b)}"
    for i, (a, b) in enumerate(zip(got.inputs, expected.inputs, strict=True)):
        if not same(a, b):
            return f"input {i} is left different{_by(a, b)}"
    for name, b in expected.state.items():
        if not same(got.state.get(name), b):
            return f"buffer {name} is left different{_by(got.state.get(name), b)}"
    return ""


def _dtypes_differ(got: Run, expected: Run) -> str:
    for i, (a, b) in enumerate(zip(got.outputs, expected.outputs, strict=True)):
        if isinstance(a, Tensor) and a.dtype != b.dtype:
            return f"output {i} is {a.dtype}, not {b.dtype}"
    return ""


def same(a: Any, b: Any) -> bool:
    """Say whether two leaves have the same values, NaN and all; of tensors the shapes too, but not the dtypes."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(*(_comparable(t) for t in (a, b)))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    return type(a) is type(b) and bool(a == b)


def _comparable(t: Tensor) -> Tensor:
    t = t.to_dense() if t.layout is not torch.strided else t
    t = torch.view_as_real(t.resolve_conj().to(torch.complex128)) if t.is_complex() else t
    return t.double().nan_to_num(nan=1.2345e300) if t.is_floating_point() else t


def _by(a: Any, b: Any) -> str:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return f": {a!r:.60}, not {b!r:.60}"
    if a.shape != b.shape:
        return f": {tuple(a.shape)}, not {tuple(b.shape)}"
    return f" by {distance([a], [b]):.3g} of {norm([b]):.3g}"


def gradients_differ(got: Run, expected: Run) -> str:
    """Say which gradient is lost, new, or differs by more than a reordered sum explains; "" if none."""
    a, b = got.gradients, expected.gradients
    if not isinstance(a, list) or not isinstance(b, list):
        return "" if isinstance(b, str) or type(a) is type(b) else f"gradients: {a!r:.80}, not {b!r:.80}"
    noise = GRADIENT_NOISE * norm([g for g in b if g is not None])
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if (x is None) != (y is None):
            return f"gradient {i} is {'lost' if x is None else 'new'}"
        if x is not None and y is not None:
            scale = norm([y])
            if not distance([x], [y]) <= max(GRADIENT_TOLERANCE * scale, noise if math.isfinite(noise) else 0.0):
                return f"gradient {i} differs{_by(x, y)}"
    return ""


def norm(values: list[Tensor]) -> float:
    """Return the norm of all values together, those that are not finite left out."""
    wide = [_wide(t) for t in values]
    return math.sqrt(sum(t[t.isfinite()].square().sum().item() for t in wide))


def distance(got: list[Tensor], expected: list[Tensor]) -> float:
    """Return the distance of all values together; inf where one is finite, and the other is not."""
    total = 0.0
    for a, b in zip(got, expected, strict=True):
        x, y = _wide(a), _wide(b)
        equal = (x == y) | (x.isnan() & y.isnan())
        total += torch.where(equal, 0.0, x - y).square().sum().item()
    return math.sqrt(total) if total == total else math.inf


def _wide(t: Tensor) -> Tensor:
    t = t.to_dense() if t.layout is not torch.strided else t
    t = torch.view_as_real(t.resolve_conj().to(torch.complex128)) if t.is_complex() else t.double()
    return t.detach().flatten()


# How far low precision may be from FP32.


class Noise(TorchDispatchMode):
    """Changes every value that an op makes by up to one rounding of a low dtype, as computing it there would.

    With the first seed by just that, which may land where a function jumps. With others at random, but for what the
    dtype holds exactly: a label of 1 stays one. What is too small for a normal number of the dtype is rounded to what
    it has: a product of tiny numbers may be none.
    """

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype, self.info, self.nearest = dtype, torch.finfo(dtype), seed == 1
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op, and change what it made and no other tensor holds."""
        made = func(*args, **(kwargs or {}))
        known = {_place(t) for t in tensors((args, kwargs))}
        for t in tensors(made):
            if _place(t) not in known:
                self.round(t)
        return made

    def round(self, t: Tensor) -> None:
        """Change a tensor in place, as rounding it may; one of integers or of another layout is left as it is."""
        if t.is_floating_point() and t.layout is torch.strided:
            with torch.no_grad():
                rounded = t.to(self.dtype).to(t.dtype)
                if self.nearest:
                    t.copy_(rounded)
                    return
                change = self.info.eps * (torch.rand(t.shape, generator=self.generator, dtype=t.dtype) - 0.5)
                exact = (rounded == t) | (t.abs() < self.info.smallest_normal)
                t.copy_(torch.where(exact, rounded, t * (1 + change)))


def _place(t: Tensor) -> int:
    return t.untyped_storage().data_ptr() if t.layout is torch.strided else id(t)


@dataclass
class Allowed:
    """How far from the run in FP32 a run in low may be, outputs and gradients each as a whole.

    A few times as far as autocast is, or as the model itself is where every op is off by one rounding: what a branch
    on a value, or a difference of nearly equal ones, makes of that is the model's own. At O3, which asks for low
    kernels, it may instead be that close to the model on low inputs: a layer norm sums the gradient of its bias in low.
    """

    again: Callable[[Noise], Run]  # the model, forward and backward
    in_low: Callable[[], Run]  # the same on low inputs, of which torch's own kernels may sum in low; raises if none do
    plain: Run
    autocast: Run | None
    dtype: torch.dtype
    tried: int = 0
    outputs: float = 0.0
    gradients: float = 0.0
    expected: Run = field(init=False)  # what is compared with

    def __post_init__(self) -> None:
        self.expected = self.plain
        self.outputs = _rounding(self.plain.floats, self.dtype)
        self.gradients = _rounding(_present(self.plain), self.dtype)
        self.as_under(self.autocast)

    def as_under(self, autocast: Run | None) -> None:
        """Allow what a run under autocast does, and what it does to gradients."""
        self.autocast = autocast
        if autocast is not None:
            self._widen(autocast, self.expected)

    def _widen(self, found: Run, plain: Run) -> None:
        self.outputs = max(self.outputs, _far(found.floats, plain.floats))
        self.gradients = max(self.gradients, _far(_present(found), _present(plain)))

    def beside(self, expected: Run, autocast: Run | None) -> Allowed:
        """Return the same allowance for runs that are compared with other ones."""
        made = copy.copy(self)
        made.expected = expected
        made.as_under(autocast)
        return made

    def too_far(self, got: Run, level: str = "") -> str:
        """Say how a run in low is further from FP32 than low precision explains; "" if it is not."""
        if got.spec != self.expected.spec:
            return f"output has the structure {got.spec}, not {self.expected.spec}"
        if found := _dtypes_differ(got, self.expected):
            return found
        if isinstance(self.expected.gradients, list):
            if not isinstance(got.gradients, list):
                # What is low is no copy any more, and is written, or a cast without gradients: autocast's are so too.
                if self.autocast is None or type(got.gradients) is not type(self.autocast.gradients):
                    return f"gradients: {got.gradients!r:.80}"
                got = replace(got, gradients=self.expected.gradients)
            given, needed = _pattern(got), _pattern(self.expected)
            known = self.autocast is not None and isinstance(self.autocast.gradients, list)
            if given != needed and not (known and _pattern(self.autocast) == given):  # type: ignore[arg-type]
                at = next(i for i, (a, b) in enumerate(zip(given, needed, strict=True)) if a != b)
                return f"gradient {at} is {'lost' if given[at] else 'new'}"
        for tries in (0, *TRIES):
            while self.tried < tries:
                self.tried += 1
                with contextlib.suppress(RuntimeError):  # an index that noise made
                    self._widen(self.again(Noise(self.dtype, self.tried)), self.plain)
            found = self._beyond(got, FACTOR_OF_O3 if level == "O3" else FACTOR, self.expected)
            if not found:
                return ""
        if level == "O3":
            with contextlib.suppress(RuntimeError, TypeError, ValueError, NotImplementedError, IndexError):
                return self._beyond(got, FACTOR, self.in_low())
        return found

    def _beyond(self, got: Run, factor: float, expected: Run) -> str:
        far, slope = _far(got.floats, expected.floats), _far(_present(got), _present(expected))
        if not far <= factor * self.outputs and far:
            return f"outputs are {far:.3g} from FP32, where {self.outputs:.3g} is what low precision does"
        if not slope <= factor * self.gradients and slope:
            return f"gradients are {slope:.3g} from FP32, where {self.gradients:.3g} is what low precision does"
        return ""


def _rounding(values: list[Tensor], dtype: torch.dtype) -> float:
    """Return what one rounding of all values may change, of those too that the dtype holds as subnormal numbers."""
    info, count = torch.finfo(dtype), sum(t.numel() for t in values)
    return max(info.eps * norm(values), info.smallest_normal * info.eps * math.sqrt(count))


def _pattern(found: Run) -> list[bool]:
    return [g is None for g in found.gradients] if isinstance(found.gradients, list) else []


def _present(found: Run) -> list[Tensor]:
    if not isinstance(found.gradients, list):
        return []
    return [torch.zeros(()) if g is None else g for g in found.gradients]


def _far(got: list[Tensor], expected: list[Tensor]) -> float:
    if [t.shape for t in got] != [t.shape for t in expected]:  # a gradient that one alone has counts as far as it is
        both = zip(got, expected, strict=False)
        pairs = [(a, b) for a, b in both if a.shape == b.shape or 1 in (a.numel(), b.numel())]
        wide = [torch.broadcast_tensors(a, b) for a, b in pairs]
        return distance([a for a, _ in wide], [b for _, b in wide]) if len(pairs) == len(expected) else math.inf
    return distance(got, expected)

"""Measure how ops behave in low on this machine, and write `passes/ops/facts_<device>.json`.

    python reports/measure_facts.py            # every device that is here
    python reports/measure_facts.py cpu
    python reports/measure_facts.py cpu --fact sums_low         # this one alone, beside the others as they were

`passes/ops/facts.py` says what each fact means. Elementwise ops of one operand are measured on all 65,536 values of
the low dtype, in three layouts; the others on a grid of shapes, strides, dimensions and distributions. Where a kernel
sums in another order than its FP32 twin, one result in 10,000 differs, so at least 50,000 of each call are compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from passes.ops.facts import NAMES, this_machine  # noqa: E402  (the path comes first)

ATEN = torch.ops.aten
LOWS = (torch.bfloat16, torch.float16)
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Case:
    """An op with its static arguments, and the shapes of the operands to call it with.

    Attributes:
        key: Key in the file, such as "softmax[dim=last]".
        calls: Pairs of a function of floating operands and their shapes; () as shapes: elementwise, all values.
        rows: Returns such a pair for a number of rows, of which each reads the same gain, bias or table; None if the op
            reads each number of an operand once.
    """

    key: str
    calls: tuple[tuple[Callable[..., Any], Shapes], ...]
    rows: Callable[[int], tuple[Callable[..., Any], Shapes]] | None = None


UNARY = """
    abs neg positive relu relu6 leaky_relu elu celu selu silu mish sigmoid hardsigmoid hardswish hardtanh
    hardshrink softshrink softplus log_sigmoid tanh sin cos tan atan asin acos sinh cosh asinh acosh atanh
    sqrt rsqrt square reciprocal exp exp2 expm1 log log2 log10 log1p erf erfc erfinv lgamma logit ceil floor
    round trunc frac sign
"""

# Shapes to reduce along each class of dimensions: short, long, and no multiple of a vector.
LAST = ((700, 33), -1), ((5, 100, 257), -1), ((40, 2048), -1)
OTHER = ((33, 700), 0), ((5, 257, 100), 1), ((2048, 40), 0)
SEVERAL = (((300, 17, 19), [1, 2]), ((4, 300, 8, 8), [0, 2, 3]))
ALL = (((1000,), None), ((33, 65), None))


def cases() -> list[Case]:
    """Return every case; the order is that of the file before it is sorted."""
    groups = _elementwise(), _reductions(), _norms(), _pools_and_pads(), _selections(), _losses(), _binary()
    every = {case.key: case for case in itertools.chain(*groups)}
    for summed in _summed():
        every[summed.key] = replace(every.get(summed.key, summed), rows=summed.rows)
    return [*every.values()]


def _elementwise() -> Iterator[Case]:
    for name in UNARY.split():
        yield Case(name, ((getattr(ATEN, name), ()),))
    for approximate in ("none", "tanh"):
        yield Case(f"gelu[approximate={approximate}]", ((lambda x, a=approximate: ATEN.gelu(x, approximate=a), ()),))
    for exponent in (2, 3, 0.5, -0.5, -1, -2):
        yield Case(f"pow[exponent={exponent:g}]", ((lambda x, e=exponent: ATEN.pow(x, e), ()),))


def _reductions() -> Iterator[Case]:
    ints: dict[str, Callable[..., Any]] = {n: getattr(ATEN, n) for n in ("cumsum", "cumprod", "logcumsumexp")}
    ints |= {"softmax": lambda x, d: ATEN.softmax(x, d), "log_softmax": lambda x, d: ATEN.log_softmax(x, d)}
    ints |= {n: lambda x, d, n=n: getattr(ATEN, n)(x, d, False) for n in ("_softmax", "_log_softmax")}
    pairs = ("cummax", "cummin", "sort", "median", "max", "min")
    ints |= {n: lambda x, d, n=n: getattr(ATEN, n)(x, d)[0] for n in pairs}
    ints |= {"topk": lambda x, d: ATEN.topk(x, 3, d)[0], "prod": lambda x, d: ATEN.prod(x, d)}
    lists: dict[str, Callable[..., Any]] = {n: getattr(ATEN, n) for n in ("sum", "mean", "var", "std", "amax", "amin")}
    lists |= {"nansum": ATEN.nansum, "logsumexp": ATEN.logsumexp}
    for name, op in ints.items():
        yield _along(f"{name}[dim=last]", op, LAST)
        yield _along(f"{name}[dim=other]", op, OTHER)
    for name, op in lists.items():
        yield _along(f"{name}[dim=last]", lambda x, d, op=op: op(x, [d]), LAST)
        yield _along(f"{name}[dim=other]", lambda x, d, op=op: op(x, [d] if isinstance(d, int) else d), OTHER + SEVERAL)
        yield _along(f"{name}[dim=all]", lambda x, d, op=op: op(x, list(range(x.dim()))), ALL)
    for name in ("max", "min", "prod", "median"):
        yield _along(f"{name}[dim=all]", lambda x, d, n=name: getattr(ATEN, n)(x), ALL)
    for order in (1, 2):
        for dims, shapes in (("last", LAST), ("other", OTHER), ("all", ALL)):
            yield _along(
                f"linalg_vector_norm[dim={dims},ord={order}]",
                lambda x, d, o=order: ATEN.linalg_vector_norm(x, o, None if d is None else [d]),
                shapes,
            )
        yield _along(f"norm[dim=all,p={order}]", lambda x, d, o=order: ATEN.norm(x, o), ALL)
        yield _along(f"norm[dim=last,p={order}]", lambda x, d, o=order: ATEN.norm(x, o, [d]), LAST)


def _along(key: str, op: Callable[..., Any], grid: Any) -> Case:
    return Case(key, tuple((lambda x, d=dim: op(x, d), (shape,)) for shape, dim in grid))


def _affine(n: int, x: Tensor) -> list[Tensor]:
    """Return a weight and a bias that are FP32, or FP64 beside an FP64 input."""
    made = torch.Generator().manual_seed(n)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return [torch.randn(n, generator=made).to(x.device, dtype) for _ in range(2)]


def _norms() -> Iterator[Case]:
    layer, group, rms = ATEN.layer_norm, ATEN.group_norm, ATEN.rms_norm
    calls: list[tuple[Callable[..., Any], Shapes]] = []
    for n in (31, 64, 768):
        calls += [(lambda x, w, b, n=n: layer(x, [n], w, b), ((50, n), (n,), (n,)))]
        calls += [(lambda x, n=n: layer(x, [n]), ((50, n),))]
        calls += [(lambda x, n=n: layer(x, [n], *_affine(n, x)), ((50, n),))]
    yield Case("layer_norm", tuple(calls))
    native = ATEN.native_layer_norm
    calls = [(lambda x, n=n: native(x, [n], None, None, 1e-5)[0], ((50, n),)) for n in (31, 64, 768)]
    yield Case("native_layer_norm", tuple(calls))
    calls = []
    for n in (31, 64, 768):
        calls += [(lambda x, w, n=n: rms(x, [n], w), ((50, n), (n,))), (lambda x, n=n: rms(x, [n]), ((50, n),))]
    yield Case("rms_norm", tuple(calls))
    shape = (3, 8, 6, 7)
    yield Case("group_norm", (
        (lambda x, w, b: group(x, 4, w, b), (shape, (8,), (8,))),
        (lambda x: group(x, 4, *_affine(8, x)), (shape,)),
        (lambda x: group(x.contiguous(memory_format=torch.channels_last), 4), (shape,)),
    ))  # fmt: skip
    for training in (True, False):
        calls = [(lambda x, t=training: _batch_norm(x, t), (s,)) for s in (shape, (9, 8), (4, 8, 14, 14))]
        yield Case(f"batch_norm[training={training}]", tuple(calls))
    yield Case("cosine_similarity", ((ATEN.cosine_similarity, ((5, 33), (5, 33))),))


def _instance_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.instance_norm(x, weight, bias, None, None, True, 0.1, 1e-5, False)


def _batch_norm(x: Tensor, training: bool) -> Tensor:
    weight, bias = _affine(8, x)
    return _batch_norm_with(x, weight, bias, training)


def _batch_norm_with(x: Tensor, weight: Tensor, bias: Tensor, training: bool) -> Tensor:
    mean, var = torch.zeros_like(weight), torch.ones_like(weight)
    return torch.batch_norm(x, weight, bias, mean, var, training, 0.1, 1e-5, False)


def _pools_and_pads() -> Iterator[Case]:
    planes = {1: (20, 3, 18), 2: (8, 3, 12, 13), 3: (4, 3, 6, 7, 8)}
    widest = {n: [size - 1 for size in reversed(shape[2:]) for _ in range(2)] for n, shape in planes.items()}
    # The second arguments of some let windows overlap, or repeat an element more than twice: gradients are summed.
    ending: dict[str, Callable[[int], tuple[tuple[Any, ...], ...]]] = {
        "max_pool": lambda n: (([2] * n,), ([3] * n, [1] * n)), "avg_pool": lambda n: (([3] * n,),),
        "adaptive_avg_pool": lambda n: (([2] * n,),), "adaptive_max_pool": lambda n: (([2] * n,), ([5] * n,)),
        "reflection_pad": lambda n: (([1, 2] * n,), (widest[n],)),
        "replication_pad": lambda n: (([1, 2] * n,), (widest[n],)), "upsample_nearest": lambda n: (([17] * n,),),
    }  # fmt: skip
    for n, (name, rests) in itertools.product(planes, ending.items()):
        yield _spatial(f"{name}{n}d", planes[n], *rests(n))
    for name, n in (("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3)):
        yield _spatial(f"upsample_{name}{n}d", planes[n], ([17] * n, False))
    yield Case("constant_pad_nd[value=0]", ((lambda x: ATEN.constant_pad_nd(x, [1, 2, 3, 0]), (planes[2],)),))
    yield Case("constant_pad_nd[value=-inf]", ((lambda x: ATEN.constant_pad_nd(x, [1, 2], -torch.inf), (planes[2],)),))


# Calls in which each of so many rows reads the same numbers, which are the last operands: a gain, a bias, a table.
def _summed() -> Iterator[Case]:
    def looked_up(op: Callable[..., Any]) -> Callable[[int], Any]:
        def call(rows: int) -> Any:
            at = torch.randint(8, (rows,), generator=torch.Generator().manual_seed(0))
            return (lambda table: op(table, at.to(table.device))), ((8, 64),)

        return call

    def beside(op: Callable[..., Any]) -> Callable[[int], Any]:
        return lambda rows: (op, ((rows, 64), (64,)))

    def planes(op: Callable[..., Any], *of: tuple[int, ...]) -> Callable[[int], Any]:
        return lambda rows: (op, ((rows // 64, 16, 8, 8), *of))

    def normed(op: Callable[..., Any], *rest: Any) -> Callable[[int], Any]:
        return lambda rows: ((lambda x, w, b: op(x, [64], w, b, *rest)), ((rows, 64), (64,), (64,)))

    channels = (16,), (16,)
    calls: dict[str, Callable[[int], Any]] = {
        "layer_norm": normed(ATEN.layer_norm), "native_layer_norm": normed(ATEN.native_layer_norm, 1e-5),
        "rms_norm": lambda rows: ((lambda x, w: ATEN.rms_norm(x, [64], w)), ((rows, 64), (64,))),
        "group_norm": planes(lambda x, w, b: ATEN.group_norm(x, 4, w, b), *channels),
        "instance_norm": planes(_instance_norm, *channels),
        "linear": lambda rows: (ATEN.linear, ((rows, 64), (16, 64), (16,))),
        "addmm": lambda rows: ((lambda x, w, b: ATEN.addmm(b, x, w)), ((rows, 64), (64, 16), (16,))),
        "matmul": lambda rows: (ATEN.matmul, ((rows // 16, 4, 4, 16), (16, 16))),
        "bmm": lambda rows: ((lambda x, w: ATEN.bmm(x, w.expand(len(x), 16, 16))), ((rows // 16, 16, 16), (16, 16))),
        "conv1d": lambda rows: (ATEN.conv1d, ((rows // 64, 4, 66), (8, 4, 3), (8,))),
        "conv2d": lambda rows: (ATEN.conv2d, ((rows // 64, 4, 10, 10), (8, 4, 3, 3), (8,))),
        "conv3d": lambda rows: (ATEN.conv3d, ((rows // 64, 4, 6, 6, 6), (8, 4, 3, 3, 3), (8,))),
        "conv_transpose2d": lambda rows: (ATEN.conv_transpose2d, ((rows // 64, 4, 8, 8), (4, 8, 3, 3), (8,))),
        "prelu": beside(ATEN.prelu), "where": beside(lambda x, w: ATEN.where(x > 0, x, w)),
        "lerp": lambda rows: (ATEN.lerp, ((rows, 64), (64,), (64,))),
        "addcmul": lambda rows: ((lambda x, y, z: ATEN.addcmul(z, x, y)), ((rows, 64), (64,), (64,))),
        **{n: beside(getattr(ATEN, n)) for n in ("add", "sub", "mul", "div", "maximum", "minimum", "atan2")},
        "expand": lambda rows: ((lambda x: ATEN.expand(x, [rows, 64])), ((64,),)),
        "repeat": lambda rows: ((lambda x: ATEN.repeat(x, [rows, 1])), ((64,),)),
        "tile": lambda rows: ((lambda x: ATEN.tile(x, [rows, 1])), ((64,),)),
        "repeat_interleave": lambda rows: ((lambda x: ATEN.repeat_interleave(x, rows, 0)), ((1, 64),)),
        "replication_pad1d": lambda rows: ((lambda x: ATEN.replication_pad1d(x, [rows, 0])), ((4, 3),)),
        "index": looked_up(lambda x, at: ATEN.index(x, [at])),
        "index_select": looked_up(lambda x, at: ATEN.index_select(x, 0, at)),
        "gather": looked_up(lambda x, at: ATEN.gather(x, 0, at[:, None].expand(-1, 64))),
        "take": looked_up(ATEN.take), "embedding": looked_up(ATEN.embedding),
        "embedding_bag": looked_up(lambda x, at: torch.nn.functional.embedding_bag(at.view(-1, 4), x)),
    }  # fmt: skip
    for training in (True, False):
        op = lambda x, w, b, t=training: _batch_norm_with(x, w, b, t)  # noqa: E731
        calls[f"batch_norm[training={training}]"] = planes(op, *channels)
    for key, call in calls.items():
        yield Case(key, (), call)


def _spatial(name: str, shape: tuple[int, ...], *rests: tuple[Any, ...]) -> Case:
    op = getattr(ATEN, name)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape), torch.contiguous_format)
    plain = tuple((lambda x, r=r: op(x, *r), (shape,)) for r in rests)
    channels_last = tuple((lambda x, r=r: op(x.contiguous(memory_format=last), *r), (shape,)) for r in rests)
    return Case(name, (*plain, *channels_last))


def _selections() -> Iterator[Case]:
    rows = torch.tensor([0, 2, 2, 4, 1])
    cols = torch.tensor([[0, 2, 2], [4, 1, 0]])
    mask = torch.arange(24).reshape(4, 6) % 3 == 0
    one: dict[str, Callable[..., Any]] = {
        "view": lambda x: x.contiguous().view(6, 4), "reshape": lambda x: ATEN.reshape(x, [3, 8]),
        "flatten": lambda x: ATEN.flatten(x), "unflatten": lambda x: ATEN.unflatten(x, 0, [2, 2]),
        "permute": lambda x: ATEN.permute(x, [1, 0]), "transpose": lambda x: ATEN.transpose(x, 0, 1),
        "t": lambda x: ATEN.t(x),
        "movedim": lambda x: ATEN.movedim(x, 0, 1), "squeeze": lambda x: ATEN.squeeze(x),
        "unsqueeze": lambda x: ATEN.unsqueeze(x, 1),
        "slice": lambda x: ATEN.slice(x, 1, 1, 5, 2), "select": lambda x: ATEN.select(x, 0, 1),
        "narrow": lambda x: ATEN.narrow(x, 1, 2, 3),
        "split": lambda x: ATEN.split(x, 2, 1), "split_with_sizes": lambda x: ATEN.split_with_sizes(x, [1, 5], 1),
        "chunk": lambda x: ATEN.chunk(x, 2, 1), "unbind": lambda x: ATEN.unbind(x),
        "diagonal": lambda x: ATEN.diagonal(x),
        "diag_embed": lambda x: ATEN.diag_embed(x), "contiguous": lambda x: x.t().contiguous(),
        "clone": lambda x: ATEN.clone(x),
        "alias": lambda x: ATEN.alias(x), "roll": lambda x: ATEN.roll(x, [1]), "flip": lambda x: ATEN.flip(x, [0]),
        "rot90": lambda x: ATEN.rot90(x), "tril": lambda x: ATEN.tril(x), "triu": lambda x: ATEN.triu(x),
        "pixel_shuffle": lambda x: ATEN.pixel_shuffle(x.reshape(4, 2, 3), 2),
        "pixel_unshuffle": lambda x: ATEN.pixel_unshuffle(x.reshape(1, 4, 6), 2),
        "channel_shuffle": lambda x: ATEN.channel_shuffle(x.reshape(1, 4, 3, 2), 2),
        "expand": lambda x: ATEN.expand(x, [300, 4, 6]), "repeat": lambda x: ATEN.repeat(x, [300, 1]),
        "tile": lambda x: ATEN.tile(x, [300, 1]), "unfold": lambda x: ATEN.unfold(x, 1, 4, 1),
        "repeat_interleave": lambda x: ATEN.repeat_interleave(x, 300, 0),
        "im2col": lambda x: ATEN.im2col(x.reshape(1, 1, 4, 6), [3, 3], [1, 1], [1, 1], [1, 1]),
        "index_select": lambda x: ATEN.index_select(x, 1, rows.repeat(100).to(x.device)),
        "index": lambda x: ATEN.index(x, [None, rows.repeat(100).to(x.device)]),
        "gather": lambda x: ATEN.gather(x, 1, cols.repeat(1, 100).to(x.device)),
        "take": lambda x: ATEN.take(x, rows.repeat(100).to(x.device)),
        "masked_select": lambda x: ATEN.masked_select(x, mask.to(x.device)),
        "masked_fill": lambda x: ATEN.masked_fill(x, mask.to(x.device), -torch.inf),
    }  # fmt: skip
    for name, op in one.items():
        key = name if name != "masked_fill" else "masked_fill[value=-inf]"
        yield Case(key, ((op, ((4, 6),)), (lambda x, op=op: op(x.t().contiguous().t()), ((4, 6),))))
    two = ((5, 7), (5, 7))
    yield Case("cat", ((lambda x, y: ATEN.cat([x, y], 1), two), (lambda x, y: ATEN.cat([x.t(), y.t()]), two)))
    yield Case("stack", ((lambda x, y: ATEN.stack([x, y], 1), two),))
    yield Case("where", ((lambda x, y: ATEN.where(torch.arange(7, device=x.device) % 2 == 0, x, y), two),))
    yield Case("maximum", ((ATEN.maximum, two),))
    yield Case("minimum", ((ATEN.minimum, two),))


def _losses() -> Iterator[Case]:
    labels = torch.arange(40) % 11
    one, two = ((40, 11),), ((40, 11), (40, 11))
    logits = ATEN.binary_cross_entropy_with_logits
    for number, reduction in enumerate(("none", "mean", "sum")):
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"):
            op = getattr(ATEN, name)
            yield Case(f"{name}[reduction={reduction}]", ((lambda x, y, f=op, r=number: f(x, y, r), two),))
        for name in ("nll_loss", "cross_entropy_loss"):
            op = getattr(ATEN, name)
            of_labels = lambda x, f=op, r=number: f(x, labels.to(x.device), None, r)  # noqa: E731
            yield Case(f"{name}[reduction={reduction}]", ((of_labels, one),))
        key = f"binary_cross_entropy_with_logits[reduction={reduction}]"
        yield Case(key, ((lambda x, y, r=number: logits(x, y.sigmoid(), None, None, r), two),))
    yield Case("trace", ((ATEN.trace, ((33, 33),)),))


def _binary() -> Iterator[Case]:
    pair, row = ((370, 650), (370, 650)), ((370, 650), (650,))
    for name in ("add", "sub", "mul", "div", "atan2", "hypot", "logaddexp", "logaddexp2", "xlogy"):
        op = getattr(ATEN, name)
        yield Case(name, ((op, pair), (op, row), (lambda x, y, f=op: f(x.t(), y.t()), pair)))
    yield Case("addcmul", ((ATEN.addcmul, (*pair, (650,))),))


# The facts.

# Results to compare for each call: of a kernel's arithmetic, and of what a rounding may cross. At most so many draws.
OUTPUTS, FEW_OUTPUTS = 50_000, 3_000
DRAWS, QUICK_DRAWS = 20_000, 8


MEASURED: dict[str, Callable[[Case, str, torch.dtype, bool], bool]] = {
    # Commuting says that it computes in FP32, too: for a low x.
    "fp32_internal": lambda *a: _commutes_forward(*a) or _fp32_internal(*a),
    "fp32_backward": lambda *a: _fp32_backward(*a),
    "rounds_once": lambda *a: _rounds_once(*a),
    "scatters": lambda *a: _scatters(*a),
    "commutes_forward": lambda *a: _commutes_forward(*a),
    "commutes_backward": lambda *a: _commutes_backward(*a),
    "sums_low": lambda case, device, low, quick: _sums_low(case, device, low),
}


def measure(
    case: Case, device: str, low: torch.dtype, quick: bool = False, names: Sequence[str] = NAMES
) -> list[str]:  # fmt: skip
    """Return which facts of these hold; none when the op has no low kernel. `quick` compares fewer results."""
    torch.manual_seed(0)
    wanted = [name for name in names if (case.rows if name == "sums_low" else case.calls)]
    try:
        return [name for name in wanted if MEASURED[name](case, device, low, quick)]
    except (RuntimeError, NotImplementedError):
        return []


def _sums_low(case: Case, device: str, low: torch.dtype) -> bool:
    """Say whether the error of a gradient that is summed over rows grows with them; as their root it does by 8."""
    few, many = (
        statistics.median(_sum_error(*case.rows(rows), device, low) for _ in range(5)) if case.rows else 1.0
        for rows in (128, 8_192)
    )
    return many >= 3 * few


def _sum_error(op: Callable[..., Any], shapes: Shapes, device: str, low: torch.dtype) -> float:
    """Return the largest relative error of the gradients of the operands that all rows read."""
    given, errors = [_draw("normal", s, device).to(low) for s in shapes], []

    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in given]
        out, seed = _floats(op(*leaves))[0], torch.Generator(device).manual_seed(0)
        by = torch.randn(out.shape, generator=seed, device=device).to(low).to(dtype)
        return torch.autograd.grad(out, leaves[1:] or leaves, by)

    for made, true in zip(gradients(low), gradients(torch.float64), strict=True):
        errors.append(float((made.double() - true).norm() / true.norm()))
    return max(errors)


def _fp32_internal(case: Case, device: str, low: torch.dtype, quick: bool) -> bool:
    def internal(op: Callable[..., Any], tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        given = [t.to(low) for t in tensors]
        return _floats(op(*given)), [y.to(low) for y in _floats(op(*(t.float() for t in given)))]

    return _equal_on_all(internal, case, device, low, OUTPUTS, quick)


def _fp32_backward(case: Case, device: str, low: torch.dtype, quick: bool) -> bool:
    def backward(op: Callable[..., Any], tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        given = [t.to(low).float() for t in tensors]
        # The operand is low, so its gradient is, too.
        ours, other = (_gradients(op, given, low, round_first) for round_first in (True, False))
        return [g.to(low) for g in ours], [g.to(low) for g in other]

    return _equal_on_all(backward, case, device, low, FEW_OUTPUTS, quick)


def _rounds_once(case: Case, device: str, low: torch.dtype, quick: bool) -> bool:
    """Compare RMS errors, which weigh as the values do; the median of five batches, lest one cancellation outweighs."""
    wanted = (FEW_OUTPUTS if quick else OUTPUTS) // 5
    return all(
        statistics.median(_error_ratio(op, shapes, kind, device, low, wanted) for _ in range(5)) <= 1.5
        for op, shapes in case.calls
        for kind in ("normal", "log_uniform")
    )


def _scatters(case: Case, device: str, low: torch.dtype, quick: bool) -> bool:
    """Compare the mean errors of rows, along each dimension: roundings cancel in them, an error that a row shares not.

    Along one dimension or another all kernels stay below 1.8, or exceed 7.
    """
    wanted = (FEW_OUTPUTS if quick else OUTPUTS) // 5
    return all(
        statistics.median(_mean_error_ratio(op, shapes, kind, device, low, wanted) for _ in range(5)) <= 3
        for op, shapes in case.calls
        for kind in ("normal", "log_uniform")
    )


LEAST_ROW = 16  # elements; in the mean of fewer, roundings do not cancel


def _mean_error_ratio(
    op: Callable[..., Any], shapes: Shapes, kind: str, device: str, low: torch.dtype, wanted: int
) -> float:  # fmt: skip
    """Return the RMS of the mean relative errors of rows over that of the rounded result: the largest of any dimension.

    It is 0 where no output has a row.
    """
    squares: dict[tuple[int, int], list[float]] = {}
    seen = 0
    for _ in range(40):
        given = [_draw(kind, s, device).to(low) for s in shapes or ((50, 100),)]
        outputs = (_floats(op(*(t.to(d) for t in given))) for d in (low, torch.float32, torch.float64))
        for place, (made, fp32, true) in enumerate(zip(*outputs, strict=True)):
            counts = _countable(fp32, true, low)
            errors = [torch.where(counts, (y.double() - true) / true, 0.0) for y in (made, true.to(low))]
            for dim in (d for d in range(true.dim()) if true.shape[d] >= LEAST_ROW):
                sums = squares.setdefault((place, dim), [0.0, 0.0])
                for i, error in enumerate(errors):
                    sums[i] += float(error.mean(dim).square().sum())
            seen += int(counts.sum())
        if seen >= wanted:
            break
    return max((_root_ratio(ours, best) for ours, best in squares.values()), default=0.0)


def _countable(fp32: Tensor, true: Tensor, low: torch.dtype) -> Tensor:
    """Return which results count: those in the range of the low dtype, where FP32 is right itself."""
    info = torch.finfo(low)
    counts = (true.abs() >= info.smallest_normal) & (true.abs() <= info.max)
    return counts & ((fp32.double() - true).abs() <= info.eps / 8 * true.abs())


def _root_ratio(ours: float, best: float) -> float:
    """Return the root of a ratio of squared errors; 1 if there is no error at all."""
    if best == 0.0:
        return 1.0 if ours == 0.0 else float("inf")
    return float((ours / best) ** 0.5)


def _error_ratio(
    op: Callable[..., Any], shapes: Shapes, kind: str, device: str, low: torch.dtype, wanted: int
) -> float:  # fmt: skip
    """Return the RMS distance to float64 over that of the rounded result; where FP32 is right itself."""
    ours = best = 0.0
    seen = 0
    for _ in range(40):
        given = [_draw(kind, s, device).to(low) for s in shapes or ((5_000,),)]
        outputs = (_floats(op(*(t.to(d) for t in given))) for d in (low, torch.float32, torch.float64))
        for made, fp32, true in zip(*outputs, strict=True):
            counts = _countable(fp32, true, low)
            ours += float((made.double() - true)[counts].square().sum())
            best += float((true.to(low).double() - true)[counts].square().sum())
            seen += int(counts.sum())
        if seen >= wanted:
            break
    return _root_ratio(ours, best) if seen else float("inf")


def _commutes_forward(case: Case, device: str, low: torch.dtype, quick: bool) -> bool:
    def forward(op: Callable[..., Any], tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return _floats(op(*(t.to(low) for t in tensors))), [y.to(low) for y in _floats(op(*tensors))]

    return _equal_on_all(forward, case, device, low, FEW_OUTPUTS, quick)


def _commutes_backward(case: Case, device: str, low: torch.dtype, quick: bool) -> bool:
    def backward(op: Callable[..., Any], tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return _gradients(op, tensors, low, True), _gradients(op, tensors, low, False)

    return _equal_on_all(backward, case, device, low, FEW_OUTPUTS, quick)


def _gradients(op: Callable[..., Any], tensors: list[Tensor], low: torch.dtype, round_first: bool) -> list[Tensor]:
    """Return the gradients of FP32 operands, where either these or the outputs are rounded."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    outputs = _floats(op(*(x.to(low) for x in leaves) if round_first else leaves))
    outputs = [y.to(low) for y in outputs if y.requires_grad]
    device = tensors[0].device
    draw = torch.Generator(device).manual_seed(0)
    seeds = [torch.randn(y.shape, generator=draw, device=device).to(low) for y in outputs]
    made = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True) if outputs else []
    return [g for g in made if g is not None]


def _equal_on_all(
    both_ways: Callable[..., tuple[list[Tensor], list[Tensor]]],
    case: Case, device: str, low: torch.dtype, outputs: int, quick: bool,
) -> bool:  # fmt: skip
    """Say whether two ways agree, over all values or over the grid of shapes, strides and distributions."""
    for op, shapes in case.calls:
        if not shapes:
            if not all(same(*both_ways(op, [x])) for x in _every_value(low, device)):
                return False
            continue
        seen = 0
        for draw in range(QUICK_DRAWS if quick else DRAWS):
            kind = ("normal", "log_uniform", "ties")[draw % 3]
            tensors = [_draw(kind, s, device) for s in shapes]
            if draw % 2:  # the same shape, with other strides
                tensors = [t.mT.contiguous().mT if t.dim() > 1 else t for t in tensors]
            ours, other = both_ways(op, tensors)
            if not same(ours, other):
                return False
            seen += sum(y.numel() for y in ours)
            if draw >= 5 and seen >= outputs:
                break
    return True


def _every_value(low: torch.dtype, device: str) -> Iterator[Tensor]:
    """Yield, as FP32, every value of the low dtype and others between: contiguous, strided, and in short rows."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(low).float()
    values = values[~values.isnan()].sort().values
    between = torch.cat([values[1:] / 2 + values[:-1] / 2, torch.randn(10_000), _draw("log_uniform", (10_000,), "cpu")])
    # FP32's own subnormal values are left out: nothing that a model computes is so small.
    between = between[between.isfinite() & (between.abs() >= torch.finfo(torch.float32).smallest_normal)]
    x = torch.cat([values, between])
    x = x[: len(x) // 5 * 5].to(device)
    yield x
    yield torch.stack([x, x], 1)[:, 0]
    yield torch.nn.functional.pad(x.view(-1, 5), (0, 3))[:, :5]


def _draw(kind: str, shape: tuple[int, ...], device: str) -> Tensor:
    if kind == "normal":
        x = torch.randn(shape)
    elif kind == "log_uniform":
        x = 10 ** (6 * torch.rand(shape) - 3) * torch.randn(shape).sign()
    else:  # values that rounding makes equal
        x = 1 + 1e-4 * torch.randn(shape)
    return x.to(device)


def _floats(made: Any) -> list[Tensor]:
    return [y for y in (made if isinstance(made, (tuple, list)) else [made]) if y.is_floating_point()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Say whether tensors are equal, any NaN being equal to any other."""
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())
        for x, y in zip(a, b, strict=True)
    )


def _named(dtypes: Sequence[torch.dtype]) -> list[tuple[str, torch.dtype]]:
    return [(str(dtype).removeprefix("torch."), dtype) for dtype in dtypes]


def _updated(case: Case, device: str, low: torch.dtype, fact: str | None, known: dict[str, Any]) -> list[str]:
    """Return the facts that hold: all measured now, or one alone beside the others as they are known."""
    if fact is None:
        return measure(case, device, low)
    before = known.get(case.key, {}).get(_named([low])[0][0], [])
    now = {*before} - {fact} | {*measure(case, device, low, names=[fact])}
    return [name for name in NAMES if name in now]


def main() -> None:
    """Measure every case on the devices asked for, and write one file each."""
    parser = argparse.ArgumentParser(description="Measure how ops behave in low, for passes/ops/facts_<device>.json.")
    here = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    parser.add_argument("device", nargs="*", help="cpu, cuda; all that are here by default")
    parser.add_argument("--fact", choices=NAMES, help="measure this one alone, and leave the others as they are")
    options = parser.parse_args()
    for device in options.device or here:
        path = ROOT / "passes" / "ops" / f"facts_{device}.json"
        known = json.loads(path.read_text())["facts"] if options.fact else {}
        found = {
            case.key: {name: _updated(case, device, low, options.fact, known) for name, low in _named(LOWS)}
            for case in tqdm(cases(), desc=device, mininterval=5)
        }
        lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(found[key])}" for key in sorted(found))
        machine = json.dumps(asdict(this_machine(device)))
        path.write_text(f'{{\n  "machine": {machine},\n  "status": "measured",\n  "facts": {{\n{lines}\n  }}\n}}\n')


if __name__ == "__main__":
    main()

"""`fxamp.census`: what ran in one real step, in which dtype, and whether that is what was planned.

`CallCensus` is that of micro-batches of a TrainStep that run anyway: the first, and the next after a capture.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import CodeType
from typing import Any, Literal

import torch
from torch import nn

from passes.contract.errors import PolicyError, VerificationError, public
from passes.contract.policy import Policy

from .._torch import compiled_call, original_of
from ..capture.graphs import runner_of
from ..convert import converted_in
from ..diagnose.step import NO_REGION, diagnostic, step_of, visible_graphs
from ..observe.watch import LOW_NAMES, Watch
from ..observe.workload import Loss
from ..results import Result, some, table
from .differences import Compiled, Difference, compiled_of, differences_of, odd_products, of_products
from .step import Observation, Row, Scaling, observe, planned_rows, rows_of

_SHOWN, _KINDS = 20, 6  # differences in the text, and kinds of ops for each dtype


@public
@dataclass(frozen=True, repr=False)
class Census(Result):
    """What ran in one step.

    Attributes:
        name: The class of the model.
        policy: The policy of the plan, "" without one.
        planned: What was planned for the graphs that ran; None without a plan.
        ran: What ran, by place, op and dtypes.
        differences: What did not run as planned. Without a plan: products that ran in another dtype than most.
        scaling: The facts of loss scaling.
        notes: What is to be said of the step, and what could not be seen.
        compiled: What Inductor's record says of each graph that it compiled.

    Example:
        >>> found = fxamp.census(converted, x)
        >>> bool(found), found.differences, found.share
        (True, (), 1.0)
        >>> [(row.where, row.dtype) for row in found.ran if row.product and row.phase == "forward"]
        [('0/linear#0', 'bfloat16'), ('2/linear#0', 'bfloat16')]
    """

    name: str
    policy: str
    planned: tuple[Row, ...] | None
    ran: tuple[Row, ...]
    differences: tuple[Difference, ...]
    scaling: Scaling
    notes: tuple[str, ...] = field(default=())
    compiled: tuple[Compiled, ...] = field(default=())

    @property
    def casts(self) -> tuple[Row, ...]:
        """The casts that were executed.

        Example:
            >>> found = fxamp.census(converted, x)
            >>> sum(row.casts for row in found.casts if row.phase == "forward")
            6
        """
        return tuple(row for row in self.ran if row.casts)

    @property
    def share(self) -> float | None:
        """The share of the FLOPs that ran as planned; None without a plan.

        Example:
            >>> fxamp.census(model, x).share is None
            True
        """
        if self.planned is None:
            return None
        wrong = {(d.graph, d.where) for d in self.differences}
        whole = sum(row.flops for row in self.ran)
        kept = sum(row.flops for row in self.ran if row.graph >= 0 and (row.graph, row.where) not in wrong)
        return kept / whole if whole else 1.0

    def __bool__(self) -> bool:
        if self.planned is None:
            raise TypeError(
                f"{self.name} has no plan, so nothing can be as planned: read .differences, which are the products "
                "that ran in another dtype than most, or convert the model."
            )
        return not self.differences

    def _data(self) -> dict[str, Any]:
        casts = {"count": sum(r.casts for r in self.ran), "bytes": sum(r.cast_bytes for r in self.ran)}
        said = [{**asdict(d), "text": str(d)} for d in self.differences]
        return {**asdict(self), "differences": said, "casts": casts, "share": self.share}

    def _low(self) -> str:
        """Say how much ran in 16 bits, and what did not, the largest first."""
        flops, wrong = Counter[str](), {(d.graph, d.where) for d in self.differences}
        wide = [row for row in self.ran if row.product and row.dtype not in LOW_NAMES]
        for row in wide:
            flops[row.where] += row.flops
        whole = sum(row.flops for row in self.ran)
        if not whole:
            return "no product ran"
        rest = some(f"{where} {100 * n / whole:.1f} %" for where, n in flops.most_common())
        kept = self.planned is not None and all(r.graph >= 0 and (r.graph, r.where) not in wrong for r in wide)
        planned = ", as planned" if kept else ""
        why = f"; in FP32{planned}: {rest}" if rest else ""
        return f"{100 * (1 - sum(flops.values()) / whole):.1f} % of FLOPs in 16 bits{why}"

    def _others(self) -> Iterator[str]:
        """Yield, for each dtype that is not 16-bit alone, the ops of the forward that ran in it, and where."""
        found: dict[str, dict[str, dict[str, None]]] = {}
        for row in self.ran:
            if row.phase == "forward" and not (row.product or row.casts or row.dtype in LOW_NAMES):
                found.setdefault(row.dtype, {}).setdefault(row.op, {})[row.where] = None
        for dtype, places in sorted(found.items()):
            yield f"ops in {dtype}: " + some((f"{op} at {some(wheres)}" for op, wheres in places.items()), _KINDS)

    def _text(self, style: str) -> str:
        whole = sum(row.flops for row in self.ran)
        counts = []
        for dtype in sorted({row.dtype for row in self.ran if not row.casts}):
            rows = [row for row in self.ran if row.dtype == dtype and not row.casts]
            flops = sum(row.flops for row in rows)
            products = sum(row.count for row in rows if row.product)
            others = sum(row.count for row in rows if not row.product)
            counts.append((dtype, products, f"{flops / 1e9:.3g}", f"{100 * flops / (whole or 1):.1f}", others))
        shown = table(("dtype", "products", "GFLOP", "% of FLOPs", "other ops"), counts, style)
        megabytes = sum(row.cast_bytes for row in self.ran) / 1e6
        casts = f"casts of the step: {sum(row.casts for row in self.ran)}, {megabytes:.3g} MB"
        planned = "no plan" if self.share is None else f"as planned: {100 * self.share:.1f} % of FLOPs"
        head = f"{self.name}{f', {self.policy}' if self.policy else ''}: {self._low()}; {planned}"
        lines = [head, *([""] if style == "pipe" else []), shown, *([""] if style == "pipe" else []), casts]
        lines += self._others()
        if self.scaling.low_gradients:
            lines.append(f"loss scaling: {self.scaling}")
        lines += [f"note: {note}" for note in (*self.notes, *self.compiled)]
        unlike = "differences" if self.planned is not None else "products in another dtype than most"
        lines.append(f"{unlike}: {len(self.differences) or 'none'}")
        lines += [f"  {difference}" for difference in self.differences[:_SHOWN]]
        if len(self.differences) > _SHOWN:
            lines.append(f"  and {len(self.differences) - _SHOWN} more in .differences")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self._text("plain")

    def __repr__(self) -> str:
        found = f"{len(self.differences)} differences" if self.differences else "no differences"
        planned = f"planned by {self.policy}" if self.planned is not None else "no plan"
        return f"<fxamp census of {self.name}: {planned}, {sum(r.count for r in self.ran)} ops ran, {found}>"


@diagnostic
def census(
    model_or_step: Any, inputs: Any = None, target: Any = None, *, kwargs: Mapping[str, Any] | None = None,
    loss: Loss = None, batches: Iterable[Any] | None = None, policies: Policy | str | None = None,
) -> Census:  # fmt: skip
    """Run one real step, forward, loss and backward, and say what ran in which dtype, and whether it was planned.

    Everything is as before afterwards: parameters, their gradients, buffers, random states, and of a TrainStep the
    optimizer and the scaler. An emitted graph runs node by node meanwhile, so that every op has the name that its
    decision has. A graph that Inductor runs is compiled once more, for the census, so that there is its own record of
    what is stored, loaded and multiplied in which dtype. What other compilers' kernels do inside cannot be seen; the
    products that they call are.

    Of a TrainStep one window is run, with its optimizer; of several batches, a step of each. Without a loss it is the
    mean of the float outputs. For a module that nobody converted, what ran is listed: call it under `torch.autocast` as
    you train.

    Args:
        policies: Convert the model by this policy first; of a module that nobody converted.

    Raises:
        PolicyError: The inputs are of another kind, or there is nothing to make a loss of.
        CaptureError: The model is on the meta device.
        NotAModuleError: It is neither a module nor a TrainStep.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     found = fxamp.census(model, x)
        >>> {row.dtype for row in found.ran if row.product}
        {'bfloat16'}
    """
    step = step_of(model_or_step, inputs, target, kwargs=kwargs, loss=loss, batches=batches).under(policies)
    parts = converted_in(step.model)
    with visible_graphs([part for _, part in parts]):
        observation = observe(step)
    found = census_of(step.model, dict(parts), observation)
    devices = {"cpu", *(p.device.type for p in step.model.parameters())}
    low = any(row.dtype in LOW_NAMES for row in found.ran) or any(map(torch.is_autocast_enabled, devices))
    return found if low or found.planned is not None else replace(found, notes=(NO_REGION, *found.notes))


def census_of(model: nn.Module, parts: Mapping[str, nn.Module], observation: Observation) -> Census:
    """Return what was seen in a step of a model, compared with the plans of its parts: views and graphs, by path."""
    watch = observation.watch
    rows = rows_of(watch)
    views = {path: runner for path, part in parts.items() if (runner := runner_of(part)) is not None}
    whole = not parts and bool(watch.graphs)
    scaling = observation.scaling(rows)
    has_plan = bool(parts) or whole or any("fxamp" in str(compiled_call(m)) for m in model.modules())
    found = differences_of(watch, views, whole) if has_plan else odd_products(watch)
    found += observation.scaling_differences(scaling)
    unseen = [
        f"graph {ran.number} ran as compiled by {ran.by}: inside its kernels the dtypes of {len(ran.decisions)} nodes "
        "cannot be seen; the products that it called are compared"
        for ran in watch.graphs if ran.by and ran.kernels is None
    ]  # fmt: skip
    if inside := of_products(watch)[1]:
        nodes = list(dict.fromkeys(d.where for d in inside))
        unseen.append(
            f"{len(nodes)} nodes read and give {inside[0].planned} as planned, and torch's op casts inside and "
            f"computes products in {inside[0].ran}: {', '.join(nodes)}"
        )
    policies = [str(ran.known.plan.policy) for ran in watch.graphs]
    policies += [str(runner.graphs.policy) for runner in views.values()]
    return Census(
        name=type(original_of(model) or model).__name__, policy=next(iter(policies), ""),
        planned=planned_rows(watch) if has_plan else None, ran=rows, differences=tuple(found), scaling=scaling,
        notes=(*observation.notes, *unseen), compiled=tuple(c for c in map(compiled_of, watch.graphs) if c is not None),
    )  # fmt: skip


class CallCensus:
    """Watches micro-batches of a TrainStep when there are new graphs, and says what did not run as planned.

    Args:
        how: "warn", or "error", which raises, before the weights are updated.

    Attributes:
        last: the last census; None before the first.

    Raises:
        PolicyError: `how` is something else.
    """

    def __init__(self, how: Literal["warn", "error"]) -> None:
        if how not in ("warn", "error"):
            raise PolicyError(f'census must be "warn", "error" or None, got {how!r}')
        self._how, self._graphs = how, -1
        self._runners: list[Any] | None = None
        self.last: Census | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_runners": None, "_graphs": -1}  # a copy has a model of its own

    def watches(self, step: Any, frame: CodeType) -> contextlib.AbstractContextManager[Any]:
        """Return a context for a micro-batch: a watch if graphs were captured since the last one, or there was none.

        Args:
            step: The TrainStep.
            frame: The code that runs the micro-batch.
        """
        if self._runners is None:
            self._runners = [runner for m in step.model.modules() if (runner := runner_of(m)) is not None]
        due = self._graphs != self._captured()
        return self._watched(step, frame) if due else contextlib.nullcontext()

    def _captured(self) -> int:
        return sum(len(runner.graphs) for runner in self._runners or ())

    @contextlib.contextmanager
    def _watched(self, step: Any, frame: CodeType) -> Iterator[None]:
        """Watch what is run inside, and judge it.

        Raises:
            VerificationError: something did not run as planned, and `how` is "error".
        """
        parts = converted_in(step.model)
        watch = Watch(step.model, frame)
        with visible_graphs([part for _, part in parts]), watch:
            yield
        self._graphs = self._captured()
        self.last = found = census_of(step.model, dict(parts), Observation(watch, (), step.scaler, ended=False))
        if found.differences:
            listed = "".join(f"\n  {d}" for d in found.differences[:5])
            text = f"{found.name}: {len(found.differences)} differences between what ran and the plan:{listed}"
            if self._how == "error":
                raise VerificationError(text)
            warnings.warn(text, stacklevel=4)

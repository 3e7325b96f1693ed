"""Convert many `transformers` architectures and compare each with `torch.autocast`, by both front ends.

    python reports/coverage.py                              # every architecture of architectures.py
    python reports/coverage.py --only BertForMaskedLM

Each runs in a process of its own, with a time limit. Low is BF16, the level O1, the device a CPU. Writes `coverage.md`
and `coverage.json` beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import json
import logging
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from fxamp.capture.states import capture  # noqa: E402

import fxamp  # noqa: E402  (the path comes first)
from fxamp.convert import autocast_for, emit  # noqa: E402
from fxamp.dynamo.resolve import resolve  # noqa: E402
from fxamp.measure.counts import _Counter, step_counts  # noqa: E402
from fxamp.trust.distance import UnderAutocast, distance, floats  # noqa: E402
from passes._torch import pytree  # noqa: E402
from passes.contract.reasons import DEVIATIONS  # noqa: E402
from passes.graph.notes import note_of  # noqa: E402
from reports.architectures import BY_NAME, Inputs  # noqa: E402
from reports.trial.first import Record, Stopped, unequal  # noqa: E402

POLICY, LOW = "O1,dtype=bf16", torch.bfloat16
EXPORT, BACKEND = "export", "backend"
BATCHES = (2, 3)
SECONDS = 600
OUTSIDE = "outside"  # no node of a graph differs: what does runs between graphs


@dataclass(frozen=True)
class Row:
    """What became of one architecture by one front end.

    `captured` is whether torch does it without fxamp, which is tried where fxamp fails, for fxamp captures by the same
    means; `problem` is why the first thing that failed did. Numbers are None where they could not be had. `outputs`
    and `gradients` are ratios of distances from float64 to those of autocast. `equal` is for a call as it is; `ambient`
    for one of `fxamp.backend` under `torch.autocast`, as trainers make it, with its dtypes; `deviation` is the code of
    the first node that differs from autocast in eval, found at `where`.
    """

    architecture: str
    family: str
    front_end: str
    captured: bool = False
    converted: bool = False
    runs: bool = False
    verified: str = ""
    graphs: int = 0
    equal: bool | None = None
    ambient: bool | None = None
    deviation: str = ""
    where: str = ""
    outputs: float | None = None
    gradients: float | None = None
    casts: int | None = None
    autocast_casts: int | None = None
    problem: str = ""
    seconds: float = 0.0


# What the converted models are compared with.


class Double(TorchFunctionMode):
    """Makes float64 of every float32 that a model asks for, so that an oracle in float64 is one throughout."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        wider: Callable[[Any], Any] = lambda v: torch.float64 if v is torch.float32 else v  # noqa: E731
        args, kwargs = pytree.tree_map(wider, (args, kwargs or {}))
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Measured:
    """Outputs in eval mode and gradients in train mode."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """What autocast gives, what float64 gives, and the casts of a training step under autocast.

    `problem` says why autocast, or float64, cannot run the model.
    """

    autocast: Measured | None = None
    truth: Measured | None = None
    casts: int | None = None
    problem: str = ""


def reference(model: nn.Module, inputs: Inputs) -> Reference:
    """Measure what the converted models are compared with."""
    found = Reference()
    under = UnderAutocast(model, LOW)
    try:
        casts = step_counts(lambda: _loss_under_autocast(model.train(), inputs)).casts
        found = replace(found, autocast=_measure(under, model, inputs), casts=casts)
    except Exception as e:
        return replace(found, problem=f"torch.autocast: {_line(e)}")
    finally:
        model.zero_grad(set_to_none=True)
    try:
        return replace(found, truth=_in_double(model, inputs))
    except Exception as e:
        return replace(found, problem=f"float64: {_line(e)}")


def _in_double(model: nn.Module, inputs: Inputs) -> Measured:
    double: Any = copy.deepcopy(model).double()
    if hasattr(double, "set_experts_implementation"):
        double.set_experts_implementation("eager")  # grouped matrix products have no float64 kernel
    torch.set_default_dtype(torch.float64)
    try:
        with Double():
            return _measure(double, double, _floats_to(inputs, torch.float64))
    finally:
        torch.set_default_dtype(torch.float32)


def _floats_to(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def _loss_under_autocast(model: nn.Module, inputs: Inputs) -> Tensor:
    with torch.autocast("cpu", dtype=LOW):
        return loss_of(model(**inputs))


def _measure(module: nn.Module, model: nn.Module, inputs: Inputs) -> Measured:
    """Run a module that shares the parameters of a model, in eval and in train mode."""
    _set_mode(module, model, False)
    torch.manual_seed(0)  # some draw numbers, in eval mode too
    with torch.no_grad():
        outputs = floats(module(**inputs))
    _set_mode(module, model, True)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    with _same_buffers(model):
        loss_of(module(**inputs)).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Measured(outputs, gradients)


def _set_mode(module: nn.Module, model: nn.Module, training: bool) -> None:
    model.train(training)
    module.train(training)


@contextlib.contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    before = {n: b.clone() for n, b in model.named_buffers()}
    yield
    with torch.no_grad():
        for n, b in model.named_buffers():
            b.copy_(before[n])


def loss_of(output: Any) -> Tensor:
    """Return the model's own loss; without one, the mean squares of its outputs together."""
    if getattr(output, "loss", None) is not None:
        loss: Tensor = output.loss
        return loss
    return torch.stack([t.float().square().mean() for t in floats(output) if t.requires_grad]).sum()


# The front ends.


def by_export(name: str) -> Row:
    """Convert one architecture ahead of time."""
    row = Row(name, BY_NAME[name].family, EXPORT)
    model, inputs = BY_NAME[name]()
    convert = functools.partial(fxamp.convert, model, (), inputs, dynamic_shapes=_dynamic(inputs))
    try:
        model.train()
        module = convert(policy=POLICY)
    except Exception as e:
        model, inputs = BY_NAME[name]()
        return _refused(row, e, lambda: _torch_export(model.train(), inputs))
    row = replace(row, captured=True, converted=True, verified=module.plan.verified, graphs=len(module.variants))
    row = _compared(row, module, model, inputs, lambda: step_counts(lambda: loss_of(module(**inputs))).casts)
    if row.equal is not False:
        return row
    plain = _unrounded(model.eval(), inputs)
    module.eval()
    with torch.no_grad():
        expected, got = _AsUnderAutocast(plain), Record(module)
        flat = module.call_spec.bind((), inputs)
        with torch.autocast("cpu", dtype=LOW), contextlib.suppress(Stopped):
            expected.run(*flat, enable_io_processing=False)
        got.run(*flat, enable_io_processing=False)
    return _explained(row, [(0, expected, got)], module.plan)


def _unrounded(model: nn.Module, inputs: Inputs) -> Any:
    """Return the graph that is converted, nothing rounded; its nodes say which dtype autocast gives each."""
    low, none = (resolve(fxamp.Policy.parse(text), model, ((), inputs)) for text in (POLICY, "O0"))
    autocast = autocast_for(low, model, ((), inputs))
    captures = capture(model, (), inputs, front_end="export", dynamic_shapes=_dynamic(inputs), autocast=autocast)
    return emit(captures, none)


def _torch_export(model: nn.Module, inputs: Inputs) -> None:
    """Let torch export the model with dynamic sizes or, failing that, with static ones."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            torch.export.export(model, (), inputs, dynamic_shapes=_dynamic(inputs))
        except Exception:
            torch.export.export(model, (), inputs)


def _dynamic(inputs: Inputs) -> dict[str, Any]:
    """Return dynamic shapes: every dimension, but of images the batch; torch takes minutes over those of windows."""
    return {k: _auto(v) if isinstance(v, Tensor) else None for k, v in inputs.items()}


def _auto(tensor: Tensor) -> dict[int, Any]:
    return dict.fromkeys(range(tensor.dim() if tensor.dim() < 4 else 1), torch.export.Dim.AUTO)


class _Inner:
    """Runs converted graphs as they are, as "eager" does; a call can be counted, or recorded."""

    def __init__(self) -> None:
        self.graphs = 0
        self.counter: _Counter | None = None
        self.records: list[tuple[int, Record]] | None = None

    def __call__(self, converted: GraphModule, _: list[Any]) -> Callable[..., Any]:
        index, author = self.graphs, {n.name for n in converted.graph.nodes if not note_of(n).made_by}
        self.graphs += 1
        return functools.partial(self._call, converted, index, author)

    def _call(self, converted: GraphModule, index: int, author: set[str], *args: Any) -> Any:
        if self.records is not None:
            record = Record(converted, author)
            self.records.append((index, record))
            return record.run(*args, enable_io_processing=False)
        with self.counter or contextlib.nullcontext():
            return converted(*args)


def _compiled(model: nn.Module, backend: _Inner) -> Any:
    return fxamp.compile(model, policy=POLICY, backend=backend)


def by_backend(name: str) -> Row:
    """Convert one architecture just in time, for two batch sizes in train and in eval mode; then measure it afresh."""
    row = Row(name, BY_NAME[name].family, BACKEND)
    model, inputs = BY_NAME[name]()
    backend = _Inner()
    module: Any = _compiled(model, backend)
    try:
        _train_and_eval(module, name)
        plan = fxamp.plan_of(module)
    except Exception as e:
        torch._dynamo.reset()
        plain: Any = torch.compile(BY_NAME[name]()[0], backend="eager")
        return _refused(row, e, lambda: _train_and_eval(plain, name))
    row = replace(row, captured=True, converted=True, verified=plan.verified)
    model, inputs = BY_NAME[name]()
    torch._dynamo.reset()  # or the graphs and the limits of the run before would count
    backend = _Inner()
    module = _compiled(model, backend)
    module.eval()
    with torch.no_grad():
        module(**inputs)
    row = replace(row, graphs=backend.graphs)
    row = _compared(row, module, model, inputs, lambda: _casts_of_compiled(module, backend, inputs))
    row = replace(row, ambient=_equal_under_autocast(model, inputs) if row.equal is not None else None)
    return row if row.equal is not False else _explained(row, *_recorded(model, inputs))


def _equal_under_autocast(model: nn.Module, inputs: Inputs) -> bool:
    """Say whether `fxamp.backend` gives in eval mode, called under autocast, what autocast alone gives, dtypes too."""
    model.eval()
    torch._dynamo.reset()
    outputs = []
    for module in (model, torch.compile(model, backend=_Inner())):
        torch.manual_seed(0)
        with torch.no_grad(), torch.autocast("cpu", dtype=LOW):
            outputs.append(floats(module(**inputs)))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def _under_autocast(model: nn.Module, inputs: Inputs) -> Any:
    """Call a model as a view's function does, so that equal nodes of the captured graphs have equal names."""
    with torch.autocast("cpu", dtype=LOW):
        outputs = model(**inputs)
    return outputs  # noqa: RET504  (nodes are named after variables)


def _recorded(model: nn.Module, inputs: Inputs) -> tuple[list[tuple[int, Record, Record]], fxamp.Plan]:
    """Record what the graphs captured under autocast make there, and what ours make, in eval mode."""
    expected: list[Record] = []

    def under_autocast(gm: GraphModule, _: list[Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            expected.append(Record(gm))
            return expected[-1].run(*args, enable_io_processing=False)

        return call

    backend = _Inner()
    backend.records = []
    model.eval()
    with torch.no_grad():
        torch._dynamo.reset()
        torch.manual_seed(0)
        torch.compile(_under_autocast, backend=under_autocast)(model, inputs)
        torch._dynamo.reset()
        torch.manual_seed(0)
        compiled = _compiled(model, backend)
        compiled(**inputs)
    calls = zip(expected, backend.records, strict=False)
    return [(index, theirs, ours) for theirs, (index, ours) in calls], fxamp.plan_of(compiled)


def _train_and_eval(module: nn.Module, name: str) -> None:
    for training in (True, False):
        module.train(training)
        for size in BATCHES:
            loss = loss_of(module(**BY_NAME[name].batch(size)))
            if training:
                loss.backward()


def _casts_of_compiled(module: nn.Module, backend: _Inner, inputs: Inputs) -> int:
    """Count the casts of a training step inside the graphs: under a dispatch mode torch would not run those at all."""
    counter = backend.counter = _Counter()
    try:
        loss = loss_of(module(**inputs))
    finally:
        backend.counter = None
    with counter:
        loss.backward()
    return counter.casts


# The comparison.


def _compared(row: Row, module: nn.Module, model: nn.Module, inputs: Inputs, casts: Callable[[], int]) -> Row:
    """Fill in what running a converted module shows."""
    found = reference(model, inputs)
    row = replace(row, autocast_casts=found.casts, problem=found.problem)
    try:
        got = _measure(module, model, inputs)
        _set_mode(module, model, True)
        row = replace(row, runs=True, casts=casts())
        model.zero_grad(set_to_none=True)
        _set_mode(module, model, False)
    except Exception as e:
        return replace(row, runs=False, problem=_line(e))
    if found.autocast is None:
        return row
    pairs = list(zip(found.autocast.outputs, got.outputs, strict=True))
    row = replace(row, equal=all(torch.equal(a.float(), b.float()) for a, b in pairs))
    if found.truth is None:
        return row
    return replace(
        row,
        outputs=_ratio(_named(got.outputs), _named(found.autocast.outputs), _named(found.truth.outputs)),
        gradients=_ratio(got.gradients, found.autocast.gradients, found.truth.gradients),
    )


def _named(tensors: list[Tensor]) -> dict[str, Tensor]:
    return {str(i): t for i, t in enumerate(tensors)}


def _ratio(got: dict[str, Tensor], autocast: dict[str, Tensor], truth: dict[str, Tensor]) -> float | None:
    """Return how far from the truth the one is, in units of how far the other is; 1 where both are equal."""
    ours, theirs = distance(got, truth), distance(autocast, truth)
    if ours == theirs:
        return 1.0
    return ours / theirs if theirs else None


class _AsUnderAutocast(Record):
    """Gives every value the dtype that it has under autocast: a dtype that the program read there is in no graph."""

    def run_node(self, n: Node) -> Any:
        made = super().run_node(n)
        dtype = note_of(n).autocast
        if isinstance(made, Tensor) and made.is_floating_point() and isinstance(dtype, torch.dtype):
            made = made.to(dtype)
            if n.name in self.made:
                self.made[n.name] = made.detach().clone()
        return made


def _explained(row: Row, runs: list[tuple[int, Record, Record]], plan: fxamp.Plan) -> Row:
    """Fill in the first node whose value differs from what autocast gives the unrounded graph, and its decision."""
    found = unequal(runs, plan)
    if found is not None:
        return replace(row, deviation=found[0], where=found[1])
    return replace(row, deviation=OUTSIDE, where="what Dynamo leaves to Python") if row.graphs > 1 else row


def _refused(row: Row, error: Exception, plain: Callable[[], object]) -> Row:
    """Fill in why fxamp failed, and whether torch without fxamp does."""
    try:
        plain()
    except Exception as e:
        return replace(row, problem=f"torch: {_line(e)}")
    return replace(row, captured=True, problem=_line(error))


def _line(error: BaseException) -> str:
    """Return an error as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


# The run.

FRONT_ENDS: dict[str, Callable[[str], Row]] = {EXPORT: by_export, BACKEND: by_backend}


def _work(name: str, front_end: str, out: Connection) -> None:
    """Run one architecture by one front end and send the row; whatever happens is a row."""
    start = time.perf_counter()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        row = FRONT_ENDS[front_end](name)
    except BaseException as e:
        row = Row(name, BY_NAME[name].family, front_end, problem=f"this script: {_line(e)}")
    out.send(replace(row, seconds=round(time.perf_counter() - start, 1)))


def run_all(cases: Sequence[tuple[str, str]], processes: int) -> list[Row]:
    """Run every case in a process of its own, some at a time; return the rows in the order of the cases."""
    context = multiprocessing.get_context("fork")  # torch and transformers are loaded once, here
    waiting, rows = list(cases), dict[tuple[str, str], Row]()
    running: dict[Any, tuple[tuple[str, str], Any, float]] = {}
    with tqdm(total=len(cases), desc="architectures", unit="run") as progress:
        while waiting or running:
            while waiting and len(running) < processes:
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(*waiting[0], sender))
                process.start()
                sender.close()
                running[receiver] = (waiting.pop(0), process, time.monotonic())
            ready = wait(list(running), timeout=1)
            late = [r for r, (_, _, start) in running.items() if time.monotonic() - start > SECONDS]
            for receiver in {*ready, *late}:
                case, process, _ = running.pop(receiver)
                rows[case] = _received(receiver, case, receiver in ready)
                process.kill()
                process.join()
                progress.update()
                progress.set_postfix_str(case[0])
    return [rows[case] for case in cases]


def _received(receiver: Any, case: tuple[str, str], ready: bool) -> Row:
    try:
        row: Row = receiver.recv() if ready else Row(*_head(case), problem=f"took longer than {SECONDS} s")
    except EOFError:
        row = Row(*_head(case), problem="its process died")
    return row


def _head(case: tuple[str, str]) -> tuple[str, str, str]:
    return case[0], BY_NAME[case[0]].family, case[1]


def to_markdown(rows: Sequence[Row], versions: Mapping[str, str]) -> str:
    """Return the report: totals, a table for each front end, deviations, and what was not captured."""
    parts = [
        "# Coverage: `transformers` architectures\n\n"
        f"Written by `reports/coverage.py` on a CPU, torch {versions['torch']}, transformers\n"
        f"{versions['transformers']}: small random configs, policy `{POLICY}`, one step and one evaluation each.\n"
        f"`export` is `fxamp.convert` ahead of time; `backend` is `fxamp.compile`, without an\n"
        f"inner compiler. Batches of {BATCHES[0]} and {BATCHES[1]} run in train and in eval mode.\n",
        _totals(rows),
    ]
    for front_end in FRONT_ENDS:
        mine = [r for r in rows if r.front_end == front_end]
        if mine:
            parts.append(f"## By `{front_end}`\n\n{_table(mine)}\n")
    parts.append(
        "The columns mean:\n\n"
        "- torch: whether torch captures the model without fxamp.\n"
        "- equal: `yes` if outputs in eval mode equal those of `torch.autocast` bit for bit; if not, the reason code\n"
        "  of the first node that differs, or `outside` if the difference is in code that Dynamo leaves to Python.\n"
        "- under autocast: the same for a model that is called under `torch.autocast`, as trainers do; dtypes must be\n"
        "  equal too.\n"
        "- outputs (in eval mode) and gradients (in train mode, of all parameters): the distance from float64,\n"
        "  divided by that of autocast; below 1 means more accurate than autocast.\n"
        "- casts: those executed in a training step. Casts in code between graphs count only for autocast.\n"
        "- graphs: with `export` two if the model computes differently in eval mode; with `backend` those of a first\n"
        "  call in eval mode.\n"
    )
    different = [(r.architecture, r.front_end, r.deviation or "none", f"`{r.where}`") for r in rows if r.equal is False]
    if different:
        headers = ("architecture", "front end", "code", "first node that differs")
        parts.append(f"## Outputs that differ from autocast's\n\n{tabulate(different, headers, 'pipe')}\n")
    problems = [f"- {r.architecture}, {r.front_end}: {r.problem}" for r in rows if r.problem]
    if problems:
        parts.append("## Refused, not captured, or not compared\n\n" + "\n".join(problems) + "\n")
    return "\n".join(parts)


def _totals(rows: Sequence[Row]) -> str:
    table = []
    for front_end in FRONT_ENDS:
        mine = [r for r in rows if r.front_end == front_end]
        captured, compared = [r for r in mine if r.captured], [r for r in mine if r.equal is not None]
        equal = sum(bool(r.equal) for r in compared)
        coded = sum(r.deviation in DEVIATIONS for r in compared if not r.equal)
        under = [r for r in mine if r.ambient is not None]
        table.append((
            front_end, len(mine), len(captured), f"{sum(r.runs for r in captured)} of {len(captured)}",
            f"{equal} of {len(compared)}", f"{coded} of {len(compared) - equal}",
            f"{sum(bool(r.ambient) for r in under)} of {len(under)}" if under else "",
        ))  # fmt: skip
    headers = (
        "front end", "architectures", "torch captures", "of those, fxamp converts and runs", "equal to autocast",
        "the others, with a code", "equal, called under autocast",
    )  # fmt: skip
    return tabulate(table, headers, "pipe", disable_numparse=True) + "\n"


def _table(rows: Sequence[Row]) -> str:
    headers = (
        "architecture", "family", "torch", "converted", "verified", "graphs", "equal", "under autocast", "outputs",
        "gradients", "casts", "autocast's",
    )  # fmt: skip
    table = [
        (
            r.architecture, r.family, _yes(r.captured), _yes(r.converted and r.runs), r.verified, r.graphs or "",
            "" if r.equal is None else "yes" if r.equal else r.deviation or "no",
            "" if r.ambient is None else _yes(r.ambient), _number(r.outputs), _number(r.gradients),
            _known(r.casts), _known(r.autocast_casts),
        )
        for r in rows
    ]  # fmt: skip
    aligned = ("left", "left", "left", "left", "left", "right", "left", "left", *["right"] * 4)
    return tabulate(table, headers, "pipe", disable_numparse=True, colalign=aligned)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _known(value: int | None) -> str:
    return "" if value is None else str(value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert the architectures asked for, print the tables and write both files."""
    parser = argparse.ArgumentParser(description="Convert many architectures and compare each with torch.autocast.")
    parser.add_argument("--only", action="append", metavar="NAME", choices=list(BY_NAME), help="this one; may repeat")
    parser.add_argument("--front-end", choices=list(FRONT_ENDS), help="this front end only")
    parser.add_argument("--processes", type=int, default=2, help="how many at a time (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, default=HERE, metavar="FOLDER", help="where to write")
    options = parser.parse_args(arguments)
    import transformers

    transformers.logging.set_verbosity_error()
    for name in options.only or BY_NAME:
        getattr(transformers, name)  # loaded once, here, and not in every process
    fronts = [options.front_end] if options.front_end else list(FRONT_ENDS)
    rows = run_all([(name, front) for name in options.only or BY_NAME for front in fronts], options.processes)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    text = to_markdown(rows, versions)
    sys.stdout.write(text)
    options.output.joinpath("coverage.md").write_text(text)
    data = {**versions, "policy": POLICY, "rows": [asdict(row) for row in rows]}
    options.output.joinpath("coverage.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)  # how a sum is shared out decides how it rounds
    torch.backends.mha.set_fastpath_enabled(False)  # fused inference kernels of eager round differently
    main()

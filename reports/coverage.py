"""Convert many `transformers` architectures and compare each with `torch.autocast`: views, and exported graphs.

    python reports/coverage.py                              # every architecture of architectures.py
    python reports/coverage.py --only BertForMaskedLM
    python reports/coverage.py --held-out 60                # those that a seed draws, see held_out.py

Each runs in a process of its own, with a time limit. Low is BF16, the level O1, the device a CPU. Writes `coverage.md`
and `coverage.json` beside this file, or `held_out.md` and `held_out.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
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
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fxamp  # noqa: E402  (the path comes first)
from fxamp.measure.counts import step_counts  # noqa: E402
from fxamp.observe.workload import floats  # noqa: E402
from passes._torch import pytree  # noqa: E402
from passes.contract.reasons import DEVIATIONS  # noqa: E402
from reports import held_out  # noqa: E402
from reports.made import made, write  # noqa: E402
from tests.support.architectures import BY_NAME, Inputs  # noqa: E402
from tests.support.baseline import UnderAutocast, distance  # noqa: E402
from tests.support.trial.first import NOWHERE, Calls, Pair, first_difference  # noqa: E402
from tests.support.trial.judge import as_graph, pair_of  # noqa: E402

POLICY, LOW = "O1,dtype=bf16", torch.bfloat16
VIEW, GRAPH = "view", "graph"
BATCHES = (2, 3)
SECONDS = 600
OUTSIDE = "outside"  # no node of a graph differs: what does runs between graphs


@dataclass(frozen=True)
class Row:
    """What became of one architecture by one front end.

    `captured` is whether torch does it without fxamp, which is tried where fxamp fails, for fxamp captures by the same
    means; `problem` is why the first thing that failed did. Numbers are None where they could not be had. `same` is
    whether outputs at O0 are those of eager PyTorch, `equal` whether those at O1 are those of autocast, both in eval
    mode; `ambient` is the latter for `fxamp.backend` called under `torch.autocast`, with its dtypes. `deviation` is the
    code of the first node that differs from autocast, found at `where`. `outputs` and `gradients` are ratios of
    distances from float64 to those of autocast.
    """

    architecture: str
    family: str
    front_end: str
    captured: bool = False
    converted: bool = False
    runs: bool = False
    graphs: int = 0
    same: bool | None = None
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
    with _ambient():
        return loss_of(model(**inputs))


def _measure(module: nn.Module, model: nn.Module, inputs: Inputs) -> Measured:
    """Run a module that shares the parameters of a model, in eval and in train mode."""
    _set_mode(module, model, False)
    outputs = _evaluated(module, inputs)
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


def by_view(name: str) -> Row:
    """Convert one architecture to a view, and call it with two batch sizes, in train and in eval mode."""
    row = Row(name, BY_NAME[name].family, VIEW)
    model, inputs = BY_NAME[name]()
    try:
        module = fxamp.convert(model.train(), (), inputs, policy=POLICY)
        _train_and_eval(module, name)
        exact = fxamp.convert(model.eval(), (), inputs, policy="O0")
    except Exception as e:
        torch._dynamo.reset()
        plain: Any = torch.compile(BY_NAME[name]()[0], backend="eager")
        return _refused(row, e, lambda: _train_and_eval(plain, name))
    model.zero_grad(set_to_none=True)
    row = replace(row, captured=True, converted=True)
    row = _compared(row, module, model, inputs)
    if not row.runs:
        return row
    row = replace(row, same=_same(exact, model, inputs), ambient=_equal_under_autocast(model, inputs))
    in_eval = [graph for graph in fxamp.graphs(module) if "eval, no_grad" in graph.meta["fxamp"]["state"]]
    row = replace(row, graphs=len(in_eval))
    if row.equal is not False:
        return row
    torch._dynamo.reset()
    with torch.no_grad():
        return _explained(row, Calls(_ambient).of_view(model.eval(), (), inputs, POLICY))


def by_graph(name: str) -> Row:
    """Convert the graph that torch exports of one architecture in eval mode, and compare it with that graph."""
    row = Row(name, BY_NAME[name].family, GRAPH)
    model, inputs = BY_NAME[name]()
    try:
        program = torch.export.export(model.eval(), (), inputs, strict=False)
    except Exception as e:
        return replace(row, problem=f"torch.export: {_line(e)}")
    row = replace(row, captured=True, graphs=1)
    given = as_graph(program)
    try:
        exact, module = (fxamp.convert(program, policy=policy) for policy in ("O0", POLICY))
        row = replace(row, converted=True, same=_same(exact, given, inputs), runs=True)
    except Exception as e:
        return replace(row, problem=_line(e))
    try:
        row = replace(row, equal=_same(module, UnderAutocast(given, LOW), inputs))
    except Exception as e:
        return replace(row, problem=f"torch.autocast: {_line(e)}")
    if row.equal:
        return row
    with torch.no_grad():
        return _explained(row, [pair_of(given, module, (), inputs, _ambient())])


def _ambient() -> torch.autocast:
    return torch.autocast("cpu", dtype=LOW)


def _evaluated(module: Any, inputs: Inputs) -> list[Tensor]:
    torch.manual_seed(0)  # some draw numbers, in eval mode too
    with torch.no_grad():
        return floats(module(**inputs))


def _same(module: Any, model: Any, inputs: Inputs) -> bool:
    """Say whether two modules have outputs of the same values, whatever they are stored in."""
    pairs = zip(_evaluated(module, inputs), _evaluated(model, inputs), strict=True)
    return all(torch.equal(a.float(), b.float()) for a, b in pairs)


def _equal_under_autocast(model: nn.Module, inputs: Inputs) -> bool:
    """Say whether `fxamp.backend` gives in eval mode, called under autocast, what autocast alone gives, dtypes too."""
    model.eval()
    torch._dynamo.reset()
    with _ambient():
        ours: Any = torch.compile(model, backend=fxamp.backend("O1", "eager"))
        outputs = [_evaluated(module, inputs) for module in (model, ours)]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def _train_and_eval(module: nn.Module, name: str) -> None:
    for training in (True, False):
        module.train(training)
        for size in BATCHES:
            loss = loss_of(module(**BY_NAME[name].batch(size)))
            if training:
                loss.backward()


# The comparison.


def _compared(row: Row, module: nn.Module, model: nn.Module, inputs: Inputs) -> Row:
    """Fill in what running a view shows."""
    found = reference(model, inputs)
    row = replace(row, autocast_casts=found.casts, problem=found.problem)
    try:
        got = _measure(module, model, inputs)
        _set_mode(module, model, True)
        row = replace(row, runs=True, casts=step_counts(lambda: loss_of(module(**inputs))).casts)
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


def _explained(row: Row, pairs: list[Pair]) -> Row:
    """Fill in the first node whose value differs from what autocast gives the captured graph, and its decision."""
    code, where = first_difference(pairs)
    if where == NOWHERE and row.graphs > 1:
        code, where = OUTSIDE, "what Dynamo leaves to Python"
    return replace(row, deviation=code, where=where)


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

FRONT_ENDS: dict[str, Callable[[str], Row]] = {VIEW: by_view, GRAPH: by_graph}


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
        f"`view` is `fxamp.convert` of the model; batches of {BATCHES[0]} and {BATCHES[1]} in both modes.\n"
        "`graph` is `fxamp.convert` of what `torch.export` makes of it in eval mode, compared with that graph.\n",
        _totals(rows),
    ]
    for front_end in FRONT_ENDS:
        mine = [r for r in rows if r.front_end == front_end]
        if mine:
            parts.append(f"## By `{front_end}`\n\n{_table(mine)}\n")
    parts.append(
        "The columns mean:\n\n"
        "- torch: whether torch captures the model without fxamp.\n"
        "- O0: whether outputs at O0 in eval mode equal those of eager PyTorch bit for bit.\n"
        "- equal: `yes` if outputs in eval mode equal those of `torch.autocast` bit for bit; if not, the reason code\n"
        "  of the first node that differs, or `outside` if the difference is in code that Dynamo leaves to Python.\n"
        "- under autocast: the same for a model compiled in place and called under `torch.autocast`, dtypes too.\n"
        "- outputs (in eval mode) and gradients (in train mode, of all parameters): the distance from float64,\n"
        "  divided by that of autocast; below 1 means more accurate than autocast.\n"
        "- casts: those executed in a training step.\n"
        "- graphs: those of eval mode without gradients.\n"
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
            f"{sum(bool(r.same) for r in mine)} of {sum(r.same is not None for r in mine)}",
            f"{equal} of {len(compared)}", f"{coded} of {len(compared) - equal}",
            f"{sum(bool(r.ambient) for r in under)} of {len(under)}" if under else "",
        ))  # fmt: skip
    headers = (
        "front end", "architectures", "torch captures", "of those, fxamp converts and runs", "O0 equal to eager",
        "O1 equal to autocast", "the others, with a code", "equal, called under autocast",
    )  # fmt: skip
    return tabulate(table, headers, "pipe", disable_numparse=True) + "\n"


def _table(rows: Sequence[Row]) -> str:
    headers = (
        "architecture", "family", "torch", "converted", "graphs", "O0", "equal", "under autocast", "outputs",
        "gradients", "casts", "autocast's",
    )  # fmt: skip
    table = [
        (
            r.architecture, r.family, _yes(r.captured), _yes(r.converted and r.runs), r.graphs or "",
            "" if r.same is None else _yes(r.same),
            "" if r.equal is None else "yes" if r.equal else r.deviation or "no",
            "" if r.ambient is None else _yes(r.ambient), _number(r.outputs), _number(r.gradients),
            _known(r.casts), _known(r.autocast_casts),
        )
        for r in rows
    ]  # fmt: skip
    aligned = ("left", "left", "left", "left", "right", "left", "left", "left", *["right"] * 4)
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
    parser.add_argument("--held-out", type=int, default=0, metavar="COUNT", help="so many that a seed draws")
    parser.add_argument("--front-end", choices=list(FRONT_ENDS), help="this front end only")
    parser.add_argument("--processes", type=int, default=2, help="how many at a time (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, default=HERE, metavar="FOLDER", help="where to write")
    options, began = parser.parse_args(arguments), made()
    import transformers

    transformers.logging.set_verbosity_error()
    names = options.only or list(BY_NAME)
    if options.held_out:
        drawn, _ = held_out.draw(options.held_out)
        BY_NAME.update(drawn)
        names = list(drawn)
    for name in names:
        getattr(transformers, name)  # loaded once, here, and not in every process
    fronts = [options.front_end] if options.front_end else list(FRONT_ENDS)
    rows = run_all([(name, front) for name in names for front in fronts], options.processes)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    data = {"made": began, **versions, "policy": POLICY, "rows": [asdict(row) for row in rows]}
    name = "held_out" if options.held_out else "coverage"
    sys.stdout.write(write(options.output, name, data, to_markdown(rows, versions)))


if __name__ == "__main__":
    torch.set_num_threads(1)  # how a sum is shared out decides how it rounds
    torch.backends.mha.set_fastpath_enabled(False)  # fused inference kernels of eager round differently
    main()

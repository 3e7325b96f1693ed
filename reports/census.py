"""Does a census see what ran, and what does it cost? `python reports/census.py` writes `census.md` and `census.json`.

    sweep    every model of the zoo, architectures and models of other libraries, the two drawn by SEED, at O1 and O2:
             a census has no difference, and its casts and bytes are those that a counter of dispatched ops counts
    tamper   behind the plan's back, a graph of a model is changed before it runs: one node in another dtype, one cast
             away, one op outside of the graph. The census names each, and nothing on the same graph untouched. In some
             models no cast can go: each is read by a kernel that takes no other dtype
    cost     plain steps, steps with `census=`, and censuses take turns

Models of other libraries are tried where these are installed (see `libraries.py`). Each case runs in a process of its
own, and a run goes on where its record ends.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import operator
import random
import sys
import time
import timeit
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.fx import GraphModule, Node

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fxamp  # noqa: E402  (the path comes first)
from fxamp._torch import inner_backend  # noqa: E402
from fxamp.measure.counts import step_counts  # noqa: E402
from fxamp.observe.workload import loss_of, output_of  # noqa: E402
from passes.graph.notes import is_inserted  # noqa: E402
from passes.graph.values import node_names  # noqa: E402
from passes.ops.rules import LOW, row_of  # noqa: E402
from reports import libraries  # noqa: E402
from reports.made import made, write  # noqa: E402
from reports.timing import interleaved  # noqa: E402
from tests.support import architectures, zoo  # noqa: E402
from tests.support.trial.options import add_options  # noqa: E402
from tests.support.trial.workers import Found, Record, run_all  # noqa: E402

RECORD = HERE.parent / "build" / "trial" / "census.jsonl"
SEED = 33
ARCHITECTURES, LIBRARIES, TAMPERED = 15, 20, 24
POLICIES = ("O1,dtype=bf16", "O2,dtype=bf16")
TO = torch.ops.aten.to.dtype
CASTS = (TO, torch.Tensor.to)  # as they are planned, and as they are called
DRAWS = 40  # nodes that are tried until one can be changed so that the graph still runs
NONE_CAN = "no node can be changed so that the graph still runs"
Loss = Callable[[Any], Tensor] | None


def names() -> list[str]:
    """Return the models of the sweep."""
    draw = random.Random(SEED)
    others = sorted(f"{library}:{name}" for library, (_, listed) in libraries.BUILDERS.items() for name in listed)
    return [
        *(f"zoo:{name}" for name in zoo.BY_NAME),
        *(f"architecture:{name}" for name in sorted(draw.sample(sorted(architectures.BY_NAME), ARCHITECTURES))),
        *sorted(draw.sample(others, LIBRARIES)),
    ]


def cases(compilers: tuple[str, ...]) -> list[str]:
    """Return all cases: those of the sweep, by compiler, and those of what is tampered with."""
    tampered = [name for name in names() if name.startswith(("zoo:", "architecture:"))][:TAMPERED]
    swept = [f"sweep|{name}|{p}|{by}" for by in compilers for name in names() for p in POLICIES]
    return swept + [f"tamper|{name}|{how}" for name in tampered for how in TAMPERS]


def build(name: str) -> tuple[nn.Module, Any, Loss]:
    """Return a model in train mode, its inputs, and its loss; None for the output's own, or its mean."""
    source, _, key = name.partition(":")
    torch.manual_seed(0)
    if source == "zoo":
        entry = zoo.BY_NAME[key]
        args, kwargs = entry.inputs(2)
        return entry.build().train(), kwargs or args, entry.loss
    if source == "architecture":
        model, inputs = architectures.BY_NAME[key]()
        return model.train(), inputs, None
    model, args, kwargs = libraries.build(name)
    return (_WithKeywords(model, kwargs) if args else model).train(), args or kwargs, None


def work(case: str) -> Found:
    """Run one case."""
    kind, name, *rest = case.split("|")
    try:
        model, inputs, loss = build(name)
    except Exception as e:
        return {"built": False, "problem": f"{type(e).__name__}: {e}"[:200]}
    run = swept if kind == "sweep" else tampered
    return {"built": True, **run(model, inputs, loss, *rest)}


class _WithKeywords(nn.Module):
    """A model whose keyword arguments are bound."""

    def __init__(self, model: nn.Module, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.kwargs = model, kwargs

    def forward(self, *args: Any) -> Any:
        return self.model(*args, **self.kwargs)


def swept(model: nn.Module, inputs: Any, loss: Loss, policy: str, compiler: str) -> Found:
    """Take a census of one model, and count the casts of one step by a counter of its own."""
    view = fxamp.convert(model, policy=policy, backend=compiler, check=False)
    found = fxamp.census(view, inputs, loss=loss)
    row = {
        "as_planned": bool(found), "share": found.share, "differences": [str(d) for d in found.differences[:5]],
        "casts": sum(r.casts for r in found.ran), "bytes": sum(r.cast_bytes for r in found.ran),
        "products": sum(r.count for r in found.ran if r.product),
        "compiled": [str(c) for c in found.compiled], "notes": list(found.notes),
    }  # fmt: skip
    if compiler != "eager":
        return row

    def step() -> Tensor:
        return loss_of(output_of(view, inputs), None, loss, any_will_do=True)[0]

    counted = step_counts(step)
    return {**row, "counted_casts": counted.casts, "counted_bytes": counted.cast_bytes}


# What is done to a graph behind the back of its plan: to which nodes, the better ones first, and how.


class _Draw:
    """Draws nodes at random, none twice, and those of an earlier list first."""

    def __init__(self) -> None:
        self.random, self.drawn = random.Random(SEED), set[tuple[int, str]]()

    def __call__(self, number: int, *lists: list[Node]) -> Node | None:
        """Return a node of the first list that has one left; None if none has."""
        for nodes in lists:
            if left := [n for n in nodes if (number, n.name) not in self.drawn]:
                node = self.random.choice(left)
                self.drawn.add((number, node.name))
                return node
        return None


def _calls(graph: GraphModule) -> tuple[list[Node], ...]:
    return ([n for n in graph.graph.nodes if _computes(n)],)


def _casts(graph: GraphModule) -> tuple[list[Node], ...]:
    """Return the casts that can go, those to FP32 first: no product takes two dtypes, and few other kernels do."""
    casts = [n for n in graph.graph.nodes if is_inserted(n) and n.target in CASTS and _readers(n)]
    up = [n for n in casts if n.args[1] is torch.float32]
    return up, [n for n in casts if not any(map(_is_product, _readers(n)))]


def _is_product(node: Node) -> bool:
    return node.op == "call_function" and row_of(node).cpu == LOW


def _in_another_dtype(graph: GraphModule, node: Node) -> None:
    """Run one node in the other dtype, its operands cast before and its result after."""
    other = torch.float32 if _value(node).dtype is torch.bfloat16 else torch.bfloat16
    for operand in [n for n in node.all_input_nodes if _is_float(n)]:
        with graph.graph.inserting_before(node):
            cast = graph.graph.call_function(TO, (operand, other))
        node.replace_input_with(operand, cast)
    with graph.graph.inserting_after(node):
        back = graph.graph.call_function(TO, (node, _value(node).dtype))
    node.replace_all_uses_with(back, lambda user: user is not back)


def _without_a_cast(graph: GraphModule, cast: Node) -> None:
    """Take one cast away, so that its readers read what it cast."""
    cast.replace_all_uses_with(cast.all_input_nodes[0])
    graph.graph.erase_node(cast)


def _outside(graph: GraphModule, node: Node) -> None:
    """Compute one op in a function that is no op of the graph."""
    call: Any = node.target if node.op == "call_function" else operator.methodcaller
    with graph.graph.inserting_before(node):
        made = graph.graph.call_function(_by_hand, (call, *node.args), node.kwargs)
    node.replace_all_uses_with(made)
    graph.graph.erase_node(node)


def _by_hand(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs)


TAMPERS = {"dtype": (_calls, _in_another_dtype), "cast": (_casts, _without_a_cast), "outside": (_calls, _outside)}


def _readers(cast: Node) -> list[Node]:
    return [n for n in cast.users if not is_inserted(n)]


def _computes(node: Node) -> bool:
    if node.op != "call_function" or is_inserted(node) or not isinstance(_value(node), Tensor):
        return False
    return _is_float(node) and any(_is_float(n) for n in node.all_input_nodes) and bool(node.users)


def _value(node: Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _is_float(node: Node) -> bool:
    value = _value(node)
    return isinstance(value, Tensor) and value.dtype in (torch.float32, torch.bfloat16)


@contextlib.contextmanager
def _tampering(how: str, draw: _Draw) -> Iterator[list[str]]:
    """Change the first graph captured inside that has a node to change; yield the key of the node."""
    changed: list[str] = []
    found, change = TAMPERS[how]
    numbers = itertools.count()

    def instead(*settings: Any) -> Any:
        def compile(graph: GraphModule, inputs: Any) -> Any:
            node = None if changed else draw(next(numbers), *found(graph))
            if node is not None:
                reader = _readers(node)[0] if how == "cast" else node
                changed.append(node_names(graph.graph).get(reader, "(output)"))
                change(graph, node)
                graph.graph.lint()
                graph.recompile()
            return inner_backend(*settings)(graph, inputs)

        return compile

    with contextlib.ExitStack() as patches:
        for module in [m for m in sys.modules.values() if m is not sys.modules[__name__]]:
            if vars(module).get("inner_backend") is inner_backend:
                patches.enter_context(mock.patch.object(module, "inner_backend", instead))
        yield changed


def tampered(model: nn.Module, inputs: Any, loss: Loss, how: str) -> Found:
    """Say whether a census names what was changed, and nothing where nothing was."""
    untouched = fxamp.census(fxamp.convert(model, policy=POLICIES[0], check=False), inputs, loss=loss)
    draw, refused = _Draw(), ""
    for tried in range(1, DRAWS + 1):
        view = fxamp.convert(model, policy=POLICIES[0], check=False)
        with _tampering(how, draw) as changed:
            try:
                found = fxamp.census(view, inputs, loss=loss)
            except Exception as e:  # the changed graph does not run
                refused = f"{type(e).__name__}: {e}"[:200]
                continue
        if not changed:
            break
        said = [str(d) for d in found.differences]
        return {
            "untouched": len(untouched.differences), "changed": changed[0], "tried": tried, "said": said[:5],
            "named": any(changed[0] in text for text in said),
        }  # fmt: skip
    return {"untouched": len(untouched.differences), "unchanged": refused or NONE_CAN}


# What a census costs.


def cost(layers: int = 4, width: int = 256, batch: int = 4, length: int = 64, rounds: int = 12) -> str:
    """Return the table of times of a BERT: of one TrainStep, with its census and without, each over a plain step."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    step, given = _step(layers, width, batch, length)
    look = step.census
    assert look is not None
    step(given)

    def plain() -> None:
        step.census = None
        step(given)

    def watched() -> None:
        step.census = look
        step(given)

    windows = interleaved({"a step": plain, "a step again": plain, "a step, census=": watched}, 4 * rounds, warmup=4)
    taken = interleaved({
        "a step": plain, "a census of the step": lambda: fxamp.census(step, given),
        "a census of the view": lambda: fxamp.census(step.model, given),
    }, rounds)  # fmt: skip
    due = timeit.timeit(lambda: look.watches(step, _step.__code__), number=200) / 200
    rows = [
        (name, f"{1e3 * t.median:.1f}", f"{t.median / found['a step'].median:.3f}")
        for found in (windows, taken) for name, t in found.items() if found is windows or name != "a step"
    ]  # fmt: skip
    rows.append(("the look whether a census is due", f"{1e3 * due:.3f}", f"{due / taken['a step'].median:.5f}"))
    shape = f"BERT, {layers} layers, {width} wide, batch {batch}, length {length}, one thread"
    table = tabulate(
        rows, ("", "ms", "over a step"), "pipe", disable_numparse=True, colalign=("left", "right", "right")
    )
    return f"{shape}\n\n{table}\n"


def _step(layers: int, width: int, batch: int, length: int) -> tuple[fxamp.TrainStep, dict[str, Tensor]]:
    """Return a TrainStep that takes a census, and a batch."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=4, intermediate_size=4 * width, vocab_size=1000
    )
    model = transformers.BertForMaskedLM(config).train()
    ids = torch.randint(1000, (batch, length))
    given = {"input_ids": ids, "labels": ids.clone()}
    view = fxamp.convert(model, kwargs=given, policy="O1,dtype=bf16", check=False)
    return fxamp.TrainStep(view, None, torch.optim.AdamW(model.parameters()), census="warn"), given


# The report.


def summary(found: dict[str, Found], took: str = "") -> Found:
    """Return all that the report says, as plain data."""
    return {"torch": torch.__version__, "seed": SEED, "cost": took, "cases": found}


def to_markdown(data: Found) -> str:
    """Write the report."""
    rows = {case: entry for case, entry in data["cases"].items() if entry.get("built", True)}
    swept = {case: e for case, e in rows.items() if case.startswith("sweep")}
    tampered = {case: e for case, e in rows.items() if case.startswith("tamper")}
    table = []
    for policy, by in sorted({tuple(case.split("|")[2:]) for case in swept}):
        those = [e for case, e in swept.items() if case.endswith(f"|{policy}|{by}")]
        counted = [e for e in those if "counted_casts" in e]
        alike = [e for e in counted if (e["casts"], e["bytes"]) == (e["counted_casts"], e["counted_bytes"])]
        casts = f"{len(alike)} of {len(counted)}" if counted else ""
        table.append((by, policy, len(those), sum(e.get("as_planned", False) for e in those), casts))
    of_tampers = [
        (how, len(those), sum("changed" in e for e in those), sum(e.get("named", False) for e in those),
         sum(e.get("untouched", 0) for e in those))
        for how in TAMPERS if (those := [e for case, e in tampered.items() if case.endswith(f"|{how}")])
    ]  # fmt: skip
    changed = Counter(case.split("|")[1] for case, e in tampered.items() if "changed" in e)
    all_three = sum(count == len(TAMPERS) for count in changed.values())
    unchanged = [f"- `{case.replace('|', ' ')}`: {e['unchanged']}" for case, e in tampered.items() if "unchanged" in e]
    lines = [
        "# The census\n", f"Written by `reports/census.py` on a CPU, torch {data['torch']}, seed {data['seed']}.\n",
        "## What ran is what was planned\n",
        tabulate(table, ("compiler", "policy", "models", "as planned", "casts and bytes as counted"), "pipe"),
        "\n## What was changed behind the plan's back\n",
        tabulate(
            of_tampers, ("change", "models", "changed", "named", "differences of the same graph untouched"), "pipe"
        ),
        f"\nIn {all_three} models all three changes could be made. Where one could not:\n", *unchanged,
        "\n## What was not so\n", *(_problem(case, e) for case, e in data["cases"].items() if failed(e)),
        "\n## What a census costs\n", data["cost"],
    ]  # fmt: skip
    return "\n".join(lines)


def failed(entry: Found) -> bool:
    """Say whether a case is not as it should be."""
    counts = entry.get("casts"), entry.get("bytes")
    miscounted = "counted_casts" in entry and counts != (entry["counted_casts"], entry["counted_bytes"])
    wrong = not entry.get("as_planned", True) or not entry.get("named", True) or entry.get("untouched", 0)
    return bool(wrong or miscounted or {"problem", "died", "harness"} & set(entry))


def _problem(case: str, entry: Found) -> str:
    keys = ("problem", "died", "harness", "differences", "said", "changed", "casts", "counted_casts", "untouched")
    said = ", ".join(f"{key} {entry[key]}" for key in keys if entry.get(key))
    return f"- `{case.replace('|', ' ')}`: {' '.join(said.split())[:500]}"


def main() -> None:
    """Run the cases, time a census, and write the report."""
    parser = argparse.ArgumentParser(description="Compare censuses with plans and with counters.")
    parser.add_argument("--compilers", nargs="+", default=["eager", "inductor"], help="that run the graphs")
    parser.add_argument("--case", help="this one alone: print what becomes of it")
    parser.add_argument("--cost", action="store_true", help="time a census, on an otherwise idle machine")
    add_options(parser, RECORD, HERE)
    options, began = parser.parse_args(), made()
    libraries.define_operators()
    if options.case:
        sys.stdout.write(json.dumps(work(options.case), indent=1) + "\n")
        return
    record = Record(options.record)
    record.forget(options.again, failed)
    until = None if options.seconds is None else time.monotonic() + options.seconds
    wanted = cases(tuple(options.compilers))
    run_all(wanted, work, record, processes=options.processes, until=until, seconds=400, name="cases")
    old = HERE / "census.json"
    before = json.loads(old.read_text())["cost"] if old.exists() else ""
    data = summary({c: record.found[c] for c in wanted if c in record.found}, cost() if options.cost else before)
    sys.stdout.write(write(options.output, "census", {"made": began, **data}, to_markdown(data)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

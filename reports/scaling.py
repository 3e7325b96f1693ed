"""Time each pass against the size of the graph, on generated graphs: chains of residual MLP blocks.

    python reports/scaling.py                    # 1,000 to 64,000 nodes at O1 and O2
    python reports/scaling.py --sizes 1000 4000

Nodes with a fixed dtype split the cut into parts; at O1 there are many such nodes. At O2 the cut spans the whole model,
and is split only where a single value connects two layers: here the residual stream. As a yardstick, `torch.export`
captures the same model at 10,000 nodes. Times are those of the processor, so that other programs do not count. Writes
`scaling.md` beside this file.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.fx import Graph, Node
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from passes import Pass, Unit, Watcher, compile_graph, watched  # noqa: E402  (the path comes first)
from passes._torch import FakeTensorMode  # noqa: E402
from passes.contract.policy import Policy  # noqa: E402
from passes.graph.bodies import origins_of  # noqa: E402
from reports.made import headed, made  # noqa: E402

aten = torch.ops.aten
WIDTH, ROWS = 64, 32
SIZES = (1_000, 4_000, 16_000, 64_000)
YARDSTICK = 10_000
NODES_PER_BLOCK = 11  # five calls, six parameters
# What is timed beside the passes: a name for the table, and the function that they call.
PARTS = {"of it the cut": "passes.assign.assign_precision.choose_storage", "verify": "passes.pipeline.verify"}
PASSES = (
    "legalize", "assign-precision", "of it the cut", "insert-casts", "eliminate-casts", "split-norms",
    "run-under-autocast",
    "annotate", "verify",
)  # fmt: skip


@dataclass
class Timed(Watcher):
    """Adds up how long each pass takes, over all graphs, in seconds by the name of the pass.

    The clock is that of the processor, unless another is given, so that other programs do not count.
    """

    clock: Callable[[], float] = time.process_time
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = 0.0

    def before(self, step: Pass, unit: Unit) -> None:
        """Start the clock."""
        self.started = self.clock()

    def after(self, step: Pass, unit: Unit, edits: Mapping[str, int]) -> None:
        """Stop the clock, and add the time of the pass."""
        self.seconds[step.name] = self.seconds.get(step.name, 0.0) + self.clock() - self.started


class Block(nn.Module):
    """A residual perceptron behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add the perceptron's output to its input."""
        made: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return made


def chain(size: int) -> Graph:
    """Return the graph of a chain of blocks, about `size` nodes, as `torch.export` would give it."""
    graph = Graph()
    with FakeTensorMode():
        x_val = torch.empty(ROWS, WIDTH)
        vector, matrix = nn.Parameter(torch.empty(WIDTH)), nn.Parameter(torch.empty(WIDTH, WIDTH))
    node = graph.placeholder("x")
    node.meta["val"] = x_val
    for i in range(max(1, (size - 2) // NODES_PER_BLOCK)):
        node = _block(graph, node, f"blocks.{i}", vector, matrix)
    graph.output((node,))
    return graph


def _block(graph: Graph, x: Node, path: str, vector: Tensor, matrix: Tensor) -> Node:
    val = x.meta["val"]

    def parameter(name: str, value: Tensor) -> Node:
        # Its owner does not exist: nothing here is run, and fx would warn of every one.
        made = graph.create_node("get_attr", f"{path}.{name}")
        made.meta["val"] = value
        return made

    def call(op: Any, *args: Any) -> Node:
        made = graph.call_function(op, args)
        made.meta["val"] = val
        made.meta["nn_module_stack"] = {"": ("", "Chain"), path: (path, f"{__name__}.Block")}
        made.meta["stack_trace"] = 'File "model.py", line 1, in forward\n    return x + self.down(...)'
        return made

    gamma, beta = parameter("norm.weight", vector), parameter("norm.bias", vector)
    normed = call(aten.layer_norm.default, x, [WIDTH], gamma, beta)
    up = call(aten.linear.default, normed, parameter("up.weight", matrix), parameter("up.bias", vector))
    active = call(aten.gelu.default, up)
    down = call(aten.linear.default, active, parameter("down.weight", matrix), parameter("down.bias", vector))
    return call(aten.add.Tensor, x, down)


def time_passes(graph: Graph, level: str) -> dict[str, float]:
    """Compile a graph; return the seconds of each pass, all its calls together, and of everything."""
    seconds = dict.fromkeys(PASSES, 0.0)
    values = {n.target: n.meta["val"] for n in graph.nodes if n.op == "get_attr"}
    policy = Policy(level, dtype=torch.bfloat16, device="cpu")
    gc.collect()
    with ExitStack() as stack:
        for name, path in PARTS.items():
            stack.enter_context(_timed(path, name, seconds))
        stack.enter_context(watched(timed := Timed()))
        start = time.process_time()
        compile_graph(graph, policy, values.__getitem__, origins_of(graph, values.__getitem__))
        seconds["all"] = time.process_time() - start
    return seconds | timed.seconds


@contextmanager
def _timed(path: str, name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Add the time that calls of a function of the compiler take."""
    module, attribute = path.rsplit(".", 1)
    holder = importlib.import_module(module)
    function: Callable[..., Any] = getattr(holder, attribute)

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[name] += time.process_time() - start

    with mock.patch.object(holder, attribute, timed):
        yield


def time_export(size: int) -> float:
    """Return the seconds that `torch.export` takes to capture the same chain."""
    model, x = nn.Sequential(*(Block() for _ in range(size // NODES_PER_BLOCK))), torch.randn(ROWS, WIDTH)
    gc.collect()
    start = time.process_time()
    torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},)).module()
    return time.process_time() - start


def to_markdown(rows: Sequence[tuple[str, int, dict[str, float]]], exported: float | None) -> str:
    """Return the report: milliseconds per 1,000 nodes, and the comparison with capture."""
    headers = ["level", "nodes", *PASSES, "all, ms / 1,000 nodes", "all, s"]
    table = [
        [level, f"{nodes:,}", *(f"{1e6 * taken[p] / nodes:.0f}" for p in (*PASSES, "all")), f"{taken['all']:.2f}"]
        for level, nodes, taken in rows
    ]
    shown = tabulate(table, headers, "pipe", disable_numparse=True, colalign=("left", *["right"] * (len(headers) - 1)))
    beside = ""
    if exported is not None:
        ours = next(taken["all"] for level, nodes, taken in rows if level == "O1" and _near(nodes, YARDSTICK))
        beside = (
            f"\n`torch.export` takes {exported:.1f} s to capture the same model at {YARDSTICK:,} nodes; all passes "
            f"together take\n{ours / exported:.2f} of that at O1.\n"
        )
    return (
        "# Time of the passes against the size of the graph\n\n"
        f"Written by `reports/scaling.py`: a chain of residual MLP blocks, BF16, torch {torch.__version__}, one\n"
        "thread. The table shows processor milliseconds per 1,000 nodes; if these do not grow from row to row, time\n"
        "is linear. `verify` is the time of the checks after passes; `write-decisions` makes the plan, and `annotate`\n"
        "writes dtypes into the graph. At O2 the cut is solved in blocks that are connected by a single value, here\n"
        "the residual stream. Parts that share more than one value form one block, whose time grows faster than its\n"
        "size.\n\n"
        f"{shown}\n{beside}"
    )


def _near(nodes: int, size: int) -> bool:
    return abs(nodes - size) <= NODES_PER_BLOCK


def main(arguments: Sequence[str] | None = None) -> None:
    """Time the passes on every size, print the table and write it."""
    parser = argparse.ArgumentParser(description="Time each pass against the size of the graph.")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of nodes (default: %(default)s)")
    parser.add_argument("--no-export", action="store_true", help="without the comparison with torch.export")
    parser.add_argument("-o", "--output", type=Path, default=HERE, metavar="FOLDER", help="where to write")
    options, began = parser.parse_args(arguments), made()
    yardstick = set() if options.no_export else {YARDSTICK}
    sizes = sorted({*options.sizes, *yardstick})
    runs = [(level, s) for level in ("O1", "O2") for s in sizes]
    time_passes(chain(200), "O1")  # what is imported and cached on first use
    rows = []
    for level, size in tqdm(runs, desc="graphs", unit="graph"):
        graph = chain(size)
        rows.append((level, len(graph.nodes), time_passes(graph, level)))
    exported = time_export(YARDSTICK) if yardstick else None
    text = headed(to_markdown(rows, exported), {"made": began})
    sys.stdout.write(text)
    options.output.joinpath("scaling.md").write_text(text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

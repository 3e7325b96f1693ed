"""Graphs captured from other people's models, rebuilt with random weights, against eager PyTorch and `torch.autocast`.

    python reports/graphnet.py PATH                         # a checkout of PaddlePaddle/GraphNet; an hour of one core
    python reports/graphnet.py PATH --sample timm/cspresnet50d

GraphNet (MIT licence) has Dynamo's graphs of some 2,500 models as `samples/*/*/model.py`, with the shape, the mean and
the deviation of each weight and input. This script reads a checkout that you have; it copies nothing of it. Samples
come in an order drawn by a seed; one with more weights than `--elements` is left out. Each is converted to a view in
train mode and with gradients: O0 has to be eager to the bit, O1 autocast, or a deviation has to be named where they
first differ. Each runs in a process of its own. Writes `graphnet.md` and `graphnet.json` beside this file.
"""

from __future__ import annotations

import argparse
import collections
import functools
import inspect
import logging
import random
import re
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from reports.made import made, write  # noqa: E402
from tests.support.trial.judge import FAILURES, Subject, judged, quiet  # noqa: E402  (the path comes first)
from tests.support.trial.options import add_options  # noqa: E402
from tests.support.trial.runs import without_fused_layers  # noqa: E402
from tests.support.trial.workers import Found, Record, code, run_all  # noqa: E402

RECORD = HERE.parent / "build" / "trial" / "graphnet.jsonl"
SEED = 20261125
ELEMENTS = 30_000_000
LEVELS = ("O0", "O1")
DEVICE = re.compile(r"""device\(type=['"]cuda['"](, index=\d+)?\)|['"]cuda(:\d+)?['"]""")


class Rebuilt(nn.Module):
    """A captured graph that owns its weights: it is called with its inputs alone.

    Args:
        graph: the module of a sample; its forward takes weights and inputs, by name.
        values: one for each name.
        inputs: the names that a caller gives.
    """

    def __init__(self, graph: nn.Module, values: dict[str, Any], inputs: Sequence[str]) -> None:
        super().__init__()
        self.graph, self.names, self.inputs = graph, tuple(values), tuple(inputs)
        self.numbers = {n: v for n, v in values.items() if not isinstance(v, Tensor)}
        for name, value in values.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            elif isinstance(value, Tensor) and name not in self.inputs:
                self.register_buffer(name, value)

    def forward(self, *given: Tensor) -> Any:
        """Run the graph."""
        values = {**self.numbers, **dict(zip(self.inputs, given, strict=True))}
        return self.graph(*(values[n] if n in values else getattr(self, n) for n in self.names))


def metas(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what a sample says of each of its weights and inputs, by name."""
    found = {}
    for file in ("weight_meta.py", "input_meta.py"):
        if (folder / file).exists():
            kinds = runpy.run_path(str(folder / file)).values()
            found |= {k.name: vars(k) for k in kinds if isinstance(k, type) and hasattr(k, "shape")}
    return found


def elements(meta: dict[str, Any]) -> int:
    """Return how many numbers a weight or an input has."""
    return int(torch.Size(meta["shape"]).numel())


def value_of(name: str, annotation: str, meta: dict[str, Any]) -> Any:
    """Return a number for a size, else a tensor of the shape, the mean and the deviation given."""
    dtype = getattr(torch, meta["dtype"].removeprefix("torch."))
    if "SymInt" in annotation:
        return int(meta["data"][0])
    if meta["data"] is not None:
        made = torch.tensor(meta["data"], dtype=dtype).reshape(meta["shape"])
    elif dtype.is_floating_point:
        mean, deviation = meta["mean"] or 0.0, meta["std"] or 0.0
        drawn = torch.randn(meta["shape"]) * deviation + mean
        made = (drawn.abs() if "running_var" in name else drawn).to(dtype)
    else:
        made = torch.randint(0, 2, tuple(meta["shape"])).to(dtype)
    trains = "Parameter" in annotation and made.is_floating_point()
    return nn.Parameter(made) if trains else made


def build(folder: Path) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the model of a sample, and its inputs; on a CPU, whatever it was captured on."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    text = DEVICE.sub("'cpu'", (folder / "model.py").read_text())
    exec(compile(text, str(folder / "model.py"), "exec"), names)
    graph, known = names["GraphModule"](), metas(folder)
    arguments = list(inspect.signature(graph.forward).parameters.values())
    values = {a.name: value_of(a.name, str(a.annotation), known[a.name]) for a in arguments}
    owned = re.compile("_(parameters|buffers)_|_self_")
    inputs = [n for n, v in values.items() if type(v) is Tensor and not owned.search(n)]
    return Rebuilt(graph, values, inputs), tuple(values[n] for n in inputs)


def work(root: Path, most: int, case: str) -> Found:
    """Rebuild one sample and judge it, in train mode with gradients."""
    folder = root / "samples" / case
    with quiet(), without_fused_layers():
        try:
            size = sum(map(elements, metas(folder).values()))
            if size > most:
                return {"left": "too large"}
            model, args = build(folder)
            found = Subject(model, args)
        except Exception as e:
            return {"left": f"fails in eager PyTorch: {type(e).__name__}: {e}"[:200]}
        return {"found": {level: [v.kind, v.why] for level, v in judged(found, "view", LEVELS).items()}}


def failed(entry: Found) -> bool:
    """Say whether a sample is what this script looks for."""
    return "died" in entry or any(kind in FAILURES for kind, _ in entry.get("found", {}).values())


def summary(entries: Sequence[Found], tried: str) -> dict[str, Any]:
    """Return what the report says, as data."""
    judged_ones = [e for e in entries if "found" in e]
    kinds = {level: dict(collections.Counter(e["found"][level][0] for e in judged_ones)) for level in LEVELS}
    named = collections.Counter(e["found"]["O1"][1] for e in judged_ones if e["found"]["O1"][0] == "deviation")
    return {
        "torch": torch.__version__, "seed": SEED, "samples": len(entries), "judged": len(judged_ones),
        "left_out": dict(collections.Counter(e["left"].partition(":")[0] for e in entries if "left" in e)),
        "kinds": kinds, "deviations": dict(named.most_common()), "code": tried,
        "failed": [
            {"sample": e["case"], **{k: e[k] for k in ("found", "died") if k in e}} for e in entries if failed(e)
        ],
    }  # fmt: skip


def to_markdown(data: dict[str, Any]) -> str:
    """Return the report."""
    words = list(dict.fromkeys(kind for level in LEVELS for kind in data["kinds"][level]))
    rows = [[level, *(data["kinds"][level].get(word, 0) for word in words)] for level in LEVELS]
    bad = [[f["sample"], str(f.get("found") or f.get("died"))[:160]] for f in data["failed"]]
    left = ", ".join(f"{count} {why}" for why, count in data["left_out"].items()) or "none"
    parts = [
        "# Graphs of other people's models",
        "",
        f"Written by `reports/graphnet.py` from a checkout of PaddlePaddle/GraphNet: {data['samples']} samples in the",
        f"order of seed {data['seed']}, of which {data['judged']} were judged (left out: {left}).",
        f"Train mode, with gradients, BF16, torch {data['torch']}, a CPU. O0 is compared with eager PyTorch, "
        "O1 with `torch.autocast`, both to the bit.",
        "",
        tabulate(rows, headers=["level", *words], tablefmt="pipe"),
        "",
    ]  # fmt: skip
    if data["deviations"]:
        named = ", ".join(f"{why} ({count})" for why, count in data["deviations"].items())
        parts += [f"Deviations, by code: {named}.", ""]
    if bad:
        parts += [tabulate(bad, headers=["sample", "what became of it"], tablefmt="pipe"), ""]
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Judge samples, and write the report."""
    parser = argparse.ArgumentParser(description="Graphs of GraphNet's samples against eager PyTorch and autocast.")
    parser.add_argument("path", type=Path, help="a checkout of PaddlePaddle/GraphNet")
    parser.add_argument("--sample", help="this one alone, as timm/cspresnet50d; prints what becomes of it")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="most weights (default: %(default)s)")
    add_options(parser, RECORD, HERE)
    options, began = parser.parse_args(argv), made()
    folder = options.path / "samples"
    if not folder.is_dir():
        parser.error(f"{options.path} is no checkout of GraphNet: it has no folder samples/")
    logging.disable(logging.WARNING)
    do = functools.partial(work, options.path, options.elements)
    if options.sample:
        print(do(options.sample))
        return 0
    cases = sorted(str(p.parent.relative_to(folder)) for p in folder.glob("*/*/model.py"))
    random.Random(SEED).shuffle(cases)
    record = Record(options.record)
    record.forget(options.again, failed)
    until = None if options.seconds is None else time.monotonic() + options.seconds
    run_all(cases, do, record, processes=options.processes, until=until, name="samples")
    data = summary([record.found[c] for c in cases if c in record.found], code())
    sys.stdout.write(write(options.output, "graphnet", {"made": began, **data}, to_markdown(data)))
    return 1 if data["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

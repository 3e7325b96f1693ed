"""Time and count training steps compiled by Inductor: FP32, autocast, fxamp at O1 and O2, and the whole model in low.

    python reports/compiled_step.py                     # BERT of four layers, width 256, batch 4, 64 tokens
    python reports/compiled_step.py --rounds 0          # counts alone; the times that were measured before stay
    python reports/compiled_step.py --windows 4         # windows of four micro-batches alone

Each step is a window of one micro-batch or of four (forward and backward each), and then a fused AdamW. Times are
medians of rounds in which the variants take turns, as ratios to compiled autocast. The report also has counts, which
are the same on every run. They are, for one micro-batch: the bytes that Inductor's kernels load and store, the kernels
that a forward and backward launch, and the bytes that forward saves for backward; and for a window the peak memory,
without weights and optimizer state. What happens outside the graphs is added: casts of weights, made once a window,
casts of their gradients, and the sums of gradients; a low copy that is an input of the graph counts as saved.

The cut counts a cast as reading and writing. Inductor fuses most casts into the kernels on either side, and what they
cost is what is stored. The last variant is placed with casts that cost nothing, the other extreme: where it moves about
the same bytes, no model of what is fused could place better.
`compiled_step.md` and `compiled_step.json` are written beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import random
import re
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fxamp  # noqa: E402  (the path comes first)
from fxamp.measure.counts import laps  # noqa: E402
from fxamp.train.weights import WeightCasts  # noqa: E402
from passes.assign.place.costs import ByteCosts  # noqa: E402
from reports.baseline import UnderAutocast  # noqa: E402
from reports.exact_numerics import cpu  # noqa: E402
from reports.made import made, write  # noqa: E402

FP32, AUTOCAST, ALL_LOW = "FP32", "torch.autocast", "all low"
FUSED = "fxamp O2 per_step, placed as if casts cost nothing"
POLICIES = {
    "fxamp O1": ("O1", "per_use"),
    "fxamp O1 per_step": ("O1", "per_step"),
    "fxamp O2": ("O2", "per_use"),
    "fxamp O2 per_step": ("O2", "per_step"),
    "fxamp O2 per_step, low output": ("O2,output_dtype=low", "per_step"),
    FUSED: ("O2", "per_step"),
}
ROUNDS, WARMUP, RESAMPLED = 11, 2, 2000
WINDOWS = (1, 4)
_LENGTH = {"1": "Steps of one micro-batch", "4": "Windows of four micro-batches"}
SIZE = (256, 4, 4, 64)  # width, layers, batch, tokens
_KERNEL = re.compile(r"^\s+(?:\w+ = )?(cpp_fused\w*|triton_\w+\.run|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", re.M)
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Counts:
    """What Inductor made of one forward and backward, and what of the work outside falls to it; None: not measured."""

    bytes_moved: float
    launches: float
    saved_bytes: int
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Row:
    """The counts of one variant."""

    variant: str
    counts: Counts


@dataclass(frozen=True)
class Time:
    """The time of one variant, as a ratio to compiled autocast, with interquartile range and 95 % interval."""

    variant: str
    time: float
    spread: float
    interval: tuple[float, float] | None = None


def bert(width: int, layers: int, batch: int, tokens: int) -> tuple[nn.Module, Inputs]:
    """Return a model and its inputs, labels among them."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=8000, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 32,
        intermediate_size=4 * width,
    )  # fmt: skip
    ids = torch.randint(0, 8000, (batch, tokens))
    return BertForMaskedLM(config).train(), {"input_ids": ids, "labels": ids}


def variants(size: tuple[int, int, int, int], window: int, options: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield names, models, functions that run a micro-batch, and its casts of weights; each has weights of its own."""
    model, inputs = bert(*size)
    for name in (FP32, AUTOCAST, ALL_LOW):
        own = copy.deepcopy(model)
        own = own.bfloat16() if name == ALL_LOW else own
        called: Any = UnderAutocast(own, torch.bfloat16) if name == AUTOCAST else own
        yield name, own, _by_hand(own, torch.compile(called, options=options), inputs, window), None
    for name, (policy, weights) in POLICIES.items():
        own = copy.deepcopy(model)
        # Graphs are captured here, and again when the step is compiled, which is before the next variant.
        with mock.patch.object(ByteCosts, "cast", return_value=0) if name == FUSED else contextlib.nullcontext():
            converted = fxamp.convert(own, (), inputs, policy=f"{policy},dtype=bf16")
            step = fxamp.TrainStep(
                converted, None, _adamw(own), scaler=None, weights=weights,  # type: ignore[arg-type]
                accumulate_steps=window, compile={"options": options},
            )  # fmt: skip
            yield name, own, lambda step=step: step(inputs).loss, step.weights


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)


def _by_hand(model: nn.Module, called: Callable[..., Any], inputs: Inputs, window: int) -> Callable[[], Tensor]:
    optimizer, done = _adamw(model), itertools.count(1)

    def step() -> Tensor:
        loss: Tensor = called(**inputs).loss
        (loss / window).backward()
        if next(done) % window == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss

    return step


@contextlib.contextmanager
def counting() -> Iterator[tuple[list[int], list[str]]]:
    """Let Inductor generate code anew, and collect the bytes that each graph moves, and its code."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    moved: list[int] = []
    made: list[str] = []
    generate: Any = GraphLowering.codegen

    def codegen(graph: Any) -> Any:
        code = generate(graph)
        moved.append(int(graph.count_bytes()[0]))
        return code

    hooks: dict[str, Any] = {"codegen": codegen, "save_output_code": made.append}
    with config.patch(force_disable_caches=True), mock.patch.multiple(GraphLowering, **hooks):
        yield moved, made


def count(model: nn.Module, step: Callable[[], Tensor], weights: WeightCasts | None = None, window: int = 1) -> Counts:
    """Compile a step, run three windows, and count what was made, and what is cast and added outside the graphs."""
    saved: list[int] = []
    backward: Any = torch.Tensor.backward
    run = _repeated(step, window)

    def look(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if not saved:
            saved.append(saved_by(loss, model))
        backward(loss, *args, **kwargs)

    moved, launches = 0.0, 0.0
    with counting() as (bytes_made, code_made), mock.patch.object(torch.Tensor, "backward", look):
        for share in (1.0, 1 - 1 / window):  # the second window compiles what adds gradients, in all but its first call
            run()
            moved += share * sum(bytes_made)
            launches += share * sum(len(_KERNEL.findall(code)) for code in code_made)
            bytes_made.clear()
            code_made.clear()
    copies: Any = () if weights is None else weights.copies._copies.values()
    for kept in copies:  # the weight is cast once a window, its gradient each time
        weight, low = kept.master(), kept.low
        moved += (1 / window + 1) * low.numel() * (weight.element_size() + low.element_size())
        launches += 1 / window + 1
    for weight in model.parameters():  # autograd loads two and stores one
        moved += (1 - 1 / window) * 3 * weight.numel() * weight.element_size()
        launches += 1 - 1 / window
    return Counts(moved, launches, saved[0], peak_of(run))  # by now there is optimizer state


def peak_of(run: Callable[[], None]) -> int:
    """Return the most that is allocated at a time while a function runs, of what it allocates itself."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        seen.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text(encoding="utf-8"))["traceEvents"]
    live: dict[int, int] = {}
    now = most = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        now += size if size > 0 else -live.pop(address, 0)
        if size > 0:
            live[address] = size
        most = max(most, now)
    return most


def saved_by(loss: Tensor, model: nn.Module) -> int:
    """Add up the storages that compiled functions have saved for backward, parameters apart."""
    storages = {p.untyped_storage().data_ptr(): 0 for p in model.parameters()}
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
        for tensor in getattr(node, "saved_tensors", ()) if "Compiled" in node.name() else ():
            storage = tensor.untyped_storage()
            storages.setdefault(storage.data_ptr(), storage.nbytes())
    return sum(storages.values())


def measure(
    size: tuple[int, int, int, int], window: int, rounds: int, options: dict[str, Any]
) -> tuple[list[Row], list[Time]]:
    """Count every variant, and time whole windows of them in turn unless `rounds` is 0."""
    torch.compiler.reset()  # or what another measurement compiled would be used again, and nothing counted
    steps, rows = {}, []
    for name, model, step, weights in tqdm(variants(size, window, options), desc="compile", total=3 + len(POLICIES)):
        rows.append(Row(name, count(model, step, weights, window)))
        steps[name] = _repeated(step, window)
    if not rounds:
        return rows, []
    seconds = {name: s[WARMUP:] for name, s in laps(steps, tqdm(range(rounds + WARMUP), desc="rounds")).items()}
    return rows, [timed(name, taken, seconds[AUTOCAST]) for name, taken in seconds.items()]


def timed(name: str, taken: Sequence[float], autocasts: Sequence[float]) -> Time:
    """Compare the seconds of a variant in each round with autocast's; the interval is from rounds drawn anew."""
    draw, rounds = random.Random(0), range(len(taken))
    drawn = (draw.choices(rounds, k=len(rounds)) for _ in range(RESAMPLED))
    ratios = sorted(_median(taken, at) / _median(autocasts, at) for at in drawn)
    low, _, high = statistics.quantiles(taken, n=4)
    base = statistics.median(autocasts)
    ends = ratios[round(0.025 * RESAMPLED)], ratios[round(0.975 * RESAMPLED) - 1]
    return Time(name, statistics.median(taken) / base, (high - low) / base, ends)


def _median(values: Sequence[float], at: Sequence[int]) -> float:
    return statistics.median(values[index] for index in at)


def _repeated(step: Callable[[], Tensor], times: int) -> Callable[[], None]:
    def window() -> None:
        for _ in range(times):
            step()

    return window


def table(rows: list[Row]) -> str:
    """Return the counts of one length of window."""
    base = next(row.counts for row in rows if row.variant == AUTOCAST)
    lines = [
        (
            row.variant,
            f"{row.counts.bytes_moved / 1e6:.1f}",
            f"{row.counts.bytes_moved / base.bytes_moved:.3f}",
            f"{row.counts.launches:.0f}",
            f"{row.counts.saved_bytes / 1e6:.2f}",
            "" if row.counts.peak_bytes is None else f"{row.counts.peak_bytes / 1e6:.2f}",
        )
        for row in rows
    ]
    headers = (
        "variant", "MB loaded and stored", "of autocast's", "kernels", "MB saved for backward", "MB at the peak"
    )  # fmt: skip
    return tabulate(lines, headers, "pipe", disable_numparse=True)


def table_of_times(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the times of each variant, with a column for each length of window."""
    columns = {window: {row["variant"]: Time(**row) for row in rows} for window, rows in found.items()}
    lines = [
        (name, *(_said(column[name]) if name in column else "" for column in columns.values()))
        for name in dict.fromkeys(name for column in columns.values() for name in column)
    ]
    return tabulate(lines, ("variant", *(_LENGTH[window].lower() for window in columns)), "pipe", disable_numparse=True)


def _said(row: Time) -> str:
    surely = "" if row.interval is None else f" ({row.interval[0]:.3f} to {row.interval[1]:.3f})"
    return f"{row.time:.3f} ± {row.spread:.3f}{surely}"


def to_markdown(found: dict[str, Any]) -> str:
    """Return the report."""
    width, layers, batch, tokens = found["size"]
    text = (
        "# Training steps compiled by Inductor, beside compiled autocast\n\n"
        f"BERT, width {width}, {layers} layers, batch {batch}, {tokens} tokens, BF16, fused AdamW, torch "
        f"{found['torch']}. Bytes and kernels are those of one micro-batch, as Inductor counts them, plus its share of "
        "what happens outside the graph: casts of weights and of their gradients, and sums of gradients. Peak is the "
        "peak memory of a window, without weights and optimizer state. Made by `python reports/compiled_step.py`.\n"
    )
    for window, rows in found["windows"].items():
        counted = [Row(row["variant"], Counts(**row["counts"])) for row in rows]
        text += f"\n## {_LENGTH[window]}\n\n{table(counted)}\n"
    if times := found.get("times"):
        text += (
            f"\n## Times\n\nRatios to compiled autocast: medians of {times['rounds']} rounds, in which the variants "
            "take turns; ± is the interquartile range, and in parentheses is the 95 % confidence interval of the ratio "
            f"(bootstrap), where it was computed. Measured at commit {times['commit']} with {times['threads']} threads "
            f"on this CPU: {times['cpu']}.\n\n{table_of_times(times['windows'])}\n"
        )
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write both reports."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--windows", type=int, nargs="+", default=WINDOWS, choices=WINDOWS)
    parser.add_argument("--size", type=int, nargs=4, default=SIZE, metavar=("WIDTH", "LAYERS", "BATCH", "TOKENS"))
    parser.add_argument("-o", "--folder", type=Path, default=HERE)
    args, began = parser.parse_args(arguments), made()
    warnings.filterwarnings("ignore")
    file = args.folder / "compiled_step.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    measured = {str(n): measure(tuple(args.size), n, args.rounds, {}) for n in args.windows}
    found = {
        "made": began, "torch": torch.__version__, "size": list(args.size),
        "windows": {n: [asdict(row) for row in rows] for n, (rows, _) in measured.items()},
        "times": before.get("times"),
    }  # fmt: skip
    if args.rounds:
        found["times"] = {
            "commit": began["commit"], "cpu": cpu(), "threads": torch.get_num_threads(), "rounds": args.rounds,
            "windows": {n: [asdict(time) for time in times] for n, (_, times) in measured.items()},
        }  # fmt: skip
    text = to_markdown(found)
    print(write(args.folder, "compiled_step", found, text))


if __name__ == "__main__":
    main()

"""Compare what rounding does to outputs and gradients: `torch.autocast`, and fxamp at O1, O2 and O3.

    python reports/accuracy.py               # every model of the tests, and those of casts.py
    python reports/accuracy.py gpt hf_bert

The models of `casts.py`, four layers of width 512 and a ResNet-50, get two examples of at most 64 tokens. The distance
is the norm of the difference from the model in float64 over the norm of that, in eval mode, on a CPU.
Writes `accuracy.md` and `accuracy.json` beside this file.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from reports import casts  # noqa: E402
from reports.made import made, write  # noqa: E402
from tests.support.baseline import UnderAutocast, distance  # noqa: E402
from tests.support.subjects import Subject, compiled, counts_of, oracle, run, set_mode, subject  # noqa: E402
from tests.support.zoo import BY_NAME, NO_FP16_ON_CPU, Zoo  # noqa: E402

LOWS = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Those of casts.py, in BF16 alone: FP16 takes a CPU minutes.
LARGE = {"bert_4x512": "bert", "vit_4x512": "vit", "resnet50": "resnet", "gpt2_4x512": "gpt2"}
EXAMPLES, TOKENS = 2, 64
AUTOCAST, LEVELS = "torch.autocast", ("O1", "O2", "O3")


@dataclass(frozen=True)
class Row:
    """How far one variant of one model is from float64, and its casts in a training step.

    A distance that is not finite is None.
    """

    model: str
    low: str
    variant: str
    outputs: float | None
    gradients: float | None
    casts: int


def measure(name: str, low: str) -> list[Row]:
    """Compare autocast and every level on one model, in one low dtype."""
    found = _large(name) if name in LARGE else subject(name)
    set_mode(found, found.model, False)
    truth = oracle(found)
    rows, autocast_casts = [], 0
    for level in LEVELS:
        module = compiled(found, f"{level},dtype={low}")
        autocast, ours = counts_of(found, module)
        autocast_casts = autocast.casts
        set_mode(found, module, False)
        rows.append(Row(name, low, level, *_distances(module, found, truth), ours.casts))
    reference = _distances(UnderAutocast(found.model, LOWS[low]), found, truth)
    return [Row(name, low, AUTOCAST, *reference, autocast_casts), *rows]


def _large(name: str) -> Subject:
    """Build one model of casts.py, with fewer inputs."""
    torch.manual_seed(0)
    model, inputs = casts.MODELS[LARGE[name]]()
    few = {k: v[:EXAMPLES, :TOKENS] if v.dim() == 2 else v[:EXAMPLES] for k, v in inputs.items()}
    inputs = {k: v.contiguous() for k, v in few.items()}
    zoo = Zoo(name, lambda: model, lambda _: ((), inputs), lambda output: output.loss, "transformers")
    return Subject(zoo, model, (), inputs)


def _distances(
    module: nn.Module, found: Subject, truth: tuple[list[Tensor], dict[str, Tensor]]
) -> tuple[float | None, float | None]:
    outputs, gradients, _, _ = run(module, found)
    apart = distance(_named(outputs), _named(truth[0])), distance(gradients, truth[1])
    return apart[0] if math.isfinite(apart[0]) else None, apart[1] if math.isfinite(apart[1]) else None


def _named(tensors: list[Tensor]) -> dict[str, Tensor]:
    return {str(i): t for i, t in enumerate(tensors)}


def to_markdown(rows: Sequence[Row], torch_version: str) -> str:
    """Return the report: autocast's distances, and the levels' as ratios to them."""
    by_case: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        by_case.setdefault((row.model, row.low), {})[row.variant] = row
    parts = [
        "# Rounding error against float64\n\n"
        f"Written by `reports/accuracy.py` on a CPU, torch {torch_version}: the small models of the tests, and those\n"
        "of `casts.py`, with random weights, in eval mode. The column `torch.autocast` shows the relative distance\n"
        "from the model in float64. The columns O1, O2 and O3 show their distances divided by that of autocast: below\n"
        "1.00 means more accurate than autocast. O3 rounds everything, and shows what that costs.\n"
    ]
    headers = ("model", "low", AUTOCAST, *LEVELS)
    for title, field in (("Outputs", "outputs"), ("Gradients", "gradients")):
        table = []
        for (model, low), variants in by_case.items():
            base = getattr(variants[AUTOCAST], field)
            ratios = [_ratio(getattr(variants[level], field), base) for level in LEVELS]
            table.append((model, low.upper(), "not finite" if base is None else f"{base:.2e}", *ratios))
        parts.append(f"## {title}\n\n{_table(table, headers)}\n{_worst(by_case, field)}")
    table = [(m, low.upper(), *(str(v[k].casts) for k in (AUTOCAST, *LEVELS))) for (m, low), v in by_case.items()]
    parts.append(f"## Casts in a training step\n\n{_table(table, headers)}\n")
    return "\n".join(parts)


def _worst(by_case: Mapping[tuple[str, str], Mapping[str, Row]], field: str) -> str:
    """Return the median and the 90th percentile of O2's ratios to autocast, and the five greatest."""
    ratios = []
    for (model, low), variants in by_case.items():
        value, base = getattr(variants["O2"], field), getattr(variants[AUTOCAST], field)
        if base:
            ratios.append((math.inf if value is None else value / base, f"{model} in {low.upper()}"))
    if len(ratios) < 2:
        return ""
    ratios.sort(reverse=True)
    numbers = [ratio for ratio, _ in ratios]
    tenth = statistics.quantiles(numbers, n=10, method="inclusive")[-1]
    worst = ", ".join(f"{name} {ratio:.2f}" for ratio, name in ratios[:5])
    middle = statistics.median(numbers)
    return f"\nAt O2 the median is {middle:.2f}, the 90th percentile {tenth:.2f}. Greatest: {worst}.\n"


def _ratio(value: float | None, base: float | None) -> str:
    if value is None:
        return "not finite"
    return "" if base is None else f"{value / base:.2f}"


def _table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    aligned = ("left", "left", *["right"] * (len(headers) - 2))
    return tabulate(rows, headers, "pipe", disable_numparse=True, colalign=aligned)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the models asked for, print the tables and write both files."""
    parser = argparse.ArgumentParser(description="Compare the rounding errors of torch.autocast and of fxamp's levels.")
    parser.add_argument("model", nargs="*", metavar="MODEL", help=", ".join((*BY_NAME, *LARGE)))
    parser.add_argument("-o", "--output", type=Path, default=HERE, metavar="FOLDER", help="where to write")
    options, began = parser.parse_args(arguments), made()
    if unknown := set(options.model) - {*BY_NAME, *LARGE}:
        parser.error(f"no model {', '.join(sorted(unknown))}: choose from {', '.join((*BY_NAME, *LARGE))}")
    cases = [
        (name, low)
        for name in options.model or (*BY_NAME, *LARGE)
        for low in LOWS
        if low == "bf16" or name not in (*NO_FP16_ON_CPU, *LARGE)  # autocast itself cannot run the former
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FP16 gradients without a loss scale")  # nothing is trained here
        rows = [row for name, low in tqdm(cases, desc="models", unit="model") for row in measure(name, low)]
    data = {"made": began, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}
    sys.stdout.write(write(options.output, "accuracy", data, to_markdown(rows, torch.__version__)))


if __name__ == "__main__":
    torch.set_num_threads(1)  # how a sum is shared out decides how it rounds
    main()

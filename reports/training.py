"""Train real models to the end, with the same seeds in every variant: FP32, `torch.autocast`, and fxamp at its levels.

    OMP_NUM_THREADS=1 python reports/training.py            # about an hour of one core
    python reports/training.py resnet gpt --seeds 1
    python reports/training.py vit --seeds 5 --variants FP32 torch.autocast "fxamp O2 compiled"

A ResNet and a vision transformer on images of digits and a character GPT on the source of Python's own library in BF16;
a smaller one of width 64 and two layers in FP16 with loss scaling. Every variant of a task and a seed starts from the
same weights and sees the same batches, in windows of two micro-batches. Runs that `training.json` has already are not
repeated, so what was stopped goes on; each names the commit that made it. After every run it writes `training.json`,
`training.md` and `training_<task>.svg` beside this file.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fxamp  # noqa: E402  (the path comes first)
from reports import made  # noqa: E402
from reports.plot import line_chart  # noqa: E402

FP32, AUTOCAST, PER_STEP, COMPILED = "FP32", "torch.autocast", "fxamp O2 per_step", "fxamp O2 compiled"
VARIANTS = (FP32, AUTOCAST, "fxamp O1", "fxamp O2", PER_STEP, COMPILED)
SEEDS, WINDOW, POINTS = 3, 2, 100
CHARACTERS = 1_200_000

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """One thing to learn: a model, batches without end, and examples that were kept back."""

    low: torch.dtype
    model: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[Batch]]
    kept_back: Callable[[], list[Batch]]
    steps: int
    learning_rate: float


@dataclass(frozen=True)
class Run:
    """What one variant of one task and seed came to; curves have at most `POINTS` points, each the mean of its steps.

    A loss that is not finite is None.
    """

    task: str
    variant: str
    seed: int
    steps: int
    loss: float | None
    skipped: int
    losses: list[float | None]
    scales: list[float]
    seconds: float
    commit: str


class Residual(nn.Module):
    """Two convolutions round which the input goes too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.na, self.nb = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both ways."""
        return F.relu(x + self.nb(self.b(F.relu(self.na(self.a(x))))))


class Block(nn.Module):
    """A block of a transformer, norms first."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend and transform."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.n1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + cast(Tensor, self.down(F.gelu(self.up(self.n2(x)))))


class VisionTransformer(nn.Module):
    """A transformer over the 16 patches of an image of 8 by 8."""

    def __init__(self, width: int = 48, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.positions = nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 4, causal=False) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return ten logits an image."""
        pooled = self.blocks(self.patches(x).flatten(2).transpose(1, 2) + self.positions).mean(1)
        return cast(Tensor, self.head(pooled))


class CharacterGPT(nn.Module):
    """A GPT over characters whose head is its embedding."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(_alphabet()), width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(layers)), nn.LayerNorm(width))
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of the next character, one row for each."""
        return F.linear(self.blocks(self.embedding(ids) + self.positions), self.embedding.weight).flatten(0, 1)


def resnet() -> nn.Module:
    """Return a ResNet of four blocks."""
    stem = (nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    grow = nn.Conv2d(16, 32, 3, stride=2, padding=1)
    blocks = (Residual(16), Residual(16), grow, Residual(32), Residual(32))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


@functools.cache
def _alphabet() -> str:
    return "\n" + "".join(map(chr, range(32, 127)))


@functools.cache
def _text() -> Tensor:
    """Return the source of Python's own library as indices of characters; what is not ASCII is '?'."""
    library = Path(os.__file__).parent
    text = ""
    for file in sorted(library.glob("*.py")):
        text += file.read_text(encoding="utf-8", errors="replace")
        if len(text) >= CHARACTERS:
            break
    place = {character: index for index, character in enumerate(_alphabet())}
    return torch.tensor([place.get(character, place["?"]) for character in text[:CHARACTERS]])


def _windows(text: Tensor, starts: Tensor, context: int) -> Batch:
    rows = torch.stack([text[s : s + context + 1] for s in starts.tolist()])
    return rows[:, :-1].contiguous(), rows[:, 1:].flatten()


def _characters(context: int, size: int) -> dict[str, Any]:
    """Return how text is drawn: from its first 95 %, and compared on the rest."""

    def batches(seed: int) -> Iterator[Batch]:
        generator, text = torch.Generator().manual_seed(seed), _text()
        last = int(0.95 * len(text)) - context - 1
        while True:
            yield _windows(text, torch.randint(last, (size,), generator=generator), context)

    def kept_back() -> list[Batch]:
        text = _text()[int(0.95 * len(_text())) :]
        starts = torch.randint(len(text) - context - 1, (8, 32), generator=torch.Generator().manual_seed(0))
        return [_windows(text, row, context) for row in starts]

    return {"batches": batches, "kept_back": kept_back}


@functools.cache
def _digits() -> Batch:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return (torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1)[order], torch.tensor(labels)[order]


def _digit_batches(seed: int) -> Iterator[Batch]:
    generator, (x, y) = torch.Generator().manual_seed(seed), _digits()
    while True:
        chosen = 600 + torch.randint(len(y) - 600, (32,), generator=generator)
        yield x[chosen], y[chosen]


def _kept_digits() -> list[Batch]:
    x, y = _digits()
    return [(x[:600], y[:600])]


DIGITS: dict[str, Any] = {"batches": _digit_batches, "kept_back": _kept_digits}
TASKS = {
    "resnet": Task(torch.bfloat16, resnet, **DIGITS, steps=500, learning_rate=3e-3),
    "vit": Task(torch.bfloat16, VisionTransformer, **DIGITS, steps=800, learning_rate=1e-3),
    "gpt": Task(
        torch.bfloat16, functools.partial(CharacterGPT, 64, 4, 4, 64), **_characters(64, 8), steps=1000,
        learning_rate=2e-3,
    ),
    "gpt_fp16": Task(
        torch.float16, functools.partial(CharacterGPT, 64, 2, 2, 32), **_characters(32, 2), steps=2000,
        learning_rate=2e-3,
    ),
}  # fmt: skip


class UnderAutocast(nn.Module):
    """A model called in a region of `torch.autocast`, whose output is FP32 again."""

    def __init__(self, model: nn.Module, low: torch.dtype) -> None:
        super().__init__()
        self.model, self.low = model, low

    def forward(self, x: Tensor) -> Tensor:
        """Return what the model does, in FP32."""
        with torch.autocast("cpu", dtype=self.low):
            out: Tensor = self.model(x)
        return out.float()


def variants_of(task: str) -> list[str]:
    """Return the variants of a task: compiled, an O2 in FP16 follows the plan of an eager O2, and is left out."""
    return [variant for variant in VARIANTS if variant != COMPILED or TASKS[task].low == torch.bfloat16]


def train(name: str, variant: str, seed: int, steps: int | None) -> Run:
    """Train one variant from its seed on."""
    task, started = TASKS[name], time.perf_counter()
    steps = steps or task.steps
    torch.manual_seed(seed)
    model = task.model().train()
    batches = task.batches(seed)
    called = _called(variant, model, task, next(task.batches(seed))[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, weight_decay=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.learning_rate, total_steps=steps)
    scaled = task.low == torch.float16 and variant != FP32
    weights: dict[str, Literal["per_step", "auto"]] = {PER_STEP: "per_step", COMPILED: "auto"}
    step = fxamp.TrainStep(
        called, F.cross_entropy, optimizer, scaler=fxamp.LossScaler(growth_interval=200) if scaled else None,
        accumulate_steps=WINDOW, max_grad_norm=1.0, scheduler=scheduler,
        weights=weights.get(variant, "per_use"), compile=variant == COMPILED,
    )  # fmt: skip
    losses, scales, skipped = [], [], 0
    for _ in tqdm(range(steps), desc=f"{name}, {variant}, seed {seed}", unit="step", mininterval=1, leave=False):
        results = [step(x, y) for x, y in itertools.islice(batches, WINDOW)]
        losses.append(statistics.mean(float(result.loss) for result in results))
        scales.append(results[-1].scale)
        skipped += results[-1].skipped
    called.eval()
    with torch.no_grad():
        kept = [float(F.cross_entropy(called(x), y)) for x, y in task.kept_back()]
    curve = [_finite(value) for value in _thinned(losses)]
    seconds = round(time.perf_counter() - started, 1)
    return Run(
        name, variant, seed, steps, _finite(statistics.mean(kept)), skipped, curve, _thinned(scales), seconds,
        made.made()["commit"],
    )  # fmt: skip


def _called(variant: str, model: nn.Module, task: Task, example: Tensor) -> nn.Module:
    if variant == FP32:
        return model
    if variant == AUTOCAST:
        return UnderAutocast(model, task.low)
    policy = fxamp.Policy(variant.split()[1], dtype=task.low)
    converted: nn.Module = fxamp.convert(model, (example,), policy=policy)
    return converted


def _thinned(values: Sequence[float]) -> list[float]:
    size = math.ceil(len(values) / POINTS)
    return [statistics.mean(values[i : i + size]) for i in range(0, len(values), size)]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def compare(runs: Sequence[Run], task: str) -> list[tuple[str, ...]]:
    """Return a row a variant: seeds, loss, difference from FP32 paired by seed, whether that is noise, skips, scale."""
    by_variant = {v: {r.seed: r for r in runs if (r.task, r.variant) == (task, v)} for v in VARIANTS}
    exact = {seed: run.loss for seed, run in by_variant[FP32].items()}
    noise = _deviation([loss for loss in exact.values() if loss is not None])
    rows: list[tuple[str, ...]] = []
    for variant, found in by_variant.items():
        losses = [run.loss for run in found.values() if run.loss is not None]
        if not losses:
            continue
        pairs = [(r.loss, exact.get(s)) for s, r in found.items()]
        apart = [ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None]
        error = _deviation(apart) / math.sqrt(max(len(apart), 1))
        within = len(losses) == len(found) and bool(apart) and abs(statistics.mean(apart)) <= max(2 * error, noise)
        rows.append((
            variant,
            str(len(found)),
            f"{statistics.mean(losses):.4f} ± {_deviation(losses):.4f}",
            "" if variant == FP32 or not apart else f"{statistics.mean(apart):+.4f} ± {error:.4f}",
            "" if variant == FP32 or len(found) < 2 else "yes" if within else "no",
            str(sum(run.skipped for run in found.values())),
            f"{statistics.mean(run.scales[-1] for run in found.values()):g}",
        ))  # fmt: skip
    return rows


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def to_markdown(runs: Sequence[Run], machine: str) -> str:
    """Return the report."""
    headers = ("variant", "seeds", "loss", "minus FP32", "within noise", "steps skipped", "last scale")
    parts = []
    for task in dict.fromkeys(run.task for run in runs):
        found = [run for run in runs if run.task == task]
        commits = "".join(
            f"{v}: {', '.join(dict.fromkeys(r.commit for r in found if r.variant == v))}; "
            for v in dict.fromkeys(run.variant for run in found)
        )
        table = tabulate(compare(runs, task), headers, "pipe", disable_numparse=True)
        low = "FP16" if TASKS[task].low == torch.float16 else "BF16"
        parts.append(
            f"## {task}\n\n{low}, {found[0].steps} steps of {WINDOW} micro-batches. "
            f"Made at {commits.removesuffix('; ')}.\n\n{table}\n\n"
            f"![training loss](training_{task}.svg)\n"
        )
        if low == "FP16":
            parts[-1] += f"\n![loss scale](training_{task}_scale.svg)\n"
    return (
        "# Training to the end\n\n"
        f"Written by `reports/training.py` on {machine}, torch {torch.__version__}.\n\n"
        "The loss is measured on held-out examples; the table shows its mean and standard deviation over seeds.\n"
        "The difference from FP32 is paired by seed. It counts as noise if its mean is within twice its standard\n"
        "error, or within the standard deviation of FP32 over seeds.\n\n" + "\n".join(parts)
    )


def draw(runs: Sequence[Run], folder: Path) -> None:
    """Draw the mean of the curves over seeds, one chart a task."""
    for task in dict.fromkeys(run.task for run in runs):
        found = {v: [r for r in runs if (r.task, r.variant) == (task, v)] for v in VARIANTS}
        losses = {v: _mean([r.losses for r in rs]) for v, rs in found.items() if rs}
        steps = next(r.steps for r in runs if r.task == task)
        folder.joinpath(f"training_{task}.svg").write_text(line_chart(losses, steps, f"{task}: training loss"))
        if TASKS[task].low == torch.float16:
            scales = {v: _mean([[*r.scales] for r in rs]) for v, rs in found.items() if rs and v != FP32}
            chart = line_chart(scales, steps, f"{task}: loss scale")
            folder.joinpath(f"training_{task}_scale.svg").write_text(chart)


def _mean(curves: Sequence[Sequence[float | None]]) -> list[float | None]:
    points = zip(*curves, strict=True)
    return [None if None in p else statistics.mean(v for v in p if v is not None) for p in points]


def write(runs: Sequence[Run], folder: Path) -> str:
    """Write the data, the report and the charts; return the report."""
    threads = torch.get_num_threads()
    machine = f"CPU ({torch.backends.cpu.get_cpu_capability()}, {threads} thread{'s' if threads > 1 else ''})"
    data = {"made": made.made(), "torch": torch.__version__, "machine": machine, "runs": [asdict(run) for run in runs]}
    draw(runs, folder)
    return made.write(folder, "training", data, to_markdown(runs, machine))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is not there yet, and write the report of all that is."""
    parser = argparse.ArgumentParser(description="Train real models in every variant, with the same seeds.")
    parser.add_argument("task", nargs="*", metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many (default: %(default)s)")
    parser.add_argument("--variants", nargs="*", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--steps", type=int, help="of every task, instead of its own")
    parser.add_argument("-o", "--output", type=Path, default=HERE, metavar="FOLDER", help="where to write")
    options = parser.parse_args(arguments)
    if unknown := set(options.task) - set(TASKS):
        parser.error(f"no task {', '.join(sorted(unknown))}: choose from {', '.join(TASKS)}")
    file = options.output / "training.json"
    runs = [Run(**run) for run in json.loads(file.read_text())["runs"]] if file.exists() else []
    done = {(run.task, run.variant, run.seed) for run in runs}
    wanted = [
        (t, v, s) for s in range(options.seeds) for t in options.task or TASKS for v in variants_of(t)
        if v in options.variants
    ]  # fmt: skip
    for task, variant, seed in tqdm([one for one in wanted if one not in done], desc="runs", unit="run"):
        runs.append(train(task, variant, seed, options.steps))
        write(runs, options.output)
    sys.stdout.write(write(runs, options.output))


if __name__ == "__main__":
    main()

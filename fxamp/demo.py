"""The demo: two small models trained on real digits, in FP32, under `torch.autocast`, and by fxamp.

Every variant starts from the same weights and sees the same windows of micro-batches. The variants take turns step by
step, so that their times can be compared.
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

from passes.contract.dtypes import dtype_name
from passes.contract.errors import FxampError, PolicyError
from passes.contract.plan_format import write_text

from .convert import convert
from .measure.counts import StepCounts, interleaved
from .train.step import TrainStep
from .train.weights.weights import WeightCasts
from .train.weights.window_counts import window_counts

BATCH, WINDOW = 32, 4  # images in a micro-batch, and micro-batches in a step
TEST_IMAGES = 898  # half of the 1,797: with fewer, one image more or less shows in the table
FP32, AUTOCAST, O1, O2, PER_STEP = VARIANTS = ("FP32", "torch.autocast", "fxamp O1", "fxamp O2", "fxamp O2 per_step")
LOSS = partial(F.cross_entropy, label_smoothing=0.1)


class LeNet5(nn.Module):
    """LeCun's digit classifier, for digits of 8x8 enlarged to 16x16."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 2 * 2, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Give the logits of the ten digits."""
        x = F.interpolate(x, scale_factor=2.0)
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        logits: Tensor = self.fc3(F.relu(self.fc2(x)))
        return logits


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention, then a perceptron, to the tokens."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        mixed: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return mixed


class VisionTransformer(nn.Module):
    """A vision transformer over the sixteen patches of a digit, which two convolutions make."""

    def __init__(self, width: int = 48, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Sequential(
            nn.Conv2d(1, width // 2, 3, padding=1), nn.ReLU(), nn.Conv2d(width // 2, width, 3, stride=2, padding=1)
        )
        self.positions = nn.Parameter(torch.randn(1, 16, width) * 0.1)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Give the logits of the ten digits."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(x)).mean(dim=1))
        return logits


@dataclass(frozen=True)
class Task:
    """A model of the demo, and how it is trained."""

    name: str
    build: Callable[[], nn.Module]
    steps: int
    learning_rate: float
    weight_decay: float


TASKS = (
    Task("LeNet-5", LeNet5, 200, 8e-3, 0.05),
    Task("vision transformer", VisionTransformer, 200, 2e-3, 0.3),
)


@dataclass(frozen=True)
class Row:
    """One row of the demo's table. Accuracies are in percent, one per seed; the time is a ratio to FP32's."""

    model: str
    variant: str
    accuracies: tuple[float, ...]
    time_ratio: float
    counts: StepCounts

    @property
    def accuracy(self) -> float:
        """Give the mean accuracy over the seeds."""
        return statistics.mean(self.accuracies)


@dataclass(frozen=True)
class Digits:
    """Scikit-learn's handwritten digits, 1,797 images of 8x8, on one device."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield shuffled batches endlessly, the same ones for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self.train_x), generator=generator).to(self.train_x.device)
            for rows in order.split(BATCH):
                yield self.train_x[rows], self.train_y[rows]


@dataclass(frozen=True)
class Trainee:
    """One variant of a model in training.

    Attributes:
        model: The module trained, in whose parameters the gradients are.
        predict: Gives the logits of a batch of images.
        loss: Gives the loss of a micro-batch, as a training step computes it.
        step: Trains on a window of micro-batches.
        weights: Which casts of weights are kept for a window, if any are.
    """

    model: nn.Module
    predict: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    step: Callable[[Sequence[tuple[Tensor, Tensor]]], object]
    weights: WeightCasts | None = None


def run(seeds: int = 1, output: str | Path | None = None, tasks: Sequence[Task] = TASKS) -> list[Row]:
    """Train every variant of every model, print the table and write it to a file.

    Args:
        seeds: How many seeds to average over.
        output: The file to write, Markdown. By default `fxamp-demo.md` in the current directory.
        tasks: What to train.
    """
    if seeds < 1:
        raise PolicyError(f"seeds must be at least 1, got {seeds}")
    path = Path("fxamp-demo.md" if output is None else output)
    _require_writable(path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    digits = _load_digits(device)
    with _one_thread():
        rows = [row for task in tasks for row in _compare(task, digits, seeds)]
    text = _to_markdown(rows, seeds, device)
    write_text(path, text)
    sys.stdout.write(f"{text}\nWritten to {path}.\n")
    return rows


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one CPU thread: the models are too small for more, and times would vary."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compare(task: Task, digits: Digits, seeds: int) -> list[Row]:
    """Train the variants of one model side by side, once per seed."""
    accuracies: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    ratios: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    counts: dict[str, StepCounts] = {}
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = task.build().to(digits.train_x.device)
        x, y = next(digits.batches(seed))
        trainees = {variant: _trainee(variant, copy.deepcopy(model), task, x) for variant in VARIANTS}
        # The counts do not depend on the weights, so one seed is enough.
        counts = counts or {variant: _count(trainee, x, y) for variant, trainee in trainees.items()}
        steps = {variant: _stepper(trainee, digits.batches(seed)) for variant, trainee in trainees.items()}
        progress = tqdm(range(task.steps), desc=f"{task.name}, seed {seed}", unit="step", mininterval=0.5)
        timings = interleaved(steps, progress)
        for variant, trainee in trainees.items():
            accuracies[variant].append(_accuracy(trainee, digits))
            ratios[variant].append(timings[variant].median / timings[FP32].median)
    return [
        Row(task.name, variant, tuple(accuracies[variant]), statistics.mean(ratios[variant]), counts[variant])
        for variant in VARIANTS
    ]


def _trainee(variant: str, model: nn.Module, task: Task, example: Tensor) -> Trainee:
    # Fused, so that little but the model is timed.
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, weight_decay=task.weight_decay, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.learning_rate, total_steps=task.steps)
    if variant in (O1, O2, PER_STEP):
        converted = convert(model, (example,), policy=variant.split()[1])
        step = TrainStep(
            converted, LOSS, optimizer, accumulate_steps=WINDOW, scheduler=scheduler,
            weights="per_step" if variant == PER_STEP else "per_use",
        )  # fmt: skip
        kept = step.weights if variant == PER_STEP else None
        return Trainee(
            model, converted, lambda x, y: LOSS(converted(x), y), lambda window: [step(x, y) for x, y in window], kept
        )
    return _by_hand(model, optimizer, scheduler, example.device.type, autocast=variant == AUTOCAST)


def _by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    device: str,
    *,
    autocast: bool,
) -> Trainee:
    """Train as PyTorch's recipe for mixed precision does; for FP32 autocast and the scaler are disabled."""
    low = torch.get_autocast_dtype(device)
    scaler = torch.amp.GradScaler(device, enabled=autocast and low is torch.float16)

    def predict(x: Tensor) -> Tensor:
        with torch.autocast(device, dtype=low, enabled=autocast):
            logits: Tensor = model(x)
        return logits

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device, dtype=low, enabled=autocast):
            return LOSS(model(x), y)

    def step(window: Sequence[tuple[Tensor, Tensor]]) -> None:
        for x, y in window:
            scaler.scale(loss(x, y) / len(window)).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        # The scale falls when the step was skipped.
        if scaler.get_scale() >= before:
            scheduler.step()
        optimizer.zero_grad(set_to_none=True)

    return Trainee(model, predict, loss, step)


def _stepper(trainee: Trainee, batches: Iterator[tuple[Tensor, Tensor]]) -> Callable[[], object]:
    return lambda: trainee.step(list(islice(batches, WINDOW)))


def _count(trainee: Trainee, x: Tensor, y: Tensor) -> StepCounts:
    counts = window_counts(lambda: trainee.loss(x, y), WINDOW, trainee.weights)
    trainee.model.zero_grad(set_to_none=True)
    return counts


@torch.no_grad()
def _accuracy(trainee: Trainee, digits: Digits) -> float:
    """Give the percentage of test images classified correctly."""
    right = trainee.predict(digits.test_x).argmax(dim=1) == digits.test_y
    return 100 * right.float().mean().item()


def _load_digits(device: str) -> Digits:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise FxampError(f"the demo needs {error.name!r}; install it with: pip install 'fxamp[demo]'") from error
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    # Pixels are 0 to 16.
    x = (torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1)[order].to(device)
    y = torch.tensor(labels)[order].to(device)
    return Digits(x[TEST_IMAGES:], y[TEST_IMAGES:], x[:TEST_IMAGES], y[:TEST_IMAGES])


def _require_writable(path: Path) -> None:
    """Raise before the training if the file cannot be written."""
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise FxampError(f"cannot write {str(path)!r} ({error.strerror}); give another file with -o FILE") from error
    if not existed:
        path.unlink()


def _to_markdown(rows: Sequence[Row], seeds: int, device: str) -> str:
    headers = (
        "model",
        "variant",
        "test accuracy, %",
        "step time / FP32",
        "casts per step",
        "MB cast",
        "MB saved for backward",
    )
    table = [
        (
            row.model,
            row.variant,
            f"{row.accuracy:.2f}" + (f" ± {statistics.stdev(row.accuracies):.2f}" if seeds > 1 else ""),
            f"{row.time_ratio:.2f}",
            row.counts.casts,
            f"{row.counts.cast_bytes / 1e6:.2f}",
            f"{row.counts.saved_bytes / 1e6:.2f}",
        )
        for row in rows
    ]
    aligned = ("left", "left", *["right"] * 5)
    machine = torch.cuda.get_device_name() if device == "cuda" else f"CPU ({torch.backends.cpu.get_cpu_capability()})"
    low = dtype_name(torch.get_autocast_dtype(device))
    return (
        "# fxamp demo\n\n"
        f"Two models trained on scikit-learn's digits ({TEST_IMAGES} test images). {machine}, {low}, torch "
        f"{torch.__version__}, {seeds} seed{'s' if seeds > 1 else ''}.\n\n"
        f"{tabulate(table, headers, 'pipe', disable_numparse=True, colalign=aligned)}\n\n"
        f"A step is {WINDOW} micro-batches of {BATCH} images; `per_step` casts weights once for all of them, as a "
        "TrainStep does by default.\nThe variants take turns. Times are medians of whole steps; compare them only as "
        "ratios. Casts, and the bytes that\nthey read and write, are counted over one step; bytes saved for backward "
        "over one micro-batch.\n"
    )

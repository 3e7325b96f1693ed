"""The demo: what a training step runs, its plan, a changed line that the gate finds, and the casts of a window.

It takes some 15 seconds of one CPU core, trains nothing, and times nothing: on a CPU, a model this small is fastest in
FP32.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from passes.contract.errors import FxampError
from passes.contract.plan_format import write_text
from passes.contract.policy import Policy

from .census.census import census
from .convert import convert, to_read
from .measure.counts import StepCounts, window_counts
from .observe.watch import USER_FILES
from .report.gate.gate import check
from .report.gate.outcomes import to_text
from .report.reader import with_totals
from .report.report import report
from .train.step import TrainStep

USER_FILES.add(__file__)
BATCH, WINDOW = 32, 4  # images in a micro-batch, and micro-batches in a step
POLICY = "O1,dtype=bf16"
FP32, AUTOCAST, O1, O2, PER_STEP = VARIANTS = ("FP32", "torch.autocast", "fxamp O1", "fxamp O2", "fxamp O2 per_step")


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


class Changed(VisionTransformer):
    """The vision transformer after somebody has changed one line."""

    def forward(self, x: Tensor) -> Tensor:
        """Give the probabilities of the ten digits."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(x)).mean(dim=1)).softmax(dim=-1)
        return logits


def run(output: str | Path | None = None) -> str:
    """Print the demo and write it to a file, as Markdown; by default to `fxamp-demo.md` in the current directory.

    Raises:
        FxampError: The file cannot be written.
    """
    path = Path("fxamp-demo.md" if output is None else output)
    _require_writable(path)
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, 1, 8, 8), torch.randint(10, (BATCH,))
    parts = ["# fxamp demo\n\nA vision transformer of two layers, 48 wide, on a CPU.\n"]
    sys.stdout.write(parts[0])
    with _one_thread():
        for title, make in (
            ("What your training runs, before you convert anything", _before),
            ("The plan, and whether it ran", _after),
            ("A changed line fails the gate", _gate),
            (f"The casts of one step, of {WINDOW} micro-batches", _casts),
        ):
            parts.append(f"\n## {title}\n\n{make(x, y)}\n")
            sys.stdout.write(parts[-1])
            sys.stdout.flush()
    text = "".join(parts)
    write_text(path, text)
    sys.stdout.write(f"\nWritten to {path}.\n")
    return text


def _before(x: Tensor, y: Tensor) -> str:
    with torch.autocast("cpu", torch.bfloat16):
        found = census(VisionTransformer(), x, y, loss=F.cross_entropy)
    return f"`fxamp.census(model, x, y, loss=...)` under `torch.autocast`:\n\n```text\n{found}\n```"


def _after(x: Tensor, y: Tensor) -> str:
    view = convert(VisionTransformer(), (x,), policy=POLICY)
    found = census(view, x, y, loss=F.cross_entropy)
    tree = report(view).to_tree(depth=1)
    shown = f"```text\n{tree}\n```\n\n```text\n{found}\n```"
    return f"`fxamp.report(view)`, and `fxamp.census(view, x, y, loss=...)`:\n\n{shown}"


def _gate(x: Tensor, y: Tensor) -> str:
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "net.plan.json"
        with_totals(to_read(VisionTransformer(), (x,), None, Policy.of(POLICY)))[0].save(plan)
        found = check("net", lambda _: to_read(Changed(), (x,), None, Policy.of(POLICY)), plan, (), update=False)
    told = to_text([found]).replace(str(plan), "net.plan.json")
    return f"Somebody appends `.softmax(dim=-1)`; `fxamp check` exits with {found.status}:\n\n```text\n{told}```"


def _casts(x: Tensor, y: Tensor) -> str:
    model = VisionTransformer()
    counts = {variant: _counted(variant, copy.deepcopy(model), x, y) for variant in VARIANTS}
    rows = [
        (variant, c.casts, f"{c.cast_bytes / 1e6:.2f}", f"{c.saved_bytes / 1e6:.2f}") for variant, c in counts.items()
    ]
    headers = ("", "casts", "MB that they move", "MB saved for backward, of a micro-batch")
    table = tabulate(rows, headers, "pipe", disable_numparse=True, colalign=("left", "right", "right", "right"))
    return f"{table}\n\n`per_step` casts each weight once a step, as a TrainStep does by default."


def _counted(variant: str, model: nn.Module, x: Tensor, y: Tensor) -> StepCounts:
    """Return what a window of one variant casts."""
    if variant in (FP32, AUTOCAST):
        return window_counts(partial(_loss, model, x, y, variant == AUTOCAST), WINDOW)
    view = convert(model, (x,), policy=f"{variant.split()[1]},dtype=bf16")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = TrainStep(view, F.cross_entropy, optimizer, accumulate_steps=WINDOW, weights="per_step")
    return window_counts(partial(_loss, view, x, y, False), WINDOW, step.weights if variant == PER_STEP else None)


def _loss(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, autocast: bool) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return F.cross_entropy(model(x), y)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one CPU thread, which is enough for a small model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _require_writable(path: Path) -> None:
    """Raise before anything is run if the file cannot be written."""
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise FxampError(f"cannot write {str(path)!r} ({error.strerror}); give another file with -o FILE") from error
    if not existed:
        path.unlink()

"""Count what a training step does about dtypes: FP32, `torch.autocast`, fxamp, and the whole model in low.

    python reports/casts.py                      # every model
    python reports/casts.py bert vit --no-times

Four `transformers` models, four layers deep where they are transformers, with random weights. The loss is computed
inside the model, and inside the autocast region. "per_step" is a model whose weights are cast once in a window of
micro-batches, as TrainStep does. On CUDA, FP16 is added, and the same variants under `torch.compile`.
Writes `casts.md` and `casts.json` beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fxamp  # noqa: E402  (the path comes first)
from fxamp.measure import StepCounts, Timing, interleaved, step_counts  # noqa: E402
from fxamp.train.weights import WeightCasts  # noqa: E402

Inputs = dict[str, Tensor]
FP32, AUTOCAST, ALL_LOW = "FP32", "torch.autocast", "all low"
LEVELS = ("O1", "O2")
COMPILED, PER_STEP = ", compiled", " per_step"
WINDOW = 4  # micro-batches that a weight is cast once for, where it is
ROUNDS, WARMUP = 9, 2
TOKENS, BATCH = 256, 4
_SMALL = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}


def _text() -> Inputs:
    ids = torch.randint(0, 8000, (BATCH, TOKENS))
    return {"input_ids": ids, "labels": ids}


def _bert() -> tuple[nn.Module, Inputs]:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=8000, **_SMALL)), _text()


def _vit() -> tuple[nn.Module, Inputs]:
    from transformers import ViTConfig, ViTForImageClassification

    inputs = {"pixel_values": torch.randn(BATCH, 3, 224, 224), "labels": torch.randint(0, 2, (BATCH,))}
    return ViTForImageClassification(ViTConfig(**_SMALL)), inputs


def _resnet() -> tuple[nn.Module, Inputs]:
    from transformers import ResNetConfig, ResNetForImageClassification

    inputs = {"pixel_values": torch.randn(8, 3, 128, 128), "labels": torch.randint(0, 2, (8,))}
    return ResNetForImageClassification(ResNetConfig()), inputs  # ResNet-50


def _gpt2() -> tuple[nn.Module, Inputs]:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=512, n_head=8, vocab_size=8000, use_cache=False)), _text()


MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "bert": _bert,
    "vit": _vit,
    "resnet": _resnet,
    "gpt2": _gpt2,
}


@dataclass(frozen=True)
class Variant:
    """One way to run a model: `loss` computes it once; `module` is whose gradients are to be cleared.

    What `torch.compile` compiled can be timed and not counted. `weights` are those cast once a window, if any are.
    """

    module: nn.Module
    loss: Callable[[], Tensor]
    counted: bool = True
    weights: WeightCasts | None = None

    def window(self) -> None:
        """Run the forwards and backwards of a window."""
        self.module.zero_grad(set_to_none=True)
        self.last_loss().backward()

    def last_loss(self) -> Tensor:
        """Run a window up to its last backward."""
        with self.weights.in_use() if self.weights is not None else contextlib.nullcontext():
            for _ in range(WINDOW - 1):
                self.loss().backward()
                if self.weights is not None:
                    self.weights.next_micro_batch()
            loss = self.loss()
        if self.weights is not None:
            self.weights.forget()
        return loss


@dataclass(frozen=True)
class Row:
    """What one variant of one model did; times are ratios to that of autocast, None where not measured."""

    model: str
    dtype: str
    variant: str
    counts: StepCounts | None
    time: float | None = None
    spread: float | None = None


def measure(name: str, device: str, low: torch.dtype, rounds: int) -> list[Row]:
    """Count every variant of one model, and time them side by side unless `rounds` is 0."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model, inputs = model.to(device).train(), {k: v.to(device) for k, v in inputs.items()}
    variants = dict(_variants(model, inputs, device, low))
    counts = {kind: _count(variant) if variant.counted else None for kind, variant in variants.items()}
    timings: dict[str, Timing] = {}
    if rounds:
        progress = tqdm(range(rounds + WARMUP), desc=f"{name}, {_word(low)}", unit="round")
        timings = interleaved({kind: variant.window for kind, variant in variants.items()}, progress, warmup=WARMUP)
    return [
        Row(name, _word(low), kind, counts[kind], *_ratios(timings.get(kind), timings.get(AUTOCAST)))
        for kind in variants
        if rounds or counts[kind] is not None
    ]


def _variants(model: nn.Module, inputs: Inputs, device: str, low: torch.dtype) -> Iterator[tuple[str, Variant]]:
    modules: dict[str, tuple[nn.Module, Inputs]] = {FP32: (model, inputs), AUTOCAST: (model, inputs)}
    for level in LEVELS:
        policy = fxamp.Policy(level, dtype=low, device=device)
        modules[f"fxamp {level}"] = fxamp.convert(model, (), inputs, policy=policy).train(), inputs
    halved = {k: v.to(low) if v.is_floating_point() else v for k, v in inputs.items()}
    modules[ALL_LOW] = copy.deepcopy(model).to(low), halved
    for kind, (module, given) in modules.items():
        loss = _loss(module, given, device, low, autocast=kind == AUTOCAST)
        yield kind, Variant(module, loss)
        if isinstance(module, fxamp.ConvertedModule):
            yield kind + PER_STEP, Variant(module, loss, weights=WeightCasts(module, "per_step", WINDOW))
    if device == "cuda":
        for kind, (module, given) in modules.items():
            compiled: Any = torch.compile(module)
            loss = _loss(compiled, given, device, low, autocast=kind == AUTOCAST)
            yield kind + COMPILED, Variant(module, loss, counted=False)


def _loss(module: nn.Module, inputs: Inputs, device: str, low: torch.dtype, *, autocast: bool) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        with torch.autocast(device, dtype=low, enabled=autocast):
            made: Tensor = module(**inputs).loss
        return made

    return loss


def _count(variant: Variant) -> StepCounts:
    # An optimizer sets gradients to None, and so does every step that is counted: adding to old ones casts nothing.
    variant.module.zero_grad(set_to_none=True)
    if variant.weights is None:
        counts = step_counts(variant.loss)
    else:
        with variant.weights.in_use():
            saved = step_counts(variant.loss).saved_bytes
        variant.weights.forget()
        variant.module.zero_grad(set_to_none=True)
        whole = step_counts(variant.last_loss)
        counts = StepCounts(whole.casts // WINDOW, whole.cast_bytes // WINDOW, saved, whole.ops // WINDOW)
    variant.module.zero_grad(set_to_none=True)
    return counts


def _ratios(timing: Timing | None, reference: Timing | None) -> tuple[float | None, float | None]:
    if timing is None or reference is None:
        return None, None
    return timing.median / reference.median, timing.spread / reference.median


def _word(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "BF16", torch.float16: "FP16"}[dtype]


def _machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"CPU ({torch.backends.cpu.get_cpu_capability()}, {threads} thread{'s' if threads > 1 else ''})"


def to_markdown(rows: Sequence[Row], machine: str) -> str:
    """Return the report as one Markdown table."""
    headers = (
        "model", "low", "variant", "casts", "MB cast", "MB saved for backward", "ops", "time / autocast", "spread",
    )  # fmt: skip
    table = [
        (
            row.model,
            row.dtype,
            row.variant,
            *_shown(row.counts),
            "" if row.time is None else f"{row.time:.2f}",
            "" if row.spread is None else f"± {row.spread / 2:.2f}",
        )
        for row in rows
    ]
    columns = 9 if any(row.time is not None for row in rows) else 7
    shown = tabulate(
        [r[:columns] for r in table], headers[:columns], "pipe", disable_numparse=True,
        colalign=("left", "left", "left", *["right"] * (columns - 3)),
    )  # fmt: skip
    times = (
        f" Times are medians of windows of {WINDOW}, the variants taking turns, and good as\n"
        "ratios only; the spread is half the distance between the quartiles."
    )
    return (
        "# What a training step does about dtypes\n\n"
        f"Written by `reports/casts.py` on {machine}, torch {torch.__version__}.\n\n"
        f"{shown}\n\n"
        "One forward and backward, no optimizer. Casts are the dtype conversions that were executed, MB cast what\n"
        "they read and wrote; MB saved for backward are distinct storages that autograd keeps, parameters apart; ops\n"
        "are all that was dispatched. Where weights are cast once a window, `per_step`, figures are the mean over its\n"
        f"{WINDOW} micro-batches, rounded down.{times if columns == 9 else ''}\n"
    )


def _shown(counts: StepCounts | None) -> tuple[object, ...]:
    if counts is None:
        return "", "", "", ""
    return counts.casts, f"{counts.cast_bytes / 1e6:.0f}", f"{counts.saved_bytes / 1e6:.0f}", counts.ops


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the models asked for, print the table and write both files."""
    parser = argparse.ArgumentParser(description="Count what a training step does about dtypes.")
    parser.add_argument("model", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--no-times", action="store_true", help="count only")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed rounds per model (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, default=HERE, metavar="FOLDER", help="where to write")
    options = parser.parse_args(arguments)
    if unknown := set(options.model) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))}: choose from {', '.join(MODELS)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lows = (torch.bfloat16, torch.float16) if device == "cuda" else (torch.bfloat16,)
    rounds = 0 if options.no_times else options.rounds
    rows: list[Row] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FP16 gradients without a loss scale")  # nothing is trained here
        for name in tqdm(options.model or MODELS, desc="models", unit="model"):
            for low in lows:
                rows += measure(name, device, low, rounds)
    text, machine = to_markdown(rows, _machine(device)), _machine(device)
    sys.stdout.write(text)
    data = {"torch": torch.__version__, "machine": machine, "rows": [asdict(row) for row in rows]}
    options.output.joinpath("casts.md").write_text(text)
    options.output.joinpath("casts.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()

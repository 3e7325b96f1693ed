"""Count casts, bytes and ops of a training step: FP32, `torch.autocast`, fxamp, and the whole model in low.

    python reports/casts.py                                      # every model
    python reports/casts.py bert_64 bert_128 bert_256 bert_256_1 # the sizes
    python reports/casts.py --missing                            # those without times, as after one was stopped
    python reports/casts.py bert vit --no-times

Four `transformers` models, four layers deep where they are transformers, with random weights, and BERT in smaller
sizes, in one of which gradients are clipped. The loss is computed inside the model, and inside the autocast region.
Outputs have the dtypes that autocast gives them (`output_dtype=autocast`); "restored" is the default, where they have
those of the model: logits go back to FP32. "per_step" is a model whose weights are cast once in a window of
micro-batches, as TrainStep does. In the smaller sizes whole windows with AdamW are timed too: fxamp by a TrainStep, the
others by a hand-written loop. On CUDA, FP16 is added, and the same variants under `torch.compile`. After every model
`casts.md` and `casts.json` are written beside this file; what they have of other models stays.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fxamp  # noqa: E402  (the path comes first)
from fxamp.measure.counts import StepCounts, last_loss, step_counts, window_counts  # noqa: E402
from fxamp.train.weights import WeightCasts  # noqa: E402
from reports.made import Made, made, write  # noqa: E402
from reports.timing import Timing, interleaved, keep_freed_memory  # noqa: E402

Inputs = dict[str, Tensor]
FP32, AUTOCAST, ALL_LOW = "FP32", "torch.autocast", "all low"
LEVELS = ("O1", "O2")
COMPILED, PER_STEP, RESTORED = ", compiled", " per_step", " restored"
WINDOW = 4  # micro-batches that a weight is cast once for, where it is
ROUNDS, WARMUP = 9, 1
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

    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=512, n_head=8, vocab_size=8000, use_cache=False))
    model.loss_type = "ForCausalLM"  # without it transformers warns before each loss, which breaks the graph there
    return model, _text()


# BERT by width, layers, batch and length.
SIZES = {
    "bert_64": (64, 4, 2, 16),
    "bert_128": (128, 4, 4, 32),
    "bert_256": (256, 6, 4, 64),
    "bert_256_1": (256, 6, 1, 32),
    "bert_256_clipped": (256, 6, 2, 32),
}
CLIPPED = {"bert_256_clipped": 1.0}  # the norm to which whole windows clip gradients


def _sized(width: int, layers: int, batch: int, length: int) -> tuple[nn.Module, Inputs]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=8000, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 32,
        intermediate_size=4 * width,
    )  # fmt: skip
    ids = torch.randint(0, 8000, (batch, length))
    return BertForMaskedLM(config), {"input_ids": ids, "labels": ids}


MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "bert": _bert,
    "vit": _vit,
    "resnet": _resnet,
    "gpt2": _gpt2,
    **{name: functools.partial(_sized, *size) for name, size in SIZES.items()},
}


@dataclass(frozen=True)
class Variant:
    """One way to run a model: `loss` computes it once; `module` is whose gradients are to be cleared.

    What `torch.compile` compiled can be timed and not counted. `weights` are those cast once a window, if any are.
    `step` trains on a window; None if the variant is only counted.
    """

    module: nn.Module
    loss: Callable[[], Tensor]
    step: Callable[[], object] | None
    counted: bool = True
    weights: WeightCasts | None = None

    def window(self) -> None:
        """Run the forwards and backwards of a window."""
        self.module.zero_grad(set_to_none=True)
        last_loss(self.loss, WINDOW, self.weights).backward()


@dataclass(frozen=True)
class Row:
    """What one variant of one model did.

    `time` is of the forwards and backwards of a window, `step_time` of a whole one with AdamW. Both are ratios to that
    of autocast, and a spread is the width of their 95 % interval; None stands where they were not measured.
    """

    model: str
    dtype: str
    variant: str
    counts: StepCounts | None
    time: float | None = None
    spread: float | None = None
    step_time: float | None = None
    step_spread: float | None = None


def measure(name: str, device: str, low: torch.dtype, rounds: int) -> list[Row]:
    """Count every variant of one model, and time them side by side unless `rounds` is 0."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model, inputs = model.to(device).train(), {k: v.to(device) for k, v in inputs.items()}
    variants = dict(_variants(model, inputs, device, low, CLIPPED.get(name)))
    counts = {kind: _count(variant) if variant.counted else None for kind, variant in variants.items()}

    def timed(what: str, runs: dict[str, Callable[[], object]]) -> dict[str, Timing]:
        progress = tqdm(range(rounds + WARMUP), desc=f"{name}, {_word(low)}, {what}", unit="round")
        return interleaved(runs, progress, warmup=WARMUP)

    steps = {kind: v.step for kind, v in variants.items() if v.step is not None}
    of_windows = timed("windows", {kind: variants[kind].window for kind in steps}) if rounds else {}
    of_steps = timed("with AdamW", steps) if rounds and name in SIZES else {}
    return [
        Row(name, _word(low), kind, counts[kind], *_ratios(of_windows, kind), *_ratios(of_steps, kind))
        for kind in variants
        if rounds or counts[kind] is not None
    ]


def _variants(
    model: nn.Module, inputs: Inputs, device: str, low: torch.dtype, clip: float | None
) -> Iterator[tuple[str, Variant]]:
    modules: dict[str, tuple[nn.Module, Inputs]] = {FP32: (model, inputs), AUTOCAST: (model, inputs)}
    levels = {f"fxamp {level}": functools.partial(fxamp.Policy, level, dtype=low, device=device) for level in LEVELS}
    policies = {kind: policy(output_dtype="autocast") for kind, policy in levels.items()}
    modules |= {kind: (fxamp.convert(model, (), inputs, policy=policy), inputs) for kind, policy in policies.items()}
    halved = {k: v.to(low) if v.is_floating_point() else v for k, v in inputs.items()}
    modules[ALL_LOW] = copy.deepcopy(model).to(low), halved
    for kind, (module, given) in modules.items():
        loss = _loss(module, given, device, low, autocast=kind == AUTOCAST)
        if kind in policies:
            yield kind, Variant(module, loss, _train_step(module, given, "per_use", clip))
            kept = WeightCasts(module, "per_step", WINDOW)
            yield kind + PER_STEP, Variant(module, loss, _train_step(module, given, "per_step", clip), weights=kept)
            restored = fxamp.convert(model, (), inputs, policy=levels[kind]())
            yield kind + RESTORED, Variant(restored, _loss(restored, inputs, device, low, autocast=False), None)
        else:
            yield kind, Variant(module, loss, _by_hand(module, loss, clip))
    if device == "cuda":
        for kind, (module, given) in modules.items():
            compiled: Any = fxamp.compile(model, policy=policies[kind]) if kind in policies else torch.compile(module)
            loss = _loss(compiled, given, device, low, autocast=kind == AUTOCAST)
            yield kind + COMPILED, Variant(module, loss, _by_hand(module, loss, clip), counted=False)


def _adamw(module: nn.Module) -> torch.optim.AdamW:
    # The variants share their weights, which had better stay what they are.
    return torch.optim.AdamW(module.parameters(), lr=1e-6, fused=True)


def _by_hand(module: nn.Module, loss: Callable[[], Tensor], clip: float | None) -> Callable[[], object]:
    optimizer = _adamw(module)

    def window() -> None:
        for _ in range(WINDOW):
            (loss() / WINDOW).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return window


def _train_step(module: nn.Module, inputs: Inputs, weights: Any, clip: float | None) -> Callable[[], object]:
    step = fxamp.TrainStep(
        module, None, _adamw(module), scaler=None, accumulate_steps=WINDOW, weights=weights, max_grad_norm=clip
    )

    def window() -> None:  # as by hand, nobody keeps what a micro-batch returned
        for _ in range(WINDOW):
            step(inputs)

    return window


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
        whole = window_counts(variant.loss, WINDOW, variant.weights)
        counts = StepCounts(whole.casts // WINDOW, whole.cast_bytes // WINDOW, whole.saved_bytes, whole.ops // WINDOW)
    variant.module.zero_grad(set_to_none=True)
    return counts


def _ratios(timings: dict[str, Timing], kind: str) -> tuple[float | None, float | None]:
    if kind not in timings:
        return None, None
    return timings[kind].over(timings[AUTOCAST])


def _word(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "BF16", torch.float16: "FP16"}[dtype]


def _machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"CPU ({torch.backends.cpu.get_cpu_capability()}, {threads} thread{'s' if threads > 1 else ''})"


def to_markdown(rows: Sequence[Row], machine: str, timed: Made | None = None) -> str:
    """Return the report as Markdown: one table of all, and one a quantity of the sizes of BERT.

    `timed` says when the times were measured, if that was before the counts were.
    """
    headers = (
        "model", "low", "variant", "casts", "MB cast", "MB saved for backward", "ops", "time / autocast", "spread",
    )  # fmt: skip
    table = [
        (row.model, row.dtype, row.variant, *_shown(row.counts), *_with_spread(row.time, row.spread)) for row in rows
    ]
    columns = 9 if any(row.time is not None for row in rows) else 7
    shown = tabulate(
        [r[:columns] for r in table], headers[:columns], "pipe", disable_numparse=True,
        colalign=("left", "left", "left", *["right"] * (columns - 3)),
    )  # fmt: skip
    times = (
        f" Times are of windows of\n{WINDOW}; the variants take turns, and each is compared with autocast in the same "
        "round.\n± is half of the 95 % interval of the median of these ratios. glibc keeps what is freed (mallopt), so "
        "that page faults,\nwhich depend on the variant that ran before, are no part of the times."
        + (f"\nTimes are of commit {timed['commit']}, at a load of {timed['load']}; counts are newer." if timed else "")
    )
    parts = [f"## {title}\n\n{sized}\n" for title, quantity in QUANTITIES.items() if (sized := by_size(rows, quantity))]
    return (
        "# Costs of a training step: casts, bytes and ops\n\n"
        f"Written by `reports/casts.py` on {machine}, torch {torch.__version__}.\n\n"
        f"{shown}\n\n"
        "One forward and backward, no optimizer. Casts counts the dtype conversions that were executed; MB cast is\n"
        "what they read and write. MB saved for backward counts distinct storages that autograd keeps, without\n"
        "parameters. Ops counts all ops that were dispatched. With `per_step` weights are cast once per window, and\n"
        f"figures are the mean over its {WINDOW} micro-batches, rounded down. With `restored`, which is the default,\n"
        f"outputs that autocast alone makes low go back to the model's own dtype.{times if columns == 9 else ''}\n"
        + "".join("\n" + part for part in parts)
    )


def by_size(rows: Sequence[Row], quantity: Callable[[Row], str]) -> str:
    """Return a table of the sizes of BERT down and the variants across, "" where there is nothing in it."""
    shown = [r for r in rows if r.model in SIZES and r.dtype == "BF16" and not r.variant.endswith(RESTORED)]
    found = {(r.model, r.variant): quantity(r) for r in shown}
    models = dict.fromkeys(model for model, _ in found)
    variants = dict.fromkeys(variant for _, variant in found)
    if not any(found.values()):
        return ""
    table = [
        [
            ", ".join(map(str, SIZES[m])) + (", clipped" if m in CLIPPED else ""),
            *(found.get((m, v), "") for v in variants),
        ]
        for m in models
    ]
    headers = ("width, layers, batch, length", *variants)
    return tabulate(table, headers, "pipe", disable_numparse=True, colalign=("left", *["right"] * len(variants)))


def _with_spread(time: float | None, spread: float | None) -> tuple[str, str]:
    return "" if time is None else f"{time:.2f}", "" if spread is None else f"± {spread / 2:.2f}"


QUANTITIES: dict[str, Callable[[Row], str]] = {
    f"BERT by size: MB cast in one of {WINDOW} micro-batches": (
        lambda row: "" if row.counts is None else f"{row.counts.cast_bytes / 1e6:.1f}"
    ),
    f"BERT by size: time of {WINDOW} forwards and backwards, over that of autocast": (
        lambda row: " ".join(_with_spread(row.time, row.spread)).strip()
    ),
    f"BERT by size: time of {WINDOW} micro-batches and AdamW, over that of autocast": (
        lambda row: " ".join(_with_spread(row.step_time, row.step_spread)).strip()
    ),
}


def _shown(counts: StepCounts | None) -> tuple[object, ...]:
    if counts is None:
        return "", "", "", ""
    return counts.casts, f"{counts.cast_bytes / 1e6:.0f}", f"{counts.saved_bytes / 1e6:.0f}", counts.ops


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the models asked for, write both files after each, and print the report."""
    parser = argparse.ArgumentParser(description="Count what a training step does about dtypes.")
    parser.add_argument("model", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--no-times", action="store_true", help="count only; times stay as they are")
    parser.add_argument("--missing", action="store_true", help="only models of which the report has no times yet")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed rounds per model (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, default=HERE, metavar="FOLDER", help="where to write")
    options, began = parser.parse_args(arguments), made()
    if unknown := set(options.model) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))}: choose from {', '.join(MODELS)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lows = (torch.bfloat16, torch.float16) if device == "cuda" else (torch.bfloat16,)
    rounds = 0 if options.no_times else options.rounds
    file = options.output / "casts.json"
    before = json.loads(file.read_text()) if file.exists() else {"rows": []}
    rows = [_row(**row) for row in before["rows"]]
    clock = {(r.model, r.dtype, r.variant): _times(r) for r in rows} if options.no_times else {}
    timed = before.get("timed", before.get("made")) if any(t for of in clock.values() for t in of.values()) else None
    untimed = {row.model for row in rows if row.time is None and not row.variant.endswith(RESTORED)}
    has_times = {row.model for row in rows} - untimed
    wanted = [name for name in options.model or MODELS if not (options.missing and name in has_times)]
    machine = _machine(device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FP16 gradients without a loss scale")  # nothing is trained here
        warnings.filterwarnings("ignore", message="training in FP16 without loss scaling")
        for name in tqdm(wanted, desc="models", unit="model"):
            counted = [row for low in lows for row in measure(name, device, low, rounds)]
            measured = [replace(r, **clock.get((r.model, r.dtype, r.variant), {})) for r in counted]
            others = [row for row in rows if row.model != name and row.model in MODELS]
            rows = sorted([*others, *measured], key=lambda row: list(MODELS).index(row.model))
            data = {
                "made": began, **({"timed": timed} if timed else {}), "torch": torch.__version__, "machine": machine,
                "rows": [asdict(row) for row in rows],
            }  # fmt: skip
            write(options.output, "casts", data, to_markdown(rows, machine, timed))
    sys.stdout.write(to_markdown(rows, machine, timed))


def _times(row: Row) -> dict[str, Any]:
    return {"time": row.time, "spread": row.spread, "step_time": row.step_time, "step_spread": row.step_spread}


def _row(counts: dict[str, int] | None, **others: Any) -> Row:
    return Row(counts=None if counts is None else StepCounts(**counts), **others)


if __name__ == "__main__":
    keep_freed_memory()
    main()

"""Time and count training steps compiled by Inductor: FP32, autocast, fxamp at O1 and O2, and the whole model in low.

    python reports/compiled_step.py                     # all that is below
    python reports/compiled_step.py --rounds 0          # counts alone; the times that were measured before stay
    python reports/compiled_step.py --windows 4 --models            # on this CPU, windows of four micro-batches alone
    python reports/compiled_step.py --windows --models BERT-base    # of a GPU, one model alone; the others stay
    python reports/compiled_step.py --windows --variants "fxamp O2, compiled update"    # and one variant alone

On this CPU it takes a BERT of four layers, width 256, batch 4, 64 tokens. Each step is a window of one micro-batch or
of four (forward and backward each), and then a fused AdamW. Times are medians of rounds in which the variants take
turns, as ratios to compiled autocast. The report also has counts, which are the same on every run: of one micro-batch
the bytes that Inductor's kernels load and store, the kernels of a forward and backward, and the bytes that forward
saves for backward; and of a window the peak memory of a run, without weights and optimizer state. A loop by hand
compiles model and loss as one function, which returns the loss.

For a GPU, which need not be there, it takes seven models of full size (one is of `diffusers`), and counts what Inductor
makes of their steps on an H100 (`fxamp.measure.fake_cuda`), with all that runs outside of the graphs. The report on
what only a GPU can show has measured some of it.

`compiled_step.md` and `compiled_step.json` are written beside this file.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fxamp  # noqa: E402  (the path comes first)
from fxamp.measure.counts import laps  # noqa: E402
from fxamp.measure.fake_cuda.breakdown import Breakdown  # noqa: E402
from fxamp.measure.fake_cuda.count import count as count_on_gpu  # noqa: E402
from fxamp.measure.inductor import Counts, recorded, recorded_since, recording  # noqa: E402
from reports.exact_numerics import cpu  # noqa: E402
from reports.gpu import SUBJECTS, Subject, own_loss  # noqa: E402
from reports.made import made, write  # noqa: E402
from reports.peak import peak_of  # noqa: E402

FP32, AUTOCAST, ALL_LOW = "FP32", "torch.autocast", "all low"
LOWS = {"bf16": torch.bfloat16, "fp16": torch.float16}
COMPILED, AT_REST = "fxamp O1, compiled update", "fxamp O2, compiled update"
OF_CPU = {"fxamp O1": "O1", COMPILED: "O1", "fxamp O1 per_use": "O1", "fxamp O2": "O2"}
POLICIES = {**OF_CPU, AT_REST: "O2"}
ROUNDS, WARMUP, RESAMPLED = 11, 2, 2000
WINDOWS = (1, 4)
_LENGTH = {"1": "Steps of one micro-batch", "4": "Windows of four micro-batches"}
SIZE = (256, 4, 4, 64)  # width, layers, batch, tokens
BATCHES = {
    "BERT-base": 32, "GPT-2": 8, "Llama 0.5B": 8, "ViT-B": 64, "ResNet-50": 64, "T5-base": 8, "diffusion UNet": 4,
}  # on a GPU  # fmt: skip
_T5 = {
    "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12, "use_cache": False,
    "decoder_start_token_id": 0,
}  # fmt: skip
_SHALLOW_T5 = {"num_layers": 1, "num_decoder_layers": 1}
Inputs = dict[str, Tensor]


class Denoising(nn.Module):
    """The UNet of Stable Diffusion 1.5 (860 million parameters, random), and the loss of its noise prediction."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import UNet2DConditionModel

        self.unet = UNet2DConditionModel(cross_attention_dim=768)  # all other sizes are the class's defaults

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, noise: Tensor) -> Any:
        """Return what has the loss of the predicted noise."""
        predicted = self.unet(sample, timestep, encoder_hidden_states).sample
        return SimpleNamespace(loss=nn.functional.mse_loss(predicted.float(), noise.float()))


@dataclass(frozen=True)
class Diffusion:
    """A subject that is no model of `transformers`: latents of 64 x 64 and texts of 77 tokens."""

    shallow: Mapping[str, Any] = field(default_factory=dict)

    def build(self, batch: int, small: bool) -> tuple[Any, Inputs]:
        """Return a model in train mode and its inputs, the noise to be predicted among them; none is small."""
        torch.manual_seed(0)
        latents, text = torch.randn(batch, 4, 64, 64), torch.randn(batch, 77, 768)
        inputs = {"timestep": torch.arange(batch), "encoder_hidden_states": text, "noise": torch.randn_like(latents)}
        return Denoising().train(), {"sample": latents, **inputs}

    def shown(self, batch: int) -> str:
        """Return what a batch is, for a table."""
        return f"{batch} x 4 x 64 x 64"


MODELS: dict[str, Subject | Diffusion] = {
    **SUBJECTS, "T5-base": Subject("T5", "ForConditionalGeneration", 512, (8,), _T5, _SHALLOW_T5, {}),
    "diffusion UNet": Diffusion(),
}  # fmt: skip


@dataclass(frozen=True)
class PerBatch:
    """What Inductor made of one forward and backward, and what of the work outside falls to it.

    `fxamp.measure.inductor.Counts` says what each is; the peak is that of a window that ran. None: not measured.
    """

    moved_bytes: float
    kernels: float
    saved_bytes: int
    peak: int | None = None
    cast_kernels: float | None = None


@dataclass(frozen=True)
class Row:
    """The counts of one variant."""

    variant: str
    counts: PerBatch


@dataclass(frozen=True)
class Time:
    """The time of one variant, as a ratio to compiled autocast, with interquartile range and 95 % interval."""

    variant: str
    time: float
    spread: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Variant:
    """A way to train, by name, in windows of so many micro-batches, in a low dtype.

    It is compared with autocast in windows of that length and in that dtype, whose loop by hand has a GradScaler for
    FP16, and looks for no inf or NaN in BF16, as TrainStep does unless it is told not to `check`.
    """

    name: str
    window: int = 1
    low: str = "bf16"
    check: bool = True

    @property
    def base(self) -> Variant:
        """Return what it is compared with."""
        return Variant(AUTOCAST, self.window, self.low)


GPU_VARIANTS = {
    AUTOCAST: Variant(AUTOCAST), "fxamp O1": Variant("fxamp O1"), COMPILED: Variant(COMPILED),
    f"{COMPILED}, check_finite=False": Variant(COMPILED, check=False), AT_REST: Variant(AT_REST),
    ALL_LOW: Variant(ALL_LOW),
    f"{AUTOCAST}, windows of 4": Variant(AUTOCAST, 4),
    "fxamp O1, windows of 4": Variant("fxamp O1", 4), f"{COMPILED}, windows of 4": Variant(COMPILED, 4),
    f"{AUTOCAST}, FP16": Variant(AUTOCAST, low="fp16"), f"{COMPILED}, FP16": Variant(COMPILED, low="fp16"),
}  # fmt: skip


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
    """Yield names, and functions that run a micro-batch; each has weights of its own."""
    model, inputs = bert(*size)
    for name in (FP32, AUTOCAST, ALL_LOW, *OF_CPU):
        own = copy.deepcopy(model).to(torch.bfloat16 if name == ALL_LOW else torch.float32)
        yield name, micro_batch(own, inputs, Variant(name, window), {"options": options})


def micro_batch(
    model: nn.Module, inputs: Inputs, of: Variant, how: Mapping[str, Any], device: str = "cpu"
) -> Callable[[], Tensor]:
    """Return what runs a micro-batch of a variant; `how` is for `torch.compile`.

    Of "all low" the model has low weights.
    """
    if of.name not in POLICIES:
        if of.name == ALL_LOW:
            inputs = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in inputs.items()}
        return _by_hand(model, inputs, of, how, device)
    example: Any = () if device == "cuda" else ((), inputs)  # a check compares values
    converted = fxamp.convert(model, *example, policy=f"{POLICIES[of.name]},dtype={of.low}")
    step = fxamp.TrainStep(
        converted, None, _adamw(model), weights="per_use" if "per_use" in of.name else "auto",
        accumulate_steps=of.window, check_finite=of.check, compile=how,
        update="compiled" if of.name in (COMPILED, AT_REST) else None,
    )  # fmt: skip
    return lambda: step(inputs).loss


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)


def _by_hand(
    model: nn.Module, inputs: Inputs, of: Variant, how: Mapping[str, Any], device: str
) -> Callable[[], Tensor]:
    options = {**recording(), **how.get("options", {})}
    optimizer, called = _adamw(model), torch.compile(own_loss, **{**how, "options": options})
    scaler = torch.amp.GradScaler(device, enabled=of.low == "fp16")
    autocast = torch.autocast(device, LOWS[of.low], of.name == AUTOCAST)
    done = itertools.count(1)

    def step() -> Tensor:
        with autocast:
            loss: Tensor = called(model, inputs)
        scaler.scale(loss / of.window if of.window > 1 else loss).backward()
        if next(done) % of.window == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def count(step: Callable[[], Tensor], window: int = 1) -> PerBatch:
    """Compile a step, run two windows, and count the graphs of forward and backward, and the peak of a third."""
    run, mark = _repeated(step, window), recorded()
    run()
    made = sum((graph.counts for graph in recorded_since(mark) if graph.kind != "inference"), Counts())
    run()  # which makes the state of the optimizer
    return PerBatch(made.moved_bytes, made.kernels, made.saved_bytes, peak_of(run), made.cast_kernels)


def model(name: str, layers: int | None = None, low: bool = False) -> tuple[nn.Module, tuple[()], Inputs]:
    """Make a model that a GPU trains, and its inputs; `fxamp.measure.fake_cuda` asks for it by name."""
    subject = MODELS[name]
    depth = dict.fromkeys(subject.shallow, layers) if layers else {}
    made, inputs = subject.build(BATCHES[name], False, **depth)
    return made.to(torch.bfloat16 if low else torch.float32), (), inputs


def train(model: nn.Module, args: tuple[()], kwargs: Inputs, **variant: Any) -> Callable[[], None]:
    """Return what trains a window of a variant on a GPU; `fxamp.measure.fake_cuda` asks for it by name."""
    of = Variant(**variant)
    return _repeated(micro_batch(model, kwargs, of, {"dynamic": False}, "cuda"), of.window)


def on_gpu(name: str, layers: int | None = None, variants: Sequence[str] = (*GPU_VARIANTS,)) -> dict[str, Breakdown]:
    """Count the steps of a model on a GPU, whether there is one or not, in each variant."""
    here = "reports/compiled_step.py"
    return {
        shown: count_on_gpu(
            f"{here}:model", f"{here}:train", 
            build_options={"name": name, "layers": layers, "low": of.name == ALL_LOW},
            run_options=asdict(of), folder=HERE.parent,
        )
        for shown, of in tqdm([(each, GPU_VARIANTS[each]) for each in variants], desc=name)
    }  # fmt: skip


def measure(
    size: tuple[int, int, int, int], window: int, rounds: int, options: dict[str, Any]
) -> tuple[list[Row], list[Time]]:
    """Count every variant, and time whole windows of them in turn unless `rounds` is 0."""
    torch.compiler.reset()  # or what another measurement compiled would be used again, and nothing recorded
    steps, rows = {}, []
    for name, step in tqdm(variants(size, window, options), desc="compile", total=3 + len(OF_CPU)):
        rows.append(Row(name, count(step, window)))
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
            f"{row.counts.moved_bytes / 1e6:.1f}",
            f"{row.counts.moved_bytes / base.moved_bytes:.3f}",
            f"{row.counts.kernels:.0f}",
            "" if row.counts.cast_kernels is None else f"{row.counts.cast_kernels:.0f}",
            f"{row.counts.saved_bytes / 1e6:.2f}",
            "" if row.counts.peak is None else f"{row.counts.peak / 1e6:.2f}",
        )
        for row in rows
    ]
    headers = (
        "variant", "MB loaded and stored", "of autocast's", "kernels", "of these casts", "MB saved for backward",
        "MB at the peak",
    )  # fmt: skip
    return tabulate(lines, headers, "pipe", disable_numparse=True)


def table_of_gpu(rows: Mapping[str, Breakdown]) -> str:
    """Return the counts of one model on a GPU; a variant is compared with autocast in windows of its length."""
    lines = []
    for name, found in rows.items():
        base = rows[next(other for other, of in GPU_VARIANTS.items() if of == GPU_VARIANTS[name].base)]
        parts = (found.forward, found.backward, found.update)
        lines.append(
            (
                name,
                " + ".join(str(part.kernels) for part in parts),
                f"{found.total.kernels / base.total.kernels:.3f}",
                f"{found.total.cast_kernels} of {base.total.cast_kernels}",
                " + ".join(f"{part.moved_bytes / 1e6:,.0f}" for part in parts),
                f"{found.total.moved_bytes / base.total.moved_bytes:.3f}",
                f"{found.total.saved_bytes / GPU_VARIANTS[name].window / 2**20:,.0f}",
                f"{found.peak / 2**20:,.0f}",
                f"{found.peak / base.peak:.3f}",
            )
        )
    headers = (
        "variant", "kernels: forward + backward + rest", "of autocast's", "casts, and autocast's",
        "MB loaded and stored: forward + backward + rest", "of autocast's", "MiB saved", "MiB at the peak",
        "of autocast's",
    )  # fmt: skip
    return tabulate(lines, headers, "pipe", disable_numparse=True)


def beside_measured(name: str, found: Breakdown) -> str:
    """Return a sentence on what a GPU ran of compiled autocast, beside the counts; "" where none has."""
    file = HERE / "gpu.json"
    sections = json.loads(file.read_text(encoding="utf-8"))["sections"].get("compiled", {}) if file.exists() else {}
    rows = sections.get(f"{name}, {MODELS[name].shown(BATCHES[name])}, BF16", [])
    row = next((row for row in rows if row["variant"] == AUTOCAST and "kernels" in row), None)
    if row is None:
        return ""
    return (
        f"\nOf compiled autocast a GPU ran {row['kernels']:.0f} kernels, {row['cast kernels']:.0f} of them casts, with "
        f"{row['peak MiB']:,.0f} MiB at the peak ([report](gpu.md)); here {found.total.kernels}, "
        f"{found.total.cast_kernels} and {found.peak / 2**20:,.0f} are counted.\n"
    )


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
    title = "# Training steps compiled by Inductor, beside compiled autocast"
    text = f"{title}\n\nMade by `python reports/compiled_step.py`.\n"
    if found["windows"]:
        width, layers, batch, tokens = found["size"]
        text += (
            f"\nBERT, width {width}, {layers} layers, batch {batch}, {tokens} tokens, BF16, fused AdamW, torch "
            f"{found['torch']}. Bytes and kernels are those of the graphs of one micro-batch, forward and backward, as "
            "Inductor counts them; what runs outside of them, the update first of all, is counted in the tables for a "
            "GPU. Peak is the peak memory of a window, without weights and optimizer state.\n"
        )
    for window, rows in found["windows"].items():
        counted = [Row(row["variant"], PerBatch(**row["counts"])) for row in rows]
        text += f"\n## {_LENGTH[window]}\n\n{table(counted)}\n"
    if times := found.get("times"):
        text += (
            f"\n## Times\n\nRatios to compiled autocast: medians of {times['rounds']} rounds, in which the variants "
            "take turns; ± is the interquartile range, and in parentheses is the 95 % confidence interval of the ratio "
            f"(bootstrap), where it was computed. Measured at commit {times['commit']} with {times['threads']} threads "
            f"on this CPU: {times['cpu']}.\n\n{table_of_times(times['windows'])}\n"
        )
    if models := found.get("gpu"):
        text += (
            "\n## For a GPU\n\nWhat Inductor makes of whole steps on an H100, which is not there: it schedules them on "
            "torch's CPU build, and nothing runs (`fxamp.measure.fake_cuda`). Kernels, bytes and peak are those of a "
            "window, without what is held between windows; what is saved for backward is of one micro-batch. The rest "
            "is the fused AdamW, sums of gradients, casts of weights outside the graphs, and the look for inf and NaN "
            "in gradients, which autocast's loop does in FP16 alone.\n"
        )
    for name, of in (models or {}).items():
        rows = msgspec.convert(of["rows"], dict[str, Breakdown])
        text += (
            f"\n### {name}, {MODELS[name].shown(BATCHES[name])}\n\nCounted at commit {of['commit']}{_apart(of)}, with "
            f"torch {of['torch']}.\n{beside_measured(name, rows[AUTOCAST])}\n{table_of_gpu(rows)}\n"
        )
    return text


def _apart(of: Mapping[str, Any]) -> str:
    """Return which variants were counted apart from the others, and when."""
    return "".join(f", {variant!r} at {commit}" for variant, commit in of.get("apart", {}).items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write both reports."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of times on this CPU")
    parser.add_argument("--windows", type=int, nargs="*", default=WINDOWS, choices=WINDOWS, help="on this CPU")
    parser.add_argument("--models", nargs="*", default=[*BATCHES], choices=[*BATCHES], help="on a GPU")
    parser.add_argument("--variants", nargs="*", default=[*GPU_VARIANTS], choices=[*GPU_VARIANTS], help="on a GPU")
    parser.add_argument("--size", type=int, nargs=4, default=SIZE, metavar=("WIDTH", "LAYERS", "BATCH", "TOKENS"))
    parser.add_argument("-o", "--folder", type=Path, default=HERE)
    args, began = parser.parse_args(arguments), made()
    warnings.filterwarnings("ignore")
    file = args.folder / "compiled_step.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    measured = {str(n): measure(tuple(args.size), n, args.rounds, {}) for n in args.windows}
    found |= {"made": began, "windows": found.get("windows", {})}
    if measured:
        found |= {
            "torch": torch.__version__, "size": list(args.size),
            "windows": {n: [asdict(row) for row in rows] for n, (rows, _) in measured.items()},
        }  # fmt: skip
    if measured and args.rounds:
        found["times"] = {
            "commit": began["commit"], "cpu": cpu(), "threads": torch.get_num_threads(), "rounds": args.rounds,
            "windows": {n: [asdict(time) for time in times] for n, (_, times) in measured.items()},
        }  # fmt: skip
    text = write(args.folder, "compiled_step", found, to_markdown(found)) if measured else ""
    # Written after each, so that a later one that fails loses nothing.
    for name, variant in tqdm([(name, variant) for name in args.models for variant in args.variants], disable=None):
        new = {variant: asdict(on_gpu(name, variants=[variant])[variant])}
        known = found.setdefault("gpu", {}).setdefault(name, {"rows": {}, "apart": {}})
        rows, apart = known["rows"] | new, known["apart"] | {variant: began["commit"]}
        if all(apart.get(each) == began["commit"] for each in rows):
            known |= {"commit": began["commit"], "torch": torch.__version__}
        known["apart"] = {each: commit for each, commit in apart.items() if commit != known["commit"]}
        known["rows"] = {variant: rows[variant] for variant in GPU_VARIANTS if variant in rows}
        text = write(args.folder, "compiled_step", found, to_markdown(found))
    print(text)


if __name__ == "__main__":
    main()

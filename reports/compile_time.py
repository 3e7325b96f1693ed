"""Time that conversion takes: `python reports/compile_time.py`.

Ahead of time: `fxamp.convert` of LeNet-5 and of a BERT with 12 layers, by one thread, each time in a new process; and
of four models in turn with the first call of the same model compiled by torch.compile. Just in time: for BERT and Llama
with 12 layers, the first forward and backward of a model compiled by torch.compile with "aot_eager" alone, and with
fxamp in front of it, in turn. A training step compiled by Inductor: its first two windows, optimizer included, each
time in a new process with an empty cache. Several rounds of each. `convert`, `first`, `compile` or `step` as an
argument measures that part alone, and leaves the others as they were. Writes `reports/compile_time.md` and `.json`.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tabulate import tabulate
from torch import nn
from tqdm import tqdm

import fxamp
from fxamp.demo import LeNet5
from reports.made import made, sentence

PARTS = ("convert", "first", "compile", "step")
ROUNDS = 5
INNER = "aot_eager"
HERE = Path(__file__).parent
SMALL = {"num_hidden_layers": 12, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}


def bert() -> nn.Module:
    """Return a BERT of 12 layers, 64 wide."""
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, vocab_size=99)).train()


def llama() -> nn.Module:
    """Return a Llama of 12 layers, 64 wide."""
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, vocab_size=99, use_cache=False)
    return transformers.LlamaForCausalLM(config).train()


def resnet() -> nn.Module:
    """Return a ResNet-50."""
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=10)).train()


def swin() -> nn.Module:
    """Return a Swin V2 of 4 stages, 24 wide."""
    config = transformers.Swinv2Config(embed_dim=24, image_size=64, window_size=4, num_labels=10)
    return transformers.Swinv2ForImageClassification(config).train()


def converting(name: str) -> tuple[float, float]:
    """Return the seconds, of the clock and of the processor, that `fxamp.convert` takes; for a process of its own."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    model, args, kwargs = {
        "LeNet-5": lambda: (LeNet5(), (torch.randn(32, 1, 8, 8),), {}),
        "BERT, 12 layers": lambda: (bert(), (), {"input_ids": torch.randint(99, (2, 16))}),
    }[name]()
    clock, processor = time.perf_counter(), time.process_time()
    fxamp.convert(model, args, kwargs, policy="O1,dtype=bf16")
    return time.perf_counter() - clock, time.process_time() - processor


def measure_convert(name: str, rounds: int, progress: tqdm[Any]) -> dict[str, Any]:
    """Convert one model several times ahead of time; return the seconds of each round."""
    found = []
    for _ in range(rounds):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found.append(pool.apply(converting, (name,)))
        progress.update()
    return {"clock": [c for c, _ in found], "processor": [p for _, p in found]}


def first_call(build: Callable[[], nn.Module], inputs: dict[str, torch.Tensor], way: str, dynamic: bool) -> float:
    """Return the seconds of the processor that a new model's first call takes, compiled, or its conversion."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build()
    given = {name: value.clone() for name, value in inputs.items()}
    if dynamic and way == "torch.compile":
        for value in given.values():
            torch._dynamo.maybe_mark_dynamic(value, 0)  # as a view does by itself
    began = time.process_time()
    if way == "torch.compile":
        with torch.autocast("cpu", torch.bfloat16):
            torch.compile(model, backend="eager")(**given)
    else:
        fxamp.convert(model, (), given, policy="O1,dtype=bf16", dynamic=None if dynamic else False)
    return time.process_time() - began


def measure_first(name: str, rounds: int, progress: tqdm[Any]) -> dict[str, Any]:
    """Convert one model, and call it compiled by torch.compile, in turn; return the seconds of each round."""
    build, inputs = FIRST[name]
    cases = list(itertools.product(("torch.compile", "fxamp"), (True, False)))
    found: dict[str, list[float]] = {f"{way}, {_SIZES[dynamic]}": [] for way, dynamic in cases}
    for at in range(rounds + 1):
        for way, dynamic in cases:
            seconds = first_call(build, inputs(), way, dynamic)
            if at:  # what is imported and cached on first use
                found[f"{way}, {_SIZES[dynamic]}"].append(seconds)
            progress.update()
    return found


def first_step(compiled: Any, ids: torch.Tensor) -> float:
    """Return the seconds that the first forward and backward of a compiled model take."""
    start = time.perf_counter()
    compiled(input_ids=ids, labels=ids).loss.backward()
    return time.perf_counter() - start


def measure(build: Callable[[], nn.Module], rounds: int, progress: tqdm[Any]) -> dict[str, Any]:
    """Compile one model in turn without and with fxamp; return the seconds of each round and their ratio."""
    torch.manual_seed(0)
    model, ids = build(), torch.randint(99, (2, 16))
    ways = {
        "torch.compile": lambda: torch.compile(model, backend=INNER),
        "fxamp": lambda: fxamp.compile(model, backend=INNER),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, compiled in ways.items():
            torch._dynamo.reset()
            seconds[way].append(first_step(compiled(), ids))
            progress.update()
    ratios = sorted(b / a for a, b in zip(seconds["torch.compile"], seconds["fxamp"], strict=True))
    return {"seconds": seconds, "ratio": statistics.median(ratios), "spread": ratios[-1] - ratios[0]}


def compiling(name: str, way: str, cache: str) -> float:
    """Return the seconds of the processor that two windows of a compiled step take; for a process of its own.

    Those of processes that compile kernels count.
    """
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    torch.compile(lambda x: x.sin() + 1)(
        torch.randn(4, requires_grad=True)
    ).sum().backward()  # imports, and g++'s header
    model, inputs = STEPS[name][0](), STEPS[name][1]()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    if way == "torch.compile":
        loss_of, update = torch.compile(lambda: model(**inputs).loss), torch.compile(optimizer.step)

        def window() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of()
            loss.backward()
            update()
            optimizer.zero_grad()

    else:
        view = fxamp.convert(model, policy=f"{way},dtype=bf16")
        step = fxamp.TrainStep(view, None, optimizer, compile={"dynamic": False})

        def window() -> None:
            step(inputs)

    began = _processor()
    for _ in range(2):
        window()
    return _processor() - began


def _processor() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure_step(name: str, rounds: int, progress: tqdm[Any]) -> dict[str, list[float]]:
    """Compile a step of one model in each way, in turn; return the seconds of each round."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, seconds in found.items():
            with tempfile.TemporaryDirectory() as cache, multiprocessing.get_context("spawn").Pool(1) as pool:
                seconds.append(pool.apply(compiling, (name, way, cache)))
            progress.update()
    return found


CONVERTED = ("LeNet-5", "BERT, 12 layers")
COMPILED = {"BERT": bert, "Llama": llama}
FIRST: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "BERT, 12 layers": (bert, lambda: {"input_ids": torch.randint(99, (2, 16))}),
    "Llama, 12 layers": (llama, lambda: {"input_ids": torch.randint(99, (2, 16))}),
    "ResNet-50": (resnet, lambda: {"pixel_values": torch.randn(2, 3, 64, 64)}),
    "Swin V2": (swin, lambda: {"pixel_values": torch.randn(2, 3, 64, 64)}),
}
STEPS = {
    "BERT, 12 layers": (bert, lambda: dict.fromkeys(("input_ids", "labels"), torch.randint(99, (8, 64)))),
    "Llama, 12 layers": (llama, lambda: dict.fromkeys(("input_ids", "labels"), torch.randint(99, (8, 64)))),
}
WAYS = ("torch.compile", "O1", "O2")
_SIZES = {True: "any batch size", False: "one batch size"}


def to_markdown(found: dict[str, Any]) -> str:
    """Return the report."""
    rounds = {
        "convert": len(next(iter(found["convert"].values()))["clock"]),
        "compile": len(next(iter(found["compile"].values()))["seconds"]["fxamp"]),
    }
    ahead = [
        (name, *(f"{statistics.median(row[k]):.1f}" for k in ("processor", "clock")), f"{min(row['processor']):.1f}")
        for name, row in found["convert"].items()
    ]
    rows = [
        (
            name,
            f"{statistics.median(row['seconds']['torch.compile']):.1f}",
            f"{statistics.median(row['seconds']['fxamp']):.1f}",
            f"{row['ratio']:.2f}",
            f"{row['spread']:.2f}",
        )
        for name, row in found["compile"].items()
    ]
    first = []
    for name, row in found.get("first", {}).items():
        cells = [name]
        for size in _SIZES.values():
            theirs, ours = (statistics.median(row[f"{way}, {size}"]) for way in ("torch.compile", "fxamp"))
            cells += [f"{theirs:.1f}", f"{ours:.1f}", f"{ours / theirs:.2f}"]
        first.append(cells)
    steps = [
        (name, f"{statistics.median(row[WAYS[0]]):.1f}", *(_over(row[way], row[WAYS[0]]) for way in WAYS[1:]))
        for name, row in found.get("step", {}).items()
    ]
    sizes = [
        f"{what} ({size})" for size in _SIZES.values() for what in ("torch.compile, s", "fxamp.convert, s", "ratio")
    ]
    headers = ("model, 12 layers", "torch.compile, s", "with fxamp, s", "ratio", "spread of the ratio")
    columns = ("model", "processor, s", "clock, s", "minimum of processor, s")
    return (
        f"# Time of a conversion\n\nMade by `python reports/compile_time.py` on a CPU. {_made(found)}\n\n"
        "## Ahead of time: fxamp.convert\n\n"
        f"The table shows medians of {rounds['convert']} rounds at O1 with example inputs. Each round is the first "
        "conversion of a new process, on one thread, and includes the imports of torch and all "
        "checks. Clock time includes the load of other programs on the machine.\n\n"
        f"{tabulate(ahead, columns, 'pipe', disable_numparse=True)}\n\n"
        "## fxamp.convert against the first call of torch.compile\n\n"
        "The table shows seconds of the processor in train mode under autocast, in one process, in turn, with "
        'everything imported: what `torch.compile(model, backend="eager")` takes for its first call, and '
        "`fxamp.convert` with its check. A view is captured for batches of any size; sizes that vary cost "
        "torch.compile more too.\n\n"
        f"{tabulate(first, ('model', *sizes), 'pipe', disable_numparse=True)}\n\n"
        "## Just in time: fxamp.compile against torch.compile\n\n"
        f"The table shows the time of the first forward and backward with the inner backend `{INNER}`: medians of "
        f"{rounds['compile']} rounds, in which both variants take turns, with {torch.get_num_threads()} threads.\n\n"
        f"{tabulate(rows, headers, 'pipe', disable_numparse=True)}\n\n"
        "## A compiled training step\n\n"
        "The table shows seconds of the processor, those of the compiler of kernels included, that the first two "
        "windows of a step take with Inductor: model and loss under autocast and AdamW's step, each by "
        "`torch.compile`, and a TrainStep with `compile=` and the same AdamW. Each round is a new process with an "
        "empty cache; in brackets are the least and the greatest ratio of a round.\n\n"
        f"{tabulate(steps, ('model', 'torch.compile, s', 'O1', 'O2'), 'pipe', disable_numparse=True)}\n"
    )


def _over(ours: Sequence[float], theirs: Sequence[float]) -> str:
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def _made(found: dict[str, Any]) -> str:
    """Say where each part was measured, and under which load."""
    said = {part: sentence(at) for part, at in found.get("made", {}).items()}
    left = [part for part in PARTS if part not in said]
    missing = [f"The commit and the load at which {' and '.join(left)} was measured were not recorded."] if left else []
    return " ".join([*(f"`{part}`: {text}" for part, text in said.items()), *missing])


def main(parts: Sequence[str] = PARTS, rounds: int = ROUNDS, folder: Path = HERE) -> None:
    """Measure, and write both reports."""
    warnings.filterwarnings("ignore")
    kept = folder / "compile_time.json"
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    steps = {"convert": 2 * rounds, "first": 16 * (rounds + 1), "compile": 4 * rounds, "step": 6 * rounds}
    with tqdm(total=sum(steps[part] for part in parts), desc="compile_time") as progress:
        found["made"] = found.get("made", {}) | dict.fromkeys(parts, made())  # before anything loads the machine
        if "convert" in parts:
            found["convert"] = {name: measure_convert(name, rounds, progress) for name in CONVERTED}
        if "first" in parts:
            found["first"] = {name: measure_first(name, rounds, progress) for name in FIRST}
        if "compile" in parts:
            found["compile"] = {name: measure(build, rounds, progress) for name, build in COMPILED.items()}
        if "step" in parts:
            found["step"] = {name: measure_step(name, rounds, progress) for name in STEPS}
    text = to_markdown(found)
    (folder / "compile_time.md").write_text(text, encoding="utf-8")
    kept.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:] or PARTS)

"""Time that conversion adds to torch.compile's own: `python reports/compile_time.py`.

For BERT and Llama with 12 layers, the first forward and backward of a model compiled by torch.compile with "aot_eager"
alone, and with fxamp in front of it, in turn, several rounds. Writes `reports/compile_time.md` and `.json`.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tabulate import tabulate
from torch import nn
from tqdm import tqdm

import fxamp

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


def to_markdown(found: dict[str, Any], rounds: int) -> str:
    """Return the report."""
    rows = [
        (
            name,
            f"{statistics.median(row['seconds']['torch.compile']):.1f}",
            f"{statistics.median(row['seconds']['fxamp']):.1f}",
            f"{row['ratio']:.2f}",
            f"{row['spread']:.2f}",
        )
        for name, row in found.items()
    ]
    headers = ("model, 12 layers", "torch.compile, s", "with fxamp, s", "ratio", "spread of the ratio")
    return (
        "# What conversion adds to the time of torch.compile\n\n"
        f"First forward and backward, `{INNER}` inside, medians of {rounds} rounds in turn on a CPU, "
        f"threads: {torch.get_num_threads()}, torch {torch.__version__}. Made by `python reports/compile_time.py`.\n\n"
        f"{tabulate(rows, headers, 'pipe', disable_numparse=True)}\n"
    )


def main(rounds: int = ROUNDS, folder: Path = HERE) -> None:
    """Measure, and write both reports."""
    warnings.filterwarnings("ignore")
    with tqdm(total=2 * 2 * rounds, desc="compile_time") as progress:
        found = {"BERT": measure(bert, rounds, progress), "Llama": measure(llama, rounds, progress)}
    text = to_markdown(found, rounds)
    (folder / "compile_time.md").write_text(text, encoding="utf-8")
    (folder / "compile_time.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

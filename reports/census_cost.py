"""What a census costs: `python reports/census_cost.py` writes `reports/census_cost.md`.

A BERT of 4 layers, 256 wide, batch 4, length 64, in BF16. Plain steps of a TrainStep, those of one that has taken its
census in the first window, a census of the step, and one of the view take turns, so that the machine's drift hits all
alike. What a window without a census pays is also timed alone: the look whether one is due.
"""

from __future__ import annotations

import sys
import timeit
import warnings
from pathlib import Path

import torch
import transformers
from tabulate import tabulate

import fxamp
from fxamp.measure.counts import interleaved

ROUNDS = 12
HERE = Path(__file__).parent


def steps(
    layers: int, width: int, batch: int, length: int
) -> tuple[dict[str, fxamp.TrainStep], dict[str, torch.Tensor]]:
    """Return three TrainSteps of equal models, one of which takes a census, and a batch."""
    made = {}
    for name, census in (("a step", None), ("a step again", None), ("a step, census=", "warn")):
        torch.manual_seed(0)
        config = transformers.BertConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=4,
            intermediate_size=4 * width,
            vocab_size=1000,
        )
        model = transformers.BertForMaskedLM(config).train()
        ids = torch.randint(1000, (batch, length))
        view = fxamp.convert(model, kwargs={"input_ids": ids, "labels": ids}, policy="O1,dtype=bf16", check=False)
        made[name] = fxamp.TrainStep(view, None, torch.optim.AdamW(model.parameters()), census=census)  # type: ignore[arg-type]
    return made, {"input_ids": ids, "labels": ids.clone()}


def run(layers: int = 4, width: int = 256, batch: int = 4, length: int = 64, rounds: int = ROUNDS) -> str:
    """Return the table of times, each over that of a plain step."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    made, given = steps(layers, width, batch, length)
    first = made["a step"]
    variants = {name: (lambda step=step: step(given)) for name, step in made.items()}
    windows = interleaved(variants, 4 * rounds, warmup=4)
    plain = windows["a step"].median
    rows = [(name, f"{1e3 * t.median:.1f}", f"{t.median / plain:.3f}") for name, t in windows.items()]
    taken = interleaved({
        "a step": variants["a step"], "a census of the step": lambda: fxamp.census(first, given),
        "a census of the view": lambda: fxamp.census(first.model, given),
    }, rounds)  # fmt: skip
    plain = taken["a step"].median
    rows += [(n, f"{1e3 * t.median:.1f}", f"{t.median / plain:.3f}") for n, t in taken.items() if n != "a step"]
    look = made["a step, census="].census
    assert look is not None
    due = timeit.timeit(lambda: look.is_due(first.model), number=200) / 200
    rows.append(("the look whether a census is due", f"{1e3 * due:.3f}", f"{due / plain:.5f}"))
    shape = f"BERT, {layers} layers, {width} wide, batch {batch}, length {length}, {torch.__version__}, one thread"
    table = tabulate(
        rows, ("", "ms", "over a step"), "pipe", disable_numparse=True, colalign=("left", "right", "right")
    )
    return f"# What a census costs\n\n{shape}\n\n{table}\n"


if __name__ == "__main__":
    text = run()
    (HERE / "census_cost.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)

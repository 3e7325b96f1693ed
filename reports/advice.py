"""Is the advice of `fxamp.compare` still right an hour later? `reports/advice.py` writes `advice.md` and `.json`.

A first process asks for advice. A second one times all options again, in turns, for longer. The regret is how much
longer the advised option takes than the fastest one that the advice allows (an error of at most twice autocast's, or
FP32). Options whose times differ by less than 3 %, or by less than the 95 % interval of the second measurement, are
equally fast. Small models and large ones are asked for, of which 16 bits make some faster and some slower.

    python reports/advice.py                # every model; what was measured before stays
    python reports/advice.py bert_64 vit
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fxamp  # noqa: E402  (the path comes first)
from fxamp.measure.counts import laps  # noqa: E402
from reports import casts  # noqa: E402
from reports.made import made, write  # noqa: E402
from reports.timing import Timing  # noqa: E402
from tests.support.zoo import BY_NAME as ZOO  # noqa: E402

OF_CASTS = ("bert_64", "bert_128", "bert_256", "bert_256_1", "vit", "gpt2")
MODELS = (*OF_CASTS, "lenet5", "unet", "resnet18", "hf_t5")
FP32, AUTOCAST, TUNED, LEVELS = "FP32", "autocast", "tuned", ("O1", "O2", "O3")
EQUAL, NEAR = 0.03, 2.0  # as `advise` has them
ROUNDS, SECONDS = 31, 40.0  # of the second measurement, at most
Row = dict[str, Any]


def given(name: str) -> tuple[nn.Module, Any, Any]:
    """Return a model, its inputs, and its loss."""
    torch.manual_seed(0)
    if name in OF_CASTS:
        model, inputs = casts.MODELS[name]()
        return model, inputs, None
    zoo = ZOO[name]
    model = zoo.build()
    args, kwargs = zoo.inputs(4)
    return model, kwargs or args, zoo.loss


def advised(name: str) -> Row:
    """Ask for advice; return it as data."""
    model, inputs, loss = given(name)
    found: Row = json.loads(fxamp.compare(model, inputs, loss=loss, dtype="bf16").to_json())
    return found


def timed(name: str, plan: Mapping[str, Any] | None) -> dict[str, list[float]]:
    """Return the median ratio of each option's time to that of FP32, and half of its 95 % interval.

    Args:
        name: of the model.
        plan: the plan of the advised option, which is timed as "tuned".
    """
    model, inputs, loss = given(name)
    views: dict[str, nn.Module] = {FP32: model, AUTOCAST: model}
    views |= {level: fxamp.convert(model, policy=f"{level},dtype=bf16", check=False) for level in LEVELS}
    if plan is not None:
        views[TUNED] = fxamp.convert(model, plan=fxamp.Plan.from_json(json.dumps(plan)), check=False)

    def step(option: str) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=option == AUTOCAST):
            output = views[option](**inputs) if isinstance(inputs, dict) else views[option](*inputs)
            value = output.loss if loss is None else loss(output)
        value.backward()
        model.zero_grad(set_to_none=True)

    steps = {option: lambda option=option: step(option) for option in views}
    laps(steps, range(2))
    once = sum(map(sum, laps(steps, range(1)).values()))
    taken = laps(steps, range(max(9, min(ROUNDS, int(SECONDS / once)))))
    timings = {option: Timing(statistics.median(t), 0.0, tuple(t)) for option, t in taken.items()}
    found = {option: timing.over(timings[FP32]) for option, timing in timings.items()}
    return {option: [ratio, width / 2] for option, (ratio, width) in found.items()}


def judged(name: str, advice: Row, times: Mapping[str, Sequence[float]]) -> Row:
    """Compare an advice with a second measurement."""
    options = {o["name"]: o for o in advice["options"]}
    limit = NEAR * options[AUTOCAST]["gradient"]
    best = advice["recommended"]
    allowed = [o for o in times if o in options and (o == FP32 or options[o]["gradient"] <= limit)]
    fastest = min(allowed, key=lambda option: times[option][0])
    regret = times[best][0] / times[fastest][0] - 1
    return {
        "model": name, "advice": best, "reason": advice["reason"], "fastest": fastest, "regret": regret,
        "allowed": max(EQUAL, (times[best][1] ** 2 + times[fastest][1] ** 2) ** 0.5 / times[fastest][0]),
        "first": {o: options[o]["seconds"] / options[FP32]["seconds"] for o in options}, "second": dict(times),
    }  # fmt: skip


def to_markdown(rows: Sequence[Row]) -> str:
    """Write the report."""
    cells = [
        (
            r["model"], r["advice"], r["fastest"], f"{r['regret']:.1%}", f"{r['allowed']:.1%}",
            ", ".join(f"{o} {ratio:.2f} ± {half:.2f}" for o, (ratio, half) in r["second"].items() if o != FP32),
        )
        for r in rows
    ]  # fmt: skip
    head = ("model", "advice", "fastest, measured again", "regret", "equally fast within", "times over that of FP32")
    kept = sum(r["regret"] <= r["allowed"] for r in rows)
    [(usual, count)] = Counter(r["advice"] for r in rows).most_common(1)
    return (
        "# Advice, measured again\n\n"
        "Written by `python reports/advice.py`. `fxamp.compare` recommended one of FP32, autocast, O1, O2, O3 and a "
        "tuned plan in BF16; then another process timed a forward and backward of each in turns. The regret is what "
        "the recommended option takes longer than the fastest allowed one.\n\n"
        f"{tabulate(cells, head, 'pipe', disable_numparse=True)}\n\n"
        f"The regret is within what counts as equal on {kept} of {len(rows)} models. The advice given most often is "
        f"{usual}, on {count}.\n"
    )


def in_process(*arguments: str) -> Any:
    """Run this script in a process of its own; return what it prints."""
    done = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, check=True, cwd=HERE.parent
    )
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask, time again, and write the report."""
    parser = argparse.ArgumentParser(description="Compare advice with a second measurement.")
    parser.add_argument("model", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--advise", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--time", nargs=2, metavar=("MODEL", "PLAN"), help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, default=HERE, metavar="FOLDER", help="where to write")
    options, began = parser.parse_args(arguments), made()
    if options.advise:
        print(json.dumps(advised(options.advise)))
        return
    if options.time:
        name, plan = options.time
        print(json.dumps(timed(name, json.loads(Path(plan).read_text()))))
        return
    file = options.output / "advice.json"
    rows = {r["model"]: r for r in json.loads(file.read_text())["rows"]} if file.exists() else {}
    for name in tqdm(options.model or MODELS, disable=None):
        advice = in_process("--advise", name)
        plan = file.with_suffix(".plan")
        plan.write_text(json.dumps(advice["plan"] if advice["recommended"] == TUNED else None))
        rows[name] = judged(name, advice, in_process("--time", name, str(plan)))
        plan.unlink()
        ordered = [rows[n] for n in MODELS if n in rows]
        write(options.output, "advice", {"made": began, "rows": ordered}, to_markdown(ordered))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

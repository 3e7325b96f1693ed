"""Random programs through every level and front end, judged against eager PyTorch and `torch.autocast`.

    python reports/programs.py                                   # 10,000 programs; goes on where the record ends
    python reports/programs.py --limit 500 --seconds 600         # less
    python reports/programs.py --seed 123 --front-end graph      # one program: its text, and what becomes of it
    python reports/programs.py --seed 123 --front-end view --shrink
    python reports/programs.py --numbers --limit 2000            # numbers are attributes, and inputs of the graphs

Every program is converted to a view and, in turn, by one of the other front ends, at every level, with low BF16 or
FP16. Writes `programs.md` and `programs.json` beside this file, with --numbers `numbers.md` and `numbers.json`.
"""

from __future__ import annotations

import argparse
import collections
import logging
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from reports.made import made, write  # noqa: E402
from tests.support.trial.generate import generate, runs  # noqa: E402  (the path comes first)
from tests.support.trial.judge import FAILURES, FRONT_ENDS, LEVELS, NUMBERS, Subject, Verdict, judged  # noqa: E402
from tests.support.trial.options import add_options  # noqa: E402
from tests.support.trial.program import Program  # noqa: E402
from tests.support.trial.shrink import shrink  # noqa: E402
from tests.support.trial.workers import Found, Record, code, run_all  # noqa: E402

WANTED = 10_000
RECORD = HERE.parent / "build" / "trial" / "programs.jsonl"


def with_numbers(case: str) -> Found:
    """Judge the program of a seed with its numbers as attributes, at O1 or O2 in turn."""
    seed = int(case)
    program, level = generate(seed), ("O1", "O2")[seed // 10 % 2]
    if program is None or not program.numbers:
        return {"found": None}
    found = verdicts(program, NUMBERS, low(seed), (level,))
    return {"found": {NUMBERS: {level: [v.kind, v.why] for level, v in found.items()}}}


def front_ends(seed: int) -> tuple[str, ...]:
    """Return the front ends that a seed is tried by: "view", and one of the others."""
    return FRONT_ENDS[0], FRONT_ENDS[1 + seed % 2]


def low(seed: int) -> str:
    """Return the low dtype that a seed is tried with."""
    return "fp16" if seed % 10 in (3, 7) else "bf16"


def verdicts(program: Program, front_end: str, dtype: str, levels: tuple[str, ...] = LEVELS) -> dict[str, Verdict]:
    """Judge one program at every level; its numbers are attributes for the front end that is for these."""
    program = replace(program, attributes=front_end == NUMBERS)
    numbers = program.numbers if program.attributes else {}
    model, args = program.build()
    return judged(Subject(model, args, low=dtype, numbers=numbers), front_end, levels)


def work(case: str) -> Found:
    """Make the program of a seed and judge it: by front end and level, [kind, why]."""
    seed = int(case)
    program = generate(seed)
    if program is None:
        return {"found": None}
    found = {front: verdicts(program, front, low(seed)) for front in front_ends(seed)}
    return {"found": {f: {level: [v.kind, v.why] for level, v in of.items()} for f, of in found.items()}}


def smallest(seed: int, front_end: str, level: str, dtype: str | None = None) -> Program:
    """Return the program of a seed, made as small as it fails in the same way."""
    program = generate(seed)
    if program is None:
        raise SystemExit(f"seed {seed} gives no program that runs")
    dtype = dtype or low(seed)
    kind = verdicts(program, front_end, dtype)[level].kind

    def fails(smaller: Program) -> bool:
        try:
            return runs(smaller) and verdicts(smaller, front_end, dtype)[level].kind == kind
        except Exception:  # it is no program
            return False

    return shrink(program, fails)


def to_markdown(data: dict[str, Any]) -> str:
    """Return the report: how many of what, deviations, reasons of refusals, and every failure with its command."""
    rows = []
    for front in [f for f in (*FRONT_ENDS, NUMBERS) if f in data["counts"]]:
        for level in LEVELS:
            counts = data["counts"].get(front, {}).get(level, {})
            rows.append((front, level, sum(counts.values()), *(counts.get(kind, 0) for kind in data["kinds"])))
    table = tabulate(rows, ("front end", "level", "programs", *data["kinds"]), "pipe")
    parts = [
        "# Random programs\n\n"
        f"Written by `reports/programs.py` on a CPU, torch {data['torch']}: {data['programs']} programs from\n"
        f"seeds up to {data['last']}, of which {data['current']} with the present version of the code, in\n"
        f"{data['hours']:.1f} hours of processor time. Each program is a model of 3 to 14 random lines: products,\n"
        "casts of every spelling, reads of dtypes, views, in-place writes, buffers, autocast regions, checkpoints,\n"
        "branches on shapes and dtypes, shared and frozen weights. `numbers` is a view of the model whose numbers are\n"
        "attributes, after one with others; its plan must be that of a fresh process.\n"
        "`view` is `fxamp.convert` of the model, `graph`\n"
        "that of what `torch.export` makes of it, compared with that graph; `ambient` is the model compiled in place,\n"
        "and called under autocast.\n\n"
        "- O0 must equal eager PyTorch bit for bit, its gradients within 1e-6.\n"
        "- O1 must equal `torch.autocast` bit for bit, except at deviations that its plan names.\n"
        "- Gradients of O1, and all results of O2 and O3, are compared with FP32. The error may be at most four times\n"
        "  (at O3 eight times) that of autocast, or that of one rounding per op. From O2 on what is infinite in FP32\n"
        "  may be the largest number of the low dtype, since downcasts that autocast would not make saturate.\n"
        "- If `torch.compile` alone differs from eager PyTorch, its results are the reference.\n"
        "- A guess is an output of another dtype than the model's, of a model with 16-bit tensors in several graphs.\n"
        f"\n{table}\n"
    ]
    if len(data["codes"]) > 1:
        table = tabulate(data["codes"], ("code of fxamp", "programs"), "pipe")
        parts.append(f"## By code\n\n{table}\n")
    if data["deviations"]:
        table = tabulate(data["deviations"], ("front end", "code", "programs"), "pipe")
        parts.append(f"## Deviations at O1, by code\n\n{table}\n")
    table = tabulate(data["refused"], ("front end", "why", "programs"), "pipe")
    parts.append(f"## Refused, by reason\n\n{table}\n")
    failures = [
        f"- `python reports/programs.py --seed {seed} --front-end {front}`: {level}, {kind}: {' '.join(why.split())}"
        for seed, front, level, kind, why in data["failures"]
    ]
    parts.append("## Failures\n\n" + ("\n".join(failures) or "None.") + "\n")
    return "\n".join(parts)


def summary(found: dict[str, Found]) -> dict[str, Any]:
    """Return what the report says of a record, as plain data."""
    counts: dict[str, dict[str, dict[str, int]]] = {}
    deviations, refused = collections.Counter[tuple[str, str]](), collections.Counter[tuple[str, str]]()
    failures = []
    ended = {"died", "harness"}
    programs = {int(case): entry for case, entry in found.items() if entry.get("found") or ended & set(entry)}
    for seed, entry in sorted(programs.items()):
        for key in ended & set(entry):
            failures.append((seed, front_ends(seed)[1], "", key, entry[key]))
        for front, levels in (entry.get("found") or {}).items():
            for level, (kind, why) in levels.items():
                at = counts.setdefault(front, {}).setdefault(level, {})
                at[kind] = at.get(kind, 0) + 1
                if kind in FAILURES:
                    failures.append((seed, front, level, kind, why))
                if kind == "deviation" and level == "O1":
                    deviations[front, why.partition(" at ")[0] if " at " in why else "named in the plan"] += 1
                if kind == "refused" and level == "O0":
                    refused[front, _reason(why)] += 1
    kinds = sorted({k for levels in counts.values() for c in levels.values() for k in c}, key=lambda k: (k != "ok", k))
    now = code()
    codes = collections.Counter(e["code"] for case, e in found.items() if int(case) in programs)
    return {
        "torch": torch.__version__, "programs": len(programs), "last": max(map(int, found), default=0),
        "current": sum(e["code"] == now for e in programs.values()), "codes": codes.most_common(),
        "hours": sum(e.get("seconds", 0) for e in found.values()) / 3600, "counts": counts, "kinds": kinds,
        "deviations": [(*key, n) for key, n in sorted(deviations.items())],
        "refused": [(*key, n) for key, n in refused.most_common() if n > 2],
        "failures": failures,
    }  # fmt: skip


def _reason(why: str) -> str:
    """Return a refusal without what differs from program to program."""
    why = re.sub(r" at program_\S+( \(.*?\)+)?", "", why.partition(": ")[2])
    return re.sub(r"'\w+'|\d+|\(program.*", "…", why).partition(". ")[0][:110]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the programs asked for; print and write the report, or what became of one."""
    parser = argparse.ArgumentParser(description="Try random programs at every level, by every front end.")
    parser.add_argument("--seed", type=int, help="this program alone: print it, and what becomes of it")
    parser.add_argument("--front-end", choices=(*FRONT_ENDS, NUMBERS), help="of that one; both of its own otherwise")
    parser.add_argument("--numbers", action="store_true", help="numbers are attributes, and inputs of the graphs")
    parser.add_argument("--low", choices=("bf16", "fp16"), help="of that one (default: as its number says)")
    parser.add_argument("--shrink", action="store_true", help="and make it as small as it fails")
    parser.add_argument("--limit", type=int, default=WANTED, help="how many programs (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    add_options(parser, RECORD, HERE)
    options, began = parser.parse_args(arguments), made()
    if options.seed is not None:
        one(options.seed, options.front_end, options.low, options.shrink)
        return
    name, trial = ("numbers", with_numbers) if options.numbers else ("programs", work)
    record = Record(options.record.with_name(f"{name}.jsonl") if options.numbers else options.record)
    record.forget(options.again, failed)
    until = None if options.seconds is None else time.monotonic() + options.seconds
    seeds = (str(seed) for seed in range(options.first, options.first + 2 * options.limit))
    while (left := options.limit - sum(bool(e.get("found")) for e in record.found.values())) > 0:
        batch = [s for s, _ in zip((s for s in seeds if s not in record.found), range(left), strict=False)]
        if not batch or (until is not None and time.monotonic() > until):
            break
        run_all(batch, trial, record, processes=options.processes, until=until, name=name)
    data = summary(record.found)
    sys.stdout.write(write(options.output, name, {"made": began, **data}, to_markdown(data)))


def failed(entry: Found) -> bool:
    """Say whether a program failed anywhere."""
    kinds = {kind for levels in (entry.get("found") or {}).values() for kind, _ in levels.values()}
    return bool(kinds & {*FAILURES}) or bool({"died", "harness"} & set(entry))


def one(seed: int, front_end: str | None, dtype: str | None, smaller: bool) -> None:
    """Print one program and what becomes of it; made small, where it fails and that is asked for."""
    logging.disable(logging.ERROR)
    program = generate(seed)
    if program is None:
        raise SystemExit(f"seed {seed} gives no program that runs")
    sys.stdout.write(program.text())
    for front in [front_end] if front_end else front_ends(seed):
        found = verdicts(program, front, dtype or low(seed))
        for level, verdict in found.items():
            sys.stdout.write(f"{front} {level} {dtype or low(seed)}: {verdict.kind} {verdict.why}\n")
        bad = next((level for level, verdict in found.items() if verdict.failed), None)
        if smaller and bad is not None:
            small = smallest(seed, front, bad, dtype)
            sys.stdout.write(f"\n{small.text()}{verdicts(small, front, dtype or low(seed))[bad]}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)  # how a sum is shared out decides how it rounds
    main()

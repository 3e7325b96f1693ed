"""torch's own samples of every op and module through every level and front end, forward and gradients.

    python reports/op_coverage.py                                  # all of it; goes on where the record ends
    python reports/op_coverage.py --only op:softmax. --only module:nn.Linear
    python reports/op_coverage.py --case "view fp32 product op:softmax."

A case is a front end (`view`, `graph`, or `cuda`: a graph planned for CUDA, its dtypes against the autocast kernels on
fake tensors), the dtype of the inputs, `plain` or behind a `product`, and what is called. Each case runs in a process
of its own, which may crash. Writes `op_coverage.md` and `op_coverage.json` beside this file.
"""

from __future__ import annotations

import argparse
import collections
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fxamp  # noqa: E402  (the path comes first)
from passes.contract.reasons import DEVIATIONS  # noqa: E402
from reports.made import made, write  # noqa: E402
from tests.support.trial import samples  # noqa: E402
from tests.support.trial.cuda import POLICY, dtypes_under_cuda  # noqa: E402
from tests.support.trial.judge import (  # noqa: E402
    FAILURES,
    LEVELS,
    MISMATCH,
    OK,
    RAISES,
    REFUSED,
    TORCH,
    Subject,
    Verdict,
    as_verdict,
    exported,
    judged,
    quiet,
)
from tests.support.trial.options import add_options  # noqa: E402
from tests.support.trial.workers import Found, Record, code, run_all  # noqa: E402

RECORD = HERE.parent / "build" / "trial" / "op_coverage.jsonl"
NONE, BANNED, ALONE, RANDOM = "no sample", "banned", "refused by fxamp alone", "random memory"
# Dtype of the inputs, whether they come from a product, and the front ends. Every op has its first sample by every one
# before any has its second.
KINDS = (
    ("fp32", "product", ("view", "graph", "cuda")), ("fp32", "plain", ("view", "graph")),
    ("fp16", "plain", ("view", "graph", "cuda")),
)  # fmt: skip


def work(case: str) -> Found:
    """Judge one case: by level, [kind, why]."""
    front, dtype, behind, name = case.split(" ", 3)
    found = samples.sample(name, dtype, product=behind == "product")
    deterministic = name.partition(":")[2].partition(".")[0] not in samples.UNINITIALISED
    if found is None:
        return {"found": {level: [NONE, ""] for level in (("O1",) if front == "cuda" else LEVELS)}}
    if front == "cuda":
        verdict, unrun = planned_for_cuda(found)
        return {"found": {"O1": _settled(verdict, deterministic)}, "unrun": unrun}
    low = "fp16" if dtype == "fp16" else "bf16"
    try:
        subject = Subject(found.model, found.args, low=low, deterministic=deterministic)
    except Exception as e:
        return {"found": {level: [RAISES, f"{type(e).__name__}: {e}"[:200]] for level in LEVELS}}
    verdicts = judged(subject, front)
    return {"found": {level: _settled(v, deterministic) for level, v in verdicts.items()}}


def _settled(verdict: Verdict, deterministic: bool) -> list[str]:
    """Say why fxamp refuses what it refuses; of memory that nobody wrote its check may find other numbers."""
    if verdict.kind in (REFUSED, MISMATCH) and not deterministic:
        return [RANDOM, verdict.why]
    if verdict.kind == REFUSED and "bans" in verdict.why:
        return [BANNED, verdict.why]
    return [ALONE if verdict.kind == REFUSED else verdict.kind, verdict.why]


def planned_for_cuda(found: samples.Sample) -> tuple[Verdict, list[str]]:
    """Judge the plan for CUDA of what torch exports; and return the ops that fake tensors cannot run."""
    with quiet():
        try:
            program = exported(found)
        except Exception as e:
            return Verdict(TORCH, f"torch.export: {as_verdict(e).why}"), []
        try:
            plain, module = (fxamp.convert(program, policy=policy) for policy in ("O0", POLICY))
        except Exception as e:
            return as_verdict(e), []
    try:
        with quiet():
            rows, unrun = dtypes_under_cuda(plain, module, found.args, {})
    except Exception as e:  # what no fake CUDA tensor gets through
        return Verdict(OK, f"not run: {type(e).__name__}: {e}"[:200]), ["(none of it)"]
    deviated = False  # a value that is not autocast's makes others so
    for key, op, expected, autocast, got, why in rows:
        deviated = deviated or why in DEVIATIONS
        if op in (*unrun, "getitem") or why in DEVIATIONS:  # nothing is decided on a getitem
            continue
        if autocast != expected or (got != expected and why != "cut" and not deviated):
            why = f"{key} gives {expected}; autocast is planned as {autocast}, run {got}: {why}"
            return Verdict(MISMATCH, why), unrun
    return Verdict(OK), unrun


def summary(found: dict[str, Found], there_are: int) -> dict[str, Any]:
    """Return what the report says of a record of so many of the cases that there are, as plain data."""
    counts: dict[str, dict[str, int]] = {}
    failures, alone, named, unrun = [], [], collections.Counter[str](), set[str]()
    refused = collections.Counter[str]()
    for case, entry in sorted(found.items()):
        front, dtype, behind, _ = case.split(" ", 3)
        unrun |= {*entry.get("unrun", ())}
        for key in {"died", "harness"} & set(entry):
            failures.append((case, "", key, entry[key]))
        for level, (kind, why) in entry.get("found", {}).items():
            at = counts.setdefault(f"{front} {dtype} {behind} {level}", {})
            at[kind] = at.get(kind, 0) + 1
            if kind in FAILURES:
                failures.append((case, level, kind, why))
            if kind == ALONE:
                alone.append((case, level, why))
            if kind == TORCH and level == "O1":
                refused[why.partition(":")[0] + ":" + why.partition(":")[2][:60]] += 1
            if kind == "deviation" and level == "O1":
                named[why.partition(" at ")[0] if " at " in why else "named in the plan"] += 1
    kinds = sorted({k for c in counts.values() for k in c}, key=lambda k: (k != OK, k))
    now = code()
    return {
        "torch": torch.__version__, "cases": len(found), "of": there_are,
        "current": sum(e["code"] == now for e in found.values()),
        "hours": sum(e.get("seconds", 0) for e in found.values()) / 3600, "counts": counts, "kinds": kinds,
        "deviations": sorted(named.items()), "refused": refused.most_common(20), "alone": alone,
        "failures": failures, "unrun": sorted(unrun),
    }  # fmt: skip


def to_markdown(data: dict[str, Any]) -> str:
    """Return the report: what became of how many, deviations, refusals, every failure with its command."""
    rows = [(at, sum(c.values()), *(c.get(kind, 0) for kind in data["kinds"])) for at, c in data["counts"].items()]
    table = tabulate(rows, ("case", "samples", *data["kinds"]), "pipe")
    parts = [
        "# torch's own samples of ops and modules\n\n"
        "Written by `reports/op_coverage.py` on a CPU, "
        f"torch {data['torch']}: {data['cases']:,} of {data['of']:,} cases,\n"
        f"of which {data['current']:,} with the present version of the code, in {data['hours']:.1f} hours of\n"
        "processor time.\n\n"
        "A case is one sample of an op of `op_db` or a module of `module_db`, captured by one front end. Inputs are\n"
        "FP32 or FP16; they are given to the op directly, or after a matrix product.\n\n"
        "- O0 must equal eager PyTorch bit for bit, its gradients within 1e-6.\n"
        "- O1 must equal `torch.autocast` bit for bit, except at deviations that its plan names.\n"
        "- Gradients of O1, and all results of O2 and O3, are compared with FP32. The error may be at most four times\n"
        "  (at O3 eight times) that of autocast, or that of one rounding per op. From O2 on what is infinite in FP32\n"
        "  may be the largest number of the low dtype, since downcasts that autocast would not make saturate.\n"
        "- O3 is also compared with torch's own kernels on low inputs.\n"
        f"- `cuda` compares the planned dtypes with those of the autocast kernels on fake tensors.\n\n{table}\n"
    ]
    for title, headers, of in (
        ("Deviations at O1, by code", ("code", "cases"), data["deviations"]),
        ("What torch alone refuses or changes", ("why", "cases"), data["refused"]),
    ):
        parts.append(f"## {title}\n\n{tabulate(of, headers, 'pipe')}\n" if of else "")
    lists = (
        ("Refused by fxamp alone", [f"- `{case}` {level}: {why}" for case, level, why in data["alone"]]),
        ("Failures", [f'- `--case "{case}"` {level}: {kind}: {why}' for case, level, kind, why in data["failures"]]),
        ("What fake CUDA tensors cannot run", [", ".join(f"`{name}`" for name in data["unrun"])]),
    )
    parts += [f"## {title}\n\n" + ("\n".join(lines) or "None.") + "\n" for title, lines in lists]
    return "\n".join(p for p in parts if p)


def failed(entry: Found) -> bool:
    """Say whether a case failed, or was refused by fxamp alone."""
    kinds = {kind for kind, _ in entry.get("found", {}).values()}
    return bool(kinds & {*FAILURES, ALONE}) or bool({"died", "harness"} & set(entry))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases asked for; print and write the report, or what became of one."""
    parser = argparse.ArgumentParser(description="Try torch's own samples of ops and modules at every level.")
    parser.add_argument("--case", help="this one alone: print what becomes of it")
    parser.add_argument("--only", action="append", metavar="NAME", help="op:NAME.VARIANT or module:NAME; may repeat")
    parser.add_argument("--limit", type=int, help="how many cases")
    add_options(parser, RECORD, HERE)
    options, began = parser.parse_args(arguments), made()
    if options.case:
        logging.disable(logging.ERROR)
        for level, (kind, why) in work(options.case)["found"].items():
            sys.stdout.write(f"{level}: {kind} {why}\n")
        return
    record = Record(options.record)
    record.forget(options.again, failed)
    until = None if options.seconds is None else time.monotonic() + options.seconds
    names = samples.names()
    wanted = options.only or names
    left = options.limit
    for dtype, behind, fronts in KINDS:
        by_name = [[f"{front} {dtype} {behind} {name}" for front in fronts] for name in wanted]
        cases = [case for each in by_name for case in each][:left]
        left = None if left is None else left - len(cases)
        for device in (True, False):  # fake CUDA tensors change a process for good
            mine = [c for c in cases if c.startswith("cuda") == device]
            run_all(mine, work, record, processes=options.processes, until=until, name=f"{dtype} {behind}")
    data = summary(record.found, len(names) * sum(len(fronts) for _, _, fronts in KINDS))
    sys.stdout.write(write(options.output, "op_coverage", {"made": began, **data}, to_markdown(data)))


if __name__ == "__main__":
    torch.set_num_threads(1)  # how a sum is shared out decides how it rounds
    main()

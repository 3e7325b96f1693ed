"""Random programs with a graph break, or code that Dynamo refuses, at a random place: is what ran known?

    python reports/breaks.py                       # 1,000 programs; goes on where the record ends
    python reports/breaks.py --limit 60            # less
    python reports/breaks.py --seed 123            # one program: its text, and what becomes of it

Each program is called four times as a view at O1, with other numbers in its guards, and a census of it taken. It is
silent where the census sees an op that ran outside of the plan, or otherwise than planned, and neither a warning said
so nor is the plan incomplete; a false alarm where a warning says so and the census sees none. Its first output and its
gradients are judged beside `torch.autocast`, as those of other random programs are. Some programs reach the limit of
graphs, which is set to two for them. Writes `breaks.md` and `breaks.json` beside this file.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fxamp  # noqa: E402  (the path comes first)
from passes._torch import pytree  # noqa: E402
from passes.contract.errors import CaptureError, FxampError  # noqa: E402
from reports.made import made, write  # noqa: E402
from tests.support.trial.generate import generate, runs  # noqa: E402
from tests.support.trial.interrupted import KINDS, interrupted  # noqa: E402
from tests.support.trial.judge import FAILURES, TORCH, Subject, judged, quiet  # noqa: E402
from tests.support.trial.options import add_options  # noqa: E402
from tests.support.trial.program import Program  # noqa: E402
from tests.support.trial.runs import without_fused_layers  # noqa: E402
from tests.support.trial.workers import Found, Record, run_all  # noqa: E402

WANTED, CALLS = 1000, 4
RECORD = HERE.parent / "build" / "trial" / "breaks.jsonl"
LEVELS = ("O0", "O1")
KNOWN, SILENT, ALARM, REFUSED = "known", "silent", "false alarm", "refused"
RAISES, ITSELF = "raises", "the model or torch.compile raises"
NOTED = "read behind the break, and so handed out low, as the plan notes"


def what_ran(program: Program, limit: int | None) -> tuple[str, str]:
    """Call a program as a view, and say whether what ran is known, with what the census or a warning says."""
    torch._dynamo.reset()
    model, args = program.build()
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(without_fused_layers())
        said = stack.enter_context(_warnings())
        if limit is not None:
            stack.enter_context(mock.patch("fxamp.capture.frames.CEILING", limit))
        view = fxamp.convert(model, policy="O1,dtype=bf16")
        try:
            for i in range(CALLS):
                model.turn = str(i)  # type: ignore[assignment]
                view(*_copies(args))
            census = fxamp.census(view, _copies(args), loss=_any_loss)
        except FxampError as e:
            return REFUSED, f"{type(e).__name__}: {e}".partition("\n")[0]
        except Exception as e:
            return ITSELF if _raises(*program.build()) else RAISES, f"{type(e).__name__}: {e}".partition("\n")[0]
        try:
            complete = fxamp.plan_of(view).complete
        except CaptureError:  # nothing was captured, which a warning has to say
            complete = True
    alarms = [text for text in said if "did not run" in text or "left to Python" in text]
    outside = [str(d) for d in census.differences]
    if outside and not alarms and complete:
        return SILENT, outside[0]
    if alarms and not outside:
        return ALARM, alarms[0]
    return KNOWN, (alarms or [""])[0]


def _raises(model: Any, args: tuple[Any, ...]) -> bool:
    """Say whether a model raises in the same calls under autocast, and a backward."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            for i in range(CALLS):
                model.turn = str(i)
                output = model(*_copies(args))
        _any_loss(output).backward()
    except Exception:
        return True
    return False


def _is_noted(program: Program) -> bool:
    """Say whether the plan of a program notes that an output is low, since something behind a break read it."""
    torch._dynamo.reset()
    model, args = program.build()
    with quiet(), without_fused_layers():
        view = fxamp.convert(model, policy="O1,dtype=bf16")
        view(*args)
        return any("is handed out in 16 bits" in note for note in fxamp.plan_of(view).notes)


def _copies(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args)  # a program may write them


def _any_loss(output: Any) -> Any:
    leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    return sum((t.float().mean() for t in leaves if t.is_floating_point()), torch.zeros((), requires_grad=True))


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, listener, before = logging.getLogger("fxamp"), Listener(logging.WARNING), logging.root.manager.disable
    logging.disable(logging.INFO)
    logger.addHandler(listener)
    propagates, logger.propagate = logger.propagate, False
    try:
        yield said
    finally:
        logger.removeHandler(listener)
        logger.propagate = propagates
        logging.disable(before)


def subject(seed: int) -> tuple[Program, str, int | None] | None:
    """Return the program of a seed with its interruption, the kind of that, and a limit of graphs if it has one."""
    plain = generate(seed)
    if plain is None:
        return None
    program, kind = interrupted(plain, seed)
    return (program, kind, 2 if kind == "guards" else None) if runs(program) else None


def work(case: str) -> Found:
    """Make the program of a seed and judge it: its kind, whether what ran is known, and its values by level."""
    found = subject(int(case))
    if found is None:
        return {"found": None}
    program, kind, limit = found
    known = what_ran(program, limit)
    torch._dynamo.reset()
    values = {}
    if kind not in ("early exit", "guards"):  # these return something else, call by call
        model, args = program.build()
        values = {level: [v.kind, v.why] for level, v in judged(Subject(model, args), "view", LEVELS).items()}
        kind_of_o1, why = values["O1"]
        if kind_of_o1 == "mismatch" and why.endswith("is torch.bfloat16, not torch.float32") and _is_noted(program):
            values["O1"] = [NOTED, why]
        if known[0] == RAISES and values["O0"][0] == TORCH:
            known = ITSELF, known[1]
    return {"found": {"kind": kind, "ran": known, "values": values}}


def failed(entry: Found) -> bool:
    """Say whether a program failed anywhere."""
    found = entry.get("found") or {}
    kinds = {kind for kind, _ in found.get("values", {}).values()}
    ran = found.get("ran", [KNOWN])[0]
    return bool(kinds & {*FAILURES}) or ran in (SILENT, ALARM, RAISES) or bool({"died", "harness"} & set(entry))


def summary(found: dict[str, Found]) -> dict[str, Any]:
    """Return what the report says of a record, as plain data."""
    ran, values = collections.Counter[tuple[str, str]](), collections.Counter[tuple[str, str]]()
    failures, programs = [], 0
    for case, entry in sorted(found.items(), key=lambda pair: int(pair[0])):
        of = entry.get("found")
        for key in {"died", "harness"} & set(entry):
            failures.append((int(case), key, str(entry[key])))
        if not of:
            continue
        programs += 1
        ran[of["kind"], of["ran"][0]] += 1
        if of["ran"][0] in (SILENT, ALARM, RAISES):
            failures.append((int(case), f"{of['kind']}, {of['ran'][0]}", of["ran"][1]))
        for level, (kind, why) in of["values"].items():
            values[level, kind] += 1
            if kind in FAILURES:
                failures.append((int(case), f"{of['kind']}, {level} {kind}", why))
    return {
        "torch": torch.__version__, "programs": programs, "ran": [(*key, n) for key, n in sorted(ran.items())],
        "values": [(*key, n) for key, n in sorted(values.items())], "failures": failures,
    }  # fmt: skip


def to_markdown(data: dict[str, Any]) -> str:
    """Return the report: what is known of what ran, values, and every failure with its command."""
    counts = {(kind, ran): n for kind, ran, n in data["ran"]}
    words = (KNOWN, REFUSED, SILENT, ALARM, RAISES, ITSELF)
    ran = tabulate([(k, *(counts.get((k, word), 0) for word in words)) for k in KINDS], ("what", *words), "pipe")
    values = tabulate(data["values"], ("level", "beside autocast; at O0 beside eager", "programs"), "pipe")
    failures = [
        f"- `python reports/breaks.py --seed {s}`: {what}: {' '.join(why.split())}" for s, what, why in data["failures"]
    ]
    return (
        "# Random programs with breaks\n\n"
        f"Written by `reports/breaks.py` on a CPU, torch {data['torch']}: {data['programs']} programs, each with one\n"
        "thing that Dynamo cannot trace, at a random place. `silent`: the census sees an op outside of the plan, and\n"
        "neither a warning nor the plan said so. `false alarm`: a warning, and the census sees none. An output of\n"
        "autocast's dtype that Python makes outside of graphs is handed out in FP32, as the guide says: a mismatch\n"
        "here.\n\n"
        f"{ran}\n\n## Values\n\n{values}\n\n## Failures\n\n" + ("\n".join(failures) or "None.") + "\n"
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the programs asked for; print and write the report, or what became of one."""
    parser = argparse.ArgumentParser(description="Try random programs with breaks: is what ran known?")
    parser.add_argument("--seed", type=int, help="this program alone: print it, and what becomes of it")
    parser.add_argument("--limit", type=int, default=WANTED, help="how many programs (default: %(default)s)")
    add_options(parser, RECORD, HERE)
    options, began = parser.parse_args(arguments), made()
    if options.seed is not None:
        found = subject(options.seed)
        sys.stdout.write(f"{'' if found is None else found[0].text()}{work(str(options.seed))}\n")
        return
    record = Record(options.record)
    record.forget(options.again, failed)
    seeds = (str(seed) for seed in range(2 * options.limit))
    while (left := options.limit - sum(bool(e.get("found")) for e in record.found.values())) > 0:
        batch = [s for s, _ in zip((s for s in seeds if s not in record.found), range(left), strict=False)]
        if not batch:
            break
        run_all(batch, work, record, processes=options.processes, name="breaks")
    data = summary(record.found)
    sys.stdout.write(write(options.output, "breaks", {"made": began, **data}, to_markdown(data)))


if __name__ == "__main__":
    main()

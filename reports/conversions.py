"""Does a conversion leave a model as it was, does its plan cover a call, and is a plan made for CUDA that of CUDA?

    python reports/conversions.py                             # all of it; goes on where the record ends
    python reports/conversions.py --case BertForMaskedLM      # one model
    python reports/conversions.py --deletions                 # 300 conversions and deletions of a model alone

Subjects are the architectures of `architectures.py`, the models of `zoo.py`, and 60 models whose forward writes to
itself, at four places. Of each is asked whether `convert` changes anything that it holds: identities, dtypes, versions
and bits of tensors, and what Python has; whether the first call after it makes Dynamo trace a graph; and whether the
plan is complete while a parameter that the call reads is in no graph. Those that write are asked the first of ENTRANCES
too; of the others, on how many decisions a plan for CUDA that is made on the CPU differs from that of a view that is
called on fake CUDA tensors. That takes a C++ compiler, for a device guard that torch's CPU build lacks. Each model runs
in a process with a time limit. Writes `conversions.md` and `conversions.json` beside this file.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from tabulate import tabulate
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fxamp  # noqa: E402  (the path comes first)
from fxamp.measure.fake_cuda import library, model, tally  # noqa: E402
from fxamp.observe.workload import floats  # noqa: E402
from reports.made import made, write  # noqa: E402
from tests.support import architectures, zoo  # noqa: E402
from tests.support.trial.covered import read_outside  # noqa: E402
from tests.support.trial.facts import differing, facts  # noqa: E402
from tests.support.trial.judge import quiet  # noqa: E402
from tests.support.trial.options import add_options  # noqa: E402
from tests.support.trial.workers import Found, Record, run_all  # noqa: E402
from tests.support.trial.writers import PLACES, WRITES, X, model_that  # noqa: E402

RECORD = HERE.parent / "build" / "trial" / "conversions.jsonl"
POLICY = "O1,dtype=bf16"
TIMES, SECONDS = 300, 200
Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
SUBJECTS: dict[str, tuple[str, Callable[[], Made]]] = {
    **{a.name: ("architectures", lambda a=a: (a()[0], (), a()[1])) for a in architectures.ARCHITECTURES},
    **{z.name: ("zoo", lambda z=z: (z.build(), *z.inputs(2))) for z in zoo.ZOO},
    **{
        f"{w.__name__}, {place}": ("writers", lambda w=w, place=place: (model_that(w, place), (X,), {}))
        for w, place in itertools.product(WRITES, PLACES)
    },
}
KINDS = tuple(dict.fromkeys(kind for kind, _ in SUBJECTS.values()))
ENTRANCES: dict[str, Callable[[nn.Module, nn.Module, Any, Any], object]] = {
    "plan": lambda model, view, args, kwargs: fxamp.plan(model, args, kwargs, policy=POLICY),
    "report": lambda model, view, args, kwargs: fxamp.report(view),
    "census": lambda model, view, args, kwargs: fxamp.census(view, args, kwargs=kwargs, loss=_loss),
    "estimate_error": lambda model, view, args, kwargs: fxamp.estimate_error(
        model, args, kwargs=kwargs, loss=_loss, policies="O1"
    ),
}
RUN_THE_MODEL = ("census", "estimate_error")  # and put back what it wrote, which versions count
# Loaded before torch, which asks once what devices there are.
_START = """
import ctypes, runpy, sys
for _ in range(2):
    ctypes.CDLL(sys.argv.pop(1), mode=ctypes.RTLD_GLOBAL)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _loss(output: Any, *_: Any) -> Tensor:
    return torch.stack([t.float().mean() for t in floats(output) if t.requires_grad]).sum()


def work(case: str) -> Found:
    """Answer all questions on one subject."""
    torch.compiler.reset()
    subject, args, kwargs = SUBJECTS[case][1]()
    there = copy.deepcopy((subject.train(), args, kwargs))
    found: Found = {"changed": {}, "raised": {}}
    whole = subject, args, kwargs

    def entered(name: str, enter: Callable[[], Any]) -> Any:
        versions = name not in RUN_THE_MODEL
        before = facts(whole, versions)
        try:
            return enter()
        except Exception as e:
            found["raised"][name] = f"{type(e).__name__}: {e}".partition("\n")[0][:200]
        finally:
            if changed := differing(before, facts(whole, versions)):
                found["changed"][name] = changed[:3]

    with quiet():
        view = entered("convert", lambda: fxamp.convert(subject, args, kwargs, policy=POLICY))
        if view is None:
            return found
        found["complete"] = fxamp.plan_of(view).complete
        try:
            found["outside"] = read_outside(view, subject, args, kwargs)[:3]
            counters = torch._dynamo.utils.counters["stats"]
            before = counters["unique_graphs"]
            view(*args, **kwargs)
            found["first call"] = counters["unique_graphs"] - before
        except Exception as e:
            found["raised"]["the model under autocast"] = f"{type(e).__name__}: {e}".partition("\n")[0][:200]
            return found
        if SUBJECTS[case][0] == "writers":
            for name, enter in ENTRANCES.items():
                entered(name, lambda enter=enter: enter(subject, view, args, kwargs))
        else:
            found["cuda"] = _for_cuda(*there)
    return found


def _for_cuda(subject: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return how many decisions there are for CUDA on the CPU, how many differ on fake CUDA tensors; or what raised."""
    here = fxamp.convert(subject, args, kwargs, policy=f"{POLICY},device=cuda", check=False)
    try:
        gpu = cast("Any", tally.FakeTensorMode(allow_non_fake_inputs=True))
        moved, (args, kwargs) = model.moved(gpu, copy.deepcopy(subject), (args, kwargs))
        with gpu:
            view = fxamp.convert(moved, policy=POLICY)
            view(*args, **kwargs)
        ours, theirs = (fxamp.plan_of(each).decisions for each in (here, view))
    except Exception as e:
        return f"{type(e).__name__}: {e}".partition("\n")[0][:200]
    return [len(ours), sum(a != b for a, b in itertools.zip_longest(ours, theirs))]


class Broken(nn.Module):
    """Two layers with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.m = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Any:
        """Return [n, 64] for [n, 64]."""
        h = self.l(x)
        torch._dynamo.graph_break()
        return self.m(h)


def deletions(way: str, times: int) -> dict[str, Any]:
    """Convert, call and delete so many models; return what is alive of them, and the resident memory in bytes."""
    x, models = torch.randn(4, 64), []
    for _ in range(times):
        subject = Broken()
        models.append(weakref.ref(subject))
        if way == "fxamp":
            called = fxamp.convert(subject, (x,), policy=POLICY)
        else:
            torch.compiler.reset()
            called = torch.compile(subject, backend="eager")
        with torch.autocast("cpu", torch.bfloat16, enabled=way != "fxamp"):
            called(x).float().sum().backward()
        del subject, called
    gc.collect()
    fxamp.convert(nn.Linear(4, 4), (torch.randn(2, 4),), policy=POLICY)  # which forgets what is gone
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(Broken.forward.__code__)
    alive = sum(entry.code is not None for entry in entries)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"alive": sum(m() is not None for m in models), "entries": alive, "rss": pages * 4096}


def failed(entry: Found) -> bool:
    """Say whether anything is otherwise than promised."""
    covered = not (entry.get("complete") and entry.get("outside"))
    cuda = entry.get("cuda")
    differs = isinstance(cuda, list) and cuda[1] > 0
    return bool(
        entry.get("changed") or entry.get("first call") or not covered or differs or {"died", "harness"} & set(entry)
    )


def summary(found: dict[str, Found]) -> list[tuple[Any, ...]]:
    """Return a row for each set of subjects."""
    rows = []
    for of in KINDS:
        cases = [e for name, e in found.items() if name in SUBJECTS and SUBJECTS[name][0] == of]
        ran = [e for e in cases if "first call" in e]
        cuda = [e["cuda"] for e in cases if isinstance(e.get("cuda"), list)]
        rows.append((
            of, len(cases), sum(bool(e.get("changed")) for e in cases), len(ran),
            sum(e["first call"] > 0 for e in ran), sum(e["complete"] for e in ran),
            sum(bool(e["complete"] and e["outside"]) for e in ran), len(cuda), sum(c[1] > 0 for c in cuda),
        ))  # fmt: skip
    return rows


def to_markdown(data: dict[str, Any]) -> str:
    """Return the report."""
    found = data["subjects"]
    headers = (
        "subjects", "converted", "changed by an entrance", "called", "first call makes a graph", "complete",
        "complete, and reads outside", "planned for CUDA both ways", "with decisions that differ",
    )  # fmt: skip
    lines = [
        f"- {name}: {what} raises {why}"
        for name, e in sorted(found.items())
        for what, why in e.get("raised", {}).items()
    ]
    lines += [f"- {n}: cannot run on fake tensors: {e['cuda']}" for n, e in found.items() if type(e.get("cuda")) is str]
    wrong = [f"- `python reports/conversions.py --case '{n}'`: {e}" for n, e in sorted(found.items()) if failed(e)]
    memory = [(way, *row.values()) for way, row in data["deletions"].items()]
    deleted = tabulate(memory, ("by", "models alive", "entries of Dynamo alive", "resident bytes"), "pipe")
    return (
        "# Conversions\n\n"
        f"Made by `python reports/conversions.py`, torch {data['torch']}: what is asked stands at its head. Of "
        f"{len(SUBJECTS)} subjects {len(found)} have been run.\n\n{tabulate(summary(found), headers, 'pipe')}\n\n"
        f"## Otherwise than promised\n\n{chr(10).join(wrong) or 'None.'}\n\n"
        f"## {TIMES} conversions and deletions of a model with a break\n\n"
        "torch.compile alone has its caches reset before each.\n\n"
        f"{deleted}\n\n## What raises\n\n{chr(10).join(lines) or 'Nothing.'}\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the record does not have; write and print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", choices=sorted(SUBJECTS), metavar="NAME", help="this model alone: print its answers")
    parser.add_argument("--only", nargs="+", default=list(KINDS), choices=KINDS, help="these subjects")
    parser.add_argument("--deletions", nargs="?", const="all", choices=("all", "fxamp", "torch.compile"))
    parser.add_argument("--guarded", action="store_true", help=argparse.SUPPRESS)
    add_options(parser, RECORD, HERE)
    options, began = parser.parse_args(arguments), made()
    if options.deletions in ("fxamp", "torch.compile"):
        with quiet():
            print(json.dumps(deletions(options.deletions, TIMES)))
        return
    if not options.guarded:
        libraries = [str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"), str(library.device_library())]
        given = sys.argv[1:] if arguments is None else arguments
        sys.exit(subprocess.call([sys.executable, "-c", _START, *libraries, __file__, "--guarded", *given]))
    if options.case:
        print(json.dumps(work(options.case), indent=1))
        return
    place = options.output / "conversions.json"
    deleted = json.loads(place.read_text())["deletions"] if place.exists() else {}
    if options.deletions or not deleted:
        for way in ("fxamp", "torch.compile"):
            command = [sys.executable, __file__, "--deletions", way]
            deleted[way] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    record = Record(options.record)
    record.forget(options.again, failed)
    if not options.deletions:
        until = None if options.seconds is None else time.monotonic() + options.seconds
        cases = [name for name, (kind, _) in SUBJECTS.items() if kind in options.only]
        run_all(cases, work, record, processes=options.processes, seconds=SECONDS, until=until, name="conversions")
    data = {"made": began, "torch": torch.__version__, "subjects": record.found, "deletions": deleted}
    print(write(options.output, "conversions", data, to_markdown(data)))


if __name__ == "__main__":
    main()

"""Count the architectures on which O1 gives the bits of eager `torch.autocast`, in outputs and in gradients.

    python reports/exact_numerics.py                                  # every architecture of architectures.py; hours
    python reports/exact_numerics.py --only BertForMaskedLM GPT2LMHeadModel
    python reports/exact_numerics.py --minutes 40                     # as many as fit, where the last run left off
    python reports/exact_numerics.py --ways "fxamp O1, exact"         # this one alone
    python reports/exact_numerics.py --device cuda --processes 8      # on a GPU, the ways of eager mode

"eager" runs the graphs of fxamp by the kernels of eager mode, without Inductor and torch's decompositions: O1 promises
equality there. Where it is not equal, the same is tried by `torch.compile(backend="eager")` under autocast alone, and
"capture" says that fxamp has the bits of that. Elsewhere the ops at which the plan names deviations are forced into
autocast's dtype; if everything then is equal, the codes of these deviations are the cause. Gradients are those of the
means of all outputs together, and, where the model returns a loss, of the loss alone too, as in training. By default
Inductor leaves out roundings between two low ops that it fuses; with its exact-numerics options it keeps them. Each
architecture runs in a process of its own, with a time limit. Low is BF16 unless a way says FP16, the model in training
without dropout. On a GPU only deterministic kernels are used, so that autocast gives its own bits again.
`exact_numerics.md` and `exact_numerics.json` (on a GPU `exact_numerics_cuda`) are written beside this file after each
one; what they have of this torch and machine stays, unless `--only` names it. What is not done in time is not in them,
and the next run takes it up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fxamp  # noqa: E402  (the path comes first)
from fxamp.observe.workload import floats  # noqa: E402
from passes.contract.reasons import Code  # noqa: E402
from reports.made import made, write  # noqa: E402
from tests.support.architectures import ARCHITECTURES, BY_NAME  # noqa: E402
from tests.support.baseline import UnderAutocast  # noqa: E402

SECONDS = 900
FP32_ROUNDING = 1e-6
EAGER = "eager autocast"  # whose failures are not those of what is compiled
LOW = torch.bfloat16
EXACT = {
    "numerics": "strict",
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
    "eager_numerics.use_pytorch_libdevice": True,
    "fallback_random": True,
}
O1 = {"policy": fxamp.Policy("O1", dtype=LOW)}
ALWAYS = {"policy": fxamp.Policy("O1", dtype=LOW, share_casts="always")}
WAYS: dict[str, dict[str, Any]] = {  # first what is asked for; without a policy it is torch.autocast
    "fxamp O1, eager": {**O1, "backend": "eager"},
    "fxamp O1, exact": {**O1, "options": EXACT},
    "fxamp O1, share_casts=always, exact": {**ALWAYS, "options": EXACT},
    "torch.autocast, exact": {"options": EXACT},
    "fxamp O1": O1,
    "torch.autocast": {},
    "fxamp O1, eager, FP16": {"policy": fxamp.Policy("O1", dtype=torch.float16), "backend": "eager"},
}
DEFAULT = {"cpu": list(WAYS)[:-1], "cuda": ["fxamp O1, eager", "fxamp O1, eager, FP16"]}  # FP16 takes long on a CPU


def exact_options() -> dict[str, Any]:
    """Return those of the options for exact numerics that this torch has."""
    import torch._inductor.config

    known = torch._inductor.config.get_config_copy()
    return {name: value for name, value in EXACT.items() if name in known}


def cpu() -> str:
    """Name what this CPU has for low dtypes, on which the order of sums in a product depends."""
    has = torch.cpu.get_capabilities()
    low = [name for name in ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16") if has.get(name)]
    return f"{torch.backends.cpu.get_cpu_capability()} CPU with {', '.join(low) or 'nothing for low dtypes'}"


def run(called: Callable[..., Any], model: nn.Module, inputs: dict[str, Any]) -> list[list[Tensor]]:
    """Run forward and backward, on the same random numbers each time.

    Return outputs in FP32, gradients, and, if the model returns a loss, gradients of the sum of all outputs' means too:
    without a loss they are the gradients, with one these are its own.
    """
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    returned = called(**inputs)
    outputs = [t.float() for t in floats(returned)]
    means = torch.stack([t.mean() for t in outputs if t.requires_grad]).sum()
    loss = getattr(returned, "loss", None)
    objectives = [loss, means] if isinstance(loss, Tensor) else [means]
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = [torch.autograd.grad(o, trained, retain_graph=True, allow_unused=True) for o in objectives]
    found = [[g for g in each if g is not None] for each in (*gradients, [])]
    return [[t.detach() for t in outputs], *found[:2]]


def distance(expected: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    """Return the norm of the difference, as a share of the norm."""
    a, b = (torch.cat([t.double().flatten() for t in tensors]) for tensors in (expected, got))
    return float((a - b).norm() / a.norm())


def compare(name: str, ways: Sequence[str], device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield for each of these ways whether outputs and gradients are those of eager autocast, or what failed."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(device == "cuda", warn_only=True)
    model, inputs = BY_NAME[name](2)
    model.train().to(device)
    inputs = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in inputs.items()}
    for way in ways:
        how = {**WAYS[way], **({"options": exact_options()} if "options" in WAYS[way] else {})}
        baseline = UnderAutocast(model, how["policy"].dtype if "policy" in how else LOW, device)
        try:
            expected = run(baseline, model, inputs)
        except Exception as error:
            yield way, {"failed": f"{EAGER}: {_line(error)}"}
            continue
        torch.compiler.reset()
        called: Any = fxamp.compile(model, **how) if "policy" in how else torch.compile(baseline, **how)
        try:
            got = run(called, model, inputs)
        except Exception as error:
            yield way, {"failed": _line(error)}
            continue
        equal = _equal(expected, got)
        distances = [distance(a, b) for a, b in zip(expected[:2], got[:2], strict=True)]
        cell = {"outputs": equal[0], "gradients": equal[1], "distances": distances}
        if expected[2]:
            cell["all outputs"] = equal[2]
        if how.get("backend") == "eager":
            if not all(equal[:2]):
                cell["repeats"] = all(_equal(expected, run(baseline, model, inputs)))
                torch.compiler.reset()
                captured = run(torch.compile(baseline, backend="eager"), model, inputs)
                cell["capture"] = all(_equal(got, captured)[:2])
                cell["codes"] = [] if cell["capture"] else _causes(called, model, inputs, expected[:2])
            elif not equal[2]:
                cell["codes of all outputs"] = _causes(called, model, inputs, expected)
        yield way, cell


def _equal(expected: list[list[Tensor]], got: list[list[Tensor]]) -> list[bool]:
    """Say whether outputs are bit-equal, and whether gradients are."""
    return [len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(expected, got, strict=True)]


def _causes(called: Any, model: nn.Module, inputs: dict[str, Any], expected: list[list[Tensor]]) -> list[str]:
    """Return the codes of the deviations that explain a difference: with their ops forced, everything is equal.

    Where outputs that the model reads are the cause, they are handed out in autocast's dtype.
    """
    plan = fxamp.plan_of(called)
    deviations = plan.deviations
    forced = {d.op: "fp32" if d.autocast_dtype == "float32" else "low" for d in deviations if d.code != Code.OUTPUT}
    torch.compiler.reset()
    read = any(d.code == Code.OUTPUT for d in deviations)
    policy = fxamp.Policy(
        "O1", dtype=plan.policy.dtype, ops=forced, output_dtype="autocast" if read else plan.policy.output_dtype
    )
    got = run(fxamp.compile(model, policy=policy, backend="eager"), model, inputs)
    return sorted({d.code for d in deviations}) if all(_equal(expected, got[: len(expected)])) else []


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]


def in_a_process(name: str, ways: Sequence[str], device: str, seconds: float) -> dict[str, Any]:
    """Compare one architecture in a process of its own; return what it comes to within the time."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", name, "--device", device]
    command += ["--ways", *ways]
    repeatable = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # what deterministic algorithms need
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=repeatable)
    except subprocess.TimeoutExpired as late:
        return _cells((late.stdout or b"").decode())
    problem = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
    return {**{way: {"failed": problem} for way in ways if done.returncode}, **_cells(done.stdout)}


def _cells(said: str) -> dict[str, Any]:
    return dict(json.loads(line) for line in said.splitlines() if line.startswith("[") and line.endswith("]"))


def _of_all_outputs(found: dict[str, Any], ways: Sequence[str]) -> str:
    """Return on how many models with a loss the gradients of all outputs' sum are bit-equal, where it was measured."""
    said = ""
    for way in ways:
        cells = [row[way] for row in found.values() if "all outputs" in row.get(way, {})]
        if cells:
            equal, codes = sum(c["all outputs"] for c in cells), [c.get("codes of all outputs") for c in cells]
            by = ", ".join(sorted({code for each in codes for code in each or ()}))
            said += (
                f"Gradients are those of a model's own loss, where it returns one. Where the caller's objective is the "
                f"sum of all outputs, logits that the loss reads among them, they are bit-equal by {way} on {equal} of "
                f"{len(cells)} models, and on {sum(map(bool, codes))} more once what is named is as autocast has it "
                f"({by}): the caller's own gradient by an output adds up in FP32. "
            )
    return said and f"{said.strip()}\n\n"


def to_markdown(data: dict[str, Any]) -> str:
    """Return the report."""
    found, rows = data["architectures"], []
    ways = [way for way in WAYS if any(way in row for row in found.values())]
    for way in ways:
        cells = [row[way] for row in found.values() if way in row]
        equal = ("outputs", "gradients", "capture")
        counts: list[Any] = [sum(cell.get(what) is True for cell in cells) for what in equal]
        counts.append(sum(bool(cell.get("codes")) for cell in cells))
        close = [sum(_far(cell, i) < FP32_ROUNDING for cell in cells) for i in (0, 1)]
        failed = [cell["failed"].startswith(EAGER) for cell in cells if "failed" in cell]
        rows.append((way, *counts, *close, failed.count(False), failed.count(True), len(cells)))
    headers = (
        "way", "outputs bit-equal", "gradients bit-equal", "not, by capture alone", "not, by code",
        f"outputs to {FP32_ROUNDING:.0e}", f"gradients to {FP32_ROUNDING:.0e}", "failed", f"{EAGER} failed",
        "architectures",
    )  # fmt: skip
    marks = [(name, *(_mark(row[way]) if way in row else "" for way in ways)) for name, row in sorted(found.items())]
    return (
        "# O1 against eager autocast, bit by bit\n\n"
        f'On an {data["cpu"]}, torch {data["torch"]}; low is BF16 where no way says FP16. "exact": '
        f"{', '.join(data['options'])}. "
        f"Of {len(ARCHITECTURES)} architectures {len(found)} have been run. "
        "Made by `python reports/exact_numerics.py`.\n\n"
        f"{tabulate(rows, headers, 'pipe')}\n\n{_of_all_outputs(found, ways)}"
        f"A difference below {FP32_ROUNDING:.0e} means that every rounding to BF16 is the same, and that FP32 numbers "
        'are summed in another order. "Not, by capture alone" counts models that are not bit-equal, but have the bits '
        'of `torch.compile(backend="eager")` under autocast, without fxamp: capture itself changes them. "Not, by '
        'code" counts those whose plans name deviations, and which are bit-equal once the ops of these have '
        "autocast's dtype; the next table has the codes. Two causes of "
        'larger differences of gradients are known. First, `share_casts="always"` casts a value once for all ops that '
        "read it, so that its gradients are summed in BF16; autocast sums them in FP32. Second, torch decomposes the "
        "backward of a layer norm of BF16 values for Inductor; the eager kernel rounds in between, so its gradients "
        "differ."
        f"{'' if data['made']['machine'].startswith('cpu') else _INTERPOLATE}\n\n"
        "For each architecture the next table shows the distances of outputs and of gradients from those of eager "
        "autocast, relative to their norm.\n\n"
        f"{tabulate(marks, ('architecture', *ways), 'pipe')}\n"
    )


_INTERPOLATE = (
    " On a GPU torch interpolates by Python code where only deterministic kernels may run, and that code reads dtypes: "
    "DPT and SegFormer interpolate."
)


def _far(cell: dict[str, Any], index: int) -> float:
    """Return how far outputs (0) or gradients (1) are from eager autocast's."""
    distances: list[float] = cell.get("distances", [float("inf")] * 2)
    return distances[index]


def _mark(cell: dict[str, Any]) -> str:
    if "failed" in cell:
        return f"{EAGER} fails" if cell["failed"].startswith(EAGER) else "failed"
    pairs = zip(("outputs", "gradients"), cell["distances"], strict=True)
    said = ", ".join("equal" if cell[what] else f"{far:.0e}" for what, far in pairs)
    codes = ["capture"] * bool(cell.get("capture")) + cell.get("codes", [])
    return said + f" ({', '.join(codes)})" * bool(codes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, and write both reports."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=sorted(BY_NAME))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), help="all but those that take long on the device")
    parser.add_argument("--device", choices=list(DEFAULT), default="cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none later")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--folder", type=Path, default=HERE)
    args = parser.parse_args(arguments)
    wanted = args.ways or DEFAULT[args.device]
    if args.one:
        for cell in compare(args.one, wanted, args.device):
            print(json.dumps(cell), flush=True)
        return
    stem = "exact_numerics" + "_cuda" * (args.device == "cuda")
    place, until = args.folder / f"{stem}.json", time.monotonic() + 60 * args.minutes
    data: dict[str, Any] = {
        "torch": torch.__version__, "cpu": cpu() if args.device == "cpu" else torch.cuda.get_device_name(),
        "options": list(exact_options()), "architectures": {},
    }  # fmt: skip
    before = json.loads(place.read_text()) if place.exists() else {}
    if {k: v for k, v in {**before, "architectures": {}}.items() if k != "made"} == data:
        data["architectures"] = before["architectures"]
    data = {"made": made(args.device), **data}
    found = data["architectures"]

    def cells_of(name: str) -> tuple[str, dict[str, Any]]:
        ways = [way for way in wanted if args.only or way not in found.get(name, {})]
        late = time.monotonic() > until
        return name, {} if late or not ways else in_a_process(name, ways, args.device, SECONDS)

    names = args.only or [a.name for a in ARCHITECTURES]
    with ThreadPool(args.processes) as pool:
        for name, cells in tqdm(pool.imap_unordered(cells_of, names), desc=stem, total=len(names)):
            if cells:
                found[name] = {**found.get(name, {}), **cells}
                write(args.folder, stem, data, to_markdown(data))
    print(to_markdown(data))


if __name__ == "__main__":
    main()

"""Count the architectures on which O1 compiled by Inductor gives the bits of eager `torch.autocast`, and gradients too.

    python reports/exact_numerics.py                                  # every architecture of architectures.py; hours
    python reports/exact_numerics.py --only BertForMaskedLM GPT2LMHeadModel

By default Inductor leaves out roundings between two low ops that it fuses. With its exact-numerics options it keeps
them. Each architecture runs in a process of its own, with a time limit. Low is BF16, the device a CPU, the model in
training without dropout. `exact_numerics.md` and `exact_numerics.json` are written beside this file after each one;
what they have of others stays.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fxamp  # noqa: E402  (the path comes first)
from fxamp.trust.distance import UnderAutocast, floats  # noqa: E402
from reports.architectures import ARCHITECTURES, BY_NAME  # noqa: E402

SECONDS = 900
LOW = torch.bfloat16
EXACT = {
    "numerics": "strict",
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
    "eager_numerics.use_pytorch_libdevice": True,
    "fallback_random": True,
}
WAYS = ("fxamp O1", "fxamp O1, exact", "torch.autocast", "torch.autocast, exact")


def exact_options() -> dict[str, Any]:
    """Return those of the options for exact numerics that this torch has."""
    import torch._inductor.config

    known = torch._inductor.config.get_config_copy()
    return {name: value for name, value in EXACT.items() if name in known}


def run(called: Callable[..., Any], model: nn.Module, inputs: dict[str, Any]) -> list[list[Tensor]]:
    """Run forward and backward; return outputs in FP32, and gradients."""
    model.zero_grad(set_to_none=True)
    outputs = [t.float() for t in floats(called(**inputs))]
    torch.stack([t.mean() for t in outputs if t.requires_grad]).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [[t.detach() for t in outputs], gradients]


def distance(expected: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    """Return the norm of the difference, as a share of the norm."""
    a, b = (torch.cat([t.double().flatten() for t in tensors]) for tensors in (expected, got))
    return float((a - b).norm() / a.norm())


def compare(name: str) -> dict[str, dict[str, Any]]:
    """Return for each way whether outputs and gradients are those of eager autocast, or what failed."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    model, inputs = BY_NAME[name](2)
    model.train()
    expected = run(UnderAutocast(model, LOW), model, inputs)
    found: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        torch.compiler.reset()
        options = exact_options() if way.endswith("exact") else {}
        called: Any = torch.compile(UnderAutocast(model, LOW), options=options)
        if way.startswith("fxamp"):
            called = fxamp.compile(model, policy=fxamp.Policy("O1", dtype=LOW), options=options)
        try:
            got = run(called, model, inputs)
        except Exception as error:
            found[way] = {"failed": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]}
            continue
        equal = [len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(expected, got, strict=True)]
        distances = [distance(a, b) for a, b in zip(expected, got, strict=True)]
        found[way] = {"outputs": equal[0], "gradients": equal[1], "distances": distances}
    return found


def in_a_process(name: str) -> dict[str, Any]:
    """Compare one architecture in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {way: {"failed": f"more than {SECONDS} s"} for way in WAYS}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {way: {"failed": last[:200]} for way in WAYS}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def to_markdown(made: dict[str, Any]) -> str:
    """Return the report."""
    found, rows = made["architectures"], []
    for way in WAYS:
        cells = [row[way] for row in found.values()]
        counts = [sum(cell.get(what) is True for cell in cells) for what in ("outputs", "gradients")]
        rows.append((way, *counts, sum("failed" in cell for cell in cells), len(cells)))
    headers = ("compiled by Inductor", "outputs bit-equal", "gradients bit-equal", "failed", "architectures")
    marks = [(name, *(_mark(row[way]) for way in WAYS)) for name, row in sorted(found.items())]
    return (
        "# O1 compiled by Inductor, against eager autocast, bit by bit\n\n"
        f'BF16 on a CPU, torch {made["torch"]}. "exact": {", ".join(made["options"])}. '
        "Made by `python reports/exact_numerics.py`.\n\n"
        f"{tabulate(rows, headers, 'pipe')}\n\n"
        "By architecture: outputs, and gradients; how far they are from eager autocast's, as a share of their norm.\n\n"
        f"{tabulate(marks, ('architecture', *WAYS), 'pipe')}\n"
    )


def _mark(cell: dict[str, Any]) -> str:
    if "failed" in cell:
        return "failed"
    pairs = zip(("outputs", "gradients"), cell["distances"], strict=True)
    return ", ".join("equal" if cell[what] else f"{far:.0e}" for what, far in pairs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, and write both reports."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=sorted(BY_NAME), default=[a.name for a in ARCHITECTURES])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--folder", type=Path, default=HERE)
    args = parser.parse_args(arguments)
    if args.one:
        print(json.dumps(compare(args.one)))
        return
    place = args.folder / "exact_numerics.json"
    found: dict[str, Any] = json.loads(place.read_text())["architectures"] if place.exists() else {}
    made = {"torch": torch.__version__, "options": list(exact_options()), "architectures": found}
    for name in tqdm(args.only, desc="exact_numerics"):
        found[name] = in_a_process(name)
        place.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        (args.folder / "exact_numerics.md").write_text(to_markdown(made), encoding="utf-8")
    print(to_markdown(made))


if __name__ == "__main__":
    main()

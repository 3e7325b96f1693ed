"""The precision reports of the models that the tests convert, and the plans that `fxamp check` holds them to.

    python reports/gate.py           # write precision/<model>.md and precision/<model>.plan.json anew
    fxamp check                           # what `.ci/run` does: a change of any decision, cast or total fails
    fxamp check bert                      # one of them

The targets are in pyproject.toml under [tool.fxamp.targets]. The plans are for CUDA, and are made without a GPU; plans
for a CPU would depend on facts measured on that kind of CPU. Plans are kept without source lines, since the gate does
not compare them and they change whenever a line of a model moves.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from torch import nn  # noqa: E402

import fxamp  # noqa: E402
from fxamp.cli.targets import Target, configured  # noqa: E402
from fxamp.convert import to_read  # noqa: E402
from fxamp.report.reader import with_totals  # noqa: E402
from tests.support.zoo import BY_NAME  # noqa: E402  (the path comes first)


def _made(name: str) -> tuple[nn.Module, Any, Any]:
    args, kwargs = BY_NAME[name].inputs(3)
    return BY_NAME[name].build(), args, kwargs


bert = functools.partial(_made, "hf_bert")
gpt = functools.partial(_made, "gpt")
llama = functools.partial(_made, "hf_llama")
vit = functools.partial(_made, "vit")
resnet = functools.partial(_made, "resnet18")


def write(target: Target, folder: Path) -> None:
    """Write the report and the plan of one target."""
    build = globals()[target.target.partition(":")[2]]
    model, args, kwargs = build()
    module = to_read(model, args, kwargs, fxamp.Policy.parse(target.policy or "O1"))
    plan, _ = with_totals(module)
    bare = tuple(replace(d, source="") for d in plan.decisions)
    replace(plan, decisions=bare).save(folder / f"{target.name}.plan.json")
    text = f"# {target.name}\n\n{fxamp.report(module).to_tree(style='pipe')}"
    folder.joinpath(f"{target.name}.md").write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Write the reports of all targets, or of some."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of targets; all by default")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "precision", help="folder")
    args = parser.parse_args(argv)
    args.output.mkdir(exist_ok=True)
    for target in configured(ROOT / "pyproject.toml", args.names):
        write(target, args.output)


if __name__ == "__main__":
    main()

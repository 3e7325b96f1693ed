"""The gate compares the present plan of a model with the committed plan and with budgets.

Decisions, casts and totals are compared; lines, times and versions never are. Where only the reason of a decision has
changed, which is a sentence, the plan is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from passes.contract.errors import PlanError
from passes.contract.plan import Plan
from passes.contract.plan_format import REMEDY
from passes.ops.facts import Machine, as_on

from ...train.step import TrainStep
from ..diff.changes import PLAN_KEY, STORED, Change, Place, counted
from ..diff.diff import GraphDiff, diff, with_cause
from ..diff.match import ALIKE
from ..reader import with_totals
from .budget import Budget

KEPT, CHANGED, UNKNOWN = 0, 1, 2  # exit statuses
NO_PLAN = "; no plan file is configured"  # after what was compared all the same
ANEW = "restore it, or delete it and write it anew with --update"
WAY_OUT = "If this is intended, run fxamp check --update with the same arguments, and commit what it writes."


@dataclass(frozen=True)
class Outcome:
    """The gate's result for one target.

    Attributes:
        target: name of the target.
        status: 0 if the plan is kept, 1 if something changed or is over a budget, 2 after an error.
        message: summary in one line.
        changes: changes relative to the plan.
        places: source lines of the changed nodes, by key, if known.
        broken: a sentence for each budget that is exceeded.
        totals: present totals.
        plan: path of the committed plan; "" for none.
        ran: a sentence for each thing that did not run as planned, or as in the census, if a step was run.
        census: path of the committed census; "" for none.
        seconds: how long the check took.
    """

    target: str
    status: int
    message: str
    changes: tuple[Change, ...] = ()
    places: dict[str, Place] = field(default_factory=dict)
    broken: tuple[str, ...] = ()
    totals: dict[str, float] = field(default_factory=dict)
    plan: str = ""
    ran: tuple[str, ...] = ()
    census: str = ""
    seconds: float = 0.0

    @property
    def is_update_asked(self) -> bool:
        """Whether `--update` makes it pass, if what changed is intended."""
        by_census = any(self.census and self.census in text for text in self.ran)
        return self.status == CHANGED and (bool(self.changes) or by_census)


def check(
    target: str, make: Callable[[Plan | None], nn.Module | TrainStep], plan: str | os.PathLike[str] | None,
    budgets: Sequence[Budget], update: bool, counts: Mapping[str, float] | None = None, strict: bool = False,
) -> Outcome:  # fmt: skip
    """Compare a converted model, or a step of one that has run, with its plan, and its totals with budgets.

    On every machine, decisions use the measured facts that the plan was made with. With measured costs, `make` gets the
    plan to replay, since times are never the same. `update` writes a plan that is missing or has changed, by the facts
    of this machine; folders on its way are made. `counts` are totals that plans do not have, for budgets. With `strict`
    a change of a reason alone counts too. PlanError if the plan is missing, cannot be read, or is of another model;
    PolicyError if a budget is of a total that is not known.
    """
    name = "" if plan is None else os.fspath(plan)
    file = Path(name).absolute()  # the model may change the directory
    before = _committed(file, name, update) if name else None
    machine = None if update or before is None else _machine(before, name)
    replayed = None if update or before is None or before.policy.cost != "measured" else before
    try:
        with as_on(machine):
            now, record = with_totals(make(replayed))
    except PlanError as e:
        if replayed is None:
            raise
        said = f"{target}: the model no longer fits {name}, made with measured costs: {e}"
        return Outcome(target, CHANGED, said, plan=name)
    if not now.complete:
        why = next((note for note in now.notes if note.startswith("not checked")), "graphs are missing")
        return Outcome(target, UNKNOWN, f"{target}: the plan is not complete: {why}", plan=name)
    found = GraphDiff("", "", ()) if before is None else _difference(before, now, name, update)
    against = now if update else before
    totals = {**now.totals, **(counts or {})}
    broken = [text for b in budgets for text in b.broken(totals, against.totals if against else None)]
    wrote = bool(name) and update and (before is None or bool(found))
    if wrote:
        file.parent.mkdir(parents=True, exist_ok=True)
        now.save(file)
    changes = () if update else tuple(found.changes)
    changed = bool(broken) or any(strict or not is_reason(change) for change in changes)
    places = {n.key: Place(n.file, n.line) for n in record.nodes if n.line}
    return Outcome(
        target, CHANGED if changed else KEPT, _message(target, found, before, now, broken, name, wrote), changes,
        {c.key: places[c.key] for c in changes if c.key in places}, tuple(broken), totals, name,
    )  # fmt: skip


def is_reason(change: Change) -> bool:
    """Say whether it is the reason of a decision alone that has changed here."""
    return change.kind == "changed" and change.field == "reason"


def with_run(outcome: Outcome, differences: Sequence[str], found: str, census: str = "") -> Outcome:
    """Return an outcome with what a step has shown: a sentence for each difference, and `found`, which sums them up.

    `census` is the path of the census that it was compared with, "" for the plan.
    """
    before = outcome.message.removesuffix(NO_PLAN)
    compared = before if before != outcome.target else ""  # else nothing was compared before
    if compared.endswith(": as planned"):
        compared = f"{compared} and " if not differences else f"{outcome.target}: "
    else:
        compared = f"{compared}, " if compared else f"{outcome.target}: "
    message = f"{compared}{found}{outcome.message[len(before) :]}"
    status = max(outcome.status, CHANGED if differences else KEPT)
    return replace(outcome, status=status, message=message, ran=(*outcome.ran, *differences), census=census)


def _committed(file: Path, plan: str, update: bool) -> Plan | None:
    if file.exists():
        try:
            return Plan.load(file)
        except PlanError as error:
            raise PlanError(str(error).replace(os.fspath(file), plan).replace(REMEDY, ANEW)) from error
    if update:
        return None
    raise PlanError(f"there is no plan {plan!r} yet: write it with --update, and commit it")


def _machine(plan: Plan, name: str) -> Machine | None:
    """Return the machine whose facts a plan uses; None for this machine, or if the plan names none."""
    found = Machine.parse(plan.machine) if plan.machine else None
    if plan.machine and found is None:
        raise PlanError(
            f"{name}: 'machine' is {plan.machine!r:.80}, which describes no machine; write a new plan with --update"
        )
    return found


def _difference(before: Plan, now: Plan, name: str, update: bool) -> GraphDiff:
    """Return the changes, also of totals; PlanError if nearly every node has changed: it is another model's plan."""
    found = diff(before, now)
    old, new = len(before.decisions), len(now.decisions)
    added = sum(c.kind == "added" and c.field != STORED for c in found.changes)
    known = 0 if found.another_model else new - added
    if not update and old and known < ALIKE * min(old, new or 1):
        raise PlanError(
            f"{name} is the plan of another model: this model has {known} of its {old} nodes; "
            "if that is intended, write a new plan with --update"
        )
    return with_cause(replace(found, changes=(*_of_plan(before, now), *found.renamed, *found.changes)), before, now)


def _of_plan(before: Plan, now: Plan) -> Iterable[Change]:
    """Yield changes of the policy and of totals; casts of a model of one state are compared with the plan."""
    if before.policy != now.policy:
        yield Change("changed", PLAN_KEY, "policy", str(before.policy), str(now.policy))
    for key in dict.fromkeys((*before.totals, *now.totals)) if before.totals else ():
        values = before.totals.get(key), now.totals.get(key)
        if key != "casts" and values[0] != values[1]:
            old, new = ("not known" if value is None else f"{value:.10g}" for value in values)
            yield Change("changed", PLAN_KEY, key, old, new)


def _message(
    target: str, found: GraphDiff, before: Plan | None, now: Plan, broken: Sequence[str], plan: str, wrote: bool
) -> str:
    if wrote:
        return f"{target}: {'wrote' if before is None else 'updated'} {plan}"
    parts = []
    if found and all(map(is_reason, found.changes)):
        parts.append(f"as planned, {len(found.changes)} for another reason than in {plan}")
    elif found:
        parts.append(f"{counted(found.changes)} against {plan}")
    if broken:
        parts.append(f"{len(broken)} budget{'s' * (len(broken) > 1)} broken")
    text = f"{target}: {', '.join(parts) or ('as planned' if plan else 'within its budgets')}{NO_PLAN * (not plan)}"
    made = () if before is None else [
        f"made with {name} {old}; this is {new}" for name, old, new in (
            ("torch", before.torch_version, str(torch.__version__)),
            ("fxamp", before.fxamp_version, now.fxamp_version), ("the facts of", before.machine, now.machine),
        ) if old and old != new
    ]  # fmt: skip
    return f"{text} ({'; '.join(made)})" if found and made else text

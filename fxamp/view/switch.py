"""Let the views of a model follow another policy: weights stay, graphs are captured again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from passes.contract.errors import PolicyError
from passes.contract.plan import Plan
from passes.contract.policy import Policy

from ..capture.backend import refuse_unmatched
from ..capture.graph import moved_to
from .runner import Runner
from .view import is_view, runner_of


def switch_views(model: nn.Module, policy_or_plan: Policy | Plan | str) -> Policy:
    """Set the policy of all views in a model, and return it; one that does not fit is refused, and changes nothing."""
    views = {path: runner_of(module) for path, module in model.named_modules() if is_view(module)}
    if not views:
        raise PolicyError("no part of this model is a view, whose policy could be switched: convert it first")
    plan = policy_or_plan if isinstance(policy_or_plan, Plan) else None
    policy = Policy.of(policy_or_plan) if not isinstance(policy_or_plan, Plan) else policy_or_plan.policy
    changes: list[tuple[Runner, Policy, Plan | None]] = []
    for path, runner in views.items():
        part = plan if plan is None or len(views) == 1 else _part(plan, f"{path}.")
        refuse_unmatched(policy, runner.model)
        if part is not None:
            _refuse_another_model(part, runner)
        changes.append((runner, _settled(runner, policy), part))
    for runner, settled, part in changes:
        runner.switch(policy, settled, part)
    return policy


def policies_in_force(model: nn.Module) -> dict[str, tuple[Policy, Plan | None]]:
    """Return what each view in a model follows, by its path: the policy that was asked for, and the plan."""
    views = {path: runner_of(module) for path, module in model.named_modules() if is_view(module)}
    return {path: (runner.graphs.asked, runner.graphs.replayed) for path, runner in views.items()}


def switch_back(model: nn.Module, policies: Mapping[str, tuple[Policy, Plan | None]]) -> None:
    """Let the views of a model follow again what they did when `policies_in_force` was asked."""
    for path, (asked, replayed) in policies.items():
        runner = runner_of(model.get_submodule(path))
        if (runner.graphs.asked, runner.graphs.replayed) != (asked, replayed):
            runner.switch(asked, _settled(runner, asked), replayed)


def _part(plan: Plan, prefix: str) -> Plan:
    inside = [d for d in plan.decisions if f"{d.module_path}.".startswith(prefix)]
    if not inside:
        raise PolicyError(f"the plan is of another model: it decides on nothing in '{prefix[:-1]}', which is a view")
    numbers = {graph: i for i, graph in enumerate(sorted({d.graph for d in inside}))}
    moved = (replace(moved_to(d, before=prefix), graph=numbers[d.graph]) for d in inside)
    return replace(plan, decisions=tuple(moved), states=())


def _settled(runner: Runner, policy: Policy) -> Policy:
    now = runner.graphs.policy
    for what, asked, has in (("dtype", policy.dtype, now.dtype), ("device", policy.device, now.device)):
        if asked is not None and has is not None and asked != has:
            raise PolicyError(
                f"a switch keeps the {what}: {type(runner.model).__name__} runs with {what}={has}, and the policy has "
                f"{what}={asked}. Convert the model again for that."
            )
    return replace(policy, dtype=policy.dtype or now.dtype, device=policy.device or now.device)


def _refuse_another_model(plan: Plan, runner: Runner) -> None:
    paths = {path for path, _ in runner.model.named_modules()}
    other = next((d.module_path for d in plan.decisions if d.module_path not in paths), None)
    if other is not None:
        raise PolicyError(f"the plan is of another model: {type(runner.model).__name__} has no module '{other}'")

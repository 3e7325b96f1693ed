"""Let the views of a model follow another policy: weights stay, graphs are captured again."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from passes.contract.errors import PolicyError
from passes.contract.plan import Plan
from passes.contract.policy import Policy

from ..capture.backend import refuse_unmatched
from ..view.runner import Runner
from ..view.view import is_view, runner_of


def switch_views(model: nn.Module, policy_or_plan: Policy | Plan | str) -> Policy:
    """Set the policy of all views in a model, and return it.

    Raises:
        PolicyError: There is no view; the policy or plan does not fit one of them, or has another low dtype. Nothing
            changed then.
    """
    runners: list[Runner] = [runner_of(module) for module in model.modules() if is_view(module)]
    if not runners:
        raise PolicyError("no part of this model is a view, whose policy could be switched: convert it first")
    policy = policy_or_plan.policy if isinstance(policy_or_plan, Plan) else Policy.of(policy_or_plan)
    settled = [_settled(runner, policy) for runner in runners]
    for runner in runners:
        refuse_unmatched(policy, runner.model)
        if isinstance(policy_or_plan, Plan):
            _refuse_another_model(policy_or_plan, runner)
    for runner, one in zip(runners, settled, strict=True):
        runner.switch(policy, one, policy_or_plan if isinstance(policy_or_plan, Plan) else None)
    return policy


def _settled(runner: Runner, policy: Policy) -> Policy:
    """Return a policy with the device and low dtype of a view.

    Raises:
        PolicyError: It names others.
    """
    now = runner.policy
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

"""Higher-order ops: calls that have graphs inside."""

from __future__ import annotations

from .row import KEEP, group, of


def _named(names: str) -> str:
    return " ".join(f"higher_order::{name}" for name in names.split())


# fmt: off
HIGHER_ORDER = (
    *group(KEEP, KEEP, "calls one body over its operands",
        of(_named("wrap"), operands_at=1),
        of(_named("tag_activation_checkpoint wrap_activation_checkpoint"), operands_at=1, recomputed=True),
        of(_named("invoke_subgraph"), operands_at=2),
        bodies="entered",
    ),
    *group(KEEP, KEEP, "calls bodies that must agree, or that get their own outputs as inputs again",
        _named("cond while_loop scan associative_scan map_impl map"),
        bodies="fixed",
    ),
    *group(KEEP, KEEP, "runs its body in another mode",
        of(_named("wrap_with_set_grad_enabled"), switches="grad"),
        of(_named("wrap_with_autocast"), switches="autocast"),
    ),
)

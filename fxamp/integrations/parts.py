"""The policy of a part of a model, from that of the whole."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from passes.contract.policy import Policy, glob, module_override, type_names


def policy_of_part(policy: Policy, path: str, part: nn.Module) -> Policy:
    """Return the policy of the part of a model at a path, from that of the whole, in which paths are of the whole.

    The rest of the model reads the outputs of the part as it does under autocast.
    """
    depth, types = path.count(".") + 1, type_names(type(part))
    cover = module_override(policy, [(path, types)])
    covered = cover is not None and cover.kind == "path"  # a path wins over the types inside it
    modules: dict[str, str] = {}
    for key, colour in policy.modules:
        head, rest = (".".join(segments) for segments in (key.split(".")[:depth], key.split(".")[depth:]))
        inside = rest if rest and glob(head).fullmatch(path) else "" if covered else key
        alone = Policy(modules={inside: colour}) if inside else None
        if alone and any(module_override(alone, [(p, type_names(type(m)))]) for p, m in part.named_modules()):
            modules[inside] = colour
    if cover is not None and covered:
        modules[types[0]] = cover.colour
    ops = {key.removeprefix(path).removeprefix("."): c for key, c in policy.ops
           if "#" not in key or key.startswith((f"{path}.", f"{path}/"))}  # fmt: skip
    outputs = "autocast" if policy.output_dtype == "original" else policy.output_dtype
    return replace(policy, modules=tuple(modules.items()), ops=tuple(ops.items()), output_dtype=outputs)

"""The constants of a graph, compared at every call with the values that the model and the converted module have now.

The converted module shares the model's parameters, and has training flags of its own; but a dropout's `p`, a number
that forward() read, or a layer that it called is a constant of the graph. If one of them changes, on the model or on
the converted module, the next call raises an error that names it. The converted module follows the training flags of
single layers of the model.
"""

from __future__ import annotations

import itertools
import operator
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import nn

from passes.contract.errors import CaptureError

from ..capture.model.call import CallSpec
from ..capture.model.reads import HOOKS, Reads, held_attribute, label

_OWN = frozenset(nn.Module().__dict__) - {"_modules"}  # torch's tables and flags
_OF_SHARDS = ("FSDPState.", "distribute_module.")  # hooks of fully_shard and parallelize_module
_CONTAINERS = (list, tuple, dict, set, OrderedDict)


class _Missing:
    def __repr__(self) -> str:
        return "not there"


_MISSING = _Missing()


_FLAG = operator.itemgetter("training")
_ANY = itertools.repeat(_MISSING)


class _Tree:
    """The comparison of one tree of modules: entries of tables with their values at capture, and tables of hooks."""

    def __init__(self, whose: str, own_hooks: Set[str]) -> None:
        self.whose = whose
        self._own_hooks = own_hooks
        self._names: dict[tuple[int, str], str] = {}
        self._tables: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._values: list[Any] = []
        self._hooks: list[Any] = []
        self._owners: list[tuple[str, dict[str, Any], str]] = []
        self._modules: list[nn.Module] = []
        self._classes: list[type] = []
        self._defaults: dict[tuple[type, str], Any] = {}  # plain values of classes

    def add(self, path: str, module: nn.Module, name: str) -> None:
        """Compare an attribute from now on, in any table of `nn.Module`, unless graphs follow its changes."""
        attributes = vars(module)
        if name in _OWN or (name != "forward" and hasattr(nn.Module, name)):
            return
        if name in attributes:
            if not _holds_parameters(attributes[name]):
                self._compare(path, attributes, name)
        elif name in module._modules:
            self._compare(path, module._modules, name)
        elif name in module._parameters or name in module._buffers:
            table: Any = module._parameters if name in module._parameters else module._buffers
            if table[name] is None:
                self._compare(path, table, name)
        elif not isinstance(getattr(type(module), name, None), property):
            self._compare(path, attributes, name)
            self._compare_default(type(module), name)

    def add_object(self, path: str, held: Any, name: str) -> None:
        """Compare an attribute of an object that a module holds."""
        plain = self._compare_default(type(held), name)
        if hasattr(held, "__dict__") and (plain or name in vars(held)):
            self._compare(path, vars(held), name)

    def add_children(self, path: str, module: nn.Module) -> None:
        """Compare each child that a module has now; a child added later is no change."""
        for name in module._modules:
            self._compare(path, module._modules, name)

    def add_hooks(self, path: str, module: nn.Module) -> None:
        """From now on refuse new hooks of a module."""
        self._hooks += [module.__dict__[name] for name in HOOKS]
        self._owners += [(path, vars(module), name) for name in HOOKS]

    def add_class(self, module: nn.Module) -> None:
        """Refuse a change of a module's class, as by a parametrization."""
        self._modules.append(module)
        self._classes.append(type(module))

    def _compare(self, path: str, table: dict[str, Any], key: str) -> None:
        if (id(table), key) not in self._names:
            self._names[id(table), key] = f"{path}.{key}".lstrip(".")
            self._tables.append(table)
            self._keys.append(key)
            self._values.append(_copy(table.get(key, _MISSING)))

    def _compare_default(self, kind: type, name: str) -> bool:
        """Compare the class's value of an attribute that instances lack, if it is a plain value; say whether it is."""
        value = getattr(kind, name, _MISSING)
        if type(value) in (bool, int, float, str):
            self._defaults[kind, name] = value
        return (kind, name) in self._defaults

    def holds(self) -> bool:
        """Say whether nothing has changed. This runs at every call, so it has no Python loops."""
        try:
            if list(map(dict.get, self._tables, self._keys, _ANY)) != self._values:
                return False
            if list(itertools.starmap(getattr, self._defaults)) != list(self._defaults.values()):
                return False
        except Exception:  # the comparison of an object of the user's
            return False
        return not any(self._hooks) and list(map(type, self._modules)) == self._classes

    def refuse(self) -> None:
        """Raise CaptureError for the first change."""
        for (path, attributes, name), table in zip(self._owners[:], self._hooks[:], strict=True):
            for hook in table.values():
                if label(hook) not in self._own_hooks:
                    way_out = "Remove it, or use"
                    if label(hook).startswith(_OF_SHARDS):
                        way_out = (
                            "Shard the converted module as a whole, or convert each block and shard the results; or use"
                        )
                    raise CaptureError(
                        f"module '{path or '(root)'}' of {self.whose} has a {HOOKS[name]} now ({label(hook)}), which "
                        f"the graph does not run. {way_out} fxamp.compile, which runs hooks."
                    )
            if table:  # hooks that forward() itself installs, which ran during capture
                self._owners = [own for own in self._owners if own[1] is not attributes or own[2] != name]
                self._hooks = [other for other in self._hooks if other is not table]
                self._compare(path, attributes, name)
        self._refuse_values()
        for module, kind_then in zip(self._modules, self._classes, strict=True):
            if type(module) is not kind_then:
                raise CaptureError(
                    f"a {kind_then.__name__} of {self.whose} is a {type(module).__name__} now (a parametrization or a "
                    "sharded wrapper changes the class). The graph does not run the code of that class. Convert again."
                )

    def _refuse_values(self) -> None:
        slots = zip(self._names.values(), self._tables, self._keys, self._values, strict=True)
        for name, table, key, value in slots:
            now = table.get(key, _MISSING)
            if not _same(now, value):
                raise self._changed(name, value, now)
        for (kind, name), value in self._defaults.items():
            if getattr(kind, name, _MISSING) != value:
                raise self._changed(f"{kind.__name__}.{name}", value, getattr(kind, name, _MISSING))

    def _changed(self, name: str, value: Any, now: Any) -> CaptureError:
        if name.endswith("_modules") and isinstance(now, dict):  # name the layer, not the table
            child = next((k for k in (*value, *now) if value.get(k, _MISSING) is not now.get(k, _MISSING)), "")
            name, value, now = f"{name.removesuffix('_modules')}{child}", value.get(child), now.get(child)
        then = "was not set" if value is _MISSING else f"was {_show(value)}"
        same = value is not _MISSING and _show(now) == _show(value)
        other = _show(now).replace("a ", "another ", 1) if same else _show(now)
        return CaptureError(
            f"'{name}' of {self.whose} {then} when the model was captured, and is {other} now, which the graph does "
            "not follow. Set it back, or change the original model and convert it again."
        )


class Baked:
    """The constants of the graphs of a converted module.

    Args:
        reads: what forward() read.
        converted: the root of the converted module's tree.
        original: the model; None for a copy, which has none. A model that was freed is not compared.
        name: the name of the model's class.
    """

    def __init__(self, reads: Reads, converted: nn.Module, original: nn.Module | None, name: str) -> None:
        self.reads = reads
        self._converted = _Tree(f"the converted {name}", frozenset())
        self._original = _Tree(f"the original {name}", reads.hooks)
        self._alive = None if original is None else weakref.ref(original)
        twins = _modules(converted)
        for path, twin in twins.items():
            if path and path not in reads.opaque:
                self._converted.add_hooks(path, twin)
        for path, attribute in _sorted(reads):
            if path == attribute == "" or path in reads.opaque or path not in twins:
                continue
            if path == "" and attribute == "_modules":
                self._converted.add_children(path, converted)
            elif path or not (attribute in vars(converted) or hasattr(type(converted), attribute)):
                self._converted.add(path, twins[path], attribute)
        self._numbers = [
            (twins[path], name, vars(twins[path])[name])
            for path, name in _sorted(reads)
            if path in twins and type(vars(twins[path]).get(name)) in (bool, int, float) and name != "training"
        ]
        self._gradients = list(_gradients(reads, converted))
        self._inputs = [(i, *reads.inputs[i]) for i in sorted(reads.inputs)]
        self._twins: list[nn.Module] = []
        self._layers: list[dict[str, Any]] = []
        if original is not None:
            self._compare_original(original, twins)

    def _compare_original(self, original: nn.Module, twins: dict[str, nn.Module]) -> None:
        modules = _modules(original)
        for path, module in modules.items():
            self._original.add_hooks(path, module)
            if path:
                self._original.add_class(module)
        for path, attribute in _sorted(self.reads):
            if path in modules:
                self._original.add(path, modules[path], attribute)
        assigned = {held_attribute(modules, name) for name in self.reads.assigned}
        for path, held, attribute in sorted(self.reads.objects):
            name = f"{path}.{held}".lstrip(".")
            if path in modules and held_attribute(modules, f"{name}.{attribute}") not in assigned:
                self._original.add_object(name, vars(modules[path]).get(held), attribute)
        both = [path for path in modules if path in twins]
        self._twins, self._layers = [twins[path] for path in both], [vars(modules[path]) for path in both]
        self._flags = list(map(_FLAG, self._layers))

    def check(self) -> None:
        """Follow training flags of the model's layers; raise CaptureError if anything else changed since capture."""
        if not self._converted.holds():
            self._converted.refuse()
        if self._alive is not None:
            if self._alive() is None:
                self._alive, self._layers, self._original = None, [], _Tree("", frozenset())
            else:
                if not self._original.holds():
                    self._original.refuse()
                flags = list(map(_FLAG, self._layers))
                if flags != self._flags:
                    self._follow(flags)
        for table, key, required, name, place in self._gradients:
            if table[key].requires_grad is not required:
                raise _asked(f"'{name}'", required, place)

    def guard(self) -> None:
        """Compare the numeric attributes of layers while `torch.compile` traces the module, so that it guards them.

        Raises:
            CaptureError: one has changed. The call then runs uncompiled, and `check` raises a more precise error.
        """
        for module, name, value in self._numbers:
            if getattr(module, name) != value:
                raise CaptureError(
                    f"'{name}' of a layer has changed since the model was captured. Set it back, or convert again."
                )

    def check_inputs(self, flat: Sequence[Any], call: CallSpec) -> None:
        """Raise CaptureError if forward() read the `requires_grad` of an input, and that has changed."""
        for i, required, place in self._inputs:
            if i < len(flat) and flat[i].requires_grad is not required:
                name = [leaf.name for leaf in call.leaves if leaf.tensor][i]
                raise _asked(f"input '{name}'", required, place)

    def _follow(self, flags: list[bool]) -> None:
        """Copy changed training flags of single layers to the converted module, but not a change of all flags."""
        before, self._flags = self._flags, flags
        for i, twin in enumerate(self._twins):
            odd, was_odd = flags[i] is not flags[0], before[i] is not before[0]
            if (odd and (not was_odd or flags[i] is not before[i])) or (was_odd and not odd and flags[0] is before[0]):
                twin.training = flags[i]
        if flags[0] is not before[0] and self._twins[0].training is not flags[0]:
            now, other = ("train()", "eval") if flags[0] else ("eval()", "train")
            warnings.warn(
                f"{now} was called on the original model, and the converted module is still in {other} mode: call "
                f"{now} on the converted module too, if you want its mode to change.",
                stacklevel=6,
            )


def _asked(name: str, required: bool, place: str) -> CaptureError:
    now, then = ("does not require", "required") if required else ("requires", "did not require")
    return CaptureError(
        f"{name} {now} gradients, and {then} them when the model was captured. forward() branches on that ({place}), "
        "and the graph has only the branch taken during capture. Convert again in the state that you want."
    )


def _modules(root: nn.Module) -> dict[str, nn.Module]:
    return {p: m for p, m in root.named_modules() if not p.startswith("_fxamp")}


def _sorted(reads: Reads) -> list[tuple[str, str]]:
    return sorted((p, name) for p, name in reads.attributes if f"{p}.{name}".lstrip(".") not in reads.assigned)


def _gradients(reads: Reads, converted: nn.Module) -> Any:
    """Yield table, key, flag, name and place of each parameter on whose flag a graph depends."""
    for path, module in _modules(converted).items():
        for key, parameter in module._parameters.items():
            place = reads.gradients.get(f"{path}.{key}".lstrip("."), reads.gradients.get(""))
            if parameter is not None and place is not None:
                yield module._parameters, key, parameter.requires_grad, f"{path}.{key}".lstrip("."), place


def _holds_parameters(value: Any) -> bool:
    """Say whether a container only lists the layer's parameters, as in recurrent layers; graphs follow these anyway."""
    if type(value) not in _CONTAINERS:
        return isinstance(value, (nn.Parameter, weakref.ref))
    return any(map(_holds_parameters, value.values() if isinstance(value, dict) else value))


def _copy(value: Any) -> Any:
    """Copy a container, also nested ones, so that later changes can be found; return other values as they are."""
    if type(value) not in _CONTAINERS:
        return value
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return type(value)(map(_copy, value))


def _same(now: Any, value: Any) -> bool:
    try:
        return now is value or bool(now == value)
    except Exception:
        return False


def _show(value: Any) -> str:
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.device, _Missing)):
        return repr(value)
    if isinstance(value, _CONTAINERS) and all(isinstance(v, (bool, int, float, str)) for v in value):
        return repr(value)[:200]
    return f"a {type(value).__name__}"

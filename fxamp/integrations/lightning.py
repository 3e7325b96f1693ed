"""A precision plugin for Lightning's Trainer and for Fabric, whose layers run by a plan.

Lightning calls `training_step` and never the module, so its children are converted, in place, since some strategies
drop what `convert_module` returns; code between them runs under autocast. Fabric gets a view of the module itself.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from passes.contract.errors import CaptureError
from passes.contract.policy import Policy, check_used, module_override, type_names

from ..capture.graphs import is_compiled
from ..convert import convert
from ..train.options import scaler_of
from ..train.scaler import LossScaler, is_held_back
from ..view.frozen import cast_once
from ..view.view import is_view, runner_of
from .parts import policy_of_part

logger = logging.getLogger("fxamp")


class FxampPrecision(Precision):  # type: ignore[misc]
    """A precision plugin of Lightning and Fabric that converts by a policy. Do not pass `precision=` beside it.

    A layer that was called and of which no graph could be captured is an error after the first backward. Layers that
    were never called, such as metrics, are listed in `uncalled`. With FP16 the loss is scaled: the state of the scaler
    is in checkpoints, and the loggers get `fxamp/scale` and `fxamp/skipped`.

    Args:
        policy: A level, a policy string or a Policy; overrides are written with the paths of the LightningModule.
        modules: Globs of the paths of the modules to convert; None is every child of a LightningModule (of a ModuleList
            or ModuleDict its members).
        backend: As `fxamp.convert` takes it.
        options: As `fxamp.convert` takes it.
        scaler: As `fxamp.TrainStep` takes it.
        cast_once: Cast each weight once between two updates, as `fxamp.cast_once` does, instead of once a micro-batch.

    Attributes:
        views: The views by the path of the module in whose place they are.

    Raises:
        PolicyError: The policy cannot be used, or a glob matches no module.
        CaptureError: A layer that was called could not be captured.

    Example:
        >>> plugin = FxampPrecision("O1,dtype=bf16", modules=["encoder", "head"])
        >>> trainer = lightning.Trainer(plugins=[plugin])
    """

    def __init__(
        self, policy: Policy | str = "O1", *, modules: Sequence[str] | None = None, backend: Any = "eager",
        options: Mapping[str, Any] | None = None, scaler: LossScaler | float | str | None = "auto",
        cast_once: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.policy, self.modules = Policy.of(policy), None if modules is None else tuple(modules)
        self.views: dict[str, Any] = {}
        self.skipped = 0
        self._settings = {"backend": backend, "options": options}
        self._asked, self._scaler = scaler, None if scaler == "auto" else scaler_of(scaler, None)
        self._module: nn.Module | None = None
        self._cast_once, self._scope = cast_once, contextlib.ExitStack()
        weakref.finalize(self, self._scope.close)
        self._in_trainer = self._looked = False

    def __repr__(self) -> str:
        return f"<fxamp plugin for {self.policy}, {len(self.views)} views>"

    @property
    def scaler(self) -> LossScaler:
        """The loss scaler; a disabled one without loss scaling."""
        if self._scaler is None:
            self._scaler = scaler_of(self._asked, self._low())
        return self._scaler

    @property
    def uncalled(self) -> tuple[str, ...]:
        """The paths of views that were never called."""
        return tuple(path for path, view in self.views.items() if not runner_of(view).called)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Put views in the place of a LightningModule's children, or return a view of any other module."""
        self._module = module
        if not isinstance(module, LightningModule) and self.modules is None:
            if not is_view(module):
                module = convert(module, policy=self.policy, **self._settings)
            self.views[self._name_of(module)] = module
            self._keep_casts(module)
            return module
        modules = [(path, type_names(type(m))) for path, m in module.named_modules()]
        check_used(replace(self.policy, ops=()), [[one] for one in modules], ())
        made: dict[nn.Module, Any] = {}  # of a layer that is there twice there is one view
        for path, child in self._chosen(module).items():
            if is_view(child) or is_compiled(child):
                continue
            if child not in made:
                made[child] = convert(child, policy=policy_of_part(self.policy, path, child), **self._settings)
            self.views[path] = made[child]
            module.set_submodule(path, made[child])
        self._scope.close()
        self._keep_casts(module)
        return module

    def _keep_casts(self, module: nn.Module) -> None:
        if self._cast_once and any(map(is_view, module.modules())):
            self._scope.enter_context(cast_once(module))

    def teardown(self) -> None:
        """Cast weights at each use again."""
        self._scope.close()
        super().teardown()

    def restore(self) -> None:
        """Put the modules back in whose place the views are, for example to export them."""
        self._scope.close()
        for path, view in self.views.items():
            if path and self._module is not None:
                self._module.set_submodule(path, runner_of(view).model)
        self.views.clear()

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Note that a Trainer runs the steps, and not Fabric's user."""
        self._in_trainer, self._looked = True, False
        return super().connect(model, optimizers, lr_schedulers)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Run code between views under autocast; without its cache, which keeps a cast made under `no_grad`."""
        return torch.autocast(self._device(), self._low(), self.policy.level.rounds, cache_enabled=False)

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Scale the loss."""
        return super().pre_backward(self.scaler.scale(tensor), module) if self._in_trainer else tensor

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward, and after the first one look whether the plans ran."""
        if self._in_trainer:
            super().backward(tensor, model, *args, **kwargs)
        else:
            self.scaler.scale(tensor).backward(*args, **kwargs)
        if not self._looked:
            self._looked = True
            self._look()

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        """Return the loss, detached."""
        return super().post_backward(tensor, module) if self._in_trainer else tensor

    def optimizer_step(self, optimizer: Any, model: Any = None, closure: Any = None, **kwargs: Any) -> Any:
        """Unscale and clip the gradients, then step or skip."""
        if model is None:
            given = {} if closure is None else {"closure": closure}
            return self._step(optimizer, **given, **kwargs)
        if not self.scaler.is_enabled():
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization:  # training_step has skipped this batch
            self._after_closure(model, optimizer)
            return result
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        made = self._step(optimizer, **kwargs)
        trainer = model.trainer
        if trainer.global_step % trainer.log_every_n_steps == 0:
            for log in trainer.loggers:
                now = {"fxamp/scale": self.scaler.get_scale(), "fxamp/skipped": float(self.skipped)}
                log.log_metrics(now, step=trainer.global_step)
        return made

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Unscale gradients before Fabric clips them."""
        self.scaler.unscale_(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler; nothing without loss scaling."""
        return {"scaler": self.scaler.state_dict(), "skipped": self.skipped} if self.scaler.is_enabled() else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the scaler."""
        if "scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["scaler"])
            self.skipped = state_dict["skipped"]

    def _step(self, optimizer: Any, **kwargs: Any) -> Any:
        made = self.scaler.step(optimizer, **kwargs)
        self.skipped += bool(is_held_back(self.scaler, optimizer))
        self.scaler.update()
        return made

    def _device(self) -> str:
        first = None if self._module is None else next(self._module.parameters(), None)
        return self.policy.device or ("cpu" if first is None else first.device.type)

    def _low(self) -> torch.dtype:
        return self.policy.dtype or torch.get_autocast_dtype(self._device())

    def _name_of(self, module: nn.Module) -> str:
        """Return the key of a module of Fabric's among the views: "" for the first, its class for later ones."""
        name = type(module).__name__ if self.views else ""
        return f"{name} {len(self.views)}" if name in self.views else name

    def _chosen(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return the modules to convert by their paths."""
        if self.modules is None:
            return dict(_children(module, ""))
        named = dict(module.named_modules())
        globs = Policy(modules=dict.fromkeys(self.modules, "low"))
        check_used(globs, [[(path, ())] for path in named], ())
        taken = [path for path in named if path and module_override(globs, [(path, ())]) is not None]
        return {path: named[path] for path in taken if path.rpartition(".")[0] not in taken}

    def _look(self) -> None:
        """Raise for a layer that was called and ran no graph; say which were not called."""
        for path, view in self.views.items():
            runner = runner_of(view)
            if runner.called and not runner.graphs and next(runner.model.parameters(), None) is not None:
                raise CaptureError(
                    f"'{path}' ({type(runner.model).__name__}) was called, and no graph of it could be captured, so it "
                    "ran under autocast: TORCH_LOGS=graph_breaks says why, and modules= of the plugin can leave it out."
                )
        if self.uncalled:
            logger.info("fxamp: views that training_step does not call: %s", ", ".join(self.uncalled))


def _children(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of a module with their paths; of one that is a mere container, its members."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _children(child, f"{path}.")
        else:
            yield path, child

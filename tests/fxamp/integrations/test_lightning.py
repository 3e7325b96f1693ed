"""The plugin for Lightning and Fabric: the trainer's own `bf16-mixed` step for step, and the plan ran."""

from __future__ import annotations

import contextlib
import csv
import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from passes.contract.errors import CaptureError, FxampError, PolicyError
from tests.support.training import WeightCasts

lightning: Any = pytest.importorskip("lightning")
pytestmark = [pytest.mark.filterwarnings("ignore")]  # Lightning's own
O1 = "O1,dtype=bf16"


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    log = logging.getLogger("lightning.pytorch")
    log.setLevel(logging.ERROR)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.norm(self.up(x))))
        return out


class Digits(lightning.LightningModule):  # type: ignore[misc]
    """A LightningModule with layers, a list of layers, a parameter of its own, and layers that nothing calls."""

    def __init__(self, scale: float = 1.0, no_grad: bool = False) -> None:
        super().__init__()
        self.body, self.blocks = Body(), nn.ModuleList([Body(), nn.Linear(8, 8)])
        self.head, self.unused = nn.Sequential(nn.ReLU(), nn.Linear(8, 4)), nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(8))
        self.factor, self.no_grad = scale, no_grad
        self.losses: list[float] = []
        self.rounded: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        for block in self.blocks:
            x = block(x)
        self.rounded.append(x.dtype)
        return self.head(x * self.gain)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        with torch.no_grad() if self.no_grad else contextlib.nullcontext():
            if self.no_grad:
                self.body(x)
                self(x)
        loss = F.cross_entropy(self(x), y) * self.factor
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.losses.append(F.cross_entropy(self(batch[0]), batch[1]).item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def loader() -> Any:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 8, generator=generator), torch.randint(4, (20,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)


def trainer(*plugins: Any, **settings: Any) -> Any:
    settings = {"logger": False, "enable_checkpointing": False, "max_epochs": 1, "num_sanity_val_steps": 0, **settings}
    return lightning.Trainer(
        plugins=list(plugins) or None, accelerator="cpu", devices=1, enable_progress_bar=False,
        enable_model_summary=False, **settings,
    )  # fmt: skip


def fitted(*plugins: Any, no_grad: bool = False, factor: float = 1.0, **settings: Any) -> Digits:
    torch.manual_seed(0)
    module = Digits(factor, no_grad)
    trainer(*plugins, **settings).fit(module, loader(), loader())
    return module


def assert_equal(ours: Digits, theirs: Digits) -> None:
    assert ours.losses == theirs.losses
    assert_equal_states(ours, theirs)


def assert_equal_states(ours: nn.Module, theirs: nn.Module) -> None:
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))


def share_in_graphs(module: Any) -> float:
    """Return the share of the FLOPs of products that run in captured graphs."""
    x, y = next(iter(loader()))
    with torch.autocast("cpu", torch.bfloat16):
        rows = [row for row in fxamp.census(module, x, y, loss=F.cross_entropy).ran if row.product]
    return sum(row.flops for row in rows if row.graph >= 0) / sum(row.flops for row in rows)


def test_a_fit_is_the_trainers_own_step_for_step_and_the_plan_ran() -> None:
    plugin = fxamp.lightning.FxampPrecision(O1)
    ours = fitted(plugin, gradient_clip_val=0.5)
    assert_equal(ours, fitted(precision="bf16-mixed", gradient_clip_val=0.5))
    assert list(plugin.views) == ["body", "blocks.0", "blocks.1", "head", "unused"]
    assert plugin.uncalled == ("unused",)
    assert "5 views" in repr(plugin)
    for path in ("body", "blocks.0", "head"):
        view = ours.get_submodule(path)
        plan = fxamp.plan_of(view)
        assert {d.colour for d in plan.decisions if d.op == "linear"} == {"bfloat16"}
        assert len(fxamp.graphs(view)) == 2, "of training and of validation"
    assert set(ours.rounded) == {torch.bfloat16}, "between layers there is what autocast hands out"
    assert share_in_graphs(ours) > 0.99
    wide = f"{O1},modules.body.up=fp32,modules.head=fp32"
    changed = fitted(fxamp.lightning.FxampPrecision(wide), gradient_clip_val=0.5)
    assert changed.losses != ours.losses
    colours = {d.colour for d in fxamp.plan_of(changed.head).decisions if d.op == "linear"}
    assert colours == {"float32"}


class Adapted(Digits):
    """With another optimizer."""

    made: Any = None

    def configure_optimizers(self) -> Any:
        return self.made(self.parameters(), 1e-2)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("fused", [True, False])
def test_each_weight_is_cast_once_between_two_updates(accumulate: int, fused: bool) -> None:
    made = functools.partial(torch.optim.AdamW, fused=fused)
    runs, counts = [], []
    for plugin in (None, *(fxamp.lightning.FxampPrecision(O1, cast_once=once) for once in (True, False))):
        torch.manual_seed(0)
        module = Adapted()
        module.made = made
        run = trainer(
            *([] if plugin is None else [plugin]), accumulate_grad_batches=accumulate, max_epochs=4, max_steps=4,
            limit_train_batches=4,
            **({"precision": "bf16-mixed"} if plugin is None else {}),
        )  # fmt: skip
        with WeightCasts(module) as casts:
            run.fit(module, loader())
        runs.append(module)
        counts.append(casts.by_step[1:])
    assert_equal(runs[1], runs[0])
    assert_equal(runs[2], runs[0])
    low = 12  # weight and bias of two layers in each body, and of two more
    assert len(counts[1]) == 3
    assert counts[1] == [low] * 3
    assert counts[2] == [accumulate * low] * 3


def test_off_is_fp32() -> None:
    assert_equal(fitted(fxamp.lightning.FxampPrecision("O0")), fitted(precision="32-true"))


def test_a_no_grad_block_in_the_training_step_changes_nothing() -> None:
    ours = fitted(fxamp.lightning.FxampPrecision(O1), no_grad=True)
    for no_grad in (True, False):
        assert_equal(ours, fitted(precision="bf16-mixed", no_grad=no_grad))


@pytest.mark.matrix  # by FxampPrecision: test_a_no_grad_block_in_the_training_step_changes_nothing
def test_views_put_there_by_hand_are_right_with_a_no_grad_block_too() -> None:
    """The way without the plugin, with Lightning's own autocast round it or without."""

    def by_hand(no_grad: bool, **settings: Any) -> Any:
        torch.manual_seed(0)
        module: Any = Digits(no_grad=no_grad)
        for name in ("body", "head"):
            setattr(module, name, fxamp.convert(getattr(module, name), policy=f"{O1},output_dtype=autocast"))
        trainer(**settings).fit(module, loader(), loader())
        return module

    for settings in ({}, {"precision": "bf16-mixed"}):
        assert_equal(by_hand(True, **settings), by_hand(False, **settings))


def test_a_fit_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    def plugin(scale: float) -> Any:
        return fxamp.lightning.FxampPrecision(
            "O1,dtype=fp16", scaler=fxamp.LossScaler(init_scale=scale, growth_interval=2)
        )

    there: dict[str, Any] = {"default_root_dir": tmp_path}
    whole = fitted(plugin(2.0**10), max_epochs=2, **there)
    torch.manual_seed(0)
    module, used, saved = Digits(), plugin(2.0**10), tmp_path / "saved.ckpt"
    first = trainer(used, max_epochs=1, **there)
    first.fit(module, loader(), loader())
    first.save_checkpoint(saved)
    kept = torch.load(saved, weights_only=False)["FxampPrecision"]["scaler"]
    assert kept["scale"] == used.scaler.get_scale() > 2.0**10
    again = Digits()
    trainer(plugin(2.0), max_epochs=2, **there).fit(again, loader(), loader(), ckpt_path=saved)
    assert module.losses + again.losses == whole.losses
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), whole.state_dict().values(), strict=True))


def test_scale_and_skips_are_logged(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    log = CSVLogger(tmp_path)
    plugin = fxamp.lightning.FxampPrecision("O1,dtype=fp16", scaler=fxamp.LossScaler(init_scale=2.0**16))
    fitted(plugin, factor=100.0, logger=log, log_every_n_steps=1)
    assert plugin.skipped > 0, "the loss overflows FP16 at first"
    rows = list(csv.DictReader(Path(log.experiment.metrics_file_path).read_text().splitlines()))
    assert float(rows[-1]["fxamp/skipped"]) == plugin.skipped
    assert float(rows[-1]["fxamp/scale"]) == plugin.scaler.get_scale() < 2.0**16


def test_globs_choose_the_modules_and_all_can_be_put_back() -> None:
    plugin = fxamp.lightning.FxampPrecision(O1, modules=["blocks.*", "head"])
    module = fitted(plugin)
    assert list(plugin.views) == ["blocks.0", "blocks.1", "head"]
    assert_equal(module, fitted(precision="bf16-mixed"))
    plugin.restore()
    assert type(module.head) is nn.Sequential
    assert not plugin.views


def test_a_second_stage_keeps_the_views() -> None:
    plugin = fxamp.lightning.FxampPrecision(O1)
    run, module = trainer(plugin), Digits()
    run.fit(module, loader())
    head = module.head
    run.validate(module, loader(), verbose=False)
    assert module.head is head


class Disabled(nn.Linear):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_a_layer_that_was_called_and_ran_no_graph_is_an_error() -> None:
    module: Any = Digits()
    module.body = Disabled(8, 8)
    with pytest.raises(CaptureError, match=r"'body' \(Disabled\) was called, and no graph"):
        trainer(fxamp.lightning.FxampPrecision(O1)).fit(module, loader())


class Fabric:
    """A model, an optimizer and batches that Fabric has set up, and the losses of its steps."""

    def __init__(self, *plugins: Any, stem: bool = True, **settings: Any) -> None:
        torch.manual_seed(0)
        self.run = lightning.Fabric(accelerator="cpu", devices=1, plugins=list(plugins) or None, **settings)
        model = nn.Sequential(nn.Linear(8, 8) if stem else nn.Identity(), Body(), nn.Linear(8, 4))
        self.module, self.optimizer = self.run.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
        self.state = {
            "module": self.module,
            "optimizer": self.optimizer,
            **dict(zip(("plugin",), plugins, strict=False)),
        }

    def train(self, first: int = 0, last: int = 5) -> list[float]:
        losses = []
        for x, y in list(self.run.setup_dataloaders(loader()))[first:last]:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.module(x), y)
            self.run.backward(loss)
            self.run.clip_gradients(self.module, self.optimizer, max_norm=0.5, error_if_nonfinite=False)
            self.optimizer.step()
            losses.append(loss.item())
        return losses


def test_fabric_trains_as_with_its_own_precision_and_the_plan_ran() -> None:
    plugin = fxamp.lightning.FxampPrecision(O1)
    ours, theirs = Fabric(plugin), Fabric(precision="bf16-mixed")
    losses = ours.train()
    assert losses == theirs.train()
    assert_equal_states(ours.module, theirs.module)
    assert next(iter(ours.module.state_dict())) == "0.weight"
    assert fxamp.census(plugin.views[""], *next(iter(loader())), loss=F.cross_entropy)
    assert Fabric(fxamp.lightning.FxampPrecision("O1,dtype=bf16,modules.1=fp32")).train() != losses
    for _ in range(2):
        plugin.convert_module(nn.Linear(2, 2))
    assert list(plugin.views) == ["", "Linear", "Linear 2"], "Fabric sets up several modules"


@pytest.mark.parametrize("fused", [True, False])
def test_fabric_casts_each_weight_once_between_two_updates(fused: bool) -> None:
    losses, counts = list[list[float]](), list[list[int]]()
    for plugin in (None, *(fxamp.lightning.FxampPrecision(O1, cast_once=once) for once in (True, False))):
        torch.manual_seed(0)
        run = lightning.Fabric(
            accelerator="cpu",
            devices=1,
            plugins=[plugin] if plugin else None,
            precision=None if plugin else "bf16-mixed",
        )
        model = nn.Sequential(nn.Linear(8, 8), Body(), nn.Linear(8, 4))
        module, optimizer = run.setup(model, torch.optim.AdamW(model.parameters(), 1e-2, fused=fused))
        batches = [*run.setup_dataloaders(loader())][:4]
        losses.append([])
        with WeightCasts(model) as casts:
            for _ in range(3):
                for x, y in batches:
                    loss = F.cross_entropy(module(x), y)
                    run.backward(loss)
                    losses[-1].append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
        counts.append(casts.by_step[1:])
    assert losses[0] == losses[1] == losses[2]
    assert counts[1:] == [[8, 8], [32, 32]]


def test_fabric_rounds_the_inputs_of_a_module_and_the_plugin_does_not() -> None:
    """A residual connection reads them; what Fabric rounds it to is seen in the losses."""
    ours = Fabric(fxamp.lightning.FxampPrecision(O1), stem=False).train()
    assert ours == fabric_by_autocast()
    theirs = Fabric(precision="bf16-mixed", stem=False).train()
    assert ours != theirs
    assert ours == pytest.approx(theirs, rel=5e-3)


def fabric_by_autocast() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), Body(), nn.Linear(8, 4))
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
    for x, y in loader():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        loss = F.cross_entropy(out.float(), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_fabric_goes_on_where_it_was_saved_with_the_scale_and_the_skips(tmp_path: Path) -> None:
    def made() -> tuple[Fabric, Any]:
        plugin = fxamp.lightning.FxampPrecision("O1,dtype=fp16", scaler=fxamp.LossScaler(init_scale=2.0**20))
        return Fabric(plugin), plugin

    (whole, plugin), (first, _) = made(), made()
    losses = whole.train()
    assert 0 < plugin.skipped < 5
    assert plugin.scaler.get_scale() == 2.0 ** (20 - plugin.skipped)
    assert first.train(0, 2) == losses[:2]
    first.run.save(tmp_path / "saved", first.state)
    again, other = made()
    again.run.load(tmp_path / "saved", again.state)
    assert again.train(2, 5) == losses[2:]
    assert (other.skipped, other.scaler.get_scale()) == (plugin.skipped, plugin.scaler.get_scale())


# Bad input.


def test_bad_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make = fxamp.lightning.FxampPrecision
    with pytest.raises(ValueError, match=r"both `precision=bf16-mixed` and `plugins=<fxamp plugin"):
        trainer(make(), precision="bf16-mixed")
    with pytest.raises(PolicyError, match="nearest name is 'O1'"):
        make("o1")
    with pytest.raises(PolicyError, match="nearest name is 'body'"):
        trainer(make(modules=["boddy"])).fit(Digits(), loader())
    with pytest.raises(PolicyError, match=r"modules\.hedd=fp32 matches no module"):
        trainer(make("O1,modules.hedd=fp32")).fit(Digits(), loader())
    with pytest.raises(PolicyError, match="scaler"):
        make(scaler="yes")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.4.1")
    with pytest.raises(FxampError, match=r"needs lightning 2.5 or newer, and 2.4.1 is installed"):
        fxamp.lightning.FxampPrecision  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'Precision'"):
        fxamp.lightning.Precision  # noqa: B018

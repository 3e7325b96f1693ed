"""Training of one small BERT on two gloo ranks, by the recipes of the README: what each rank runs."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import socket
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxamp
from tests.support.processes import warm

LOW = "O1,dtype=bf16"
STEPS = 3


def bert() -> Any:
    """Return a model of 1.8 MB, which torch splits for DistributedDataParallel with buckets of one."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 1024}
    config = transformers.BertConfig(vocab_size=500, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForSequenceClassification(config)


def shard(module: nn.Module, **settings: Any) -> Any:
    """Shard a module over all ranks on the CPU, also where there is a GPU."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, **{"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), **settings})


def data() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 500, (4 * STEPS, 6), generator=generator)
    return [{"input_ids": i, "labels": i[0] % 2} for i in ids]


def loader() -> Any:
    return torch.utils.data.DataLoader(data(), batch_size=2)  # type: ignore[arg-type]


def entry(converted: bool) -> dict[str, Any]:
    """Return the arguments of torch.compile: by fxamp, or as it is."""
    return {"backend": "fxamp", "options": {"policy": LOW, "backend": "eager"}} if converted else {"backend": "eager"}


def ran(view: Any) -> None:
    """Hold that a view runs by its plan on this rank."""
    found = fxamp.census(view, next(iter(loader())))
    assert found, found.differences


def compiled(model: Any, converted: bool, inner: str = "eager") -> Any:
    return fxamp.compile(model, policy=LOW, backend=inner) if converted else torch.compile(model, backend=inner)


def by_hand(converted: bool) -> list[float]:
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    losses = trained_by_hand(converted)
    leave_group()
    return losses


def trained_by_hand(converted: bool) -> list[float]:
    from torch.nn.parallel import DistributedDataParallel

    model = bert()
    parallel = DistributedDataParallel(compiled(model, converted, "aot_eager"), bucket_cap_mb=1)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.05), []
    for batch in list(loader())[torch.distributed.get_rank() :: 2]:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = parallel(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if converted:
        assert len(fxamp.graphs(parallel.module)) > 1, "torch has not split the graph"
    return losses


def _by_trainer(model: Any, *callbacks: Any, bf16: bool = True) -> list[float]:
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no",
            disable_tqdm=True, seed=0, bf16=bf16, logging_steps=1, ddp_backend="gloo",
        )  # fmt: skip
        run = transformers.Trainer(model, arguments, train_dataset=data(), callbacks=list(callbacks))
        run.train()
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def trainer(converted: bool) -> list[float]:
    model = bert()
    model.compile(**entry(converted))
    return _by_trainer(model)


def trainer_of_view(converted: bool) -> list[float]:
    if not converted:
        return _by_trainer(bert())
    callback, view = fxamp.huggingface.FxampCallback(LOW), fxamp.convert(bert(), policy=LOW)
    losses = _by_trainer(view, callback, bf16=False)
    assert callback.census, callback.census
    return losses


def _by_accelerate(module: Any, precision: str) -> list[float]:
    import accelerate

    prepared, losses = accelerate.Accelerator(cpu=True, mixed_precision=precision), []
    module, optimizer, batches = prepared.prepare(module, torch.optim.SGD(module.parameters(), 0.05), loader())
    for batch in batches:
        optimizer.zero_grad()
        loss = module(**batch).loss
        prepared.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def accelerator(converted: bool) -> list[float]:
    return _by_accelerate(compiled(bert(), converted), "bf16")


def accelerator_of_view(converted: bool) -> list[float]:
    if not converted:
        return _by_accelerate(bert(), "bf16")
    view = fxamp.convert(bert(), policy=LOW)
    losses = _by_accelerate(view, "no")
    ran(view)
    return losses


def _by_fabric(prepare: Callable[[Any], Any], **settings: Any) -> list[float]:
    import lightning

    run = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp", **settings)
    run.launch()
    model, losses = bert(), []
    module, optimizer = run.setup(prepare(model), torch.optim.SGD(model.parameters(), 0.05))
    for batch in run.setup_dataloaders(loader()):
        optimizer.zero_grad()
        loss = module(**batch).loss
        run.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _by_lightning(prepare: Callable[[Any], Any], **settings: Any) -> list[float]:
    import lightning

    losses: list[float] = []

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = bert()

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.05)

    run = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **settings,
    )  # fmt: skip
    run.fit(prepare(Module()), loader())
    return losses


def fabric(converted: bool) -> list[float]:
    return _by_fabric(lambda model: compiled(model, converted), precision="bf16-mixed")


def fit(converted: bool) -> list[float]:
    return _by_lightning(lambda module: torch.compile(module, **entry(converted)), precision="bf16-mixed")


def _by_plugin(train: Callable[..., list[float]], converted: bool) -> list[float]:
    """Train with the plugin, or with the trainer's own precision."""
    if not converted:
        return train(lambda model: model, precision="bf16-mixed")
    plugin = fxamp.lightning.FxampPrecision(LOW)
    losses = train(lambda model: model, plugins=[plugin])
    (view,) = plugin.views.values()
    ran(view)
    return losses


def fabric_by_plugin(converted: bool) -> list[float]:
    return _by_plugin(_by_fabric, converted)


def fit_by_plugin(converted: bool) -> list[float]:
    return _by_plugin(_by_lightning, converted)


TOOLS: dict[str, Callable[[bool], list[float]]] = {
    "by hand": by_hand, "Trainer": trainer, "Accelerate": accelerator, "Fabric": fabric, "Lightning": fit,
    "Trainer's callback": trainer_of_view, "Accelerate's view": accelerator_of_view,
    "Fabric's plugin": fabric_by_plugin, "Lightning's plugin": fit_by_plugin,
}  # fmt: skip


def leave_group() -> None:
    """Leave the group when no replica is left in the process.

    A DistributedDataParallel that dies after the group holds the GIL while it waits for gloo's threads, and they may
    wait for the GIL.
    """
    gc.collect()
    torch.distributed.destroy_process_group()


def free_ports(count: int) -> tuple[int, ...]:
    """Return ports of this machine on which nothing listens, all of them different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return tuple(free.getsockname()[1] for free in sockets)


def on_rank(rank: int, ports: tuple[int, ...], tool: str, ways: tuple[bool, ...], out: str) -> None:
    """Train on one rank, converted or not, one after the other; the first rank writes the losses."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update({
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true",
    })  # fmt: skip
    losses = []
    for port, converted in zip(ports, ways, strict=True):  # a rank would find the store of the way before on its port
        os.environ["MASTER_PORT"] = str(port)
        losses.append(TOOLS[tool](converted))
    if rank == 0:
        torch.save(losses, out)


def train(tool: str, ways: tuple[bool, ...], folder: Path) -> list[list[float]]:
    """Return the losses of the first of two ranks, for every way: converted, or not."""
    out = str(folder / "losses")
    warm()
    start: Any = torch.multiprocessing.start_processes  # type: ignore[attr-defined]
    start(on_rank, (free_ports(len(ways)), tool, ways, out), 2, start_method="forkserver")
    losses: list[list[float]] = torch.load(out)
    return losses

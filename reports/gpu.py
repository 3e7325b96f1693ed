"""Run, in at most nine minutes, what only a GPU can show, and write `gpu.md` and `gpu.json` beside this file.

    python reports/gpu.py                       # every section, the most telling first
    python reports/gpu.py eager compiled        # these
    python reports/gpu.py --small -o /tmp       # tiny models, on a CPU too: to see that it runs

Needs `pip install ".[test]"`, and no network: the models of `transformers` have random weights. Each section runs in a
process of its own, which is ended when its time is over, and both files are written after every row. A second call
measures what failed or was left out for lack of time; other results of this machine in `gpu.json` are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import json
import logging
import math
import re
import subprocess
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.optim import SGD, AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fxamp  # noqa: E402  (the path comes first)
from fxamp._torch import dynamo_errors  # noqa: E402
from fxamp.observe.workload import floats  # noqa: E402
from fxamp.train.describe import compiled_rows  # noqa: E402
from passes._torch import pytree  # noqa: E402
from passes.contract.reasons import DEVIATIONS  # noqa: E402
from passes.ops.facts import NAMES  # noqa: E402
from reports import measure_facts  # noqa: E402
from reports.casts import _machine, _word  # noqa: E402
from reports.made import made as making  # noqa: E402
from reports.made import write as write_report  # noqa: E402
from reports.measure_facts import same  # noqa: E402
from reports.timing import interleaved  # noqa: E402
from tests.support.baseline import UnderAutocast  # noqa: E402
from tests.support.trial.cuda import rows_of  # noqa: E402
from tests.support.trial.first import Calls  # noqa: E402
from tests.support.trial.generate import generate  # noqa: E402
from tests.support.trial.program import Program  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BF16, FP16 = torch.bfloat16, torch.float16
SECONDS, GRACE = 510.0, 30.0  # in all, and what a section may take longer before it is ended
WARMUP, ROUNDS, FEWEST, WINDOW = 3, 15, 5, 4
LEAST = 5  # rows in which fxamp gains least
UNFINISHED, NO_TIME = "was not finished", "left out for lack of time"

Inputs = dict[str, Tensor]
Row = dict[str, Any]
Rows = Iterator[list[Row]]  # of one task, each time all that there are


# The models.


@dataclass(frozen=True)
class Subject:
    """A model of `transformers`: the beginning of its class's name, the class, its sizes, and those of other forms.

    `tokens` is the length of a text, 0 for images. `batches` go from one that is bound by launching kernels to one that
    is bound by computing.
    """

    family: str
    task: str
    tokens: int
    batches: tuple[int, ...]
    sizes: Mapping[str, Any]
    shallow: Mapping[str, Any]
    small: Mapping[str, Any]

    def build(self, batch: int, small: bool, **others: Any) -> tuple[Any, Inputs]:
        """Return a model in train mode and its inputs, labels among them; `others` are sizes that differ."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{self.family}Config")(
            **{**self.sizes, **(self.small if small else {}), **others}
        )
        with torch.device(DEVICE):
            model = getattr(transformers, self.family + self.task)(config)
            if small and not model.loss_type:  # without one it warns, which breaks the graph: that takes long
                model.loss_type = "ForCausalLM"
            if self.tokens:
                ids = torch.randint(1, config.vocab_size, (batch, 8 if small else self.tokens))
                return model.train(), {"input_ids": ids, "labels": ids}
            side = 32 if small else 224
            images, labels = torch.randn(batch, 3, side, side), torch.randint(0, config.num_labels, (batch,))
            return model.train(), {"pixel_values": images, "labels": labels}

    def shown(self, batch: int) -> str:
        """Return what a batch is, for a table."""
        return f"{batch} x {self.tokens}" if self.tokens else str(batch)


_LAYERS = {"num_hidden_layers": 2}
_TINY = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 1}
_GPT2_TINY = {"n_embd": 32, "n_head": 2, "n_layer": 1, "vocab_size": 60, "n_positions": 32}
_LLAMA = {
    "hidden_size": 1280, "num_hidden_layers": 24, "num_attention_heads": 20, "num_key_value_heads": 4,
    "intermediate_size": 3584, "vocab_size": 32000, "use_cache": False,
}  # fmt: skip
_RESNET_TINY = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3}
SUBJECTS = {
    "BERT-base": Subject("Bert", "ForMaskedLM", 128, (1, 8, 32, 128), {}, _LAYERS, {**_TINY, "vocab_size": 60}),
    "GPT-2": Subject(
        "GPT2", "LMHeadModel", 512, (1, 8), {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}, {"n_layer": 2},
        _GPT2_TINY,
    ),
    "ResNet-50": Subject(
        "ResNet", "ForImageClassification", 0, (1, 64), {"num_labels": 1000}, {"depths": [1, 1, 1, 1]}, _RESNET_TINY
    ),
    "ViT-B": Subject(
        "ViT", "ForImageClassification", 0, (1, 64), {"num_labels": 1000}, _LAYERS,
        {**_TINY, "image_size": 32, "num_labels": 3},
    ),
    "Llama 0.5B": Subject(
        "Llama", "ForCausalLM", 512, (1, 8), _LLAMA, _LAYERS, {**_TINY, "num_key_value_heads": 1, "vocab_size": 60}
    ),
}  # fmt: skip


def converted(model: nn.Module, inputs: Inputs, low: torch.dtype, *levels: str, **settings: Any) -> Iterator[Any]:
    """Yield a view of a model at each level, in train mode."""
    for level in levels:
        yield fxamp.convert(model.train(), (), inputs, policy=fxamp.Policy(level, dtype=low, **settings))


# A TrainStep: what it waits for, CUDA graphs, and whether it trains as a loop by hand does.


def _fused(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=1e-4, fused=True)


def _plain(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=1e-4, foreach=True, capturable=CUDA)


def _sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=1e-3, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """A way to train."""

    low: torch.dtype = FP16
    optimizer: Callable[[Any], Optimizer] = _fused
    window: int = 1
    clip: float | None = 1.0
    compile: bool | Mapping[str, Any] = False


CASES = {
    "FP16, fused AdamW": Case(clip=None),
    "FP16, fused AdamW, clipped, windows of 4": Case(window=WINDOW),
    "FP16, AdamW, clipped": Case(optimizer=_plain),
    "FP16, SGD, clipped": Case(optimizer=_sgd),
    "BF16, fused AdamW, clipped": Case(low=BF16),
    "FP16, fused AdamW, clipped, compiled": Case(compile=True),
    "FP16, fused AdamW, clipped, compiled, CUDA graphs": Case(compile={"mode": "reduce-overhead"}),
    "FP16, AdamW, clipped, compiled": Case(optimizer=_plain, compile=True),
    "FP16, AdamW, clipped, compiled, CUDA graphs, windows of 4": Case(
        optimizer=_plain, compile={"mode": "reduce-overhead"}, window=WINDOW
    ),
}
BEFORE, WATCHED = 8, 4  # windows, and how many more in which a wait is an error
SCALE = 2.0**24  # so high that FP16 overflows at first
SMALL_SCALE, SMALL_BEFORE = 2.0**20, 3
SMALL_CASES = (
    "FP16, fused AdamW, clipped, windows of 4",
    "BF16, fused AdamW, clipped",
    "FP16, AdamW, clipped, compiled",
)


def train_tasks(small: bool) -> dict[str, Callable[[float], Rows]]:
    """Return a task for every way to train."""
    chosen = SMALL_CASES if small else CASES
    return {name: functools.partial(trained, name, CASES[name], small) for name in chosen}


def trained(name: str, case: Case, small: bool, until: float) -> Rows:
    """Train by a TrainStep, at last where a wait is an error, and by hand under autocast, and compare."""
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    layers = {} if small else SUBJECTS["BERT-base"].shallow
    model, inputs = SUBJECTS["BERT-base"].build(2 if small else 8, small, **layers, **none)
    start = [p.detach().clone() for p in model.parameters()]
    twin = copy.deepcopy(model)
    (module,) = converted(model, inputs, case.low, "O1")
    scaled, scale = case.low == FP16, SMALL_SCALE if small else SCALE
    windows = (SMALL_BEFORE if small else BEFORE) + WATCHED
    # Inductor compiles for too long on a CPU, and has no CUDA graphs there.
    compile: Any = case.compile and ("aot_eager" if small else case.compile)
    scaler = fxamp.LossScaler(init_scale=scale) if scaled else None
    step = fxamp.TrainStep(
        module, None, case.optimizer(model.parameters()), scaler=scaler, accumulate_steps=case.window,
        max_grad_norm=case.clip, compile=compile,
    )  # fmt: skip
    while step.windows < windows - WATCHED:
        step(inputs)
    waited = waits_of(lambda: [step(inputs) for _ in range(WATCHED * case.window)])
    while step.windows < windows:  # after a wait
        step(inputs)
    row: Row = {"step": name, "waited": waited, "says it waits": "; ".join(step.waits) or "never"}
    row["compiled"] = "; ".join(f"{what}: {text}" for what, text in compiled_rows(step.compiled))
    yield [row]
    expected = torch.amp.GradScaler(DEVICE, init_scale=scale, enabled=scaled)
    parameters = list(twin.parameters())
    optimizer = case.optimizer(parameters)

    def loss_of() -> Tensor:
        with torch.autocast(DEVICE, dtype=case.low):
            return own_loss(twin, inputs)

    for _ in range(windows):
        by_hand(loss_of, parameters, optimizer, expected, case.window, case.clip)
    row["loss scale"] = f"{step.scaler.get_scale():g}, by hand {expected.get_scale():g}" if scaled else ""
    row["distance"] = distance(model, twin, start)
    yield [row]


def waits_of(run: Callable[[], object]) -> str:
    """Run something where to wait for the GPU is an error; say where it did."""
    if not CUDA:
        run()
        return "not known on a CPU"
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as e:
        at = traceback.extract_tb(e.__traceback__)[-1]
        return f"{first_line(e)} in {Path(at.filename).name}:{at.lineno}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "never"


def by_hand(
    loss_of: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler,
    window: int,
    clip: float | None = None,
) -> None:
    """Run one window of the loop that one writes by hand."""
    for _ in range(window):
        scaler.scale(loss_of() / window).backward()
    if clip is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)


def own_loss(model: Any, inputs: Inputs) -> Tensor:
    """Return the loss that a model computes itself."""
    loss: Tensor = model(**inputs).loss
    return loss


def distance(model: nn.Module, twin: nn.Module, start: Sequence[Tensor]) -> float:
    """Return how far two trained models are apart, over how far training took the second from the start."""
    pairs = list(zip(model.parameters(), twin.parameters(), start, strict=True))
    apart = sum(float((a.detach() - b.detach()).double().square().sum()) for a, b, _ in pairs)
    moved = sum(float((b.detach() - s).double().square().sum()) for _, b, s in pairs)
    return math.sqrt(apart / moved)


# O1 against the autocast kernels of this device.


def agreement_tasks(small: bool) -> dict[str, Callable[[float], Rows]]:
    """Return a task for every model and low dtype."""
    lows = (BF16,) if small else (BF16, FP16)
    return {f"{name}, {_word(low)}": functools.partial(agrees, name, low, small) for low in lows for name in SUBJECTS}


def agrees(name: str, low: torch.dtype, small: bool, until: float) -> Rows:
    """Compare the dtypes of every value, outputs and gradients of O1 with those of autocast, two layers deep."""
    model, inputs = SUBJECTS[name].build(2, small, **({} if small else SUBJECTS[name].shallow))
    model.eval()
    policy = fxamp.Policy("O1", dtype=low)
    with torch.no_grad():
        pairs = Calls(lambda: torch.autocast(DEVICE, dtype=low)).of_view(model, (), inputs, policy)
    rows = []
    for pair in pairs:
        dtypes = {node: value.dtype for node, value in pair.expected.made.items()}
        rows += rows_of(pair.got.module, pair.plan, dtypes)
    wrong = [
        f"{key} ({op}): autocast gives {expected}, planned {autocast}, runs {got}"
        for key, op, expected, autocast, got, code in rows
        if autocast != expected or (got != expected and code not in ("cut", *DEVIATIONS))
    ]
    row: Row = {
        "model": name,
        "low": _word(low),
        "values": len(rows),
        "wrong": len(wrong),
        "first": wrong[0] if wrong else "",
    }
    yield [row]
    module = fxamp.convert(model, (), inputs, policy=policy)
    first, again = (_outcome(model, model, inputs, low) for _ in range(2))
    ours = _outcome(module, model, inputs, None)
    row["output"] = (
        "equal" if torch.equal(first[0], ours[0]) else f"{float((first[0] - ours[0]).abs().max()):.2g} apart"
    )
    for what, other in (("gradients", ours), ("autocast's own", again)):
        equal, apart = sum(map(torch.equal, first[1], other[1])), max(map(_apart, first[1], other[1]))
        row[what] = f"{equal} of {len(first[1])} equal" + (f", {apart:.2g} apart" if apart else "")
    yield [row]


def _outcome(module: Any, model: nn.Module, inputs: Inputs, low: torch.dtype | None) -> tuple[Tensor, list[Tensor]]:
    """Return logits and gradients of a module over the parameters of a model, under autocast where `low` is given."""
    with torch.autocast(DEVICE, dtype=low, enabled=low is not None):
        output = module(**inputs)
    output.loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return output.logits.detach().float(), gradients


def _apart(expected: Tensor, got: Tensor) -> float:
    return float((expected - got).double().norm() / expected.double().norm().clamp_min(1e-30))


# Times, memory and kernels.


@dataclass(frozen=True)
class Run:
    """One way to train a model or to call it, ready to be measured.

    Attributes:
        call: Trains on a window, or calls the model as often.
        window: How many micro-batches or calls that is.
        note: Says what was compiled, and of inference how far the output is from autocast's.
        owned: Where it captures CUDA graphs, the bytes of a model and an optimizer that no other way has.
    """

    call: Callable[[], object]
    window: int = 1
    note: Callable[[], str] = str
    owned: Callable[[], int] | None = None


class Inference:
    """A model in evaluation mode with inputs, and the ways to call it under `torch.inference_mode`.

    A run is several calls in one autocast region, as a generation or a diffusion is.
    """

    def __init__(self, subject: Subject, batch: int, low: torch.dtype, small: bool) -> None:
        self.low, self.small = low, small
        model, inputs = subject.build(batch, small)
        self.model, self.inputs = model.eval(), {k: v for k, v in inputs.items() if k != "labels"}
        self._open = contextlib.ExitStack()
        with torch.inference_mode(), torch.autocast(DEVICE, dtype=low):
            self._expected = own_logits(self.model, self.inputs).float()

    def close(self) -> None:
        """Leave the regions in which weights are frozen."""
        self._open.close()

    def by_hand(
        self, *, autocast: bool = True, cached: bool = False, compiled: bool = False, graphs: bool = False
    ) -> Run:
        """Return calls under autocast or in FP32; `cached` is under `torch.no_grad`, where autocast keeps casts."""
        call = _compiled(own_logits, self.small, graphs=graphs) if compiled else own_logits
        return self._run(self.model, call, autocast=autocast, cached=cached, graphs=graphs)

    def all_low(self, *, compiled: bool = False) -> Run:
        """Return calls of a copy of the model whose weights are low."""
        call = _compiled(own_logits, self.small, graphs=False) if compiled else own_logits
        return self._run(copy.deepcopy(self.model).to(self.low), call, autocast=False)

    def by_fxamp(self, level: str, *, frozen: bool = True, compiled: bool = False, graphs: bool = False) -> Run:
        """Return calls of a view, whose weights are cast at every call or, `frozen`, once."""
        how: Any = {"backend": "aot_eager" if self.small else "inductor"} if compiled else {}
        if graphs and not self.small:
            how["mode"] = "reduce-overhead"
        view = fxamp.convert(self.model, policy=fxamp.Policy(level, dtype=self.low), dynamic=False, **how)
        if frozen:
            self._open.enter_context(fxamp.frozen(view))
        return self._run(view, own_logits, autocast=False, graphs=graphs)

    def _run(
        self,
        model: nn.Module,
        logits: Callable[[Any, Inputs], Tensor],
        *,
        autocast: bool,
        cached: bool = False,
        graphs: bool = False,
    ) -> Run:
        dtype = next(model.parameters()).dtype
        inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in self.inputs.items()}
        without_gradients = torch.no_grad if cached else torch.inference_mode

        def calls(times: int = WINDOW) -> Tensor:
            with without_gradients(), torch.autocast(DEVICE, dtype=self.low, enabled=autocast):
                for _ in range(times):
                    if graphs:
                        torch.compiler.cudagraph_mark_step_begin()
                    output = logits(model, inputs)
            return output

        def note() -> str:
            apart = _apart(self._expected, calls(1).float())
            return f"output {apart:.2g} apart" if apart else "output equal"

        return Run(calls, WINDOW, note, (lambda: 0) if graphs else None)


def own_logits(model: Any, inputs: Inputs) -> Tensor:
    """Return the logits of a model."""
    logits: Tensor = model(**inputs).logits
    return logits


def _compiled(function: Callable[[Any, Inputs], Tensor], small: bool, *, graphs: bool) -> Any:
    """Return a function compiled by Inductor, in CUDA graphs or not; in the small form nothing is generated."""
    # A function of its own: of what shares its code Dynamo would check the guards of all at every call.
    own = types.FunctionType(function.__code__.replace(), globals())
    how: Any = {"backend": "aot_eager" if small else "inductor"}
    return torch.compile(own, dynamic=False, **({"mode": "reduce-overhead"} if graphs and not small else how))


class Bench:
    """A model with inputs, and the ways to train it, which share its weights and the state of one optimizer.

    A way with 16-bit weights has its own copy of the model. So has one with CUDA graphs, whose gradients have to stay
    at their addresses.
    """

    def __init__(self, subject: Subject, batch: int, low: torch.dtype, small: bool) -> None:
        self.low, self.small = low, small
        self.model, self.inputs = subject.build(batch, small)
        self.optimizer = _adamw(self.model)
        self._levels: dict[str, Any] = {}

    def close(self) -> None:
        """Nothing is open."""

    def by_hand(self, *, autocast: bool = True, window: int = 1, compiled: bool = False, graphs: bool = False) -> Run:
        """Return a loop by hand, under autocast or in FP32."""
        model: nn.Module = copy.deepcopy(self.model) if graphs else self.model
        optimizer = _adamw(model) if graphs else self.optimizer
        one = self._loss(model, self.inputs, autocast=autocast, compiled=compiled, graphs=graphs)
        scaler = torch.amp.GradScaler(DEVICE, enabled=autocast and self.low == FP16)
        call = functools.partial(by_hand, one, list(model.parameters()), optimizer, scaler, window)
        return Run(call, window, owned=functools.partial(_nbytes, model, optimizer) if graphs else None)

    def all_low(self, *, compiled: bool = False) -> Run:
        """Return a loop by hand over a model whose weights are low."""
        model: nn.Module = copy.deepcopy(self.model).to(self.low)
        inputs = {k: v.to(self.low) if v.is_floating_point() else v for k, v in self.inputs.items()}
        one = self._loss(model, inputs, autocast=False, compiled=compiled, graphs=False)
        scaler = torch.amp.GradScaler(DEVICE, enabled=False)
        return Run(functools.partial(by_hand, one, list(model.parameters()), _adamw(model), scaler, 1))

    def _loss(
        self, model: nn.Module, inputs: Inputs, *, autocast: bool, compiled: bool, graphs: bool
    ) -> Callable[[], Tensor]:
        run: Any = _compiled(own_loss, self.small, graphs=graphs) if compiled else own_loss

        def loss() -> Tensor:
            if graphs:
                torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast(DEVICE, dtype=self.low, enabled=autocast):
                made: Tensor = run(model, inputs)
            return made

        return loss

    def by_fxamp(
        self, level: str, *, window: int = 1, weights: Any = "auto", compiled: bool = False, graphs: bool = False
    ) -> Run:
        """Return a TrainStep of the model converted at a level."""
        if not self._levels:
            levels = ("O1", "O2")
            self._levels.update(zip(levels, converted(self.model, self.inputs, self.low, *levels), strict=True))
        module = copy.deepcopy(self._levels[level]) if graphs else self._levels[level]
        optimizer = _adamw(module) if graphs else self.optimizer
        backend = "aot_eager" if self.small else "inductor"
        mode = {"mode": "reduce-overhead"} if graphs and not self.small else {}
        compile: Any = {"backend": backend, "dynamic": False, **mode} if compiled else False
        step = fxamp.TrainStep(module, None, optimizer, accumulate_steps=window, weights=weights, compile=compile)

        def note() -> str:
            return "; ".join(f"{what}: {text}" for what, text in compiled_rows(step.compiled)[1:])

        owned = functools.partial(_nbytes, module, optimizer) if graphs else None
        return Run(lambda: [step(self.inputs) for _ in range(window)], window, note, owned)


def _nbytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Return the bytes of a model and of the state of an optimizer."""
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *states))


def _adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-6, fused=True)  # slow: they share their weights


AUTOCAST = "torch.autocast"
FOURS, GRAPHED = f", windows of {WINDOW}", ", CUDA graphs"
# By variant: the variant of autocast to divide its time by, and how to make it.
Ways = Mapping[str, tuple[str, Callable[[Any], Run]]]
INFERENCE: Ways = {
    AUTOCAST: (AUTOCAST, Inference.by_hand),
    "torch.autocast, no_grad": (AUTOCAST, lambda b: b.by_hand(cached=True)),
    "fxamp O1": (AUTOCAST, lambda b: b.by_fxamp("O1", frozen=False)),
    "fxamp O1, frozen": (AUTOCAST, lambda b: b.by_fxamp("O1")),
    "fxamp O2, frozen": (AUTOCAST, lambda b: b.by_fxamp("O2")),
    "FP32 with TF32": (AUTOCAST, lambda b: b.by_hand(autocast=False)),
    "all low": (AUTOCAST, Inference.all_low),
}
COMPILED_INFERENCE: Ways = {
    AUTOCAST: (AUTOCAST, lambda b: b.by_hand(compiled=True)),
    "fxamp O1, frozen": (AUTOCAST, lambda b: b.by_fxamp("O1", compiled=True)),
    AUTOCAST + GRAPHED: (AUTOCAST + GRAPHED, lambda b: b.by_hand(compiled=True, graphs=True)),
    "fxamp O1, frozen" + GRAPHED: (AUTOCAST + GRAPHED, lambda b: b.by_fxamp("O1", compiled=True, graphs=True)),
    "FP32 with TF32": (AUTOCAST, lambda b: b.by_hand(autocast=False, compiled=True)),
    "all low": (AUTOCAST, lambda b: b.all_low(compiled=True)),
}
EAGER: Ways = {
    AUTOCAST: (AUTOCAST, Bench.by_hand),
    "fxamp O1": (AUTOCAST, lambda b: b.by_fxamp("O1")),
    "fxamp O2": (AUTOCAST, lambda b: b.by_fxamp("O2")),
    "FP32 with TF32": (AUTOCAST, lambda b: b.by_hand(autocast=False)),
    AUTOCAST + FOURS: (AUTOCAST + FOURS, lambda b: b.by_hand(window=WINDOW)),
    "fxamp O2 per_step" + FOURS: (
        AUTOCAST + FOURS, lambda b: b.by_fxamp("O2", window=WINDOW, weights="per_step")
    ),
    "fxamp O2 per_use" + FOURS: (AUTOCAST + FOURS, lambda b: b.by_fxamp("O2", window=WINDOW, weights="per_use")),
    "all low": (AUTOCAST, Bench.all_low),
}  # fmt: skip
COMPILED: Ways = {
    AUTOCAST: (AUTOCAST, lambda b: b.by_hand(compiled=True)),
    "fxamp O1": (AUTOCAST, lambda b: b.by_fxamp("O1", compiled=True)),
    AUTOCAST + GRAPHED: (AUTOCAST + GRAPHED, lambda b: b.by_hand(compiled=True, graphs=True)),
    "fxamp O1" + GRAPHED: (AUTOCAST + GRAPHED, lambda b: b.by_fxamp("O1", compiled=True, graphs=True)),
    "fxamp O2": (AUTOCAST, lambda b: b.by_fxamp("O2", compiled=True)),
    "fxamp O2" + GRAPHED: (AUTOCAST + GRAPHED, lambda b: b.by_fxamp("O2", compiled=True, graphs=True)),
    "FP32 with TF32": (AUTOCAST, lambda b: b.by_hand(autocast=False, compiled=True)),
    "all low": (AUTOCAST, lambda b: b.all_low(compiled=True)),
}
SMALL_COMPILED = 4  # the first of the compiled ways, which are slow to compile


def step_tasks(ways: Ways, bench: Any, small: bool) -> dict[str, Callable[[float], Rows]]:
    """Return a task for every low dtype, model and batch: BF16 first, and in it the batches of the first model."""
    order = [(n, b, low) for low in (BF16, FP16) for n, subject in SUBJECTS.items() for b in subject.batches]
    if small:
        low = BF16 if bench is Inference else FP16
        compiled = ways in (COMPILED, COMPILED_INFERENCE)
        order, ways = [("BERT-base", 2, low)], dict([*ways.items()][: SMALL_COMPILED if compiled else None])
    return {
        f"{name}, {SUBJECTS[name].shown(batch)}, {_word(low)}": functools.partial(
            measured, name, batch, low, small, ways, bench
        )
        for name, batch, low in order
    }


def measured(name: str, batch: int, low: torch.dtype, small: bool, ways: Ways, bench: Any, until: float) -> Rows:
    """Measure every way to train a model, or to call it; times last, the ways taking turns."""
    with contextlib.closing(bench(SUBJECTS[name], batch, low, small)) as made:
        yield from _measured(f"{name}, {SUBJECTS[name].shown(batch)}", made, ways, until)


def _measured(shown: str, bench: Any, ways: Ways, until: float) -> Rows:
    rows: dict[str, Row] = {}
    runs: dict[str, Run] = {}
    slowest = 0.0
    with tf32():
        for way, (_, make) in ways.items():
            row = rows[way] = {"model": shown, "low": _word(bench.low), "variant": way}
            begun = time.monotonic()
            if begun + slowest > until:  # what is ready is to be timed yet
                row["problem"] = NO_TIME
                continue
            try:
                runs[way], found = prepared(make, bench)
                row.update(found)
            except Exception as e:  # out of memory, say
                row["problem"] = first_line(e)
            tidy()
            row["ready after, s"] = time.monotonic() - begun
            slowest = max(slowest, row["ready after, s"])
            yield list(rows.values())
        timings = interleaved({way: run.call for way, run in runs.items()}, rounds(until, bench.small), warmup=1)
    for way, timing in timings.items():
        rows[way].update(ms=1e3 * timing.median / runs[way].window, spread=1e3 * timing.spread / 2 / runs[way].window)
        if base := timings.get(ways[way][0]):
            rows[way]["over autocast"] = timing.median / base.median
    yield list(rows.values())


def prepared(make: Callable[[Any], Run], bench: Any) -> tuple[Run, Row]:
    """Make a way to train, warm it up, and measure the memory and the kernels of a window."""
    before = reserved()
    run = make(bench)
    for _ in range(WARMUP):
        run.call()
    if not CUDA:
        return run, {"note": run.note()}
    row: Row = {"peak MiB": peak(run, before)}
    try:
        row |= kernels(run)
    except Exception as e:  # where profiling is not allowed, times are still to be had
        row["problem"] = f"profiler: {first_line(e)}"
    return run, {**row, "note": run.note()}


def reserved() -> int:
    """Return the bytes that torch has of the GPU and cannot give back."""
    tidy()
    return torch.cuda.memory_reserved() if CUDA else 0


def peak(run: Run, before: int) -> float:
    """Return the MiB that a window takes at its peak above what is held between windows.

    A CUDA graph allocates nothing when it runs. Its memory is what was reserved for it since `before`, apart from the
    model and the state of the optimizer that it has to itself.
    """
    pool = 0 if run.owned is None else reserved() - before - run.owned()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run.call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held + max(pool, 0)) / 2**20


# Kernels that only cast: those of aten for one tensor or several, and Triton's with nothing else fused into them.
_CASTS = re.compile(
    r"float16(?:tofloat32)?_copy_kernel|\bCopy<|(?:unrolled_elementwise_kernel|gpu_kernel_impl)<.*direct_copy_kernel"
    r"|^triton_[a-z]+_fused(?=\w*__to_copy)(?:_(?:_to_copy|t|transpose|permute|view))+_\d+"
)


def only_casts(kernel: str) -> bool:
    """Say by its name whether a kernel only changes a dtype."""
    return _CASTS.search(kernel) is not None


def kernels(run: Run) -> Row:
    """Return, for one micro-batch or call, the kernels that ran, their time, and how many calls launched them."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run.call()
        torch.cuda.synchronize()
    events = [e for e in profiled.key_averages() if not e.is_user_annotation]
    device = [e for e in events if e.device_type == DeviceType.CUDA]
    ran = sum(e.count for e in device if not e.key.startswith(("Memcpy", "Memset")))
    launches = sum(e.count for e in events if e.device_type == DeviceType.CPU and "Launch" in e.key)
    busy = sum(e.self_device_time_total for e in device) / 1e3
    casts = [e for e in device if only_casts(e.key)]
    found = {"kernels": ran, "cast kernels": sum(e.count for e in casts), "launches": launches, "GPU ms": busy}
    share = 100 * sum(e.self_device_time_total for e in casts) / 1e3 / max(busy, 1e-9)
    return {**{what: number / run.window for what, number in found.items()}, "casts, % of GPU ms": share}


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """Let a GPU multiply FP32 matrices as TF32, as people train."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if CUDA else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def rounds(until: float, small: bool) -> Iterator[int]:
    """Yield the rounds of a measurement, the first to warm up, fewer where time is over."""
    for number in range(1 + (2 if small else ROUNDS)):
        if number > FEWEST and time.monotonic() > until:
            return
        yield number


# Losses.

CURVE = (1, 3, 10, 30, 100, 300)  # steps whose loss is shown; the small form stops at the third
LEARNER = SUBJECTS["GPT-2"]
CURVES: Mapping[str, tuple[str | None, bool]] = {  # a level of fxamp, and whether autocast is on
    AUTOCAST: (None, True), "fxamp O1": ("O1", False), "fxamp O2": ("O2", False), "FP32 with TF32": (None, False),
}  # fmt: skip


def curve_tasks(small: bool) -> dict[str, Callable[[float], Rows]]:
    """Return the one task."""
    return {f"GPT-2, {_word(BF16)}": functools.partial(curves, small)}


def curves(small: bool, until: float) -> Rows:
    """Train a GPT-2 of two layers in every way, on the same batches from the same weights."""
    rows: list[Row] = []
    expected: list[float] = []
    with tf32():
        for way, (level, autocast) in CURVES.items():
            losses = trained_losses(level, autocast, CURVE[2] if small else CURVE[-1], small)
            expected = expected or losses
            apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            shown = {f"loss at {n}": losses[n - 1] for n in CURVE if n <= len(losses)}
            rows.append({"variant": way, **shown, "apart from autocast": apart})
            yield list(rows)


def trained_losses(level: str | None, autocast: bool, steps: int, small: bool) -> list[float]:
    """Return the losses of a training at a level of fxamp, under autocast, or in FP32."""
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model, inputs = LEARNER.build(8, small, **({} if small else LEARNER.shallow), **none)
    called = next(converted(model, inputs, BF16, level)) if level else model
    optimizer = AdamW(model.parameters(), lr=3e-4)
    words = torch.Generator().manual_seed(0)
    follows = torch.randperm(model.config.vocab_size, generator=words)  # the word that mostly comes after each word
    losses = []
    for _ in range(steps):
        batch, tokens = inputs["input_ids"].shape
        ids = sentences(follows, batch, tokens, words).to(DEVICE)
        with torch.autocast(DEVICE, dtype=BF16, enabled=autocast):
            loss = own_loss(called, {"input_ids": ids, "labels": ids})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def sentences(follows: Tensor, batch: int, tokens: int, generator: torch.Generator) -> Tensor:
    """Return sentences of random words, except that three of four are what `follows` the word before."""
    ids = torch.randint(len(follows), (batch, tokens), generator=generator)
    learned = torch.rand(batch, tokens, generator=generator) < 0.75
    for at in range(1, tokens):
        ids[:, at] = torch.where(learned[:, at], follows[ids[:, at - 1]], ids[:, at])
    return ids


# Random programs.

SEEDS, TASKS = 25, 40  # of a task, and tasks


def program_tasks(small: bool) -> dict[str, Callable[[float], Rows]]:
    """Return a task for some seeds each."""
    size, firsts = (4, (0,)) if small else (SEEDS, range(0, SEEDS * TASKS, SEEDS))
    return {f"{n} to {n + size - 1}": functools.partial(programs, range(n, n + size)) for n in firsts}


def programs(seeds: range, until: float) -> Rows:
    """Compare O1 of random programs with autocast."""
    torch.use_deterministic_algorithms(CUDA, warn_only=True)
    found: dict[str, list[int]] = {name: [] for name in (*VERDICTS, "differs")}
    for seed in seeds:
        if (program := generate(seed)) is not None:
            found[verdict(program, FP16 if seed % 3 == 0 else BF16)].append(seed)
        row: Row = {name: len(found[name]) for name in VERDICTS}
        yield [{"seeds": f"{seeds[0]} to {seeds[-1]}", **row, "differs": ", ".join(map(str, found["differs"]))}]


VERDICTS = ("equal", "fails in eager mode", "fails in Dynamo", "as captured", "deviation named")


def verdict(program: Program, low: torch.dtype) -> str:
    """Return what becomes of a program at O1: outputs and gradients are compared with those of autocast, bit by bit."""

    def outcome(called: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.compiler.reset()
        model, args = program.build()
        call = called(model.to(DEVICE))
        args = pytree.tree_map_only(Tensor, lambda t: t.detach().to(DEVICE).requires_grad_(t.requires_grad), args)
        torch.manual_seed(0)
        outputs = floats(call(*args))
        if trained := [t.double().mean() for t in outputs if t.requires_grad]:
            torch.stack(trained).sum().backward()
        return [*(t.detach() for t in outputs), *(p.grad for p in model.parameters() if p.grad is not None)]

    try:
        expected = outcome(lambda model: UnderAutocast(model, low, DEVICE))
    except Exception:
        return VERDICTS[1]
    views: list[Any] = []

    def view(model: nn.Module) -> Any:
        policy = fxamp.Policy("O1", dtype=low, output_dtype="autocast")
        views.append(fxamp.compile(model, policy=policy, backend="eager"))
        return views[0]

    try:
        got = outcome(view)
        if same(expected, got):
            return VERDICTS[0]
        captured = outcome(lambda model: torch.compile(UnderAutocast(model, low, DEVICE), backend="eager"))
    except dynamo_errors().TorchRuntimeError:
        return VERDICTS[2]
    if same(captured, got):
        return VERDICTS[3]
    return VERDICTS[4] if fxamp.plan_of(views[0]).deviations else "differs"


# The facts of measure_facts.py.


def fact_tasks(small: bool) -> dict[str, Callable[[float], Rows]]:
    """Return a task for every case."""
    cases = measure_facts.cases()
    return {case.key: functools.partial(facts_of, case) for case in (cases[:2] if small else cases)}


def facts_of(case: measure_facts.Case, until: float) -> Rows:
    """Measure which facts hold of an op, on few values."""
    yield [
        {"op": case.key, "low": _word(low), "holds": measure_facts.measure(case, DEVICE, low, quick=True),
         "assumed": _assumed().get(case.key, {}).get(str(low).removeprefix("torch."), [])}
        for low in (BF16, FP16)
    ]  # fmt: skip


@functools.cache
def _assumed() -> Any:
    files = [measure_facts.ROOT / "passes" / "ops" / f"facts_{device}.json" for device in (DEVICE, "cpu")]
    return json.loads(next(file for file in files if file.exists()).read_text())["facts"]


def differing(rows: Sequence[Row]) -> list[Row]:
    """Return what holds and was not assumed, and what was assumed and does not hold."""
    found = []
    for row in rows:
        if row.get("problem"):
            found.append(row)
            continue
        more, less = (
            [n for n in NAMES if (n in row[a]) > (n in row[b])] for a, b in (("holds", "assumed"), ("assumed", "holds"))
        )
        if more or less:
            found.append({**row, "holds, not assumed": ", ".join(more), "assumed, does not hold": ", ".join(less)})
    return found


# The sections.


@dataclass(frozen=True)
class Section:
    """A part of the report: its tasks by name, which part of the time they may take, and how it reads."""

    title: str
    share: float
    tasks: Callable[[bool], dict[str, Callable[[float], Rows]]]
    columns: tuple[str, ...]
    legend: str
    shown: Callable[[Sequence[Row]], Sequence[Row]] = lambda rows: rows


_TIMES = (
    "model", "low", "variant", "ms", "spread", "over autocast", "peak MiB", "kernels", "cast kernels",
    "casts, % of GPU ms", "launches", "GPU ms", "ready after, s", "note",
)  # fmt: skip
_LEGEND = (
    f"Times are medians of {ROUNDS} rounds in which the variants take turns, the GPU idle at the start of each; the\n"
    "spread is half the distance between the quartiles. A time is divided by that of the variant of autocast that is\n"
    "compiled, or in CUDA graphs, or in windows of several micro-batches, as it is itself. The peak is what a window\n"
    "takes above what is held between windows, and all that is reserved for CUDA graphs. fxamp returns logits in\n"
    'FP32, as the model does: for BERT, 32 x 128, a copy of 500 MB, which `output_dtype="autocast"` leaves out'
)
_OF_STEPS = (
    f"{_LEGEND}.\nWhole steps, with fused AdamW, and in FP16 with loss scaling (but all low). Times, kernels,\n"
    "launches and GPU ms, in which the GPU was busy, are of one micro-batch. Batches of a model go from one that is\n"
    "bound by launching kernels (the step takes much longer than its GPU ms) to one that is bound by computing"
)
_OF_CALLS = (
    f"{_LEGEND}.\nAll are under `torch.inference_mode`, in which autocast keeps no cast of a weight, but one that\n"
    f"says `no_grad`: there it keeps casts as long as its region is open, here {WINDOW} calls. `fxamp.frozen` and\n"
    "all low hold 16-bit weights, which the peak does not count. Times, kernels, launches and GPU ms are of one\n"
    "call. The note compares the output with that of eager autocast"
)
SECTIONS = {
    "inference": Section(
        "Inference", 50, functools.partial(step_tasks, INFERENCE, Inference), _TIMES, f"{_OF_CALLS}."
    ),
    "train": Section(
        "A TrainStep: waits, CUDA graphs, and the loop by hand", 60, train_tasks,
        ("step", "waited", "says it waits", "distance", "loss scale", "compiled"),
        'O1 of BERT-base with two layers. `waited`: the first wait for the GPU of\n'
        f'{WATCHED} windows, found by `torch.cuda.set_sync_debug_mode("error")`. The distance from a loop by hand\n'
        "under `torch.autocast`, from the same weights and not compiled, is divided by how far that has\n"
        "moved: 0 is bit-equal.",
    ),
    "agreement": Section(
        "O1 against the kernels of torch.autocast", 45, agreement_tasks,
        ("model", "low", "values", "wrong", "first", "output", "gradients", "autocast's own"),
        "Two layers of each, in evaluation mode. `wrong`: values in another dtype than autocast's for which the plan\n"
        "names no reason. Autocast's own: how many gradients it repeats to the bit. How far any are apart is\n"
        "over its norm; O1 adds up in 16 bits what comes back to a value that it casts once.",
    ),
    "programs": Section(
        "Random programs", 60, program_tasks, ("seeds", *VERDICTS, "differs"),
        "O1 against autocast, outputs and gradients bit by bit; every third program in FP16. As captured: not equal,\n"
        "but with the bits of `torch.compile(backend=\"eager\")` under autocast. The seeds of those that differ are\n"
        "named: the program is `tests.support.trial.generate.generate(seed)`. One that makes tensors on the CPU fails\n"
        "in eager mode, or differs where it computes with them alone: autocast for CUDA leaves such ops as they are.",
    ),
    "eager": Section("Steps", 80, functools.partial(step_tasks, EAGER, Bench), _TIMES, f"{_OF_STEPS}."),
    "compiled": Section(
        "Steps compiled by Inductor", 150, functools.partial(step_tasks, COMPILED, Bench), _TIMES,
        f"{_OF_STEPS}.\nAutocast has CUDA graphs by `torch.compile(mode=\"reduce-overhead\")`.",
    ),
    "compiled_inference": Section(
        "Inference compiled by Inductor", 45, functools.partial(step_tasks, COMPILED_INFERENCE, Inference), _TIMES,
        f"{_OF_CALLS}.",
    ),
    "loss": Section(
        "Losses", 35, curve_tasks, ("variant", *(f"loss at {n}" for n in CURVE), "apart from autocast"),
        "A GPT-2 of two layers in BF16 with AdamW, on sentences in which three words of four follow from the word\n"
        "before: the loss at some steps, and the largest distance from autocast's over all steps.",
    ),
    "facts": Section(
        "Facts about kernels that differ from those assumed", 50, fact_tasks,
        ("op", "low", "holds, not assumed", "assumed, does not hold"),
        "By `reports/measure_facts.py`, on fewer values than it takes itself: what does not hold does not.", differing,
    ),
}  # fmt: skip


def run_section(name: str, data: Any, folder: Path, small: bool, until: float) -> None:
    """Run the tasks of a section that are not done yet, and write both files after every row."""
    found: dict[str, list[Row]] = data["sections"].setdefault(name, {})
    left: list[str] = []
    data["left"][name] = left
    for label, run in tqdm(SECTIONS[name].tasks(small).items(), desc=name, unit="task", mininterval=5):
        if label in found and not any(row.get("problem") for row in found[label]):
            continue
        if time.monotonic() > until:
            left.append(label)
            continue
        rows: list[Row] = []
        named = {SECTIONS[name].columns[0]: label}
        try:
            found[label] = [{**named, "problem": UNFINISHED}]
            write(data, folder)
            for rows in run(until):
                found[label] = [*rows, {**named, "problem": UNFINISHED}]
                write(data, folder)
            found[label] = rows
        except Exception as e:  # a row of its own: the rest goes on
            found[label] = [*rows, {**named, "problem": first_line(e)}]
        torch.compiler.reset()  # lets go of CUDA graphs and their memory
        tidy()
        write(data, folder)
    write(data, folder)


def tidy() -> None:
    """Give back the memory of the GPU that is no longer in use."""
    if CUDA:
        gc.collect()
        torch.cuda.empty_cache()


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of what it says."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0][:200]}" if said else type(error).__name__


def load(folder: Path, small: bool) -> Any:
    """Return what was measured before on the same machine in the same form, by section and task."""
    head = {"machine": _machine(DEVICE), "torch": torch.__version__, "small": small}
    file = folder / "gpu.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    same = all(before.get(what) == value for what, value in head.items())
    return before if same else {"made": making(DEVICE), **head, "left": {}, "sections": {}}


def write(data: Any, folder: Path) -> None:
    """Write both files."""
    write_report(folder, "gpu", data, to_markdown(data))


def to_markdown(data: Any) -> str:
    """Return the report: a table a section."""
    form = ", in its small form, which measures nothing" if data["small"] else ""
    machine = f"{data['machine']}, torch {data['torch']}{form}"
    parts = [f"# What only a GPU can show\n\nWritten by `reports/gpu.py` on {machine}.\n"]
    for name, section in SECTIONS.items():
        if name not in data["sections"]:
            continue
        every = [row for rows in data["sections"][name].values() for row in rows]
        rows = section.shown(every)
        columns = [c for c in (*section.columns, "problem") if any(row.get(c) not in (None, "") for row in rows)]
        table = [[_cell(row.get(c)) for c in columns] for row in rows]
        left = data["left"].get(name)
        parts.append(
            f"## {section.title}\n\n{section.legend}\n\n"
            + (tabulate(table, columns, "pipe", disable_numparse=True) if rows else f"None in {len(every)} rows.")
            + (f"\n\nLeft out for lack of time: {'; '.join(left)}." if left else "")
            + "\n"
        )
    if least := least_gains(data):
        table = [[_cell(value) for value in row.values()] for row in least]
        parts.append(
            "## Where fxamp gains least\n\nThe fastest variant of fxamp against the fastest of autocast and FP32, "
            "compiled or not as the section says.\nAbove 1 fxamp does not win.\n\n"
            + tabulate(table, list(least[0]), "pipe", disable_numparse=True)
            + "\n"
        )
    return "\n".join(parts)


def least_gains(data: Any) -> list[Row]:
    """Return, of the models and batches that were timed, those in which fxamp gained least over the best of the others.

    Models with 16-bit weights, which train differently, are not counted.
    """
    found = []
    for name in ("inference", "eager", "compiled", "compiled_inference"):
        for rows in data["sections"].get(name, {}).values():
            timed = [row for row in rows if row.get("ms") and row["variant"] != "all low"]
            ours, others = (
                min(
                    (row for row in timed if row["variant"].startswith("fxamp") is of),
                    key=lambda r: r["ms"],
                    default=None,
                )
                for of in (True, False)
            )
            if ours and others:
                best = {"fastest of fxamp": ours["variant"], "fastest of the others": others["variant"]}
                where = {"section": SECTIONS[name].title, "model": ours["model"], "low": ours["low"]}
                found.append({**where, **best, "ms over ms": ours["ms"] / others["ms"]})
    return sorted(found, key=lambda row: -row["ms over ms"])[:LEAST]


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sections asked for, each for its share of the time, and print the report."""
    parser = argparse.ArgumentParser(description="Run what only a GPU can show.")
    parser.add_argument("section", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="in all (default: %(default)g)")
    parser.add_argument("--small", action="store_true", help="tiny models, on a CPU too, to see that it runs")
    parser.add_argument(
        "--here", action="store_true", help="in this process, in which nothing ends what takes too long"
    )
    parser.add_argument("-o", "--output", type=Path, default=HERE, metavar="FOLDER", help="where to write")
    options = parser.parse_args(arguments)
    if unknown := set(options.section) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}: choose from {', '.join(SECTIONS)}")
    if not CUDA and not options.small:
        parser.error("there is no GPU here: --small runs all of it on a CPU, with tiny models")
    if options.small and options.output == HERE:
        parser.error("--small measures nothing, and is no report to keep here: say by -o where to write")
    names = [name for name in SECTIONS if name in (options.section or SECTIONS)]
    until = time.monotonic()
    for name in names:
        # What a section does not need is the next one's.
        until += options.seconds * SECTIONS[name].share / sum(SECTIONS[n].share for n in names)
        if options.here:
            with quiet():
                run_section(name, load(options.output, options.small), options.output, options.small, until)
            continue
        seconds = max(0.0, until - time.monotonic())
        small = ["--small"] if options.small else []
        command = [
            sys.executable,
            __file__,
            name,
            "--here",
            "--seconds",
            str(seconds),
            "-o",
            str(options.output),
            *small,
        ]
        with contextlib.suppress(subprocess.TimeoutExpired):  # the row that it was at says so
            subprocess.run(command, timeout=seconds + GRACE, check=False)
    sys.stdout.write(options.output.joinpath("gpu.md").read_text())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out what torch and transformers warn of and log while models are measured that are not to be used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


if __name__ == "__main__":
    main()

"""A compiled training step is the step that is not compiled, in few graphs that are compiled once."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode

import fxamp
from fxamp.train.compiled_step import CompiledStep
from fxamp.train.describe import compiled_rows
from fxamp.train.step import TrainStep
from passes.contract.errors import PolicyError
from tests.support.front_ends import tensors
from tests.support.helpers import OLD_DYNAMO, Layers

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of a module that torch imports

VOCABULARY, TOKENS = 61, 11


@pytest.fixture(autouse=True)
def _forget_other_sizes() -> None:
    """Let Dynamo begin with fixed sizes: for code that it has seen with several, it goes on with symbols."""
    torch.compiler.reset()


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    # Of a dropout in a low dtype AOTAutograd computes the backward by another kernel, with or without fxamp.
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    small = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=48, **small, **none))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 48, "bos_token_id": 0, "eos_token_id": 0}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, use_cache=False, **small, **none))


class Logits(NamedTuple):
    """What a model of `transformers` returns, as far as it is read here."""

    logits: Tensor


class OneBlock(nn.Module):
    """A transformer of one block, whose head is its embedding: Dynamo traces it in a third of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, 32), nn.LayerNorm(32)
        self.qkv, self.up, self.down = nn.Linear(32, 96), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, input_ids: Tensor) -> Logits:
        x = self.embedding(input_ids)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.down(F.gelu(self.up(x)))
        return Logits(F.linear(x, self.embedding.weight))


class WithLoss(nn.Module):
    """A model that returns its loss, a number and its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> dict[str, Any]:
        output = self.model(input_ids)
        return {"loss": loss_fn(output, input_ids), "count": 3, "logits": output.logits}


MODELS: dict[str, Callable[[], nn.Module]] = {"one block": OneBlock, "bert": _bert, "gpt2": _gpt2}


def ids_of(seed: int, rows: int = 4) -> Tensor:
    return torch.randint(VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))


def loss_fn(output: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), ids.flatten())


def converted(name: str, policy: str = "O1,dtype=bf16") -> Any:
    torch.manual_seed(0)
    return fxamp.convert(MODELS[name]().train(), policy=policy)


def train(name: str, policy: str, windows: int, accumulate: int = 1, **settings: Any) -> tuple[TrainStep, list[Any]]:
    """Train with clipping and a scheduler; the last window is of smaller batches. Returns what a run shows."""
    model = converted(name, policy)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    step = TrainStep(
        model, loss_fn, optimizer, accumulate_steps=accumulate, max_grad_norm=1.0,
        scheduler=LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 4)), **settings,
    )  # fmt: skip
    shown: list[Any] = []
    torch.manual_seed(1)
    for window in range(windows):
        for micro in range(accumulate):
            ids = ids_of(window * accumulate + micro, 4 if window + 1 < windows else 3)
            result = step({"input_ids": ids}, ids)
        shown.append((result.loss.item(), result.scale, result.stepped, result.grad_norm.item()))  # type: ignore[union-attr]
    return step, [shown, [p.detach().clone() for p in model.parameters()]]


# ------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize(
    ("name", "policy", "accumulate"),
    [
        ("one block", "O1,dtype=bf16", 2),
        *(
            pytest.param(name, policy, accumulate, marks=pytest.mark.matrix)
            for name, policy in (("bert", "O1,dtype=bf16"), ("gpt2", "O2,dtype=fp16")) for accumulate in (1, 3)
        ),
    ],
)  # fmt: skip
def test_a_traced_step_gives_the_bits_of_the_eager_one(name: str, policy: str, accumulate: int) -> None:
    step, (shown, parameters) = train(name, policy, 3, accumulate, weights="per_step", compile="aot_eager")
    _, (expected, theirs) = train(name, policy, 3, accumulate)
    assert shown == expected
    assert all(map(torch.equal, parameters, theirs))
    assert step.compiled is not None
    assert not step.compiled.loss.breaks
    assert not step.compiled.loss.fallbacks
    assert step.compiled.loss.frames == 2  # the second for the smaller batch


class Frozen(nn.Module):
    """Two converted layers, of which the first is read without gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        x = torch.ones(3, 4)
        self.parts = nn.ModuleList(fxamp.convert(nn.Linear(4, 4), (x,), policy="O1,dtype=bf16") for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.parts[0](x)
        return self.parts[1](x)


def test_a_loss_that_is_compiled_by_itself_reads_the_weights() -> None:
    @torch.compile(backend="aot_eager")
    def loss_of_two(model: nn.Module, output: Tensor) -> Tensor:
        return (output + model(output)).sum()

    found = []
    for weights in ("per_step", "per_use"):
        torch.compiler.reset()
        model = Frozen()
        loss: Any = functools.partial(loss_of_two, model)
        step = TrainStep(model, loss, SGD(model.parameters(), lr=0.1), weights=weights)
        step(torch.ones(3, 4))
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_step_that_converts_finds_its_loss_scale_at_the_first_call_and_reports_its_plan() -> None:
    def step_of(compile: Any, convert: bool) -> TrainStep:
        torch.manual_seed(0)
        model: Any = OneBlock().train()
        kwargs = {"input_ids": ids_of(0)}
        called = fxamp.convert(model, kwargs=kwargs, policy="O1,dtype=fp16") if convert else model
        return TrainStep(called, loss_fn, SGD(model.parameters(), lr=0.1), compile=compile)

    ours = step_of({"backend": "fxamp", "options": {"policy": "O1,dtype=fp16", "backend": "aot_eager"}}, convert=False)
    theirs = step_of(False, convert=True)
    for index in range(2):
        results = [step({"input_ids": ids_of(index)}, ids_of(index)) for step in (ours, theirs)]
        assert [result.scale for result in results] == [2.0**16] * 2
        assert torch.equal(results[0].loss, results[1].loss)
    assert ours.compiled is not None
    assert (ours.compiled.loss.frames, ours.compiled.loss.breaks) == (1, [])  # the loss is in the graph
    assert "embedding" in str(fxamp.report(ours))
    assert dict(fxamp.report(ours).training)["compiled"] == "by 'fxamp'"


# ------------------------------------------------------------------------------------- what is saved for backward


_VIEWS = [getattr(torch.ops.aten, name).default for name in ("t", "permute", "view")]


def _without_views(node: torch.fx.Node) -> torch.fx.Node:
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node


class Saved:
    """A backend with torch's min-cut partitioner, as Inductor has, that notes what forward hands to backward.

    `bytes` are those of the storages that its first graph hands on, with low inputs, which are kept casts, and without
    all other inputs.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.bytes = 0

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from functorch.compile import (  # type: ignore[import-untyped]
            make_boxed_func,
            min_cut_rematerialization_partition,
        )
        from torch._dynamo.backends.common import aot_autograd

        def forward(graph: GraphModule, _: Any) -> Any:
            outputs = graph.graph.output_node().all_input_nodes
            made = [node.meta.get("val") for node in outputs if _without_views(node).op != "placeholder"]
            self.tensors += [value for value in made if isinstance(value, Tensor)]
            storages = {root: root.meta.get("val") for root in map(_without_views, outputs)}
            self.bytes = self.bytes or sum(
                value.numel() * value.element_size() for root, value in storages.items()
                if isinstance(value, Tensor) and (root.op != "placeholder" or value.dtype == torch.bfloat16)
            )  # fmt: skip
            return make_boxed_func(graph.forward)

        def backward(graph: GraphModule, _: Any) -> Any:
            return make_boxed_func(graph.forward)

        run: Any = aot_autograd(
            fw_compiler=forward, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition
        )
        return run(gm, inputs)


def by_step(model: nn.Module, backend: Saved, weights: Any) -> None:
    step = TrainStep(model, loss_fn, SGD(model.parameters(), lr=0.1), weights=weights, compile={"backend": backend})
    step({"input_ids": ids_of(0)}, ids_of(0))


def saved_under_autocast(model: nn.Module) -> int:
    backend = Saved()

    def loss(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(model(input_ids=ids), ids)

    torch.compile(loss, backend=backend)(ids_of(0)).backward()
    return backend.bytes


@pytest.mark.parametrize(
    ("name", "policy", "weights"),
    [
        ("one block", "O1,dtype=bf16", "per_step"),
        *(
            pytest.param(name, policy, weights, marks=pytest.mark.matrix)
            for name in ("gpt2", "bert") for policy in ("O1,dtype=bf16", "O2,dtype=bf16")
            for weights in ("per_use", "per_step")
        ),
    ],
)  # fmt: skip
def test_no_more_is_saved_for_backward_than_under_compiled_autocast(name: str, policy: str, weights: Any) -> None:
    model, backend = converted(name, policy), Saved()
    by_step(model, backend, weights)
    torch.manual_seed(0)
    theirs = MODELS[name]().train()
    theirs = torch.export.export(theirs, (), {"input_ids": ids_of(0)}).module()  # where masks are made the same way
    assert 0 < backend.bytes <= saved_under_autocast(theirs)


# ------------------------------------------------------------------------------------- the output


@pytest.mark.parametrize("loss", [loss_fn, None])
@pytest.mark.parametrize("compile", ["aot_eager", pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("weights", ["per_use", "per_step"])
def test_a_compiled_step_keeps_of_the_output_what_it_is_asked_for(compile: Any, weights: Any, loss: Any) -> None:
    results, logits = [], list[list[Any]]()
    for output in (None, "low", "full"):
        model = converted("one block") if loss is not None else WithLoss(converted("one block"))
        step = TrainStep(model, loss, SGD(model.parameters(), lr=0.1), weights=weights, compile=compile, output=output)
        results.append([step({"input_ids": ids_of(i)}, ids_of(i) if loss is not None else None) for i in (0, 1)])
        logits.append([r.output if r.output is None else tensors(r.output)[-1] for r in results[-1]])
    none, low, full = logits
    assert none == [None, None]
    assert [(t.dtype, t.requires_grad) for t in low] == [(torch.bfloat16, False)] * 2
    assert [(t.dtype, t.requires_grad) for t in full] == [(torch.float32, False)] * 2
    assert all(map(torch.equal, full, (t.float() for t in low)))
    losses = [torch.stack([result.loss for result in run]) for run in results]
    for other in losses[1:]:  # Inductor fuses a graph of other outputs in other kernels
        torch.testing.assert_close(other, losses[0], rtol=0 if compile == "aot_eager" else 1e-5, atol=0)


class Object:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def test_an_output_that_cannot_be_kept_detached_is_refused() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = OneBlock()

        def forward(self, input_ids: Tensor) -> Object:
            return Object(self.block(input_ids).logits)

    model = fxamp.convert(Wrapped(), policy="O1,dtype=bf16")
    step = TrainStep(model, loss_fn, SGD(model.parameters(), lr=0.1), compile="aot_eager", output="low")
    with pytest.raises(PolicyError, match=r"returns an object of class Object, .*: leave output= out"):
        step({"input_ids": ids_of(0)}, ids_of(0))
    step = TrainStep(model, loss_fn, SGD(model.parameters(), lr=0.1), compile="aot_eager")
    assert step({"input_ids": ids_of(0)}, ids_of(0)).output is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"output": "half", "compile": True}, 'output must be None, "low" or "full", got \'half\''),
        ({"output": "low"}, "says what a compiled step keeps .* leave it out"),
    ],
)
def test_an_output_that_cannot_be_asked_for_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        small(**settings)


# ------------------------------------------------------------------------------------- what goes wrong, and is said


def small(**settings: Any) -> TrainStep:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return TrainStep(model, lambda out: out.square().mean(), SGD(model.parameters(), lr=0.1), **settings)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(PolicyError, match=r"LBFGS evaluates the loss several times .* together with compile=True"):
        TrainStep(model, None, LBFGS(model.parameters()), compile=True)


def test_what_is_compiled_already_is_refused_with_the_way_out() -> None:
    model: Any = torch.compile(nn.Linear(4, 3), backend="eager")
    with pytest.raises(PolicyError, match=r"the model is compiled by torch\.compile already"):
        TrainStep(model, None, SGD(model.parameters(), lr=0.1), compile=True)


def test_what_is_converted_already_is_not_converted_again() -> None:
    model = fxamp.convert(nn.Linear(4, 3), (torch.randn(2, 4),))
    with pytest.raises(PolicyError, match="compile='fxamp' converts the model, and the model is converted already"):
        TrainStep(model, None, SGD(model.parameters(), lr=0.1), compile="fxamp")


HAS_NOTES = pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before Python 3.11")


def fails(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    raise ZeroDivisionError("this backend divides by zero")


@HAS_NOTES
def test_the_error_of_a_backend_is_its_own_with_a_note_of_what_it_was_given() -> None:
    step = small(compile={"backend": fails})
    with pytest.raises(Exception, match="this backend divides by zero") as raised:
        step(torch.randn(2, 4))
    assert raised.value.__notes__ == [
        "The backend 'fails' failed on the graph 'model and loss' of this TrainStep. Try compile='aot_eager' to see "
        "whether the graph is at fault, or compile=False to train uncompiled."
    ]
    assert all(p.grad is None for p in step.model.parameters())


@HAS_NOTES
def test_without_a_cpp_compiler_the_way_that_needs_none_is_named() -> None:
    step = small(compile={"options": {"cpp.cxx": ("no-such-compiler",)}})
    with pytest.raises(Exception, match="No working C") as raised:
        step(torch.randn(2, 4))
    assert "compile='aot_eager', which compiles no kernels" in raised.value.__notes__[0]


@pytest.mark.skipif(OLD_DYNAMO, reason="Dynamo fails where code raises an error")
def test_an_error_in_the_loss_is_the_one_of_the_eager_step() -> None:
    model = nn.Linear(4, 3)
    step = TrainStep(model, None, SGD(model.parameters(), lr=0.1), compile="aot_eager")
    with pytest.raises(PolicyError, match=r"the output \(Tensor\) has no loss"):
        step(torch.randn(2, 4))


# ------------------------------------------------------------------------------------- what became of it


def test_breaks_recompiles_and_fallbacks_are_counted_and_named() -> None:
    def breaks(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x)

    torch.manual_seed(0)
    model = Layers(breaks, first=nn.Linear(4, 4), last=nn.Linear(4, 3))
    step = TrainStep(model, lambda out: out.square().mean(), SGD(model.parameters(), lr=0.1),
                     compile={"backend": "aot_eager", "dynamic": False})  # fmt: skip
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in (2, 3, 4):
            step(torch.randn(rows, 4))
    said = dict(compiled_rows(step.compiled))
    assert said["compiled"] == "by 'aot_eager'"
    assert "graph break" in said["model and loss"]
    assert Path(__file__).name in said["model and loss: graph break"]
    assert "size mismatch" in said["model and loss: recompile"]
    assert "recompile limit" in said["model and loss: fallback"]


def test_a_cuda_graph_is_not_captured_where_there_is_no_cuda_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    step = small(compile={"mode": "reduce-overhead"})
    assert step.compiled is not None
    assert step.compiled.cuda_graph == "none: there is no CUDA device here"


def test_for_a_cuda_graph_gradients_stay_where_they_are_and_are_zeroed() -> None:
    def trained(captures: bool) -> tuple[list[Any], list[Tensor], list[Any]]:
        step = small(compile="aot_eager", accumulate_steps=2, max_grad_norm=0.1)
        assert step.compiled is not None
        settings = dataclasses.replace(step.compiled.settings, captures=captures)
        step.compiled = CompiledStep(settings, step.model, step.weights)
        addresses = []
        for index in range(6):
            step(torch.randn(2, 4, generator=torch.Generator().manual_seed(index)))
            addresses.append([None if p.grad is None else p.grad.data_ptr() for p in step.model.parameters()])
        return addresses, [p.detach() for p in step.model.parameters()], [p.grad for p in step.model.parameters()]

    addresses, ours, gradients = trained(True)
    _, theirs, _ = trained(False)
    assert all(map(torch.equal, ours, theirs))
    assert all(found == addresses[0] for found in addresses)
    assert not any(g.any() for g in gradients)


def test_behind_a_break_a_compiled_step_decides_as_an_uncompiled_one() -> None:
    def breaks(self: Any, x: Tensor) -> Tensor:
        h = self.first(x)
        torch._dynamo.graph_break()
        scores = self.middle(h).pow(3.0)
        lowest = torch.finfo(scores.dtype).min
        return self.last(scores.masked_fill(scores > 2, lowest).softmax(-1).to(scores.dtype))

    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    decided = []
    for compiles in (False, "aot_eager"):
        torch.manual_seed(0)
        model = Layers(breaks, first=nn.Linear(4, 4), middle=nn.Linear(4, 4), last=nn.Linear(4, 3))
        step = fxamp.TrainStep(
            fxamp.convert(model, policy="O2,dtype=bf16"), F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1),
            compile=compiles,
        )  # fmt: skip
        loss = step(x, y).loss
        plan = fxamp.plan_of(step.model)
        decided.append((loss, [(d.op, d.colour, d.autocast_dtype, d.reason) for d in plan.decisions]))
    assert decided[0] == decided[1]
    assert ("pow", "bfloat16") in [row[:2] for row in decided[0][1]]


class Upcasts(TorchDispatchMode):
    """Keeps the shapes of the BF16 values that are cast to FP32."""

    def __init__(self, shapes: list[torch.Size]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes = shapes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (args[0].dtype, out.dtype) == (torch.bfloat16, torch.float32):
            self.shapes.append(out.shape)
        return out


class WithLogits(nn.Module):
    """A language model in small, whose own loss breaks the graph, as that of plain GPT-2 of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(ids))
        torch._dynamo.graph_break()
        return {"loss": F.cross_entropy(logits.float(), ids), "logits": logits}


@pytest.mark.parametrize("hooked", [False, True])
def test_of_a_model_with_its_own_loss_a_compiled_step_hands_out_the_loss_alone_behind_a_break_too(hooked: bool) -> None:
    ids, seen, losses = torch.arange(32), list[Tensor](), list[Any]()
    for compiles in (False, "aot_eager"):
        torch.manual_seed(0)
        model = WithLogits()
        view = fxamp.convert(model, policy="O1,dtype=bf16")
        if hooked:
            view.register_forward_hook(lambda *passed: seen.append(passed[-1]["logits"]))
        upcasts = list[torch.Size]()

        def compiled(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            def run(*args: Any) -> Any:
                with Upcasts(upcasts):  # noqa: B023
                    return gm(*args)

            return run

        how: Any = compiles and {"backend": compiled}
        step = fxamp.TrainStep(view, None, torch.optim.SGD(model.parameters(), 0.1), compile=how)
        losses += [step(ids).loss, step(ids).loss]
    assert torch.equal(losses[0], losses[2])
    assert torch.equal(losses[1], losses[3])
    assert all(map(torch.equal, seen[: len(seen) // 2], seen[len(seen) // 2 :]))
    assert bool(seen) == hooked
    assert upcasts.count(torch.Size([32, 32])) == 2  # in two steps, by cross_entropy: none to hand logits out


@pytest.mark.parametrize("compile", [False, "aot_eager"])
def test_a_hook_that_is_registered_after_the_first_call_runs_and_one_that_is_removed_does_not(compile: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    view = fxamp.convert(model, policy="O1,dtype=bf16")
    step = fxamp.TrainStep(view, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), compile=compile)
    x, y, calls = torch.ones(4, 8), torch.arange(4), list[int]()
    plain = float(step(x, y).loss)
    handle = model[0].register_forward_pre_hook(lambda *_: calls.append(0))
    step(x, y)
    step(x, y)
    zeroes = model[1].register_forward_hook(lambda module, args, out: out * 0)
    assert float(step(x, y).loss) == pytest.approx(math.log(4))
    assert len(calls) == 3
    zeroes.remove()
    handle.remove()
    assert float(step(x, y).loss) < plain
    assert len(calls) == 3


class Registers(nn.Module):
    """Registers the same module at each call, as models of `transformers` do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.inner = self.inner
        out: Tensor = self.inner(x)
        return out


def test_a_forward_that_registers_a_module_is_compiled_once() -> None:
    model, x, y = Registers(), torch.randn(6, 8), torch.randint(4, (6,))
    view = fxamp.convert(model, policy="O1,dtype=bf16")
    step = TrainStep(view, F.cross_entropy, SGD(model.parameters(), lr=0.1), compile="aot_eager")
    for _ in range(4):
        step(x, y)
    assert step.compiled is not None
    assert (step.compiled.loss.frames, step.compiled.loss.recompiles) == (1, [])

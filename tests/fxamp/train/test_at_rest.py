"""A compiled O2 is O1 whose saved values and gradients are stored in 16 bits: what it stores, counts, and its error."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import partitioners
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor import config, custom_graph_pass
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Node
from torch.optim import SGD
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import fxamp
from fxamp.measure.fake_cuda.count import count
from fxamp.measure.inductor import STORED
from fxamp.train import compiler, partitioner
from fxamp.train.at_rest import PARTS, AtRest, Part
from fxamp.train.describe import compiled_rows
from fxamp.train.partitioner import Partitioner
from fxamp.train.step import TrainStep
from passes.contract.plan import Stored

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of a module that torch imports
ROOT = Path(__file__).parents[3]
POLICY = fxamp.Policy("O2", dtype="bf16")
IDS = torch.randint(50, (128,), generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """A block of a transformer without attention; the stream that it adds to is FP32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


def blocks(count: int = 2, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    inner = (Block(width) for _ in range(count))
    model = nn.Sequential(nn.Embedding(50, width), *inner, nn.LayerNorm(width), nn.Linear(width, 50))
    for norm in (m for m in model.modules() if isinstance(m, nn.LayerNorm)):
        nn.init.normal_(norm.weight, 1.0, 0.3)  # with ones, rounding before or behind it would be the same
    return model


class Cut:
    """The blocks and their loss, cut in two after a change; both graphs have run node by node."""

    def __init__(self, change: Any, wrap: Any = None, ids: Tensor = IDS) -> None:
        graphs, model = list[GraphModule](), blocks()
        for i in (1, 2) if wrap else ():
            model[i] = wrap(model[i])

        def keep(gm: GraphModule, example_inputs: Any) -> Any:
            graphs.append(gm)
            return make_boxed_func(gm.forward)

        def compile(gm: GraphModule, inputs: list[Tensor]) -> Any:
            return aot_module_simplified(
                gm, inputs, fw_compiler=keep, bw_compiler=keep, partition_fn=Partitioner(change, ""),
                decompositions=select_decomp_table(),
            )  # fmt: skip

        @functools.partial(torch.compile, backend=compile)
        def loss_of(ids: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return F.cross_entropy(model(ids), ids)

        torch.compiler.reset()
        loss = loss_of(ids)
        loss.backward()
        self.loss, self.gradients = loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]
        self.forward, self.backward = graphs
        (output,) = self.forward.graph.find_nodes(op="output")
        self.saved = output.all_input_nodes

    def notes(self) -> list[tuple[str, str, str]]:
        """Return what forward and backward store, by part, module and line."""
        found = dict.fromkeys(stored for _, stored in (*noted(self.forward), *noted(self.backward)))
        return [(each.part, each.module.removeprefix("L['model']."), each.dtype) for each in found]

    def wide(self) -> list[str]:
        """Return what is saved in FP32 of the size of the stream."""
        values = {node.name: node.meta["val"] for node in self.saved if node.op != "placeholder"}
        return [name for name, v in values.items() if v.dtype == torch.float32 and v.numel() == 128 * 64]


def noted(graph: GraphModule) -> list[tuple[Node, Stored]]:
    return [(n, Stored(**n.meta[STORED])) for n in graph.graph.nodes if STORED in n.meta]


def at_rest(*parts: Part, policy: fxamp.Policy = POLICY) -> AtRest:
    return AtRest(torch.bfloat16, (policy,), parts)


def test_what_is_saved_is_stored_in_16_bits_and_forward_reads_it_unrounded() -> None:
    before, after = Cut(at_rest()), Cut(at_rest("saved"))
    assert not before.notes()
    assert after.notes() == [("saved", "3", "bfloat16")]
    assert torch.equal(after.loss, before.loss)
    assert len(after.wide()) == len(before.wide()) - 1
    saved = {node.name for node, _ in noted(after.forward)}
    assert saved <= {node.name for node in after.saved}
    differs = [not torch.equal(a, b) for a, b in zip(after.gradients, before.gradients, strict=True)]
    assert any(differs)
    assert not differs[-1]  # the last bias, whose gradient is that of the logits


def test_what_kernels_of_backward_hand_on_is_stored_in_16_bits() -> None:
    before, after = Cut(at_rest()), Cut(at_rest("backward"))
    assert {part for part, *_ in after.notes()} == {"backward"}
    assert len(after.notes()) >= 2  # the gradient of the stream, once a block
    assert torch.equal(after.loss, before.loss)
    assert after.wide() == before.wide()
    for node, _ in noted(after.backward):
        (wide,) = node.all_input_nodes
        assert any(user.target is node.target for user in node.users)  # what reads it in FP32
        assert wide.meta["val"].numel() == 128 * 64  # no statistic of rows


def test_statistics_of_rows_stay_as_they_are_however_many_rows_there_are() -> None:
    cut = Cut(at_rest(*PARTS), ids=IDS.repeat(64))
    sizes = {node.meta["val"].shape[-1] for graph in (cut.forward, cut.backward) for node, _ in noted(graph)}
    assert sizes == {64}


def test_a_module_that_a_policy_keeps_in_fp32_is_stored_so() -> None:
    assert "saved" in {part for part, *_ in Cut(at_rest(*PARTS)).notes()}
    policy = fxamp.Policy("O2", dtype="bf16", modules={nn.LayerNorm: "fp32"})
    assert not [part for part, module, _ in Cut(at_rest(*PARTS, policy=policy)).notes() if module == "3"]


class Checkpointed(nn.Module):
    """A block that is computed again in backward; what a policy says is saved."""

    def __init__(self, inner: nn.Module, by_policy: bool) -> None:
        super().__init__()
        self.inner, self.by_policy = inner, by_policy

    def forward(self, x: Tensor) -> Tensor:
        if self.by_policy:
            return checkpoint(self.inner, x, use_reentrant=False, context_fn=SELECTED)
        return checkpoint(self.inner, x, use_reentrant=False)


def _saves(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


SELECTED = functools.partial(create_selective_checkpoint_contexts, _saves)


@pytest.mark.parametrize("by_policy", [False, True])
def test_checkpoints_save_and_recompute_what_they_did(by_policy: bool) -> None:
    wrap = functools.partial(Checkpointed, by_policy=by_policy)
    before, after = Cut(at_rest(), wrap), Cut(at_rest(*PARTS), wrap)
    assert ("backward", "3", "bfloat16") in after.notes()
    assert torch.equal(after.loss, before.loss)
    assert [n.meta["val"].shape for n in after.saved] == [n.meta["val"].shape for n in before.saved]
    for ours, theirs in zip(after.gradients, before.gradients, strict=True):
        assert (ours - theirs).norm() <= 2**-7 * theirs.norm()


def test_another_choice_has_another_key_and_the_same_one_the_same_in_every_process() -> None:
    policies = (POLICY, fxamp.Policy("O2", dtype="bf16", modules={"head": "fp32"}))
    choices: list[tuple[Part, ...]] = [(), ("saved",), ("backward",), PARTS]
    each = [
        Partitioner(AtRest(torch.bfloat16, (p,), parts), "code") for p, parts in itertools.product(policies, choices)
    ]
    assert len({one.uuid() for one in each}) == len(each)
    again = pickle.loads(pickle.dumps(each[0]))
    assert again == each[0]
    assert again.uuid() == each[0].uuid()
    assert Partitioner(each[0].change, "other code").uuid() != each[0].uuid()


def step_of(policy: str = "O2,dtype=bf16", **settings: Any) -> TrainStep:
    model = blocks()
    settings.setdefault("compile", True)
    return TrainStep(fxamp.convert(model, policy=policy), F.cross_entropy, SGD(model.parameters(), lr=0.1), **settings)


class Theirs(custom_graph_pass.CustomPartitionerFn):
    """Stands for a partitioner of the user's."""

    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        return partitioners.default_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return "theirs"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the options with which backends are asked for from now on; what they compile runs as it is."""
    options: list[dict[str, Any]] = []

    def backend(name: Any, mode: str | None, given: dict[str, Any]) -> Any:
        def run(gm: GraphModule, inputs: Any) -> Any:
            options.append(given)
            return gm.forward

        return run

    monkeypatch.setattr(compiler, "inner_backend", backend)
    torch.compiler.reset()
    return options


def test_a_compiled_o2_is_the_plan_of_o1_with_a_partitioner(asked: list[dict[str, Any]]) -> None:
    losses = []
    for level in ("O1", "O2"):
        step = step_of(f"{level},dtype=bf16")
        losses.append(step(IDS, IDS).loss)
        assert step.compiled is not None
        assert not step.compiled.not_at_rest
        assert fxamp.plan_of(step.converted_model).policy.level == "O1"
    of_o1, _, of_o2, _ = asked  # beside those of the updates
    assert "custom_partitioner_fn" not in of_o1
    assert isinstance(of_o2.pop("custom_partitioner_fn"), Partitioner)
    assert of_o1 == of_o2
    assert torch.equal(*losses)


@pytest.mark.parametrize(
    ("policy", "compile", "reason"),
    [
        ("O2,dtype=fp16", True, "FP16 does not have the range"),
        ("O2,dtype=bf16", "aot_eager", "'aot_eager' is asked to compile"),
        ("O2,dtype=bf16", {"options": {"custom_partitioner_fn": Theirs()}}, "custom_partitioner_fn is Theirs"),
        ("O3,dtype=bf16", True, ""),
    ],
)
def test_where_it_cannot_be_the_plan_of_an_eager_o2_is_compiled(
    policy: str, compile: Any, reason: str, asked: list[dict[str, Any]]
) -> None:
    step, eager = step_of(policy, compile=compile), step_of(policy, compile=False)
    step(IDS, IDS)
    eager(IDS, IDS)
    assert step.compiled is not None
    assert step.compiled.not_at_rest.startswith(reason)
    assert bool(reason) == any("O2 as when uncompiled" in row for row in compiled_rows(step.compiled))
    assert not isinstance(asked[0].get("custom_partitioner_fn"), Partitioner)
    decided = [(d.key, d.colour) for d in fxamp.plan_of(eager.converted_model).decisions]
    assert decided == [(d.key, d.colour) for d in fxamp.plan_of(step.converted_model).decisions]
    assert fxamp.plan_of(step.converted_model).policy.level == policy[:2]


def test_a_partitioner_in_the_settings_of_torch_stays(asked: list[dict[str, Any]]) -> None:
    step = step_of()
    with config.patch(custom_partitioner_fn=Theirs()):
        step(IDS, IDS)
    assert step.compiled is not None
    assert step.compiled.not_at_rest == "custom_partitioner_fn is Theirs"
    assert "custom_partitioner_fn" not in asked[0]


def test_a_torch_that_takes_no_partitioner_is_named(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitioner, "OPTION", "not_there_yet")
    step = step_of()
    step(IDS, IDS)
    assert step.compiled is not None
    assert step.compiled.not_at_rest == "this torch takes no partitioner"


def test_views_of_several_levels_in_one_graph_follow_their_plans(asked: list[dict[str, Any]]) -> None:
    model = blocks()
    model[1], model[2] = (fxamp.convert(model[i], policy=f"O{i},dtype=bf16") for i in (1, 2))
    step = TrainStep(model, F.cross_entropy, SGD(model.parameters(), lr=0.1), compile=True)
    step(IDS, IDS)
    assert step.compiled is not None
    assert step.compiled.not_at_rest == "not all views in the graph follow O2"
    assert [fxamp.plan_of(model[i]).policy.level for i in (1, 2)] == ["O1", "O2"]


def test_a_plan_that_is_carried_out_stays(asked: list[dict[str, Any]]) -> None:
    plan, model = fxamp.plan(blocks(), (IDS,), policy="O2,dtype=bf16"), blocks()
    view = fxamp.convert(model, (IDS,), plan=plan)
    step = TrainStep(view, F.cross_entropy, SGD(model.parameters(), lr=0.1), compile=True)
    step(IDS, IDS)
    assert step.compiled is not None
    assert step.compiled.not_at_rest == "a plan is carried out, in which nothing is stored so"


RUN = """
import json, sys, torch
from torch._dynamo.utils import counters
from tests.fxamp.train.test_at_rest import IDS, step_of
step = step_of(sys.argv[1])
loss = step(IDS, IDS).loss.item()
shown = [str(each) for each in step.compiled.stored]
print(json.dumps([dict(counters["aot_autograd"]), shown, loss, vars(step.compiled.loss.kernels.counts)]))
"""


@pytest.mark.slow  # builds the kernels of two graphs
def test_another_process_finds_the_graphs_and_what_they_store_in_the_cache(tmp_path: Path) -> None:
    cached = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}

    def run(policy: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", RUN, policy],
            capture_output=True, text=True, check=True, env={**os.environ, **cached}, cwd=ROOT,
        )  # fmt: skip
        return json.loads(done.stdout.splitlines()[-1])

    first, *found = run("O2,dtype=bf16")
    second, *again = run("O2,dtype=bf16")
    assert first["autograd_cache_miss"] == second["autograd_cache_hit"] == 2  # the loss, and the update
    assert "autograd_cache_miss" not in second
    assert found == again
    stored, loss, counts = again
    line = f"test_at_rest.py:{inspect.getsourcelines(Block.forward)[1] + 1}"
    assert [each.split()[0] for each in stored] == ["saved", "backward", "backward"]
    assert stored[0].endswith(" in bfloat16: 3, (no line)")  # of the last norm, which torch's code calls
    assert line in stored[-1]
    other, none, loss_of_o1, counts_of_o1 = run("O1,dtype=bf16")
    assert other["autograd_cache_miss"] == 1  # the update is the same
    assert none == []
    assert loss == loss_of_o1
    for key in ("moved_bytes", "saved_bytes", "peak", "cast_kernels", "kernels"):
        assert counts[key] <= counts_of_o1[key], key
    assert counts["moved_bytes"] < counts_of_o1["moved_bytes"]
    assert counts["saved_bytes"] < counts_of_o1["saved_bytes"]


def make(width: int = 256) -> tuple[nn.Module, tuple[Tensor]]:
    """Return what a GPU would train."""
    return blocks(3, width), (torch.randint(50, (4096,)),)


def train(model: nn.Module, args: tuple[Tensor], kwargs: Any, policy: str) -> Any:
    step = TrainStep(
        fxamp.convert(model, policy=policy), F.cross_entropy, torch.optim.AdamW(model.parameters(), fused=True),
        compile={"dynamic": False},
    )  # fmt: skip
    return lambda: step(args[0], args[0])


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or bool(torch.version.cuda or torch.version.hip),
    reason="a GPU is feigned by torch's CPU build on Linux alone",
)
def test_on_a_gpu_it_is_above_o1_in_no_count_and_moves_fewer_bytes() -> None:
    here = "tests/fxamp/train/test_at_rest.py"
    o1, o2 = (
        count(f"{here}:make", f"{here}:train", run_options={"policy": f"{level},dtype=bf16"}, folder=ROOT)
        for level in ("O1", "O2")
    )
    for part in ("forward", "backward"):
        ours, theirs = getattr(o2, part), getattr(o1, part)
        assert (ours.kernels, ours.cast_kernels) == (theirs.kernels, theirs.cast_kernels)
    assert o2.total.moved_bytes < o1.total.moved_bytes
    assert o2.total.saved_bytes < o1.total.saved_bytes
    assert o2.peak <= o1.peak
    assert o2.update == o1.update


def language_model(name: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Return a small model, trained for a few steps, so that its weights are not those that it begins with."""
    sizes = {"vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    if name == "bert":
        dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        model: Any = BertForMaskedLM(BertConfig(**sizes, intermediate_size=512, **dropouts))
    else:
        dropouts = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
        sizes = {"vocab_size": 1000, "n_embd": 128, "n_layer": 4, "n_head": 4}
        model = GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, use_cache=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    ids = (torch.rand(9, 2, 64) ** 3 * 1000).long()
    for batch in ids[3:]:
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, [{"input_ids": batch, "labels": batch} for batch in ids[:3]]


def gradients_of(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    model.zero_grad()
    model(**batch).loss.backward()
    return [p.grad.double() for p in model.parameters() if p.grad is not None]


def error(found: list[list[Tensor]], exact: list[list[Tensor]]) -> float:
    """Return the error of gradients relative to exact ones: the root of the mean square over batches."""
    squares = [
        sum((a - b).square().sum().item() for a, b in zip(ours, theirs, strict=True))
        / sum(b.square().sum().item() for b in theirs)
        for ours, theirs in zip(found, exact, strict=True)
    ]
    return float((sum(squares) / len(squares)) ** 0.5)


@pytest.mark.slow  # builds the kernels of a model
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_gradients_have_at_most_five_quarters_of_the_error_that_autocast_gives_them(name: str) -> None:
    model, batches = language_model(name)
    exact = [gradients_of(copy.deepcopy(model).double(), batch) for batch in batches]
    with torch.autocast("cpu", torch.bfloat16):
        autocast = [gradients_of(model, batch) for batch in batches]
    found: list[list[Tensor]] = []

    def keep(params: list[Tensor]) -> None:
        found.append([p.grad.double() for p in params if p.grad is not None])

    view = fxamp.convert(model, policy="O2,dtype=bf16")
    step = TrainStep(view, None, SGD(model.parameters(), lr=0.0), compile={"dynamic": False}, on_gradients=keep)
    torch.compiler.reset()
    for batch in batches:
        step(batch)
    assert step.compiled is not None
    assert {each.part for each in step.compiled.stored} == {*PARTS}
    ratio = error(found, exact) / error(autocast, exact)
    print(f"{name}: {ratio:.2f} of autocast's error")
    assert ratio <= 1.25

"""CUDA: dtypes are those of the real autocast kernels, for which no GPU is needed; CUDA graphs, for which one is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from passes.contract.reasons import DEVIATIONS
from passes.graph import values
from passes.ops import ops
from passes.ops.rules import FOLLOW, LOW, lookup
from tests.support.cuda_oracle import compare
from tests.support.front_ends import casts
from tests.support.helpers import OLD_DYNAMO
from tests.support.processes import in_another_process
from tests.support.zoo import BY_NAME

SECONDS = 600.0  # for all models of the zoo
SOME = ("lenet5", "graph_conv", "gpt")
# What fake CUDA tensors cannot run without a device (the latter in a build for CUDA), and what the rule table says.
UNRUN = {"batch_norm": FOLLOW, "lstm": LOW}


def _check(names: Sequence[str]) -> None:
    found = in_another_process(compare, list(names), seconds=SECONDS)
    assert [model["name"] for model in found] == list(names)
    for model in found:
        assert set(model["unrun"]) <= set(UNRUN), model["name"]
        assert len(model["rows"]) >= 8
        for row in model["rows"]:
            _, _, expected, autocast, got, code = row
            assert autocast == expected, (model["name"], row)
            # The cut stores a value in another dtype where no reader sees the difference.
            assert got == expected or code in ("cut", *DEVIATIONS), (model["name"], row)


def test_every_node_has_the_dtype_of_the_real_cuda_autocast_kernels() -> None:
    _check(SOME)


@pytest.mark.matrix
def test_every_node_of_the_other_models_has_the_dtype_of_the_real_cuda_autocast_kernels() -> None:
    _check([name for name in BY_NAME if name not in SOME])


@pytest.mark.parametrize("name", UNRUN)
def test_what_cannot_run_here_is_in_the_rule_table(name: str) -> None:
    assert lookup(name, "cuda")[1] == UNRUN[name]


# What differs from a CPU, found on a GPU. The graphs that are made for CUDA run on a CPU here.

BF16 = torch.bfloat16


class Computes(nn.Module):
    """Computes a function of itself and an input."""

    target: Tensor

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.function = nn.Linear(6, 5), nn.LayerNorm(5), function
        self.register_buffer("target", torch.tensor([1, 4, -100, 0]))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def _decided(
    function: Callable[[Any, Tensor], Any], policy: str = "O1,dtype=bf16,device=cuda"
) -> list[tuple[str, str]]:
    """Return the ops of a function and the dtypes they run in on CUDA."""
    plan = fxamp.plan(Computes(function), (torch.randn(4, 6),), policy=policy)
    assert not plan.deviations or not policy.startswith("O1")
    return [(d.op, d.colour) for d in plan.decisions]


@pytest.mark.parametrize("settings", [{}, {"weight": torch.arange(1.0, 6)}, {"reduction": "sum"}])
def test_cross_entropy_rounds_the_logarithms_of_low_logits_as_autocast_does_on_cuda(settings: dict[str, Any]) -> None:
    """The op calls log_softmax with the dtype of its logits, which autocast then leaves, and nll_loss in FP32."""
    model, x = Computes(lambda m, x: F.cross_entropy(m.layer(x), m.target, **settings)), torch.randn(4, 6)
    module = fxamp.convert(torch.export.export(model, (x,)), policy="O1,dtype=bf16,device=cuda")
    got = module(x)
    found = torch.autograd.grad(got, [*module.parameters()][:2])
    weights = [p.detach().clone().requires_grad_() for p in model.layer.parameters()]
    logits = F.linear(x.to(BF16), *(w.to(BF16) for w in weights))
    expected = F.nll_loss(F.log_softmax(logits, 1).float(), model.target, **settings)
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)
    assert all(map(torch.equal, found, torch.autograd.grad(expected, weights)))
    assert not torch.equal(got, F.cross_entropy(logits.float(), model.target, **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"label_smoothing": 0.1}, {"weight": torch.arange(1.0, 6), "label_smoothing": 0.1},
        {"reduction": "none", "ignore_index": 2}, {"reduction": "sum", "of": "probabilities"},
        {"of": "probabilities", "label_smoothing": 0.2},
    ],
)  # fmt: skip
def test_at_o0_the_losses_that_are_made_for_cuda_are_eagers_at_every_batch_size(settings: dict[str, Any]) -> None:
    settings = dict(settings)
    probabilities = settings.pop("of", "") != ""

    def loss(m: Any, x: Tensor) -> Tensor:
        target = x[:, :5].softmax(-1) if probabilities else x[:, :5].argmax(-1)
        return F.cross_entropy(m.layer(x), target, **settings)

    model, x = Computes(loss), torch.randn(4, 6)
    fixed = probabilities and OLD_DYNAMO  # the exporter fixed the batch of such a loss before torch 2.13
    sizes = None if fixed else ({0: torch.export.Dim("batch", min=2, max=64)},)
    program = torch.export.export(model, (x,), dynamic_shapes=sizes)
    module = fxamp.convert(program, policy="O0,device=cuda")
    for batch in (x, torch.randn(4 if fixed else 9, 6)):
        got, expected = module(batch), model(batch)
        assert torch.equal(got, expected)
        for a, b in zip(
            *(torch.autograd.grad(y.sum(), [*model.layer.parameters()]) for y in (got, expected)), strict=True
        ):
            assert torch.equal(a, b)


def test_cross_entropy_that_the_policy_names_is_not_taken_apart() -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        return F.cross_entropy(m.layer(x), m.target)

    assert _decided(loss)[1:] == [("_log_softmax", "bfloat16"), ("nll_loss_nd", "float32")]
    assert _decided(loss, "O1,dtype=bf16,device=cuda,ops.cross_entropy_loss=fp32")[1:] == [
        ("cross_entropy_loss", "float32")
    ]


def test_a_dtype_that_code_reads_decides_for_an_op_that_autocast_runs_in_fp32() -> None:
    def read(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        return F.softmax(y, -1, dtype=y.dtype)

    assert _decided(read)[-1] == ("softmax", "bfloat16")
    assert _decided(lambda m, x: m.layer(x).softmax(-1))[-1] == ("softmax", "float32")


def test_what_einsum_makes_of_two_operands_may_be_written_to() -> None:
    def written(m: Any, x: Tensor) -> Tensor:
        y = torch.einsum("bi,oi->bo", x, m.layer.weight)
        y *= m.layer.bias
        return y

    assert ("einsum", "bfloat16") in _decided(written)


@pytest.mark.default_case(level="O3")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_no_norm_runs_low_beside_fp32_weights(level: str) -> None:
    assert _decided(lambda m, x: m.norm(m.layer(x)), f"{level},dtype=bf16,device=cuda")[1] == ("layer_norm", "float32")


def test_autocast_widens_operands_before_an_op_that_keeps_them_for_its_backward() -> None:
    model, x = Computes(lambda m, x: torch.atan2(x[:, :5].exp(), m.layer(x))), torch.randn(4, 6)
    module = fxamp.convert(torch.export.export(model, (x,)), policy="O1,dtype=bf16,device=cuda")
    found = torch.autograd.grad(module(x).sum(), [*module.parameters()][:2])
    weights = [p.detach().clone().requires_grad_() for p in model.layer.parameters()]
    low = F.linear(x.to(BF16), *(w.to(BF16) for w in weights))
    expected = torch.atan2(x[:, :5].exp(), low.float()).sum()
    assert all(map(torch.equal, found, torch.autograd.grad(expected, weights)))


@pytest.mark.parametrize(
    "op",
    [
        torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm, torch.cumsum,
        torch.cumprod, torch.prod, F.softmax, torch.log_softmax, F.softmin, torch.sum,
    ],
)  # fmt: skip
def test_gradients_of_an_op_that_autocast_gives_a_dtype_are_those_of_its_low_operand(op: Any) -> None:
    """The backward computes with the operand that the op has: a cast before it would make that FP32."""
    rest = (-1,) if op in (torch.cumsum, torch.cumprod, torch.log_softmax, F.softmax, F.softmin) else ()
    model, x = Computes(lambda m, x: op(m.layer(x), *rest)), torch.randn(64, 6)
    view = fxamp.convert(model, policy="O1,dtype=bf16,device=cuda")
    weights = [p.detach().clone().requires_grad_() for p in model.layer.parameters()]
    got = view(x)
    expected = op(F.linear(x.to(BF16), *(w.to(BF16) for w in weights)), *rest, dtype=torch.float32)
    wanted = torch.randn_like(expected)
    assert torch.equal(got, expected)
    found = torch.autograd.grad(got, [*model.layer.parameters()], wanted)
    assert all(map(torch.equal, found, torch.autograd.grad(expected, weights, wanted)))
    (graph,) = fxamp.graphs(view)
    assert len(casts(graph)) == 3  # of the layer


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="the op raises under autocast, and breaks the graph there")
def test_a_norm_that_takes_no_low_operand_gets_a_cast() -> None:
    """It is the sum of singular values, of which torch has none of a low matrix, whatever the dtype asked for."""
    model, x = Computes(lambda m, x: torch.norm(m.layer(x), "nuc")), torch.randn(4, 6)
    graph = fxamp.convert(torch.export.export(model, (x,)), policy="O1,dtype=bf16,device=cuda")
    low = F.linear(x.to(BF16), *(p.to(BF16) for p in model.layer.parameters()))
    assert torch.equal(graph(x), torch.norm(low.float(), "nuc"))


@pytest.mark.default_case(low=torch.float16)
@pytest.mark.parametrize("low", [BF16, torch.float16])
def test_a_recurrence_runs_in_fp16_as_autocast_has_it_there(low: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast casts the operands of cuDNN's kernel to FP16 where it is asked for BF16 too."""

    def run(node: torch.fx.Node, value_of: Callable[[torch.fx.Node], Any]) -> Any:
        if ops.name(node) == "lstm":  # as on CUDA, where a dropout between layers has a state that its kernel reads
            raise RuntimeError("fake tensors cannot run it")
        return really(node, value_of)

    really = values.run
    monkeypatch.setattr(values, "run", run)
    model, x = nn.LSTM(3, 4, 2, dropout=0.5), torch.randn(5, 2, 3)
    for level, expected in {"O1": torch.float16, "O2": low}.items():
        plan = fxamp.plan(model, (x,), policy=fxamp.Policy(level, dtype=low, device="cuda"))
        assert {d.colour for d in plan.decisions if d.op == "lstm"} == {str(expected).removeprefix("torch.")}
        assert not plan.deviations


# Where torch itself is wrong: CUDA graphs under autocast. A view has no autocast region that a graph could record.

LOW = "O1,dtype=bf16,output_dtype=autocast"
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")


class Convolutions(nn.Module):
    """The model of pytorch#71631, smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x)
        return x


@needs_cuda
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # of torch's own function
def test_pytorch_71631_a_model_trains_in_cuda_graphs_as_without() -> None:
    """Captured under autocast, a graph may read casts of weights that were cached before an optimizer step."""
    torch.manual_seed(0)
    model, x = Convolutions().cuda(), torch.randn(4, 16, 8, 8, device="cuda")
    twin = copy.deepcopy(model)
    graphed: Any = torch.cuda.make_graphed_callables(fxamp.convert(model, (x,), policy=LOW), (x,))
    plain = fxamp.convert(twin, (x,), policy=LOW)
    for called, parameters in ((graphed, model.parameters()), (plain, twin.parameters())):
        optimizer = torch.optim.SGD(parameters, 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            called(x).float().square().mean().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert torch.equal(graphed(x), plain(x))


class Scaled(nn.Module):
    """The model of pytorch#120930."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a * 10, b * 10)


@needs_cuda
def test_pytorch_120930_the_backward_of_a_cuda_graph_is_not_under_autocast() -> None:
    """Captured under autocast, a graph records its backward under autocast too."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, n, 96, device="cuda", requires_grad=True) for n in (64, 96)]
    others = [t.detach().clone().requires_grad_() for t in inputs]
    sample = tuple(t.detach().clone().requires_grad_() for t in inputs)
    graphed: Any = torch.cuda.make_graphed_callables(fxamp.convert(Scaled(), sample, policy=LOW), sample)
    got = graphed(*inputs)
    with torch.autocast("cuda", torch.bfloat16):
        expected = Scaled()(*others)
    assert torch.equal(got, expected)
    got.float().square().mean().backward()
    expected.float().square().mean().backward()  # outside of autocast, as torch's documentation says
    for a, b in zip(inputs, others, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)

"""Overflows and NaNs that are planted are found where they were planted, with the line, and cured where that can be."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from passes.contract.errors import PolicyError
from tests.support.exported import program_of
from tests.support.helpers import autocast_runs_lstms, in_turns
from tests.support.small import NormByHand

F = nn.functional
SOURCE = Path(__file__).read_text(encoding="utf-8").splitlines()
O1, O2 = "O1,dtype=fp16", "O2,dtype=fp16"
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


class Net(nn.Module):
    """Two linears, and what is planted between them."""

    def __init__(self, planted: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.planted = nn.Linear(8, 16), nn.Linear(16, 4), planted

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.planted(self.first(x)))
        return out


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def scaled(h: Tensor) -> Tensor:
    return (h.abs() + 3) * 3e4 * 1e-4  # the product


def squared(h: Tensor) -> Tensor:
    big = 400 * (h.abs() + 1)
    return big.square() * 1e-6  # the square


def exponent(h: Tensor) -> Tensor:
    return torch.exp(h.sigmoid() + 12) * 1e-5  # exp


def summed(h: Tensor) -> Tensor:
    big = (h.abs() + 1) * 10000
    return h + big.sum(-1, keepdim=True) * 1e-6  # the sum


def divided(h: Tensor) -> Tensor:
    tiny = h.abs() * 1e-9
    return (1 / (tiny + 1e-9)) * 1e-9  # one over


def logged(h: Tensor) -> Tensor:
    small = torch.exp(-(h.sigmoid() + 20))
    return torch.log(small)  # log of nothing


def infinities(h: Tensor) -> Tensor:
    big = (h.abs() + 3) * 3e4  # first infinite
    return (big - big.detach()) + h


def root(h: Tensor) -> Tensor:
    return torch.sqrt(-h.abs() - 1)  # root of a negative number


def nothing(h: Tensor) -> Tensor:
    zero = h - h
    return zero / (h - h)  # nothing over nothing


def masked(h: Tensor) -> Tensor:
    scores = h.masked_fill(torch.ones_like(h, dtype=torch.bool), -torch.inf)
    return torch.softmax(scores, -1)  # softmax of a row without an entry


def beside_a_mask(h: Tensor) -> Tensor:
    mask = torch.zeros_like(h, dtype=torch.bool).index_fill(1, torch.tensor([3]), True)
    seen = torch.softmax(h.masked_fill(mask, -torch.inf), -1)
    return seen + (h.abs() + 3) * 3e4 * 1e-4  # beside the mask


def in_checkpoint(h: Tensor) -> Tensor:
    made: Any = checkpoint(scaled, h, use_reentrant=False)
    return h + made


def root_of_nothing(h: Tensor) -> Tensor:
    return torch.sqrt(h - h) + h  # root of nothing


def trap(h: Tensor) -> Tensor:
    chosen = h * (h > 0)
    return torch.where(chosen > 0, torch.log(chosen), 0.0)  # the trap


def length(h: Tensor) -> Tensor:
    rows = h * torch.tensor([[1.0], [0.0], [1.0], [1.0], [1.0], [1.0]])
    return rows / torch.sqrt(rows.square().sum(-1, keepdim=True)).clamp_min(1e-2)  # the length


class Spoiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 0  # spoiled


SPOILED: Any = Spoiled.apply


def own_function(h: Tensor) -> Tensor:
    made: Tensor = SPOILED(h)  # the function
    return made


def own_function_outside(h: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    made: Tensor = torch.compiler.disable(SPOILED)(h)
    return made


def after_a_break(h: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return F.relu(_outside(h))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside(h: Tensor) -> Tensor:
    return h * 1e30 * 1e30  # outside


def hooked(h: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    _hook(h)
    return h * 2


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _hook(h: Tensor) -> None:
    if h.requires_grad:
        h.register_hook(lambda grad: grad * 1e30 * 1e30)  # the hook


# name: what is planted, the comment on its line, inf or NaN, in backward, whether FP32 cures it
PLANTED: dict[str, tuple[Callable[[Tensor], Tensor], str, str, bool, bool]] = {
    "product": (scaled, "the product", "inf", False, True),
    "square": (squared, "the square", "inf", False, True),
    "exp": (exponent, "exp", "inf", False, True),
    "sum": (summed, "the sum", "inf", False, True),
    "division": (divided, "one over", "inf", False, True),
    "logarithm": (logged, "log of nothing", "inf", False, True),
    "difference": (infinities, "first infinite", "inf", False, True),
    "root": (root, "root of a negative number", "NaN", False, False),
    "nothing": (nothing, "nothing over nothing", "NaN", False, False),
    "mask": (masked, "softmax of a row without an entry", "NaN", False, False),
    "beside a mask": (beside_a_mask, "beside the mask", "inf", False, True),
    "checkpoint": (in_checkpoint, "the product", "inf", False, True),
    "root in backward": (root_of_nothing, "root of nothing", "inf", True, False),
    "trap": (trap, "the trap", "NaN", True, False),
    "length": (length, "the length", "NaN", True, False),
    "function": (own_function, "the function", "inf", True, False),
    "function outside": (own_function_outside, "spoiled", "inf", True, False),
    "break": (after_a_break, "outside", "inf", False, False),
    "hook": (hooked, "the hook", "inf", True, False),
}
LIKE = ("square", "exp", "sum", "difference", "root in backward")  # each is like another of them


@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *in_turns([name for name in PLANTED if name not in LIKE], [O1, O2]),
        *(pytest.param(name, policy, marks=pytest.mark.matrix) for name in LIKE for policy in (O1, O2)),
    ],
)
def test_what_is_planted_is_found_and_cured(name: str, ahead: bool, policy: str) -> None:
    planted, comment, kind, backward, curable = PLANTED[name]
    model = Net(planted)
    view = fxamp.convert(model, *[(X,)] * ahead, policy=policy, check=False)
    found = fxamp.find_overflow(view, X, loss=mean_square)
    if (name, policy) == ("division", O2):
        assert found is None  # O2 keeps a number in FP32 that FP16 cannot hold
        return
    assert found is not None
    lines = [i for i, line in enumerate(SOURCE, 1) if line.endswith(f"# {comment}")]
    assert found.source.split(": ")[0] in [f"test_overflow.py:{i}" for i in lines], str(found)
    assert (found.kind, found.backward) == (kind, backward), str(found)
    assert bool(found.fp32) == curable, str(found)
    if curable:
        again = fxamp.convert(model, (X,), policy=found.policy, check=False)
        assert fxamp.find_overflow(again, X, loss=mean_square) is None


@pytest.mark.parametrize(
    ("planted", "scale", "steps", "cured"),
    [(lambda h: h, 1.0, 1, False), (scaled, 1.0, 2, True), (root, 1.0, 4, False), (lambda h: h, 2.0**22, 4, True)],
)
def test_an_overflow_is_found_in_one_step_and_cured_in_few_more(
    planted: Callable[[Tensor], Tensor], scale: float, steps: int, cured: bool
) -> None:
    ran = []

    def loss(output: Tensor) -> Tensor:
        ran.append(output)
        return mean_square(output)

    view = fxamp.convert(Net(planted), (X,), policy=O1, check=False)
    found = fxamp.find_overflow(view, X, loss=loss, scale=scale)
    assert (found is not None and bool(found.fp32)) == cured
    assert len(ran) == steps


# Elsewhere than in a view.


def halved(output: Tensor) -> Tensor:
    return (output.abs().mean() * 0 + 70000).half()  # the loss


def test_an_overflow_in_a_loss_is_named_by_its_line() -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    step = fxamp.TrainStep(
        fxamp.convert(model, policy=O1), lambda output: halved(output), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    found = fxamp.find_overflow(step, X)
    assert found is not None
    assert (found.where, found.op, found.fp32) == (f"test_overflow.py:{_line('the loss')}", "_to_copy", ())
    assert "no cure was found" in str(found)


def _line(comment: str) -> int:
    return next(i for i, line in enumerate(SOURCE, 1) if line.endswith(f"# {comment}"))


@pytest.mark.parametrize("way", ["autocast", "view", "step"])
def test_an_overflow_that_no_loss_shows_is_found_and_cured(way: str) -> None:
    model, y = NormByHand(), torch.arange(6) % 4
    ce: Any = nn.functional.cross_entropy
    if way == "autocast":
        with torch.autocast("cpu", torch.float16):
            found = fxamp.find_overflow(model, X, y, loss=ce)
            assert torch.equal(model(X), model.b.bias.half().expand(6, 4))
    elif way == "view":
        found = fxamp.find_overflow(fxamp.convert(model, policy=O1), X, y, loss=ce)
    else:
        step = fxamp.TrainStep(fxamp.convert(model, policy=O1), ce, torch.optim.SGD(model.parameters(), lr=0.1))
        found = fxamp.find_overflow(step, X, y)
    assert found is not None
    assert (found.op, found.kind, found.backward) == ("pow", "inf", False)
    line = inspect.getsourcelines(NormByHand.forward)[1] + 3
    assert f"small.py:{line}" in (found.where if way == "autocast" else found.source)
    assert "rsqrt makes finite values of inf" in str(found)
    assert found.fp32 == ("/pow#0", "/mean#0", "/add#0", "/rsqrt#0")
    view = fxamp.convert(model, policy=found.policy)
    assert fxamp.find_overflow(view, X, y, loss=ce) is None
    exact = ce(model(X), y)
    assert abs(ce(view(X), y) - exact) < 1e-2 * exact


@pytest.mark.parametrize("squashed", [
    lambda h: torch.softmax(h.masked_fill(h > 0, -65504.0) * 2, -1), lambda h: torch.tanh(h * 1e4),
    lambda h: torch.clamp(h * 1e4, -1, 1), lambda h: torch.where(h.abs() < 1e9, h, h * 1e9),
])  # fmt: skip
def test_an_overflow_of_which_nothing_comes_is_none(squashed: Any) -> None:
    model = Net(squashed)
    with torch.autocast("cpu", torch.float16):
        assert not model(X).isinf().any()
        assert fxamp.find_overflow(model, X, loss=mean_square) is None
    assert fxamp.find_overflow(fxamp.convert(model, policy=O1), X, loss=mean_square) is None


@pytest.mark.parametrize("count", [8, 9])
def test_that_not_all_batches_are_searched_is_said(count: int) -> None:
    model = fxamp.convert(nn.Linear(8, 4), policy=O1)
    batches = [X] * count
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxamp.find_overflow(model, batches=batches, loss=mean_square)
        fxamp.find_overflow(model, batches=itertools.islice(iter(batches), count), loss=mean_square)
    with pytest.warns(UserWarning, match="only the first 8 batches were searched"):
        fxamp.find_overflow(model, batches=iter(batches), loss=mean_square)


@pytest.mark.parametrize("loss", [mean_square, lambda output: torch.log(output * 0).mean()])
def test_a_model_that_nobody_converted_is_searched_too_and_a_view_that_cures_it_is_named(loss: Any) -> None:
    model = Net(scaled)
    with torch.autocast("cpu", torch.float16):
        found = fxamp.find_overflow(model, X, loss=loss)
    assert found is not None
    assert found.where == f"test_overflow.py:{_line('the product')}"
    if loss is mean_square:
        assert f'fxamp.convert(model, policy="{found.policy}")' in str(found)
        assert found.fp32
        assert fxamp.find_overflow(fxamp.convert(model, policy=str(found.policy)), X, loss=loss) is None
    else:
        assert (found.policy, found.fp32) == (None, ())
        assert "no cure was found: the model itself is not finite in FP32" in str(found)


def test_the_policy_of_a_cure_has_the_low_dtype_of_the_authors_own_region() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)
            nn.init.constant_(self.inner.weight, 1e-38)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    largest = torch.full_like(X, 3.4e38)  # rounds to infinity in BF16 alone
    found = fxamp.find_overflow(Inside(), largest, loss=lambda output: output.float().mean())
    assert found is not None
    assert found.policy is not None
    assert found.policy.dtype is torch.bfloat16


def test_that_nothing_ran_in_16_bits_is_said_where_nothing_overflows() -> None:
    model = Net(scaled)
    with pytest.warns(UserWarning, match="nothing of the step ran in 16 bits: no torch.autocast region was entered"):
        assert fxamp.find_overflow(model, X, loss=mean_square) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert fxamp.find_overflow(model, X, loss=mean_square) is None
    assert fxamp.find_overflow(fxamp.convert(model, policy="O0"), X, loss=mean_square) is None


def test_layers_of_torch_without_a_line_of_the_user_are_named_by_their_path() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    nn.init.constant_(model.get_parameter("1.weight"), 1e38)
    found = fxamp.find_overflow(model, X * 1e10, loss=torch.mean)
    assert found is not None
    assert (found.where, found.op) == ("1", "addmm")
    assert "no cure was found: it ran in FP32" in str(found)


def test_a_graph_that_the_user_brings_and_a_model_compiled_in_place() -> None:
    model = Net(squared)
    graph = fxamp.convert(program_of(model, (X,)), policy=O1)
    found = fxamp.find_overflow(graph, X, loss=mean_square)
    assert found is not None
    assert (found.where, found.fp32[0]) == ("/square#0", "/square#0")
    model.compile(backend="fxamp", options={"policy": O1, "backend": "aot_eager"})
    compiled = fxamp.find_overflow(model, X, loss=mean_square)
    assert compiled is not None
    assert compiled.source.startswith(f"test_overflow.py:{_line('the square')}")


def test_what_was_not_finite_from_the_start_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    view = fxamp.convert(model, (X,), policy=O1)
    found = fxamp.find_overflow(view, torch.full_like(X, torch.nan), loss=torch.mean)
    assert found is not None
    assert (found.where, found.kind) == ("(inputs)", "NaN")
    with torch.no_grad():
        model.get_parameter("2.bias")[1] = torch.inf
    found = fxamp.find_overflow(view, X, loss=torch.mean)
    assert found is not None
    assert (found.where, found.kind) == ("2.bias", "inf")
    assert "from the start" in str(found)


def test_a_loss_scale_that_is_too_large_is_told_with_the_largest_that_fits() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    view = fxamp.convert(model, (X,), policy=O1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fxamp.TrainStep(view, mean_square, optimizer, scaler=fxamp.LossScaler(init_scale=2.0**22))
    found = fxamp.find_overflow(step, X)
    assert found is not None
    assert (found.backward, found.scale) == (True, 2.0**22)
    assert 1 <= found.largest_scale < 2.0**22
    assert fxamp.find_overflow(step, X, scale=found.largest_scale) is None
    assert fxamp.find_overflow(step, X, scale=8 * found.largest_scale) is not None
    assert found.policy is not None
    assert fxamp.find_overflow(fxamp.convert(model, policy=found.policy), X, loss=mean_square, scale=2.0**22) is None


@pytest.mark.default_case(policy="O3,dtype=fp16")
@pytest.mark.parametrize("policy", [O1, O2, "O3,dtype=fp16"])
def test_masks_of_a_real_model_are_no_overflow_and_all_is_as_before(policy: str) -> None:
    tf = pytest.importorskip("transformers")
    config = tf.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=100)
    ids = torch.randint(0, 100, (2, 8))
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.tensor([[1] * 8, [0, 0] + [1] * 6])}
    model = tf.GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # without one it warns, which breaks the graph: that takes long
    before = {name: value.clone() for name, value in model.state_dict().items()}
    view, random = fxamp.convert(model, kwargs=batch, policy=policy), torch.get_rng_state()
    assert fxamp.find_overflow(view, batch, scale=64.0) is None
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(random, torch.get_rng_state())
    found = fxamp.find_overflow(view, batches=[batch, batch], scale=2.0**40)
    assert found is not None
    assert found.backward


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf"), "1", True])
def test_a_scale_that_is_none_is_refused(scale: Any) -> None:
    with pytest.raises(PolicyError, match="scale is a loss scale"):
        fxamp.find_overflow(nn.Linear(8, 4), X, loss=torch.mean, scale=scale)


def test_an_open_window_and_a_missing_loss_are_refused() -> None:
    model = nn.Linear(8, 4)
    step = fxamp.TrainStep(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), accumulate_steps=2)
    step(X)
    with pytest.raises(PolicyError, match="call flush"):
        fxamp.find_overflow(step, X)
    with pytest.raises(PolicyError, match="give loss="):
        fxamp.find_overflow(model, X)


class Masked(nn.Module):
    """Attention whose scores overflow in FP16, with a mask of -inf that is no cause of it."""

    mask: Tensor
    allowed: Tensor

    def __init__(self, held: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.v, self.held = nn.Linear(8, 8), nn.Linear(8, 8), held
        nn.init.constant_(self.q.weight, 10.0)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(6))
        self.register_buffer("allowed", torch.ones(6, 6).tril())

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.held != "input":
            mask = self.mask if self.held == "buffer" else self.allowed.log()
        q = self.q(x)
        out: Tensor = F.softmax(q @ q.transpose(-1, -2) + mask, -1) @ self.v(x)
        return out.mean()


@pytest.mark.parametrize("held", ["input", "buffer", "computed"])
def test_a_mask_is_not_to_blame_for_an_overflow_that_meets_it(held: str) -> None:
    x = X[None].expand(2, 6, 8).abs() + 1
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    view = fxamp.convert(Masked(held), policy=O1)
    found = fxamp.find_overflow(view, (x, mask))
    assert found is not None
    assert (found.where, found.fp32) == ("/matmul#0", ("/matmul#0",))
    assert fxamp.find_overflow(fxamp.convert(Masked(held), policy=found.policy), (x, mask)) is None


def test_gradients_are_looked_at_where_the_caller_computes_none() -> None:
    view = fxamp.convert(nn.Linear(8, 4), policy=O1)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            found = fxamp.find_overflow(view, X, loss=torch.mean, scale=2.0**24)
        assert found is not None
        assert found.backward


class BothSides(nn.Module):
    """What overflows is made on one side of a graph break, and read on the other."""

    def __init__(self, breaks: bool, twice: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.breaks, self.twice = breaks, twice
        self.m, self.s = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mu, sig = self.m(x) * 3, nn.functional.softplus(self.s(x) - 6) + 1e-6
        if self.breaks:
            torch._dynamo.graph_break()
        more = ((mu - 0.0) / 1.0).pow(2).mean() if self.twice else 0.0
        out: Tensor = (((0.0 - mu) / sig).pow(2) - (1.0 / sig).log()).mean() + more
        return out


class Recurrent(nn.Module):
    def __init__(self, cell: Any, times: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.c, self.o, self.times = cell(8, 8), nn.Linear(8, 4), times
        with torch.no_grad():
            self.c.weight_hh.mul_(3e6)

    def forward(self, x: Tensor) -> Tensor:
        h: Any = torch.zeros(x.shape[0], 8)
        for _ in range(self.times):
            h = self.c(x, (h, h) if isinstance(self.c, nn.LSTMCell) else h)
            h = h[0] if isinstance(h, tuple) else h
        out: Tensor = self.o(h).square().mean()
        return out


@pytest.mark.parametrize(
    "make",
    [
        lambda: BothSides(True, False), lambda: BothSides(True, True), lambda: Recurrent(nn.GRUCell, 3),
        lambda: Recurrent(nn.LSTMCell, 3),
    ],
)  # fmt: skip
def test_the_cure_lies_on_both_sides_of_a_break_or_in_what_is_written_in_place(make: Any) -> None:
    model, x = make(), torch.randn(4, 8)
    found = fxamp.find_overflow(model, x, loss=lambda out: out.float(), policies="O1,dtype=fp16")
    assert found is not None
    assert found.fp32, found
    assert found.policy is not None
    cured = fxamp.convert(model, policy=found.policy)
    assert fxamp.find_overflow(cured, x, loss=lambda out: out.float()) is None
    if isinstance(model, Recurrent):
        assert "the cast of c.weight_hh makes inf" in str(found)


class OverflowsAnyway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.a(x) * 1e30 * 1e30 + self.b(x)).mean()
        return out


def test_what_is_not_finite_in_fp32_either_is_said_after_it_was_run() -> None:
    found = fxamp.find_overflow(OverflowsAnyway(), torch.ones(4, 8), policies="O1,dtype=fp16")
    assert found is not None
    assert (found.fp32, found.policy) == ((), None)
    assert "no cure was found: the model itself is not finite in FP32" in str(found)


class Tagger(nn.Module):
    """An LSTM of FP32 values with a gradient; or, outside of all graphs, of those that a linear gives."""

    def __init__(self, *, traced: bool) -> None:
        super().__init__()
        self.first, self.cells, self.traced = nn.Linear(8, 8), nn.LSTM(8, 8, bidirectional=True), traced

    def forward(self, x: Tensor) -> Tensor:
        return self.cells((x * self.first.bias)[None])[0] if self.traced else self.outside(self.first(x))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def outside(self, x: Tensor) -> Tensor:
        out: Tensor = self.cells(x[None])[0]
        return out


def run_lstm_of_autocast(diagnostic: Callable[..., Any], policy: str) -> Any:
    return diagnostic(Tagger(traced=True), X, loss=mean_square, policies=policy)


@pytest.mark.skipif(autocast_runs_lstms(torch.float16), reason="this CPU has an LSTM in FP16")
@pytest.mark.filterwarnings("ignore:FP16 gradients without a loss scale")
@pytest.mark.parametrize("diagnostic", [fxamp.find_overflow, fxamp.census, fxamp.measure_error])
def test_an_lstm_that_has_no_kernel_in_fp16_is_named_with_a_policy_that_runs(diagnostic: Any) -> None:
    with pytest.raises(PolicyError, match=r"'cells' \(LSTM\) cannot run here.*modules.cells=fp32") as refused:
        run_lstm_of_autocast(diagnostic, O1)
    assert "primitive descriptor" in str(refused.value.__cause__)
    run_lstm_of_autocast(diagnostic, str(refused.value).partition("policy='")[2].partition("'")[0])


@pytest.mark.skipif(autocast_runs_lstms(torch.float16), reason="this CPU has an LSTM in FP16")
def test_an_overflow_is_told_where_the_search_for_its_cure_meets_an_lstm_that_cannot_run() -> None:
    view = fxamp.convert(Tagger(traced=False), policy=O1)
    found = fxamp.find_overflow(view, X, loss=mean_square, scale=2.0**60)
    assert found is not None
    assert found.kind == "inf"
    assert "'cells' (LSTM) cannot run here" in found.why

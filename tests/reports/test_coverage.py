"""`reports/coverage.py` measures an architecture as a view and as a graph, and gives a row whatever happens."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from fxamp.measure.counts import step_counts
from passes.contract.reasons import DEVIATIONS
from reports import coverage
from reports.gpu import converted
from tests.support import architectures
from tests.support.architectures import Architecture

# The script ignores warnings, of torch's own above all.
pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = 9


class Small(nn.Module):
    """Stands for an architecture of `transformers`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).float()
        return y @ y.t()  # in float32, as your code says; autocast rounds


class Branching(Small):
    """Is broken into two graphs by Dynamo, and is not exported."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y if y.sum() > 0 else -y)


class Failing(Small):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no such thing")


@pytest.fixture(autouse=True)
def small_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    for model in (Small, Branching, Failing):
        found = Architecture(model.__name__, "text encoder", model, lambda batch: {"x": torch.randn(batch, 4)})
        monkeypatch.setitem(architectures.BY_NAME, model.__name__, found)


def test_the_list_has_all_families() -> None:
    names = [a.name for a in architectures.ARCHITECTURES]
    assert len(names) == len(set(names)) >= 66
    assert len({a.family for a in architectures.ARCHITECTURES}) == FAMILIES


def test_inputs_are_the_same_at_every_call() -> None:
    found = architectures.BY_NAME["BertForMaskedLM"]
    first, second = found.batch(2), found.batch(2)
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_an_architecture_is_measured() -> None:
    row = coverage.by_view("Small")
    assert row.captured
    assert row.converted
    assert row.runs
    assert row.same
    assert row.outputs is not None
    assert row.gradients is not None
    assert row.casts is not None
    assert row.autocast_casts is not None
    assert row.ambient is False
    assert row.equal is False
    assert row.deviation in DEVIATIONS
    assert row.where == "/matmul#0"


def test_an_exported_architecture_is_compared_with_its_graph() -> None:
    row = coverage.by_graph("Small")  # in which nothing of a cast from FP32 to FP32 is left
    assert (row.captured, row.runs, row.graphs, row.same, row.equal) == (True, True, 1, True, True)


def test_a_branch_on_data_makes_two_graphs_of_a_view_and_is_not_exported() -> None:
    refused, kept = coverage.by_graph("Branching"), coverage.by_view("Branching")
    assert not refused.captured
    assert refused.problem.startswith("torch.export: ")
    assert kept.runs
    assert kept.graphs > 1


@pytest.mark.default_case(front_end="graph")
@pytest.mark.parametrize("front_end", coverage.FRONT_ENDS)
def test_a_model_that_fails_is_a_row(front_end: str) -> None:
    row = coverage.FRONT_ENDS[front_end]("Failing")
    assert not row.captured
    assert "no such thing" in row.problem


def test_the_report_has_totals_and_reasons() -> None:
    rows = [
        coverage.Row("A", "vision", "view", captured=True, converted=True, runs=True, equal=True),
        coverage.Row("B", "vision", "view", problem="torch: it cannot"),
    ]
    text = coverage.to_markdown(rows, {"torch": "2.13.0", "transformers": "5.0.0"})
    assert "1 of 1" in text
    assert "- B, view: torch: it cannot" in text


def _loss(module: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return module(**inputs).loss


@pytest.mark.matrix
def test_where_o2_takes_more_casts_than_autocast_they_move_fewer_bytes() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ConvNextV2Config(hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 1, 1], image_size=64)
    model = transformers.ConvNextV2ForImageClassification(config)
    inputs = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.tensor([0, 1])}

    def under_autocast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = model(**inputs).loss
        return loss

    autocast = step_counts(under_autocast)
    counts = {}
    for level, settings in (("O1", {"output_dtype": "autocast"}), ("O2", {})):  # O1 restores the logits otherwise
        (module,) = converted(model, inputs, torch.bfloat16, level, **settings)
        counts[level] = step_counts(functools.partial(_loss, module, inputs))
    assert counts["O1"].casts <= autocast.casts
    assert (counts["O2"].casts, autocast.casts) == (98, 87)  # of small gammas, betas and statistics
    assert counts["O2"].cast_bytes < 0.6 * autocast.cast_bytes

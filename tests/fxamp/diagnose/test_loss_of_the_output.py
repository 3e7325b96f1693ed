"""Models that return their loss beside other values: every diagnostic and a TrainStep take it, and say which it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxamp
from fxamp.cli.main import main
from passes.contract.errors import PolicyError

NOTE = "the loss was {}, the one scalar of the output that has a gradient"


class TinyLM(nn.Module):
    """A language model in the style of nanoGPT: `(logits, loss)` with targets, in a tuple or a dict."""

    def __init__(self, form: str = "tuple") -> None:
        super().__init__()
        self.form = form
        self.embed, self.mix, self.head = nn.Embedding(11, 16), nn.Linear(16, 16), nn.Linear(16, 11)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.head(F.gelu(self.mix(self.embed(tokens))))
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        accuracy = (logits.argmax(-1) == targets).float().mean()  # a scalar, and no gradient
        made: dict[str, Any] = {
            "tuple": (logits, loss), "dict": {"logits": logits, "ce": loss, "accuracy": accuracy},
            "two": (logits, loss, logits.square().mean()),
        }  # fmt: skip
        return made[self.form]


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(11, (3, 5)), torch.randint(11, (3, 5))


def picked(output: Any) -> Any:
    return output["ce"] if isinstance(output, Mapping) else output[1]


def said(found: Any) -> list[str]:
    return [note for note in found.notes if "the loss was" in note]


@pytest.mark.parametrize(("form", "name"), [("tuple", "output[1]"), ("dict", "output['ce']")])
@pytest.mark.parametrize("diagnose", [fxamp.estimate_error, fxamp.measure_error, fxamp.census])
def test_the_one_scalar_with_a_gradient_is_the_loss(diagnose: Any, form: str, name: str) -> None:
    model = TinyLM(form)
    found, asked = diagnose(model, batch()), diagnose(model, batch(), loss=picked)
    assert said(found) == [NOTE.format(name)]
    assert not said(asked)
    data, by_function = (json.loads(one.to_json()) for one in (found, asked))
    data["notes"].remove(NOTE.format(name))
    assert data == by_function


def test_compare_tune_and_an_overflow_say_which_scalar_was_the_loss() -> None:
    model = TinyLM()
    assert said(fxamp.tune(model, batch(), tolerance=0.1)) == [NOTE.format("output[1]")]
    assert said(fxamp.compare(model, batch(), policies="O1")) == [NOTE.format("output[1]")]
    nn.init.constant_(model.mix.weight, 1e5)
    found = fxamp.find_overflow(model, batch(), policies="O1,dtype=fp16")
    assert found is not None
    assert said(found) == [NOTE.format("output[1]")]
    assert NOTE.format("output[1]") in str(found)


def test_pairs_of_a_loader_are_the_inputs_of_a_model_that_returns_its_loss() -> None:
    found = fxamp.measure_error(TinyLM(), batches=[batch(), batch()], policies="O1")
    assert found.batches == 2
    assert said(found) == [NOTE.format("output[1]")]


@pytest.mark.parametrize("compiled", [None, "aot_eager"])
@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_a_train_step_without_a_loss_function_trains_on_it(form: str, compiled: str | None) -> None:
    losses = []
    for loss_fn in (None, picked):
        torch.manual_seed(0)
        model = fxamp.convert(TinyLM(form), policy="O1,dtype=bf16")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        step = fxamp.TrainStep(model, loss_fn, optimizer, compile=compiled or False)
        losses.append([float(step(batch()).loss) for _ in range(3)])
    assert losses[0] == losses[1]
    assert losses[0][2] < losses[0][0]


def test_two_scalars_are_refused_with_the_line_to_write() -> None:
    model = TinyLM("two")
    text = r"2 scalars, any of which may be the loss: output\[1\], output\[2\]: give loss= .*lambda output: output\[1\]"
    for diagnose in (fxamp.estimate_error, fxamp.measure_error, fxamp.find_overflow, fxamp.tune, fxamp.compare):
        with pytest.raises(PolicyError, match=text):
            diagnose(model, batch())
    with pytest.raises(PolicyError, match=text):
        fxamp.TrainStep(model, None, torch.optim.SGD(model.parameters(), lr=0.1))(batch())


def test_a_target_without_a_loss_says_where_a_second_input_belongs() -> None:
    with pytest.raises(PolicyError, match=r"second input of the model, the inputs are one tuple, \(x, y\)"):
        fxamp.census(TinyLM(), *batch())


def test_the_command_writes_the_line_to_add(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = ["from test_loss_of_the_output import TinyLM, batch", ""]
    lines += ["def make(): return TinyLM(), batch()", "def two(): return TinyLM('two'), batch()"]
    (tmp_path / "lm_target.py").write_text("\n".join([*lines, "def loss(output): return output[1]", ""]))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)
    assert main(["error", "lm_target.py:make", "--policy", "O1"]) == 0
    assert NOTE.format("output[1]") in capfd.readouterr().out
    assert main(["error", "lm_target.py:two", "--policy", "O1"]) == 2
    err = capfd.readouterr().err
    assert "2 scalars" in err
    assert "write `def loss(output): return output[1]` and give --loss" in err
    assert main(["error", "lm_target.py:two", "--policy", "O1", "--loss", "lm_target.py:loss"]) == 0

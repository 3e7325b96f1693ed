"""The callback for Hugging Face's Trainer, and the one way to train with it: checkpoints, evaluation, generation."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from passes.contract.errors import FxampError, PolicyError
from tests.support.architectures import BY_NAME
from tests.support.helpers import Layers, in_turns
from tests.support.training import WeightCasts

accelerate: Any = pytest.importorskip("accelerate")
transformers: Any = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore")]  # the libraries' own
O1 = "O1,dtype=bf16"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    accelerate.state.AcceleratorState._reset_state(True)
    yield
    accelerate.state.AcceleratorState._reset_state(True)


def gpt() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=60, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # without one it warns, which breaks the graph: that takes long
    return model


def data() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 60, (16, 8), generator=generator)
    return [{"input_ids": i, "labels": i} for i in ids]


def trainer(model: Any, folder: Path, *callbacks: Any, **settings: Any) -> Any:
    settings = {"save_strategy": "no", "max_steps": 4, **settings}
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True, seed=0,
        logging_steps=1, learning_rate=1e-2, **settings,
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=data(), eval_dataset=data(), callbacks=list(callbacks))


def losses(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_a_view_trains_as_the_trainers_own_bf16_and_the_plan_ran(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback, model = fxamp.huggingface.FxampCallback(O1), gpt()
    view = fxamp.convert(model, policy=O1)
    run = trainer(view, tmp_path, callback)
    with caplog.at_level(logging.INFO, "fxamp"):
        run.train()
    theirs = trainer(gpt(), tmp_path, bf16=True)
    theirs.train()
    assert losses(run) == losses(theirs)
    trained = theirs.model.state_dict()
    assert all(torch.equal(v, trained[n]) for n, v in model.state_dict().items())
    assert callback.census
    [entry] = [e for e in run.state.log_history if "fxamp/casts" in e]
    assert entry["fxamp/casts"] == fxamp.plan_of(view).casts > 0
    assert entry["fxamp/differences"] == 0
    assert entry["fxamp/as_planned"] == pytest.approx(1.0)
    assert "census of the first batch" in caplog.text
    changed = trainer(fxamp.convert(gpt(), policy=f"{O1},modules.lm_head=fp32"), tmp_path)
    changed.train()
    assert losses(changed) != losses(run)
    assert len(fxamp.graphs(view)) == len(fxamp.graphs(changed.model)), "the census captures nothing"


@pytest.mark.parametrize(("optim", "accumulate"), in_turns(["adamw_torch_fused", "adamw_torch", "sgd"], [4, 1]))
def test_each_weight_is_cast_once_between_two_updates(tmp_path: Path, optim: str, accumulate: int) -> None:
    found, counts = [], []
    for once in (None, True, False):
        model = gpt()
        callbacks = [] if once is None else [fxamp.huggingface.FxampCallback(census=False, cast_once=once)]
        run = trainer(
            model if once is None else fxamp.convert(model, policy=O1), tmp_path, *callbacks, bf16=once is None,
            optim=optim, gradient_accumulation_steps=accumulate, max_steps=5,
        )  # fmt: skip
        with WeightCasts(model) as casts:
            run.train()
        found.append(losses(run))
        counts.append(casts.by_step[1:])
    assert found[1] == found[0]
    assert found[2] == found[0]
    low = 9  # weight and bias of four products, and the embedding, which is the head
    assert counts[1:] == [[low] * 4, [accumulate * low] * 4]


def test_a_census_that_fails_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    def scaled(self: Any, x: Tensor, scale: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * scale
        return out

    view = fxamp.convert(Layers(scaled, layer=nn.Linear(8, 4)), policy=O1)
    state = types.SimpleNamespace(log_history=[], epoch=0, global_step=1)
    for breaks in (False, True):
        callback = fxamp.huggingface.FxampCallback()
        callback.on_train_begin(types.SimpleNamespace(bf16=False, fp16=False), state, None, model=view)
        view(torch.randn(2, 8), scale=torch.tensor(2.0)).sum().backward()  # by place and by name
        if breaks:
            view.layer = nn.Linear(7, 4)
        callback.on_step_end(None, state, None, model=view)
        callback.on_train_end(None, state, None)
        assert ("there is no census of the first batch" in caplog.text) is breaks
    assert state.log_history[0]["fxamp/as_planned"] == 1
    assert "fxamp/as_planned" not in state.log_history[1]


def test_bf16_beside_a_view_changes_no_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = fxamp.huggingface.FxampCallback()
    run = trainer(fxamp.convert(gpt(), policy=O1), tmp_path, callback, bf16=True)
    with caplog.at_level(logging.INFO, "fxamp"):
        run.train()
    assert "concern code outside of the view's graphs" in caplog.text
    plain = trainer(gpt(), tmp_path, bf16=True)
    plain.train()
    assert losses(run) == losses(plain)
    assert callback.census is not None
    assert callback.census, callback.census.differences


def test_checkpoints_evaluation_and_generation(tmp_path: Path) -> None:
    whole = trainer(
        fxamp.convert(gpt(), policy=O1), tmp_path, fxamp.huggingface.FxampCallback(), save_strategy="steps",
        save_steps=2, max_steps=4,
    )  # fmt: skip
    whole.train()
    saved = tmp_path / "checkpoint-2"
    kept = json.loads((saved / "trainer_state.json").read_text())["log_history"]
    assert any("fxamp/casts" in entry for entry in kept)
    assert type(transformers.GPT2LMHeadModel.from_pretrained(saved)) is transformers.GPT2LMHeadModel
    view = fxamp.convert(gpt(), policy=O1)
    again = trainer(view, tmp_path, fxamp.huggingface.FxampCallback(), max_steps=4)
    again.train(resume_from_checkpoint=str(saved))
    assert losses(again)[-2:] == losses(whole)[-2:]
    assert again.evaluate()["eval_loss"] == whole.evaluate()["eval_loss"]
    ids = torch.randint(2, 60, (2, 5))
    made = view.generate(ids, max_new_tokens=2, do_sample=False)
    model = gpt().eval()
    model.load_state_dict(whole.model.state_dict())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(made, model.generate(ids, max_new_tokens=2, do_sample=False))


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_scale_and_skips_are_logged(tmp_path: Path, optim: str) -> None:
    """On a CPU Accelerate makes no scaler, so it is given one; under its large scale gradients overflow FP16."""

    def pairs(self: Any, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.head(input_ids / 60), labels / 60)}

    torch.manual_seed(0)
    callback = fxamp.huggingface.FxampCallback(census=False)
    view = fxamp.convert(Layers(pairs, head=nn.Linear(8, 8)), policy="O1,dtype=fp16")
    run = trainer(view, tmp_path, callback, optim=optim, max_grad_norm=0.0, max_steps=8)
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    before = [2.0**20]
    run.train()
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    scales = [entry["fxamp/scale"] for entry in logged]
    fell = [b < a for a, b in zip(before + scales, scales, strict=False)]
    assert [entry["fxamp/skipped"] for entry in logged] == [sum(fell[: i + 1]) for i in range(8)]
    assert callback.skipped == sum(fell) > 1
    assert not all(fell)
    assert scales[-1] == run.accelerator.scaler.get_scale()


def test_bad_input_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = fxamp.huggingface.FxampCallback
    with pytest.raises(PolicyError, match=r"GPT2LMHeadModel, is not converted: .*fxamp\.convert\(model\)"):
        trainer(gpt(), tmp_path, make()).train()
    with pytest.raises(PolicyError, match="is converted by O2, and FxampCallback was given O1"):
        trainer(fxamp.convert(gpt(), policy="O2"), tmp_path, make("O1")).train()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.57.0")
    with pytest.raises(FxampError, match=r"needs transformers 5.0 or newer, and 4.57.0 is installed"):
        fxamp.huggingface.FxampCallback  # noqa: B018


def test_exported_by_the_exporter_of_transformers() -> None:
    exporters: Any = pytest.importorskip("transformers.exporters")
    model = gpt().eval()
    inputs = {"input_ids": torch.randint(2, 60, (2, 8)), "use_cache": False}
    program = exporters.DynamoExporter().export(model, inputs, config=exporters.DynamoConfig(dynamic=True))
    graph = fxamp.convert(getattr(program, "program", program), policy=O1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(**inputs).logits
    assert torch.equal(graph(**inputs).logits, expected.float())
    assert isinstance(graph, nn.Module)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ProphetNetForConditionalGeneration", ""),
        ("LongformerForMaskedLM", "Could not guard on data-dependent expression Eq(u0, 1)"),
        ("LEDForConditionalGeneration", "Could not guard on data-dependent expression Eq(u0, 1)"),
        ("ViltForImagesAndTextClassification", "Could not guard on data-dependent expression u0 > 1"),
        ("SwitchTransformersForConditionalGeneration", "_apply(): Couldn't swap Linear.weight"),
    ],
)
def test_what_the_exporter_makes_no_program_of_is_a_limit_of_torch_export(name: str, said: str) -> None:
    """The guide on trainers has these errors; `reports/exact_numerics.md` has the same models as views."""
    exporters: Any = pytest.importorskip("transformers.exporters")
    model, inputs = BY_NAME[name]()
    model.eval()
    labels = inputs.pop("labels")
    if name.startswith(("ProphetNet", "Switch")):
        inputs["decoder_input_ids"] = labels
    outcome: Any = pytest.raises(Exception, match=re.escape(said)) if said else contextlib.nullcontext()
    with outcome:
        exported = exporters.DynamoExporter().export(model, dict(inputs), config=exporters.DynamoConfig())
    if said:
        return
    graph = fxamp.convert(exported.program, policy=O1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(**inputs).logits
    assert torch.equal(graph(**inputs).logits, expected.float())


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        out: Tensor = self.fc(x) * scale
        return out


def _state() -> Any:
    return SimpleNamespace(log_history=[], epoch=0, global_step=1)


def test_a_census_of_a_call_with_positional_and_keyword_inputs() -> None:
    view, callback, state = fxamp.convert(_Scale(), policy="O1,dtype=bf16"), fxamp.huggingface.FxampCallback(), _state()
    arguments = SimpleNamespace(bf16=False, fp16=False)
    callback.on_train_begin(arguments, state, None, model=view)
    view(torch.randn(2, 8), scale=torch.tensor(2.0)).sum().backward()
    callback.on_step_end(arguments, state, None, model=view)
    assert callback.census
    assert state.log_history[0]["fxamp/differences"] == 0


def test_a_callback_that_only_looks_ends_no_training(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("no census today")

    view, callback, state = fxamp.convert(_Scale(), policy="O1,dtype=bf16"), fxamp.huggingface.FxampCallback(), _state()
    arguments = SimpleNamespace(bf16=False, fp16=False)
    callback.on_train_begin(arguments, state, None, model=view)
    view(torch.randn(2, 8)).sum().backward()
    monkeypatch.setattr("fxamp.integrations.huggingface.census", broken)
    callback.on_step_end(arguments, state, None, model=view)
    assert callback.census is None
    assert "ValueError: no census today" in caplog.text

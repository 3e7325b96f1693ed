"""The tools that training code is written in: what works in them, and what does not yet, with its error."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp

accelerate: Any = pytest.importorskip("accelerate")
transformers: Any = pytest.importorskip("transformers")

# The libraries' own, and Dynamo's.
pytestmark = [pytest.mark.filterwarnings("ignore")]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    accelerate.state.AcceleratorState._reset_state(True)
    yield
    accelerate.state.AcceleratorState._reset_state(True)


def bert(drop: float = 0.0) -> Any:
    torch.manual_seed(0)
    rates = {"hidden_dropout_prob": drop, "attention_probs_dropout_prob": drop}
    config = transformers.BertConfig(vocab_size=50, **SIZES, **rates)
    return transformers.BertForSequenceClassification(config)


def data() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (8, 6), generator=generator)
    return [{"input_ids": i, "labels": i[0] % 2} for i in ids]


def arguments(folder: Path, **options: Any) -> Any:
    return transformers.TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True, seed=0, **options,
    )  # fmt: skip


@functools.cache
def trained_by_autocast() -> Any:
    model = bert()
    with tempfile.TemporaryDirectory() as folder:
        transformers.Trainer(model, arguments(Path(folder), bf16=True), train_dataset=data()).train()
    accelerate.state.AcceleratorState._reset_state(True)
    return model


@pytest.mark.parametrize("bf16", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_trainer_on_a_model_compiled_in_place_trains_as_under_autocast(tmp_path: Path, bf16: bool) -> None:
    reference, model = trained_by_autocast(), bert()
    keys = list(model.state_dict())
    model.compile(backend="fxamp", options={"policy": "O1,dtype=bf16", "backend": "eager"})
    transformers.Trainer(model, arguments(tmp_path, bf16=bf16), train_dataset=data()).train()
    assert type(model) is transformers.BertForSequenceClassification
    assert list(model.state_dict()) == keys
    for ours, theirs, before in zip(model.parameters(), reference.parameters(), bert().parameters(), strict=True):
        moved = (theirs - before).norm()
        assert (ours - theirs).norm() <= 0.1 * moved + 1e-7
    assert {d.colour for d in fxamp.plan_of(model).decisions} >= {"bfloat16"}


def test_accelerate_prepares_a_compiled_model_and_its_precision_is_the_dtype() -> None:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = bert()
    module = fxamp.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    module, optimizer = accelerator.prepare(module, optimizer)
    batch = torch.utils.data.default_collate(data())
    losses = []
    for _ in range(4):
        loss = module(**batch).loss
        assert loss.dtype == torch.float32
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert fxamp.plan_of(module).policy.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_accelerates_own_list_of_backends_has_no_fxamp(tmp_path: Path) -> None:
    # The day one of these works, the README can say so.
    with pytest.raises(ValueError, match="'FXAMP' is not a valid DynamoBackend"):
        accelerate.Accelerator(cpu=True, dynamo_backend="fxamp")
    accelerate.state.AcceleratorState._reset_state(True)
    with pytest.raises(ValueError, match="'FXAMP' is not a valid DynamoBackend"):
        transformers.Trainer(bert(), arguments(tmp_path, torch_compile_backend="fxamp"), train_dataset=data())


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_transformers_is_autocasts(reentrant: bool) -> None:
    own, model = bert(0.1), bert(0.1)
    batch = torch.utils.data.default_collate(data())
    losses = []
    for each, called in ((own, own), (model, fxamp.convert(model, policy="O1,dtype=bf16"))):
        each.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(called(**batch).loss)
        losses[-1].backward()
    assert torch.equal(*losses)
    for a, b in zip(own.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    inside = [d for d in fxamp.plan_of(called).decisions if d.graph]
    assert {d.colour for d in inside if d.op == "linear"} == {"bfloat16"}


def gpt2() -> tuple[Any, dict[str, Tensor]]:
    config = transformers.GPT2Config(
        vocab_size=60, n_positions=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": torch.randint(2, 60, (2, 5))}


def t5() -> tuple[Any, dict[str, Tensor]]:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(vocab_size=60, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config), {"input_ids": torch.randint(2, 60, (2, 5))}


def whisper() -> tuple[Any, dict[str, Tensor]]:
    config = transformers.WhisperConfig(
        vocab_size=60, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=20,
        max_target_positions=20, num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=3, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config), {"input_features": torch.randn(2, 8, 40)}


def low(call: Any, **inputs: Any) -> Any:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return call(**inputs)


@pytest.mark.parametrize(
    "build", [gpt2, *(pytest.param(b, marks=pytest.mark.matrix) for b in (t5, whisper))], ids=lambda b: b.__name__
)
def test_generation_is_autocasts(build: Any) -> None:
    torch.manual_seed(0)
    model, inputs = build()
    asked = {"max_new_tokens": 3, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    module = fxamp.compile(model.eval(), policy="O1,dtype=bf16", backend="eager")
    expected, got = low(model.generate, **inputs, **asked), module.generate(**inputs, **asked)
    assert torch.equal(got.sequences, expected.sequences)
    assert all(torch.equal(a, b.float()) for a, b in zip(got.scores, expected.scores, strict=True))


@pytest.mark.matrix  # by a model of one layer: tests/fxamp/view/test_outputs_and_methods.py
@pytest.mark.parametrize("build", [gpt2, t5, whisper], ids=lambda b: b.__name__)
def test_calls_beyond_the_recompile_limit_are_autocasts(build: Any) -> None:
    torch.manual_seed(0)
    (model, inputs), (again, _) = build(), build()
    again.load_state_dict(model.state_dict())
    module, later = (  # a view made later has a limit of its own
        fxamp.compile(m.eval(), policy="O1,dtype=bf16", backend="eager", dynamic=False) for m in (model, again)
    )
    key = "decoder_input_ids" if build is not gpt2 else "input_ids"
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("fxamp.capture.frames.CEILING", 2)
        for length in range(1, 5):
            call = {**inputs, key: torch.randint(3, 60, (2, length)), "output_hidden_states": length % 2 == 0}
            expected = low(model, **call).logits.float()
            assert torch.equal(module(**call).logits, expected)
        assert torch.equal(later(**call).logits, expected)
    assert any("recompile limit" in note for note in fxamp.plan_of(module).notes)


def test_fabric_runs_a_view_in_any_precision() -> None:
    lightning: Any = pytest.importorskip("lightning")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 8)
    with torch.autocast("cpu"):
        expected = model(x)
    converted = fxamp.convert(model, (x,))
    full, mixed = (lightning.Fabric(accelerator="cpu", precision=p) for p in ("32-true", "bf16-mixed"))
    assert torch.equal(full.setup(converted)(x), expected.float())
    assert torch.equal(mixed.setup(converted)(x), expected.float())

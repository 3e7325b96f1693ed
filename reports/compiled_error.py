"""Compare the error of a compiled O2 step with autocast's, in real runs of Inductor on a CPU against float64.

    OMP_NUM_THREADS=1 python reports/compiled_error.py              # all ten models
    python reports/compiled_error.py BERT GPT-2                     # two; the others stay

Ten models of `transformers`, 64 to 128 wide, of 4 layers or blocks, without dropout, after 20 steps of training in FP32
on random data whose tokens are drawn as unevenly as words are. Each takes 4 batches of about 1,000 rows (tokens or
patches). An error is relative to float64: of gradients, the distance of all of them, the root of its mean square over
batches; of the loss, the root of the mean square of its distances over 12 batches. Autocast runs eagerly. "O2's plan"
is that of an eager O2, put through Inductor. What `fxamp.tune` of the step predicts of its choice, which here may have
any error, is compared with what it measures: the error of gradients per parameter.

`compiled_error.json` and `compiled_error.md` are written beside this file.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fxamp  # noqa: E402
from reports.made import made, write  # noqa: E402

Inputs = dict[str, Tensor]
GRADIENTS, LOSSES, TRAINED = 4, 12, 20  # batches
VOCABULARY, TOKENS, CLASSES = 1000, 128, 10


@dataclass(frozen=True)
class Row:
    """Errors of one model: autocast's, and those of variants over it.

    Attributes:
        gradients: By variant, the relative error of gradients.
        losses: By variant, the relative error of the loss.
        stored: How many values are stored in 16 bits, by part.
        tuned: Of the plan that `fxamp.tune` chooses: its error as "predicted" and as "measured".
    """

    model: str
    gradients: dict[str, float]
    losses: dict[str, float]
    stored: dict[str, int]
    tuned: dict[str, float]


AUTOCAST, O1, O2, PLAN = "torch.autocast", "O1, compiled", "O2, compiled", "O2's plan, compiled"


def _of_transformers(family: str, task: str, batch: Callable[[], Inputs], **sizes: Any) -> Callable[[], Any]:
    def build() -> tuple[nn.Module, Callable[[], Inputs]]:
        import transformers

        dropouts = (
            "dropout",
            "attention_dropout",
            "hidden_dropout_prob",
            "attention_probs_dropout_prob",
            "resid_pdrop",
        )
        others = ("embd_pdrop", "attn_pdrop", "activation_dropout", "dropout_rate", "drop_path_rate", "hidden_dropout")
        config = getattr(transformers, f"{family}Config")(**sizes)
        for name in (*dropouts, *others):
            if getattr(config, name, None):
                setattr(config, name, 0.0)
        return getattr(transformers, family + task)(config), batch

    return build


def _words() -> Tensor:
    return (torch.rand(8, TOKENS) ** 3 * (VOCABULARY - 3)).long() + 3  # three are special


def _text() -> Inputs:
    ids = _words()
    return {"input_ids": ids, "labels": ids}


def _images(side: int) -> Callable[[], Inputs]:
    def batch() -> Inputs:
        labels = torch.arange(16) % CLASSES
        return {
            "pixel_values": torch.randn(16, 3, side, side) + labels[:, None, None, None] / CLASSES,
            "labels": labels,
        }

    return batch


def _speech() -> Inputs:
    return {"input_features": torch.randn(8, 80, 256), "labels": _words()}


_STACK = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
_TEXT = {**_STACK, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_VISION = {**_STACK, "image_size": 64, "patch_size": 8, "num_labels": CLASSES}
_WHISPER = {
    "vocab_size": VOCABULARY, "d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "max_source_positions": 128,
    "max_target_positions": TOKENS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "use_cache": False,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_decoder_layers": 2,
    "num_heads": 4, "use_cache": False, "decoder_start_token_id": 0,
}  # fmt: skip
MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[[], Inputs]]]] = {
    "BERT": _of_transformers("Bert", "ForMaskedLM", _text, **_TEXT),
    "GPT-2": _of_transformers(
        "GPT2", "LMHeadModel", _text, vocab_size=VOCABULARY, n_embd=128, n_layer=4, n_head=4, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    ),
    "Llama": _of_transformers("Llama", "ForCausalLM", _text, **_TEXT, num_key_value_heads=2, use_cache=False),
    "OPT": _of_transformers(
        "OPT", "ForCausalLM", _text, **_TEXT, ffn_dim=512, word_embed_proj_dim=128, use_cache=False
    ),
    "T5": _of_transformers("T5", "ForConditionalGeneration", _text, **_T5),
    "Whisper": _of_transformers("Whisper", "ForConditionalGeneration", _speech, **_WHISPER),
    "ViT": _of_transformers("ViT", "ForImageClassification", _images(64), **_VISION),
    "DeiT": _of_transformers("DeiT", "ForImageClassification", _images(64), **_VISION),
    "ResNet": _of_transformers(
        "ResNet", "ForImageClassification", _images(64), embedding_size=32, hidden_sizes=[64, 128], depths=[2, 2],
        num_labels=CLASSES,
    ),
    "ConvNeXt": _of_transformers(
        "ConvNext", "ForImageClassification", _images(64), hidden_sizes=[64, 128], depths=[2, 2], num_labels=CLASSES,
        num_stages=2,
    ),
}  # fmt: skip


def measure(name: str) -> Row:
    """Train a model a little, and compare a step of it in every variant."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(TRAINED):
        model(**batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    batches = [batch() for _ in range(LOSSES)]
    exact = [_eager(copy.deepcopy(model).double(), each, torch.float64) for each in batches]
    with torch.autocast("cpu", torch.bfloat16):
        ran = {AUTOCAST: [_eager(copy.deepcopy(model), each, torch.float32) for each in batches]}
    stored = Counter[str]()
    for variant, policy in {O1: "O1,dtype=bf16", O2: "O2,dtype=bf16", PLAN: "O2,dtype=bf16"}.items():
        torch.compiler.reset()
        plan = fxamp.plan(model, (), batches[0], policy=policy) if variant == PLAN else None
        how: Any = {"policy": policy} if plan is None else {"plan": plan}
        view = fxamp.convert(copy.deepcopy(model), (), batches[0], **how)
        ran[variant], step = _compiled(view, batches)
        if variant == O2:
            stored.update(each.part for each in step.stored)
    torch.compiler.reset()
    view = fxamp.convert(copy.deepcopy(model), policy="O2,dtype=bf16")
    tuned = fxamp.TrainStep(view, None, torch.optim.SGD(view.parameters(), lr=0.0), compile={"dynamic": False})
    certificate = fxamp.tune(tuned, batches=batches[:GRADIENTS], tolerance=1.0).certificate
    return Row(
        name, {v: _error([g for _, g in each[:GRADIENTS]], [g for _, g in exact]) for v, each in ran.items()},
        {v: _error([[loss] for loss, _ in each], [[loss] for loss, _ in exact]) for v, each in ran.items()},
        dict(stored), {key: certificate[key] for key in ("predicted", "measured") if key in certificate},
    )  # fmt: skip


Ran = tuple[Tensor, list[Tensor]]  # a loss, and gradients of parameters; float64


def _eager(model: nn.Module, batch: Inputs, dtype: torch.dtype) -> Ran:
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    loss = model(**inputs).loss
    with torch.autocast("cpu", enabled=False):
        loss.backward()
    return loss.detach().double(), _gradients(model.parameters())


def _compiled(view: nn.Module, batches: Sequence[Inputs]) -> tuple[list[Ran], Any]:
    gradients: list[list[Tensor]] = []
    step = fxamp.TrainStep(
        view, None, torch.optim.SGD(view.parameters(), lr=0.0), compile={"dynamic": False},
        on_gradients=lambda parameters: gradients.append(_gradients(parameters)),
    )  # fmt: skip
    losses = [step(each).loss.detach().double() for each in batches]
    assert step.compiled is not None
    return list(zip(losses, gradients, strict=True)), step.compiled


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad.double() for p in parameters if p.grad is not None]


def _error(ran: Sequence[Sequence[Tensor]], exact: Sequence[Sequence[Tensor]]) -> float:
    """Return the root of the mean square, over batches, of the relative distance of all tensors together."""
    squares = [
        sum(float((a - b).square().sum()) for a, b in zip(ours, theirs, strict=True))
        / sum(float(b.square().sum()) for b in theirs)
        for ours, theirs in zip(ran, exact, strict=False)
    ]
    return float((sum(squares) / len(squares)) ** 0.5)


def to_markdown(rows: Sequence[Row]) -> str:
    """Return the report."""
    variants = (O1, O2, PLAN)
    headers = ("model", AUTOCAST, *variants)

    def table(of: Callable[[Row], Mapping[str, float]]) -> str:
        lines = [
            (row.model, f"{of(row)[AUTOCAST]:.2e}", *(f"{of(row)[v] / of(row)[AUTOCAST]:.2f}" for v in variants))
            for row in rows
        ]
        return tabulate(lines, headers, "pipe", disable_numparse=True)

    tuned = [
        (row.model, *(f"{row.tuned[key]:.2e}" if key in row.tuned else "" for key in ("predicted", "measured")),
         f"{row.tuned['predicted'] / row.tuned['measured']:.2f}" if "predicted" in row.tuned else "")
        for row in rows
    ]  # fmt: skip
    stored = [(row.model, *(str(row.stored.get(part, 0)) for part in ("saved", "backward"))) for row in rows]
    return (
        "# Errors of compiled steps\n\nMade by `python reports/compiled_error.py`: ten models of `transformers`, "
        "64 to 128 wide, trained for a few steps, in BF16, against float64. The column of autocast is its relative "
        "error, run eagerly; the others are over it.\n\n"
        f"## Gradients\n\n{table(lambda row: row.gradients)}\n\n## Loss\n\n{table(lambda row: row.losses)}\n\n"
        "## The error that fxamp.tune predicts of its choice\n\n"
        f"{tabulate(tuned, ('model', 'predicted', 'measured', 'ratio'), 'pipe', disable_numparse=True)}\n\n"
        "## Values that a compiled O2 stores in 16 bits, where O1 stores FP32\n\n"
        f"{tabulate(stored, ('model', 'saved for backward', 'handed on in backward'), 'pipe', disable_numparse=True)}\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write both reports."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    options, began = parser.parse_args(arguments), made()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))}: choose from {', '.join(MODELS)}")
    warnings.filterwarnings("ignore")
    file = HERE / "compiled_error.json"
    for name in tqdm(options.models or MODELS):
        row = measure(name)
        rows = {row["model"]: Row(**row) for row in json.loads(file.read_text())["rows"]} if file.exists() else {}
        rows[name] = row  # another process may have measured others
        ordered = [rows[model] for model in MODELS if model in rows]
        text = write(HERE, "compiled_error", {"made": began, "rows": list(map(asdict, ordered))}, to_markdown(ordered))
    print(text)


if __name__ == "__main__":
    main()

"""Architectures of `transformers` that nobody picked: a seed draws them from the library's own lists.

    python reports/held_out.py                      # which ones, and why the others do not run
    python reports/coverage.py --held-out           # how they fare

Each has the config's own defaults but for the sizes below, which every config that has such a setting gets. What does
not build with them, or does not give a finite loss in FP32, is passed over and listed; nothing is tuned to one model.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tests.support.architectures import BY_NAME, Architecture, Inputs  # noqa: E402  (the path comes first)

SEED = 30
TOKENS, VOCABULARY, PIXELS, LABELS = 12, 99, 64, 3
TASKS: dict[str, dict[str, Any]] = {  # the lists that are drawn from, and the settings of a model for it
    "CAUSAL_LM": {"is_decoder": True},
    "MASKED_LM": {},
    "SEQ_TO_SEQ_CAUSAL_LM": {},
    "SEQUENCE_CLASSIFICATION": {"pad_token_id": 0},
    "IMAGE_CLASSIFICATION": {"num_labels": LABELS},
}
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "embedding_size", "width"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("qk_rope_head_dim",), 4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "sliding_window"), 64),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "src_vocab_size", "tgt_vocab_size"), VOCABULARY),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "sep_token_id"), 1),
    "image_size": PIXELS,
}
LARGEST = 20_000_000  # parameters
DROPPED = ("drop", "dropout", "drop_rate", "dropout_rate", "dropout_prob", "drop_path_rate", "jitter_noise")


def names() -> Iterator[tuple[str, str, str]]:
    """Yield model type, class and task of every model that is not in architectures.py, each type once."""
    known = {name.partition("For")[0] for name in BY_NAME}
    types = set[str]()
    for task in TASKS:
        for kind, found in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            name = found if isinstance(found, str) else found[0]
            if kind not in types and name.partition("For")[0] not in known:
                types.add(kind)
                yield kind, name, task


def _config(kind: str, task: str) -> Any:
    default = transformers.CONFIG_MAPPING[kind]()
    sizes = {k: v for k, v in SIZES.items() if isinstance(getattr(default, k, None), int)}
    dropped = {k: 0.0 for k, v in vars(default).items() if k.endswith(DROPPED) and isinstance(v, float)}
    return transformers.CONFIG_MAPPING[kind](**sizes, **dropped, **TASKS[task])


def _inputs(task: str, batch: int) -> Inputs:
    if task == "IMAGE_CLASSIFICATION":
        return {"pixel_values": torch.randn(batch, 3, PIXELS, PIXELS), "labels": torch.randint(LABELS, (batch,))}
    ids = torch.randint(5, VOCABULARY, (batch, TOKENS))
    if task == "SEQUENCE_CLASSIFICATION":
        return {"input_ids": ids, "labels": torch.randint(2, (batch,))}
    return {"input_ids": ids, "labels": ids.clone()}


def _architecture(kind: str, name: str, task: str) -> Architecture:
    def build() -> nn.Module:
        model: nn.Module = getattr(transformers, name)(_config(kind, task))
        return model

    return Architecture(name, task.lower().replace("_", " "), build, functools.partial(_inputs, task))


def problem(architecture: Architecture) -> str:
    """Return why an architecture does not run with the sizes above; "" if it does."""
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in architecture.build().parameters())
        if size > LARGEST:
            return f"{size:,} parameters"
        model, inputs = architecture()
        loss = model.train()(**inputs).loss
    except Exception as error:  # whatever a config or a model raises
        return f"{type(error).__name__}: {error}".splitlines()[0][:100]
    return "" if bool(loss.isfinite()) else "the loss is not finite"


def draw(count: int) -> tuple[dict[str, Architecture], dict[str, str]]:
    """Return the first architectures in the order of the seed that run, and why those before them do not."""
    order = list(names())
    random.Random(SEED).shuffle(order)
    drawn, problems = dict[str, Architecture](), dict[str, str]()
    for kind, name, task in order:
        if len(drawn) == count:
            break
        found = _architecture(kind, name, task)
        if why := problem(found):
            problems[name] = why
        else:
            drawn[name] = found
    return drawn, problems


if __name__ == "__main__":
    drawn, problems = draw(60)
    sys.stdout.writelines(f"{name}\n" for name in drawn)
    sys.stdout.writelines(f"not {name}: {why}\n" for name, why in problems.items())

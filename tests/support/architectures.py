"""The `transformers` architectures that `coverage.py` converts, each small and with random weights.

An entry names a model class, the sizes in which its config differs from the class's defaults, and its inputs for a
batch. Every probability of dropping something is 0, so that a training step draws no random number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]
VOCABULARY, TOKENS, LABELS, PIXELS = 99, 12, 3, 32


@dataclass(frozen=True)
class Architecture:
    """One architecture: its family, how to build it, and what to feed it for a batch of a given size."""

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]

    def __call__(self, batch: int = 2) -> tuple[nn.Module, Inputs]:
        """Return the model and the keyword inputs of a batch, the same at every call."""
        torch.manual_seed(0)
        return self.build(), self.batch(batch)

    def batch(self, size: int) -> Inputs:
        """Return the keyword inputs of a batch, the same at every call."""
        with torch.random.fork_rng():
            torch.manual_seed(size)
            return self.inputs(size)


# Inputs.


def _ids(batch: int, tokens: int = TOKENS, first: int = 5) -> Tensor:
    return torch.randint(first, VOCABULARY, (batch, tokens))  # the first few are the tokenizers' own


def _padded(batch: int, tokens: int = TOKENS) -> Inputs:
    """Give ids of sentences of which the first is shorter."""
    mask = torch.ones(batch, tokens, dtype=torch.long)
    mask[0, -3:] = 0
    return {"input_ids": _ids(batch, tokens), "attention_mask": mask}


def _language(batch: int) -> Inputs:
    inputs = _padded(batch)
    return {**inputs, "labels": inputs["input_ids"]}


def _unpadded(batch: int) -> Inputs:
    ids = _ids(batch)
    return {"input_ids": ids, "labels": ids}


def _few(batch: int) -> Inputs:
    ids = _ids(batch, 5)  # a recurrence is unrolled, token by token
    return {"input_ids": ids, "labels": ids}


def _classes(batch: int) -> Inputs:
    return {**_padded(batch), "labels": torch.arange(batch) % LABELS}


def _translation(batch: int) -> Inputs:
    return {**_padded(batch), "labels": _ids(batch, 9)}


def _pixels(batch: int, size: int = PIXELS) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, size, size)}


def _images(batch: int) -> Inputs:
    return {**_pixels(batch), "labels": torch.arange(batch) % LABELS}


def _sized(size: int) -> Callable[[int], Inputs]:
    return lambda batch: {**_pixels(batch, size), "labels": torch.arange(batch) % LABELS}


def _segmented(batch: int) -> Inputs:
    return {**_pixels(batch, 64), "labels": torch.randint(0, LABELS, (batch, 64, 64))}


def _video(batch: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 4, 3, PIXELS, PIXELS), "labels": torch.arange(batch) % LABELS}


def _wave(batch: int) -> Inputs:
    return {"input_values": torch.randn(batch, 800), "labels": torch.arange(batch) % LABELS}


def _spectrogram(batch: int) -> Inputs:
    return {"input_features": torch.randn(batch, 16, 40), "labels": _ids(batch, 9)}


def _frames(batch: int) -> Inputs:
    return {"input_features": torch.randn(batch, 40, 16), "labels": _ids(batch, 9)}


def _captions(batch: int) -> Inputs:
    return {**_padded(batch), **_pixels(batch), "return_loss": True}


def _series(batch: int) -> Inputs:
    return {"past_values": torch.randn(batch, 32, 3), "future_values": torch.randn(batch, 8, 3)}


# Configs.

_WORDS = {"vocab_size": VOCABULARY, "num_labels": LABELS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_STACK = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 72}
_TEXT = {**_WORDS, **_STACK, "max_position_embeddings": 64}
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "use_cache": False}
_HEADS8 = {**_GROUPED, "head_dim": 8}
_EXPERTS = {**_GROUPED, "num_experts_per_tok": 2}
_MOE_INTERMEDIATE = {"moe_intermediate_size": 24, "num_experts": 4}
_VISION = {**_STACK, "image_size": PIXELS, "patch_size": 8, "num_labels": LABELS}
_SEQ2SEQ = {
    **_WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 72, "decoder_ffn_dim": 72, "max_position_embeddings": 64,
    "decoder_start_token_id": 2, "forced_eos_token_id": None, "use_cache": False,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 72, "num_layers": 2, "num_decoder_layers": 2,
    "num_heads": 4, "decoder_start_token_id": 0, "use_cache": False,
}  # fmt: skip
_SOUND = {
    **_STACK, "vocab_size": VOCABULARY, "num_labels": LABELS, "conv_dim": (16, 16), "conv_stride": (5, 4),
    "conv_kernel": (10, 8), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False, "classifier_proj_size": 24,
}  # fmt: skip
_STAGES4 = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_labels": LABELS}
_SWIN = {
    "image_size": PIXELS, "patch_size": 2, "embed_dim": 16, "depths": [1, 2, 1], "num_heads": [2, 2, 4],
    "window_size": 2, "num_labels": LABELS,
}  # fmt: skip
_TOWERS = {"text_config": _TEXT, "vision_config": _VISION, "projection_dim": 24}


def _drop_nothing(config: Any) -> None:
    """Set every probability of dropping something to 0, in nested configs too."""
    from transformers import PretrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _drop_nothing(value)
        elif isinstance(value, float) and ("drop" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)


def _plain(name: str, family: str, inputs: Callable[[int], Inputs], /, **sizes: Any) -> Architecture:
    """Describe a model class of `transformers`, by name, whose config has these sizes."""

    def build() -> nn.Module:
        import transformers

        cls: Any = getattr(transformers, name)
        config = cls.config_class(**sizes)
        _drop_nothing(config)
        model: nn.Module = cls(config)
        return model

    return Architecture(name, family, build, inputs)


def _text_encoders() -> Iterator[Architecture]:
    family = "text encoder"
    yield _plain("BertForMaskedLM", family, _language, **_TEXT)
    yield _plain("RobertaForMaskedLM", family, _language, **_TEXT)
    yield _plain("AlbertForMaskedLM", family, _language, **_TEXT, embedding_size=16)
    yield _plain(
        "DistilBertForMaskedLM", family, _language, **_WORDS, dim=32, n_layers=2, n_heads=4, hidden_dim=72,
        max_position_embeddings=64,
    )  # fmt: skip
    yield _plain("ElectraForPreTraining", family, _padded_detection, **_TEXT, embedding_size=16)
    yield _plain("DebertaForMaskedLM", family, _language, **_TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"])
    yield _plain(
        "DebertaV2ForMaskedLM", family, _language, **_TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"],
        position_buckets=8,
    )  # fmt: skip
    yield _plain("FNetForMaskedLM", family, _unpadded, **_TEXT)
    yield _plain("ModernBertForMaskedLM", family, _language, **_TEXT, cls_token_id=1, sep_token_id=2)
    yield _plain("RoFormerForMaskedLM", family, _language, **_TEXT, embedding_size=16)
    yield _plain(
        "FunnelForMaskedLM", family, _language, **_WORDS, d_model=32, n_head=4, d_head=8, d_inner=72,
        block_sizes=[1, 1], num_decoder_layers=1,
    )  # fmt: skip
    yield _plain("LongformerForMaskedLM", family, _language, **_TEXT, attention_window=[4, 4])
    yield _plain("BigBirdForMaskedLM", family, _language, **_TEXT, attention_type="original_full")
    yield _plain("XLMWithLMHeadModel", family, _language, n_words=VOCABULARY, emb_dim=32, n_layers=2, n_heads=4)
    yield _plain("IBertForMaskedLM", family, _language, **_TEXT)


def _padded_detection(batch: int) -> Inputs:
    return {**_padded(batch), "labels": torch.randint(0, 2, (batch, TOKENS))}


def _text_decoders() -> Iterator[Architecture]:
    family = "text decoder"
    gpt = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False}
    yield _plain("GPT2LMHeadModel", family, _language, **_WORDS, **gpt)
    yield _plain("GPTJForCausalLM", family, _language, **_WORDS, **gpt, rotary_dim=4)
    yield _plain(
        "GPTNeoForCausalLM", family, _language, **_WORDS, hidden_size=32, num_layers=2, num_heads=4,
        attention_types=[[["global", "local"], 1]], window_size=4, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    yield _plain("GPTNeoXForCausalLM", family, _language, **_TEXT, use_cache=False)
    yield _plain(
        "OPTForCausalLM", family, _language, **_WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        ffn_dim=72, max_position_embeddings=64, word_embed_proj_dim=32, use_cache=False,
    )  # fmt: skip
    yield _plain("BloomForCausalLM", family, _language, **_WORDS, hidden_size=32, n_layer=2, n_head=4, use_cache=False)
    yield _plain("FalconForCausalLM", family, _language, **_TEXT, use_cache=False)
    for name in ("Llama", "Qwen2", "Olmo2", "Cohere", "Phi"):
        yield _plain(f"{name}ForCausalLM", family, _language, **_GROUPED)
    for name in ("Qwen3", "Gemma2"):
        yield _plain(f"{name}ForCausalLM", family, _language, **_HEADS8)
    yield _plain("Gemma3ForCausalLM", family, _language, **_HEADS8, sliding_window=4)
    yield _plain("XLNetLMHeadModel", family, _language, vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4,
                 d_inner=72, use_mems_eval=False)  # fmt: skip


def _mixtures() -> Iterator[Architecture]:
    family = "mixture of experts"
    yield _plain("MixtralForCausalLM", family, _language, **_EXPERTS, num_local_experts=4)
    yield _plain("Qwen2MoeForCausalLM", family, _language, **_EXPERTS, **_MOE_INTERMEDIATE,
                 shared_expert_intermediate_size=24)  # fmt: skip
    yield _plain("PhimoeForCausalLM", family, _language, **_EXPERTS, num_local_experts=4)
    yield _plain(
        "DeepseekV3ForCausalLM", family, _language, **{**_EXPERTS, "num_key_value_heads": 4}, moe_intermediate_size=24,
        n_routed_experts=4, n_shared_experts=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1, n_group=2, topk_group=1,
    )  # fmt: skip
    yield _plain("GptOssForCausalLM", family, _language, **_HEADS8, num_local_experts=4, num_experts_per_tok=2)
    yield _plain(
        "SwitchTransformersForConditionalGeneration", family, _translation, **_T5, num_experts=4,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
    )  # fmt: skip


def _state_spaces() -> Iterator[Architecture]:
    family = "state space, recurrence"
    mamba = {**_WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "use_cache": False}
    yield _plain("MambaForCausalLM", family, _few, **mamba, time_step_rank=4)
    yield _plain("Mamba2ForCausalLM", family, _few, **mamba, num_heads=8, head_dim=8, n_groups=2, chunk_size=8)
    yield _plain("RwkvForCausalLM", family, _few, **_WORDS, hidden_size=32, attention_hidden_size=32,
                 num_hidden_layers=2, context_length=64, use_cache=False)  # fmt: skip
    yield _plain(
        "JambaForCausalLM", family, _few, **_EXPERTS, num_experts=4, mamba_d_state=8, mamba_dt_rank=4,
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        use_mamba_kernels=False,
    )  # fmt: skip
    yield _plain("Lfm2ForCausalLM", family, _few, **_GROUPED, layer_types=["conv", "full_attention"])


def _encoder_decoders() -> Iterator[Architecture]:
    family = "text encoder-decoder"
    yield _plain("T5ForConditionalGeneration", family, _translation, **_T5)
    for name in ("Bart", "Pegasus", "M2M100"):
        yield _plain(f"{name}ForConditionalGeneration", family, _translation, **_SEQ2SEQ)
    yield _plain("LEDForConditionalGeneration", family, _translation, **{k: v for k, v in _SEQ2SEQ.items()
                 if k != "max_position_embeddings"}, attention_window=4, max_encoder_position_embeddings=64,
                 max_decoder_position_embeddings=64)  # fmt: skip
    yield _plain(
        "ProphetNetForConditionalGeneration", family, _translation, **_WORDS, hidden_size=32, encoder_ffn_dim=72,
        decoder_ffn_dim=72, num_encoder_layers=2, num_decoder_layers=2, num_encoder_attention_heads=4,
        num_decoder_attention_heads=4, max_position_embeddings=64, decoder_start_token_id=1, use_cache=False,
    )  # fmt: skip


def _vision() -> Iterator[Architecture]:
    family = "vision"
    for name in ("ViT", "Dinov2"):
        yield _plain(f"{name}ForImageClassification", family, _images, **_VISION)
    yield _plain("ViTMAEForPreTraining", family, lambda b: {**_pixels(b), "noise": torch.rand(b, 16)}, **_VISION,
                 decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2,
                 decoder_intermediate_size=32)  # fmt: skip
    yield _plain("SwinForImageClassification", family, _images, **_SWIN)
    yield _plain("ConvNextV2ForImageClassification", family, _images, **_STAGES4)
    yield _plain("ResNetForImageClassification", family, _images, **_STAGES4, embedding_size=8, layer_type="basic")
    yield _plain("EfficientNetForImageClassification", family, _images, num_labels=LABELS, width_coefficient=0.25,
                 depth_coefficient=0.3, hidden_dim=320)  # fmt: skip
    yield _plain("MobileViTForImageClassification", family, _sized(64), num_labels=LABELS, image_size=64,
                 hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 12, 16, 24, 24, 32])  # fmt: skip
    yield _plain("LevitForImageClassification", family, _sized(64), image_size=64, hidden_sizes=[16, 24, 32],
                 num_attention_heads=[2, 3, 4], depths=[1, 1, 1], key_dim=[8, 8, 8], num_labels=LABELS,
                 mlp_ratio=[2, 2, 2], attention_ratio=[2, 2, 2])  # fmt: skip
    yield _plain("SegformerForSemanticSegmentation", family, _segmented, **_STAGES4,
                 num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16)  # fmt: skip
    yield _plain("DPTForDepthEstimation", family, lambda b: _pixels(b), **_VISION, backbone_out_indices=[0, 1],
                 neck_hidden_sizes=[8, 8], fusion_hidden_size=8, reassemble_factors=[2, 1], is_hybrid=False,
                 neck_ignore_stages=[])  # fmt: skip
    yield _plain("YolosForObjectDetection", family, lambda b: _pixels(b), **{**_VISION, "image_size": [32, 32]},
                 num_detection_tokens=5)  # fmt: skip
    yield _plain("VideoMAEForVideoClassification", family, _video, **_VISION, num_frames=4, tubelet_size=2)


def _audio() -> Iterator[Architecture]:
    family = "audio"
    for name in ("Wav2Vec2", "Hubert", "WavLM", "SEW"):
        yield _plain(f"{name}ForSequenceClassification", family, _wave, **_SOUND)
    yield _plain("Wav2Vec2ConformerForSequenceClassification", family, _wave, **_SOUND)
    yield _plain("WhisperForConditionalGeneration", family, _spectrogram, **{k: v for k, v in _SEQ2SEQ.items()
                 if k != "max_position_embeddings"}, num_mel_bins=16, max_source_positions=20,
                 max_target_positions=20)  # fmt: skip
    yield _plain("Speech2TextForConditionalGeneration", family, _frames, **{k: v for k, v in _SEQ2SEQ.items()
                 if k != "max_position_embeddings"}, input_feat_per_channel=16, input_channels=1, conv_channels=16,
                 conv_kernel_sizes=(3, 3), max_source_positions=60, max_target_positions=20)  # fmt: skip
    yield _plain("ASTForAudioClassification", family,
                 lambda b: {"input_values": torch.randn(b, 32, 16), "labels": torch.arange(b) % LABELS},
                 **_STACK, patch_size=8, max_length=32, num_mel_bins=16, frequency_stride=8, time_stride=8,
                 num_labels=LABELS)  # fmt: skip
    yield _plain("MoonshineForConditionalGeneration", family,
                 lambda b: {"input_values": torch.randn(b, 2400), "labels": _ids(b, 9)},
                 **_WORDS, hidden_size=32, intermediate_size=72, encoder_num_hidden_layers=1,
                 decoder_num_hidden_layers=1, encoder_num_attention_heads=4, decoder_num_attention_heads=4,
                 max_position_embeddings=64, decoder_start_token_id=1, use_cache=False)  # fmt: skip


def _multimodal() -> Iterator[Architecture]:
    family = "multimodal"
    yield _plain("CLIPModel", family, _captions, **_TOWERS)
    yield _plain("SiglipModel", family, _captions, text_config=_TEXT, vision_config=_VISION)
    yield _plain("ViltForImagesAndTextClassification", family, _two_images, **{**_TEXT, **_VISION}, num_images=1,
                 modality_type_vocab_size=3)  # fmt: skip
    yield _plain("GitForCausalLM", family, lambda b: {**_language(b), **_pixels(b)}, **_TEXT, vision_config=_VISION,
                 use_cache=False)  # fmt: skip
    yield _plain(
        "LlavaForConditionalGeneration", family, _interleaved, text_config={**_GROUPED, "model_type": "llama"},
        vision_config={**_VISION, "model_type": "clip_vision_model"}, image_token_index=3, image_token_id=3,
        vision_feature_layer=-1,
    )  # fmt: skip
    yield _plain("LayoutLMv3ForSequenceClassification", family, _document, **_TEXT, input_size=PIXELS, patch_size=8,
                 coordinate_size=6, shape_size=4, max_2d_position_embeddings=100)  # fmt: skip
    yield _plain("VisualBertForPreTraining", family, _visual, **_TEXT, visual_embedding_dim=16)
    yield _plain("LxmertModel", family,
                 lambda b: {**_padded(b), "visual_feats": torch.randn(b, 5, 16), "visual_pos": torch.rand(b, 5, 4)},
                 **{k: v for k, v in _TEXT.items() if k != "num_hidden_layers"}, l_layers=1, x_layers=1, r_layers=1,
                 visual_feat_dim=16)  # fmt: skip


def _two_images(batch: int) -> Inputs:
    return {**_padded(batch), "pixel_values": torch.randn(batch, 1, 3, PIXELS, PIXELS),
            "labels": torch.arange(batch) % LABELS}  # fmt: skip


def _interleaved(batch: int) -> Inputs:
    ids = torch.cat([torch.full((batch, 16), 3), _ids(batch)], dim=1)
    return {"input_ids": ids, **_pixels(batch), "labels": ids}


def _boxes(batch: int) -> Tensor:
    corner, size = torch.randint(0, 50, (batch, TOKENS, 2)), torch.randint(1, 49, (batch, TOKENS, 2))
    return torch.cat([corner, corner + size], dim=-1)


def _document(batch: int) -> Inputs:
    return {**_classes(batch), **_pixels(batch), "bbox": _boxes(batch)}


def _visual(batch: int) -> Inputs:
    inputs = _padded(batch)
    labels = torch.cat([inputs["input_ids"], torch.full((batch, 5), -100)], dim=1)
    return {**inputs, "visual_embeds": torch.randn(batch, 5, 16), "labels": labels,
            "visual_attention_mask": torch.ones(batch, 5),
            "visual_token_type_ids": torch.ones(batch, 5, dtype=torch.long)}  # fmt: skip


def _time_series() -> Iterator[Architecture]:
    family = "time series"
    yield _plain("PatchTSTForPrediction", family, _series, num_input_channels=3, context_length=32, patch_length=8,
                 patch_stride=8, d_model=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=72,
                 prediction_length=8, loss="mse")  # fmt: skip


ARCHITECTURES: tuple[Architecture, ...] = (
    *_text_encoders(),
    *_text_decoders(),
    *_mixtures(),
    *_state_spaces(),
    *_encoder_decoders(),
    *_vision(),
    *_audio(),
    *_multimodal(),
    *_time_series(),
)
BY_NAME = {a.name: a for a in ARCHITECTURES}

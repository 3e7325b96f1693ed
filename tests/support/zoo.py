"""The models that tests and reports convert: eight written here, six from `transformers` out of small random configs.

Every model is small (a forward and backward takes milliseconds), takes a batch of two or more, and has sizes that
differ from one another, so that no two dynamic dimensions are taken for one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Zoo:
    """One model of the zoo: how to build it, what to feed it, what to minimise."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    loss: Callable[[Any], Tensor]
    family: Literal["own", "transformers"]


class LeNet5(nn.Module):
    """LeCun's digit classifier, for images of 1x28x28."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.tanh(self.conv1(x)), 2)
        x = F.max_pool2d(torch.tanh(self.conv2(x)), 2)
        x = torch.flatten(x, 1)
        x = torch.tanh(self.fc1(x))
        x = torch.tanh(self.fc2(x))
        return self.fc3(x)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm beside an identity or 1x1 shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet18(nn.Module):
    """The ResNet of 18 layers, its first stage `width` channels wide (64 in the paper)."""

    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        blocks: list[nn.Module] = []
        inputs = width
        for stage in range(4):
            outputs = width << stage
            blocks += [BasicBlock(inputs, outputs, 1 if stage == 0 else 2), BasicBlock(outputs, outputs, 1)]
            inputs = outputs
        self.layers = nn.Sequential(*blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layers(x))
        return self.fc(torch.flatten(x, 1))


def _double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(4, outputs),
        nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.GroupNorm(4, outputs),
        nn.SiLU(),
    )


class UNet(nn.Module):
    """Two levels down and up; one way up is a transposed convolution, the other an interpolation."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1 = _double_conv(3, width)
        self.down2 = _double_conv(width, 2 * width)
        self.middle = _double_conv(2 * width, 4 * width)
        self.raise2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up2 = _double_conv(4 * width, 2 * width)
        self.up1 = _double_conv(3 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.down1(x)
        skip2 = self.down2(F.max_pool2d(skip1, 2))
        x = self.middle(F.max_pool2d(skip2, 2))
        x = self.up2(torch.cat([self.raise2(x), skip2], dim=1))
        x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
        x = self.up1(torch.cat([x, skip1], dim=1))
        return self.head(x)


class LSTMTagger(nn.Module):
    """A bidirectional LSTM that gives each word of a sentence a tag."""

    def __init__(self, words: int = 53, width: int = 24, tags: int = 9) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, 20, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(0.1)
        self.tag = nn.Linear(40, tags)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(words))
        return self.tag(self.dropout(states))


class CausalBlock(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        split = batch, tokens, self.heads, width // self.heads
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = q.view(split).transpose(1, 2), k.view(split).transpose(1, 2), v.view(split).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, tokens, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A causal language model with learned positions; its head is the embedding itself when `tied`."""

    def __init__(self, vocabulary: int = 61, width: int = 32, heads: int = 4, *, tied: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(48, width)
        self.blocks = nn.ModuleList(CausalBlock(width, heads, 0.1) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SoftmaxAttention(nn.Module):
    """Attention spelled out: two matrix products round a softmax."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5, dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, tokens, width))


class ViTBlock(nn.Module):
    """A pre-norm transformer block without a mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SoftmaxAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A vision transformer: patches by a strided convolution, a class token, pre-norm blocks."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 1 + 4 * 5, width) * 0.02)
        self.blocks = nn.Sequential(*(ViTBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0])


class MixerBlock(nn.Module):
    """One perceptron over the patches, one over the channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.over_patches = nn.Sequential(nn.Linear(patches, 28), nn.GELU(), nn.Linear(28, patches))
        self.norm2 = nn.LayerNorm(width)
        self.over_channels = nn.Sequential(nn.Linear(width, 80), nn.GELU(), nn.Linear(80, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norm2(x))


class MLPMixer(nn.Module):
    """The all-MLP image classifier, for images of 3x16x20."""

    def __init__(self, width: int = 32, layers: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.Sequential(*(MixerBlock(4 * 5, width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


class GraphConv(nn.Module):
    """Two rounds of mean aggregation over the edges of one graph, by `scatter_add`."""

    def __init__(self, features: int = 11, width: int = 32, classes: int = 7) -> None:
        super().__init__()
        self.message1 = nn.Linear(features, width)
        self.own1 = nn.Linear(features, width)
        self.message2 = nn.Linear(width, classes)
        self.own2 = nn.Linear(width, classes)

    @staticmethod
    def _gather(messages: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index[0], edge_index[1]
        index = target.unsqueeze(1).expand(-1, messages.shape[1])
        total = torch.zeros_like(messages).scatter_add(0, index, messages[source])
        degree = torch.zeros(messages.shape[0], device=messages.device)
        degree = degree.scatter_add(0, target, torch.ones_like(target, dtype=torch.float32))
        return total / degree.clamp(min=1.0).unsqueeze(1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.relu(self.own1(x) + self._gather(self.message1(x), edge_index))
        return self.own2(x) + self._gather(self.message2(x), edge_index)


def _cross_entropy(output: Any) -> Tensor:
    """Give the cross-entropy of the logits (classes last) against fixed targets."""
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    rows = logits.flatten(0, -2)
    return F.cross_entropy(rows, torch.arange(rows.shape[0], device=rows.device) % rows.shape[1])


def _mse(output: Tensor) -> Tensor:
    """Give the mean squared error against a fixed wave."""
    target = torch.sin(torch.arange(output.numel(), device=output.device)).view(output.shape)
    return F.mse_loss(output, target.to(torch.promote_types(output.dtype, target.dtype)))


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def _images(channels: int, height: int, width: int, batch: int) -> Inputs:
    generator = torch.Generator().manual_seed(batch)
    return (torch.randn(batch, channels, height, width, generator=generator),), {}


def _words(count: int, length: int, batch: int) -> Inputs:
    return (torch.randint(count, (batch, length), generator=torch.Generator().manual_seed(batch)),), {}


def _graph(batch: int) -> Inputs:
    """Give a random graph of 6 nodes and 17 edges per unit of `batch`."""
    generator = torch.Generator().manual_seed(batch)
    edges = torch.randint(6 * batch, (2, 17 * batch), generator=generator)
    return (torch.randn(6 * batch, 11, generator=generator), edges), {}


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 72}
    return BertForMaskedLM(BertConfig(vocab_size=61, max_position_embeddings=48, **small))


def _bert_inputs(batch: int) -> Inputs:
    (ids,), _ = _words(61, 13, batch)
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0  # one sentence is shorter
    return (), {"input_ids": ids, "attention_mask": mask}


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, use_cache=False, **small))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 72}
    return ViTForImageClassification(ViTConfig(image_size=20, patch_size=4, num_labels=10, **small))


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    small = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(num_labels=10, **small))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    small = {"d_model": 32, "d_kv": 8, "d_ff": 72, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=61, use_cache=False, **small))


def _t5_inputs(batch: int) -> Inputs:
    (ids,), _ = _words(61, 13, batch)
    (answer,), _ = _words(61, 9, batch)
    return (), {"input_ids": ids, "decoder_input_ids": answer}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, intermediate_size=72, use_cache=False, **small))


def _named(inputs: Callable[[int], Inputs], name: str, batch: int) -> Inputs:
    """Give the only positional input by keyword, as `transformers` models are called."""
    (value,), _ = inputs(batch)
    return (), {name: value}


def _entry(
    name: str, build: Callable[[], nn.Module], inputs: Callable[[int], Inputs], loss: Callable[[Any], Tensor]
) -> Zoo:
    return Zoo(name, partial(_seeded, build), inputs, loss, "transformers" if name.startswith("hf_") else "own")


_ids = partial(_named, partial(_words, 61, 13), "input_ids")

ZOO: list[Zoo] = [
    _entry("lenet5", LeNet5, partial(_images, 1, 28, 28), _cross_entropy),
    _entry("resnet18", ResNet18, partial(_images, 3, 40, 48), _cross_entropy),
    _entry("unet", UNet, partial(_images, 3, 16, 24), _mse),
    _entry("lstm_tagger", LSTMTagger, partial(_words, 53, 13), _cross_entropy),
    _entry("gpt", GPT, partial(_words, 61, 13), _cross_entropy),
    _entry("vit", ViT, partial(_images, 3, 16, 20), _cross_entropy),
    _entry("mlp_mixer", MLPMixer, partial(_images, 3, 16, 20), _cross_entropy),
    _entry("graph_conv", GraphConv, _graph, _cross_entropy),
    _entry("hf_bert", _bert, _bert_inputs, _cross_entropy),
    _entry("hf_gpt2", _gpt2, _ids, _cross_entropy),
    _entry("hf_vit", _vit, partial(_named, partial(_images, 3, 20, 20), "pixel_values"), _cross_entropy),
    _entry("hf_resnet", _resnet, partial(_named, partial(_images, 3, 40, 48), "pixel_values"), _cross_entropy),
    _entry("hf_t5", _t5, _t5_inputs, _cross_entropy),
    _entry("hf_llama", _llama, _ids, _cross_entropy),
]
BY_NAME: dict[str, Zoo] = {entry.name: entry for entry in ZOO}

# Convolutions, an RNN, a scatter, an encoder with a mask.
SOME = ("lenet5", "lstm_tagger", "graph_conv", "hf_bert")
# oneDNN has an FP16 LSTM only on CPUs with FP16 arithmetic; elsewhere autocast itself raises.
NO_FP16_ON_CPU = frozenset({"lstm_tagger"})

"""Every module of torch.nn exports to ops that have a row."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.ops import ops, rules


def t(*shape: int) -> Tensor:
    return torch.randn(*shape)


def modules() -> dict[str, tuple[nn.Module, tuple[Any, ...]]]:
    """Return each module class of torch.nn that has a forward to export, with inputs."""
    row, image, volume = t(2, 4, 8), t(2, 4, 8, 8), t(2, 4, 8, 8, 8)
    by_rank = {1: row, 2: image, 3: volume}
    labels, sign, same = torch.tensor([1, 0]), torch.tensor([1.0, -1.0]), (t(2, 4), t(2, 4))
    made: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {}
    simple = """
        CELU ELU Flatten GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish
        PReLU RReLU ReLU ReLU6 SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Dropout
        AlphaDropout FeatureAlphaDropout
    """
    for name in simple.split():
        made[name] = getattr(nn, name)(), (row,)
    for name in ("LogSoftmax", "Softmax", "Softmin"):
        made[name] = getattr(nn, name)(dim=-1), (row,)
    for n, x in by_rank.items():
        sizes: dict[str, tuple[Any, ...]]
        sizes = {"Conv": (4, 4, 3), "ConvTranspose": (4, 4, 3), "BatchNorm": (4,), "InstanceNorm": (4,)}
        sizes |= {
            "AvgPool": (2,),
            "MaxPool": (2,),
            "LPPool": (2, 2),
            "AdaptiveAvgPool": (2,),
            "AdaptiveMaxPool": (2,),
            "Dropout": (),
        }
        sizes |= {f"{pad}Pad": (1,) for pad in ("Reflection", "Replication", "Zero", "Circular")} | {
            "ConstantPad": (1, 0.5)
        }
        for name, args in sizes.items():
            cls = getattr(nn, f"{name}{n}d", None)
            if cls is not None:
                made[f"{name}{n}d"] = cls(*args), (x,)
        pooled, where = getattr(F, f"max_pool{n}d")(x, 2, return_indices=True)
        made[f"MaxUnpool{n}d"] = getattr(nn, f"MaxUnpool{n}d")(2), (pooled, where)
    made |= {
        "Linear": (nn.Linear(8, 3), (row,)), "Bilinear": (nn.Bilinear(4, 4, 3), same),
        "LayerNorm": (nn.LayerNorm(8), (row,)),
        "RMSNorm": (nn.RMSNorm(8), (row,)), "GroupNorm": (nn.GroupNorm(2, 4), (image,)),
        "LocalResponseNorm": (nn.LocalResponseNorm(2), (image,)),
        "Embedding": (nn.Embedding(5, 4), (labels,)), "Threshold": (nn.Threshold(0.1, 0.0), (row,)),
        "EmbeddingBag": (nn.EmbeddingBag(5, 4), (labels[None],)), "Softmax2d": (nn.Softmax2d(), (image,)),
        "Unflatten": (nn.Unflatten(1, (2, 2)), (row,)),
        "Fold": (nn.Fold((4, 5), (2, 2)), (t(1, 12, 12),)), "Unfold": (nn.Unfold((2, 2)), (image,)),
        "PixelShuffle": (nn.PixelShuffle(2), (image,)),
        "PixelUnshuffle": (nn.PixelUnshuffle(2), (image,)), "ChannelShuffle": (nn.ChannelShuffle(2), (image,)),
        "FractionalMaxPool2d": (nn.FractionalMaxPool2d(2, output_size=3), (image,)),
        "FractionalMaxPool3d": (nn.FractionalMaxPool3d(2, output_size=3), (volume,)),
        "UpsamplingNearest2d": (nn.UpsamplingNearest2d(scale_factor=2), (image,)),
        "UpsamplingBilinear2d": (nn.UpsamplingBilinear2d(scale_factor=2), (image,)),
        "Upsample": (nn.Upsample(scale_factor=2, mode="bicubic"), (image,)),
        "CosineSimilarity": (nn.CosineSimilarity(), same),
        "PairwiseDistance": (nn.PairwiseDistance(), same), "LSTM": (nn.LSTM(8, 5), (row,)),
        "GRU": (nn.GRU(8, 5), (row,)), "RNN": (nn.RNN(8, 5), (row,)),
        "LSTMCell": (nn.LSTMCell(4, 5), (t(2, 4),)), "GRUCell": (nn.GRUCell(4, 5), (t(2, 4),)),
        "RNNCell": (nn.RNNCell(4, 5), (t(2, 4),)),
        "MultiheadAttention": (nn.MultiheadAttention(8, 2), (row, row, row)),
        "Transformer": (nn.Transformer(8, 2, 1, 1, 16, batch_first=True), (row, row)),
        "CrossEntropyLoss": (nn.CrossEntropyLoss(), (t(2, 4), labels)), "NLLLoss": (nn.NLLLoss(), (t(2, 4), labels)),
        "NLLLoss2d": (nn.NLLLoss(), (t(2, 4, 3, 3), torch.zeros(2, 3, 3).long())),
        "BCELoss": (nn.BCELoss(), tuple(x.sigmoid() for x in same)),
        "CosineEmbeddingLoss": (nn.CosineEmbeddingLoss(), (*same, sign)),
        "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss(), (t(2), sign)),
        "MarginRankingLoss": (nn.MarginRankingLoss(), (t(2), t(2), sign)),
        "MultiMarginLoss": (nn.MultiMarginLoss(), (t(2, 4), labels)),
        "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss(), (t(2, 4), torch.zeros(2, 4).long())),
        "TripletMarginLoss": (nn.TripletMarginLoss(), (*same, t(2, 4))),
        "TripletMarginWithDistanceLoss": (nn.TripletMarginWithDistanceLoss(), (*same, t(2, 4))),
    }  # fmt: skip
    losses = """L1Loss MSELoss SmoothL1Loss HuberLoss KLDivLoss PoissonNLLLoss BCEWithLogitsLoss SoftMarginLoss
        MultiLabelSoftMarginLoss"""
    for name in losses.split():
        made[name] = getattr(nn, name)(), (t(2, 4), t(2, 4).sigmoid())
    layer = {"TransformerEncoderLayer": 1, "TransformerDecoderLayer": 2}
    for name, inputs in layer.items():
        made[name] = getattr(nn, name)(8, 2, 16, batch_first=True), (row,) * inputs
        stack = name.removesuffix("Layer")
        made[stack] = getattr(nn, stack)(getattr(nn, name)(8, 2, 16, batch_first=True), 1), (row,) * inputs
    return made


# Containers and bases, which compute nothing; what needs CUDA, reads values, or is an autograd.Function.
NOT_EXPORTED = """
    Container Module ModuleDict ModuleList ParameterDict ParameterList Sequential RNNBase RNNCellBase Buffer
    Parameter UninitializedBuffer UninitializedParameter DataParallel AdaptiveLogSoftmaxWithLoss
    LinearCrossEntropyLoss SyncBatchNorm CrossMapLRN2d GaussianNLLLoss CTCLoss
"""


class All(nn.Module):
    """Every module, each on inputs of its own."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, inputs: list[tuple[Tensor, ...]]) -> list[Any]:
        return [part(*given) for part, given in zip(self.parts, inputs, strict=True)]


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_every_module_of_torch_nn_exports_to_ops_that_have_a_row(
    training: bool, caplog: pytest.LogCaptureFixture
) -> None:
    made = modules()
    classes = {n for n, c in vars(nn).items() if isinstance(c, type) and issubclass(c, nn.Module)}
    named = {n for n in classes if not n.startswith("Lazy")}
    assert named - set(made) <= set(NOT_EXPORTED.split())
    caplog.set_level(logging.ERROR, "torch")  # until the test ends: others read what torch warns of
    parts, inputs = [m.train(training) for m, _ in made.values()], [given for _, given in made.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nn.LSTM gathers its weights in forward
        program = torch.export.export(All(parts), (inputs,))
    unknown = {n: ops.name(n) for n in program.graph.nodes if ops.name(n) and not rules.row_of(n).known}
    assert unknown == {}

"""Models of other people's libraries, from random configs, converted and compared with `torch.autocast`.

Run it in an environment of its own. torchvision has no build for CPUs, so it is installed first, without what it
depends on, and this script defines the operators that its import asks for:

    python -m pip install --no-deps "torchvision==0.28.*"
    python -m pip install timm diffusers torch_geometric monai peft vit-pytorch x-transformers \
        segmentation-models-pytorch
    python reports/libraries.py                       # every model; goes on where the record ends
    python reports/libraries.py --case timm:levit_128s

Each model runs in a process of its own, which may crash. Sizes are those of the example. Writes `libraries.md` and
`libraries.json` beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import library as operators
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fxamp  # noqa: E402  (the path comes first)
from passes.contract.errors import FxampError  # noqa: E402
from passes.contract.reasons import DEVIATIONS  # noqa: E402
from reports.made import made, write  # noqa: E402
from tests.support.trial.first import first_difference  # noqa: E402
from tests.support.trial.judge import FAILURES, TORCH, Subject, judged, quiet, recorded  # noqa: E402
from tests.support.trial.options import add_options  # noqa: E402
from tests.support.trial.runs import distance, norm, run, values_differ, without_fused_layers  # noqa: E402
from tests.support.trial.workers import Found, Record, code, run_all  # noqa: E402

RECORD = HERE.parent / "build" / "trial" / "libraries.jsonl"
LIBRARIES = {
    "timm": "timm", "diffusers": "diffusers", "geometric": "torch_geometric", "monai": "monai", "peft": "peft",
    "vit": "vit-pytorch", "x": "x-transformers", "smp": "segmentation-models-pytorch", "torchvision": "torchvision",
}  # fmt: skip
Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

# Models of timm by the side of their image; some with a smaller config.
TIMM: dict[int, str] = {
    32: """resnet10t resnet18 skresnet18 lcnet_035 mobilenetv3_small_050 mobilenetv2_035 tinynet_e
        ghostnet_050 fbnetc_100 mnasnet_small semnasnet_075 hardcorenas_a efficientnet_b0 tf_mixnet_s rexnet_100
        repvgg_a0 regnetx_002 regnety_002 convnext_atto convnextv2_atto dla34 vovnet39a selecsls42
        resnest14d hrnet_w18_small edgenext_xx_small starnet_s1 repvit_m0_9 mambaout_femto inception_next_atto
        hgnetv2_b0 eca_nfnet_l0 cspresnet50 poolformerv2_s12 efficientvit_b0 mobileone_s0 gernet_s nf_regnet_b0
        test_byobnet test_resnet test_efficientnet test_convnext ese_vovnet19b_dw xcit_nano_12_p16_224""",
    64: """mobilevit_xxs mobilevitv2_050 poolformer_s12 pvt_v2_b0 fastvit_t8 caformer_s18
        mobilenetv4_conv_small ghostnetv2_100 res2net50_14w_8s""",
    160: "test_vit test_vit2 test_nfnet",
    224: "levit_128s efficientformer_l1",
}
TIMM_SMALL: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 2}, "deit_tiny_patch16_224": {"img_size": 64, "depth": 2},
    "cait_xxs24_224": {"img_size": 64, "depth": 2},
    "swin_tiny_patch4_window7_224": {"img_size": 56, "depths": (1, 1, 1, 1)},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 2}, "beit_base_patch16_224": {"img_size": 64, "depth": 2},
}  # fmt: skip


def _timm(name: str) -> Made:
    import timm

    options = TIMM_SMALL.get(name, {})
    side = options.get("img_size") or next(s for s, names in TIMM.items() if name in names.replace("?", "").split())
    return timm.create_model(name, pretrained=False, num_classes=10, **options), (torch.randn(2, 3, side, side),), {}


def _torchvision(name: str) -> Made:
    import torchvision

    side = {"alexnet": 64, "inception_v3": 96}.get(name, 32)
    options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    model = torchvision.models.get_model(name, weights=None, num_classes=10, **options)
    return model, (torch.randn(2, 3, side, side),), {}


def _diffusers(name: str) -> Made:
    import diffusers

    two = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    cross = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": 4}
    image, at = torch.randn(2, 3, 16, 16), torch.tensor([1, 7])
    latent = torch.randn(2, 4, 8, 8)
    text = torch.randn(2, 5, 8)
    if name == "UNet2DModel":
        model = diffusers.UNet2DModel(
            sample_size=16, down_block_types=down, up_block_types=up, attention_head_dim=4, **two
        )
        return model, (image, at), {"return_dict": False}
    if name == "UNet2DConditionModel":
        up = ("CrossAttnUpBlock2D", "UpBlock2D")
        model = diffusers.UNet2DConditionModel(sample_size=8, up_block_types=up, cross_attention_dim=8, **cross, **two)
        return model, (latent, at, text), {"return_dict": False}
    if name == "ControlNetModel":
        model = diffusers.ControlNetModel(
            cross_attention_dim=8, conditioning_embedding_out_channels=(4, 8), **cross, **two
        )
        return model, (latent, at, text, torch.randn(2, 3, 16, 16)), {"return_dict": False}
    if name in ("AutoencoderKL", "VQModel", "AutoencoderTiny", "AsymmetricAutoencoderKL"):
        kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
        if name == "AutoencoderTiny":
            tiny = {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8),
                    "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}  # fmt: skip
            return diffusers.AutoencoderTiny(**tiny), (image,), {"return_dict": False}
        if name == "AsymmetricAutoencoderKL":
            sizes = {"down_block_out_channels": (8, 16), "up_block_out_channels": (8, 16), "norm_num_groups": 4}
            return diffusers.AsymmetricAutoencoderKL(**kinds, **sizes), (image,), {"return_dict": False}
        return getattr(diffusers, name)(**kinds, **two), (image,), {"return_dict": False}
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}
    if name == "DiTTransformer2DModel":
        model = diffusers.DiTTransformer2DModel(in_channels=4, sample_size=8, patch_size=2, norm_num_groups=4, **heads)
        return model, (latent,), {"timestep": at, "class_labels": torch.tensor([1, 2]), "return_dict": False}
    if name == "PixArtTransformer2DModel":
        model = diffusers.PixArtTransformer2DModel(
            sample_size=8, in_channels=4, out_channels=4, cross_attention_dim=16, caption_channels=8,
            use_additional_conditions=False, **heads,
        )  # fmt: skip
        return model, (latent, text, at), {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
                                           "return_dict": False}  # fmt: skip
    if name == "SD3Transformer2DModel":
        model = diffusers.SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, joint_attention_dim=8, caption_projection_dim=16,
            pooled_projection_dim=8, out_channels=4, pos_embed_max_size=8, **heads,
        )  # fmt: skip
        return model, (latent, text, torch.randn(2, 8), at), {"return_dict": False}
    if name == "FluxTransformer2DModel":
        model = diffusers.FluxTransformer2DModel(
            in_channels=4, joint_attention_dim=8, pooled_projection_dim=8, num_single_layers=1,
            axes_dims_rope=(2, 2, 4), **heads,
        )  # fmt: skip
        more = {"pooled_projections": torch.randn(2, 8), "timestep": torch.rand(2), "img_ids": torch.rand(16, 3),
                "txt_ids": torch.rand(5, 3), "guidance": None, "return_dict": False}  # fmt: skip
        return model, (torch.randn(2, 16, 4), text), more
    if name == "PriorTransformer":
        model = diffusers.PriorTransformer(embedding_dim=8, num_embeddings=5, additional_embeddings=4, **heads)
        return model, (torch.randn(2, 8), at, torch.randn(2, 8), text), {"return_dict": False}
    if name == "Transformer2DModel":
        model = diffusers.Transformer2DModel(in_channels=8, norm_num_groups=4, cross_attention_dim=8, **heads)
        return model, (torch.randn(2, 8, 8, 8), text), {"return_dict": False}
    raise ValueError(name)


DIFFUSERS = """UNet2DModel UNet2DConditionModel ControlNetModel AutoencoderKL VQModel AutoencoderTiny
    AsymmetricAutoencoderKL DiTTransformer2DModel PixArtTransformer2DModel SD3Transformer2DModel FluxTransformer2DModel
    PriorTransformer Transformer2DModel"""


class Graph(nn.Module):
    """Two convolutions on a graph, with a norm between."""

    def __init__(self, first: nn.Module, second: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.second = first, norm, second

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Return what the nodes have after both."""
        made: torch.Tensor = self.second(self.norm(self.first(x, edges)).relu(), edges)
        return made


def _geometric(name: str) -> Made:
    import torch_geometric.nn as gnn

    edges, x = torch.randint(12, (2, 40)), torch.randn(12, 8)
    whole = {
        "GCN": lambda: gnn.GCN(8, 8, 2, norm="batch"), "GAT": lambda: gnn.GAT(8, 8, 2, heads=2),
        "GIN": lambda: gnn.GIN(8, 8, 2), "GraphSAGE": lambda: gnn.GraphSAGE(8, 8, 2, norm="layer"),
        "PNA": lambda: gnn.PNA(8, 8, 2, aggregators=["mean", "max", "std"], scalers=["identity"], deg=torch.ones(9)),
        "EdgeCNN": lambda: gnn.EdgeCNN(8, 8, 2),
    }  # fmt: skip
    if name in whole:
        return whole[name](), (x, edges), {}
    conv: Any = getattr(gnn, name)
    options = {"ChebConv": {"K": 2}, "TAGConv": {"K": 2}, "GATv2Conv": {"heads": 1}, "ARMAConv": {"num_stacks": 2},
               "TransformerConv": {"heads": 2, "concat": False}}.get(name, {})  # fmt: skip
    if name == "GatedGraphConv":
        return Graph(conv(8, 2), conv(8, 2), gnn.BatchNorm(8)), (x, edges), {}
    return Graph(conv(8, 8, **options), conv(8, 8, **options), gnn.BatchNorm(8)), (x, edges), {}


GEOMETRIC = """GCN GAT GIN GraphSAGE PNA EdgeCNN GCNConv SAGEConv GATConv GATv2Conv GraphConv ChebConv TAGConv SGConv
    TransformerConv ARMAConv LEConv ClusterGCNConv MFConv FeaStConv GatedGraphConv ResGatedGraphConv FiLMConv"""


def _monai(name: str) -> Made:
    from monai.networks import nets

    flat = torch.randn(2, 1, 32, 32)
    common = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
    made: dict[str, Callable[[], nn.Module]] = {
        "UNet": lambda: nets.UNet(channels=(4, 8, 16), strides=(2, 2), num_res_units=1, **common),
        "AttentionUnet": lambda: nets.AttentionUnet(channels=(4, 8, 16), strides=(2, 2), **common),
        "BasicUNet": lambda: nets.BasicUNet(features=(4, 4, 8, 8, 16, 4), **common),
        "BasicUNetPlusPlus": lambda: nets.BasicUNetPlusPlus(features=(4, 4, 8, 8, 16, 4), **common),
        "SegResNet": lambda: nets.SegResNet(init_filters=8, blocks_down=(1, 1), blocks_up=(1,), **common),
        "DynUNet": lambda: nets.DynUNet(
            kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2], filters=[4, 8, 16], **common
        ),
        "VNet": lambda: nets.VNet(spatial_dims=2, in_channels=1, out_channels=2),
        "HighResNet": lambda: nets.HighResNet(**common),
        "UNETR": lambda: nets.UNETR(
            1, 2, 32, feature_size=4, hidden_size=16, mlp_dim=32, num_heads=2, spatial_dims=2
        ),
        "DenseNet": lambda: nets.DenseNet(init_features=8, growth_rate=4, block_config=(2, 2), **common),
        "ViT": lambda: nets.ViT(
            1, 32, 8, hidden_size=16, mlp_dim=32, num_layers=2, num_heads=2, spatial_dims=2, classification=True
        ),
        "AutoEncoder": lambda: nets.AutoEncoder(channels=(4, 8), strides=(2, 2), **common),
        "ResNet": lambda: nets.resnet10(spatial_dims=2, n_input_channels=1, num_classes=3),
    }  # fmt: skip
    return made[name](), (flat,), {}


MONAI = """UNet AttentionUnet BasicUNet BasicUNetPlusPlus SegResNet DynUNet VNet HighResNet UNETR DenseNet ViT
    AutoEncoder ResNet"""


def _peft(name: str) -> Made:
    import peft
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    base = BertForSequenceClassification(config)
    ids = torch.randint(50, (16, 6))  # as many as the error of two classes has to be taken over
    targets = {"target_modules": ["query", "value"]}
    made: dict[str, Callable[[], Any]] = {
        "LoRA": lambda: peft.LoraConfig(r=2, task_type="SEQ_CLS", **targets),
        "DoRA": lambda: peft.LoraConfig(r=2, use_dora=True, task_type="SEQ_CLS", **targets),
        "IA3": lambda: peft.IA3Config(feedforward_modules=[], task_type="SEQ_CLS", **targets),
        "LoHa": lambda: peft.LoHaConfig(r=2, task_type="SEQ_CLS", **targets),
        "LoKr": lambda: peft.LoKrConfig(r=2, task_type="SEQ_CLS", **targets),
        "OFT": lambda: peft.OFTConfig(r=0, oft_block_size=4, task_type="SEQ_CLS", **targets),
        "VeRA": lambda: peft.VeraConfig(r=2, task_type="SEQ_CLS", **targets),
        "Prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="SEQ_CLS"),
        "Prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="SEQ_CLS"),
    }  # fmt: skip
    return peft.get_peft_model(base, made[name]()), (), {"input_ids": ids, "return_dict": False}


PEFT = "LoRA DoRA IA3 LoHa LoKr OFT VeRA Prefix Prompt"


def _vit(name: str) -> Made:
    module = {
        "ViT": "vit", "SimpleViT": "simple_vit", "DeepViT": "deepvit", "CaiT": "cait", "T2TViT": "t2t", "CCT": "cct",
        "CrossViT": "cross_vit", "PiT": "pit", "LeViT": "levit", "CvT": "cvt", "RegionViT": "regionvit",
        "NesT": "nest", "MobileViT": "mobile_vit", "XCiT": "xcit", "ViT_small": "vit_for_small_dataset",
        "Parallel": "parallel_vit", "Rotary": "rvt",
    }[name]  # fmt: skip
    found = importlib.import_module(f"vit_pytorch.{module}")
    plain = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32}
    made: dict[str, Callable[[], nn.Module]] = {
        "CaiT": lambda: found.CaiT(**plain, cls_depth=1, dim_head=8),
        "T2TViT": lambda: found.T2TViT(image_size=32, num_classes=5, dim=16, depth=1, heads=2, mlp_dim=32,
                                       t2t_layers=((3, 2), (3, 2))),
        "CCT": lambda: found.CCT(img_size=32, embedding_dim=16, n_conv_layers=1, num_layers=1, num_heads=2,
                                 num_classes=5),
        "CrossViT": lambda: found.CrossViT(image_size=32, num_classes=5, sm_dim=8, lg_dim=16, sm_patch_size=8,
                                           lg_patch_size=16, depth=1, sm_enc_heads=2, lg_enc_heads=2),
        "PiT": lambda: found.PiT(image_size=32, patch_size=8, num_classes=5, dim=16, depth=(1, 1), heads=2, mlp_dim=32),
        "LeViT": lambda: found.LeViT(image_size=64, num_classes=5, dim=(8, 16), depth=1, heads=(2, 2), mlp_mult=2,
                                     stages=2),
        "CvT": lambda: found.CvT(num_classes=5, s1_emb_dim=8, s2_emb_dim=8, s3_emb_dim=16, s3_depth=1, s2_depth=1),
        "NesT": lambda: found.NesT(image_size=32, patch_size=4, num_classes=5, dim=8, heads=2, num_hierarchies=2,
                                   block_repeats=(1, 1)),
        "MobileViT": lambda: found.MobileViT(image_size=(64, 64), dims=[8, 8, 8], num_classes=5, patch_size=(2, 2),
                                             channels=[4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 16]),
        "XCiT": lambda: found.XCiT(**plain, cls_depth=1),
        "ViT_small": lambda: found.ViT(**plain), "Parallel": lambda: found.ViT(**plain),
        "Rotary": lambda: found.RvT(**plain),
    }  # fmt: skip
    side = 64 if name in ("LeViT", "MobileViT") else 32
    if name == "RegionViT":
        model = found.RegionViT(dim=(8, 8, 8, 8), depth=(1, 1, 1, 1), window_size=2, num_classes=5)
        return model, (torch.randn(2, 3, 64, 64),), {}
    model = made[name]() if name in made else getattr(found, name)(**plain)
    return model, (torch.randn(2, 3, side, side),), {}


VIT = """ViT SimpleViT DeepViT CaiT T2TViT CCT CrossViT PiT LeViT CvT RegionViT NesT MobileViT XCiT ViT_small
    Parallel Rotary"""

# Options of one small decoder of x-transformers.
X: dict[str, dict[str, Any]] = {
    "plain": {}, "rotary": {"rotary_pos_emb": True}, "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "rmsnorm": {"use_rmsnorm": True}, "glu": {"ff_glu": True, "ff_swish": True}, "qk_norm": {"attn_qk_norm": True},
    "scalenorm": {"use_scalenorm": True}, "t5": {"rel_pos_bias": True}, "sandwich": {"sandwich_norm": True},
    "macaron": {"macaron": True}, "one_kv": {"attn_one_kv_head": True}, "memory": {"attn_num_mem_kv": 2},
    "flash": {"attn_flash": True}, "residual": {"residual_attn": True}, "shift": {"shift_tokens": 1},
    "talking": {"attn_pre_talking_heads": True}, "gate": {"attn_gate_values": True}, "relu2": {"ff_relu_squared": True},
}  # fmt: skip


def _x(name: str) -> Made:
    import x_transformers as x

    layers = x.Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, **X[name])
    return x.TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers), (torch.randint(50, (2, 8)),), {}


def _smp(name: str) -> Made:
    import segmentation_models_pytorch as smp

    model = getattr(smp, name)("resnet18", encoder_weights=None, in_channels=3, classes=2)
    return model, (torch.randn(2, 3, 64, 64),), {}


def _names(text: str) -> list[str]:
    return [name for name in text.split() if not name.endswith("?")]


BUILDERS: dict[str, tuple[Callable[[str], Made], list[str]]] = {
    "x": (_x, list(X)), "geometric": (_geometric, _names(GEOMETRIC)), "vit": (_vit, _names(VIT)),
    "peft": (_peft, _names(PEFT)), "diffusers": (_diffusers, _names(DIFFUSERS)), "monai": (_monai, _names(MONAI)),
    "timm": (_timm, [*TIMM_SMALL, *(n for names in TIMM.values() for n in _names(names))]),
    "smp": (_smp, _names("Unet Linknet FPN PSPNet MAnet DeepLabV3 DeepLabV3Plus UnetPlusPlus")),
    "torchvision": (_torchvision, _names("alexnet squeezenet1_1 shufflenet_v2_x0_5 mobilenet_v2 mnasnet0_5 googlenet")),
}  # fmt: skip


def define_operators() -> None:
    """Define what the import of a torchvision without its binary asks for."""
    for name, arguments in (("nms", "Tensor dets, Tensor scores, float iou_threshold"),
                            ("qnms", "Tensor dets, Tensor scores, float iou_threshold")):  # fmt: skip
        with contextlib.suppress(RuntimeError):  # it has them
            operators.define(f"torchvision::{name}", f"({arguments}) -> Tensor")


def build(case: str) -> Made:
    """Return a model in eval mode, its inputs, and those by keyword."""
    library, _, name = case.partition(":")
    torch.manual_seed(0)
    model, args, kwargs = BUILDERS[library][0](name)
    return model.eval(), args, kwargs


def work(case: str) -> Found:
    """Convert one model at O1 and O2, and compare it in eval mode with autocast and FP32."""
    with quiet(), without_fused_layers():
        try:
            model, args, kwargs = build(case)
        except Exception as e:
            return {"built": False, "problem": f"{type(e).__name__}: {e}"[:200]}
        try:
            found = Subject(model, args, kwargs, backward=False)
        except Exception as e:
            return {"built": False, "problem": f"eager: {type(e).__name__}: {e}"[:200]}
        row: Found = {"built": True, "autocast_runs": found.autocast is not None}
        try:
            modules = {
                level: fxamp.convert(model, args, kwargs, policy=f"{level},dtype=bf16") for level in ("O0", "O1", "O2")
            }
        except FxampError as e:
            return {**row, "problem": f"{e}"[:300]}
        row |= compared(found, modules)
        if row.get("equal") is False:
            row["code"], row["where"] = first_difference(recorded(found, "view", "O1"))
        row["graph"] = judged(found, "graph", ("O1",))["O1"].kind
        return {**row, "states": in_every_state(found, modules["O1"]), **trained(model, modules["O1"], args, kwargs)}


def in_every_state(found: Subject, module: nn.Module) -> list[str]:
    """Name the states of a model, of four, in which its one converted module does not give autocast's bits."""
    missed = []
    for training, grad in itertools.product((True, False), repeat=2):
        found.model.train(training)
        module.train(training)
        with torch.set_grad_enabled(grad):
            try:
                got = run(module, found.model, found.args, found.kwargs, backward=False)
                low = run(
                    found.model, found.model, found.args, found.kwargs, backward=False,
                    context=torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
                )  # fmt: skip
                problem = values_differ(got, low)
            except Exception as e:
                problem = f"{type(e).__name__}: {e}"[:200]
        if problem:
            state = f"{'training' if training else 'evaluation'}, {'with' if grad else 'no'} gradients"
            missed.append(f"{state}: {problem}")
    found.model.eval()
    module.eval()
    return missed


def compared(found: Subject, modules: dict[str, Any]) -> Found:
    """Compare every level with eager: O0 and O1 to the bit, the errors of O1, O2 and autocast by their norms."""
    plain = found.plain
    scale = max(norm(plain.floats), 1e-30)
    runs = {level: found.run(module) for level, module in modules.items()}
    row: Found = {"same": not values_differ(runs["O0"], plain), "O2": distance(runs["O2"].floats, plain.floats) / scale}
    if found.autocast is not None:
        row["equal"] = not values_differ(runs["O1"], found.autocast)
        row["autocast"] = distance(found.autocast.floats, plain.floats) / scale
    return row


def trained(model: nn.Module, module: nn.Module, args: Any, kwargs: Any) -> Found:
    """Say whether gradients at O1 in training mode are finite, and there where the model has them."""
    model.train()
    module.train()
    try:
        expected = run(model, model, args, kwargs).gradients
        got = run(module, model, args, kwargs).gradients
    except Exception as e:
        return {"trains": False, "problem": f"training: {type(e).__name__}: {e}"[:200]}
    if not isinstance(expected, list):
        return {}
    if not isinstance(got, list):
        return {"trains": False}
    pairs = list(zip(got, expected, strict=True))
    there = all((a is None) == (b is None) for a, b in pairs)
    return {"trains": there and all(bool(a.isfinite().all()) for a, _ in pairs if a is not None)}


def summary(found: dict[str, Found]) -> dict[str, Any]:
    """Return what the report says of a record, as plain data."""
    now = code()
    versions = {}
    for package in LIBRARIES.values():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {"torch": torch.__version__, "versions": versions, "current": sum(e["code"] == now for e in found.values()),
            "rows": [found[case] for case in sorted(found)]}  # fmt: skip


def to_markdown(data: dict[str, Any]) -> str:
    """Return the report: totals against what is wanted, and a row for every model."""
    rows = [r for r in data["rows"] if r.get("built") and r.get("autocast_runs")]
    converted = [r for r in rows if "same" in r]
    equal, graphs = [r for r in converted if r.get("equal")], [r["graph"] for r in converted if r["graph"] != TORCH]
    others = [r for r in converted if r.get("equal") is False]
    named = sum(r.get("code") in DEVIATIONS for r in others)
    far = [r["case"] for r in converted if "autocast" in r and _ratio(r) > (2 if r["autocast"] > 1e-4 else 10)]
    totals = (
        ("run in eager and under autocast", len(rows)), ("of those, converted", f"{len(converted)} of {len(rows)}"),
        ("O0 equal to eager", f"{sum(r['same'] for r in converted)}"),
        ("O1 in eval equal to autocast", _share(len(equal), len(converted))),
        ("the others, with a deviation at the first node that differs", f"{named} of {len(others)}"),
        ("O2 further from FP32 than it may be", ", ".join(far) or "none"),
        ("autocast's bits in every state from one module", _states(converted)),
        ("exported by torch, and of those the graph at O1 as promised", f"{len(graphs)}, {_kept(graphs)}"),
        ("gradients there and finite at O1", f"{sum(r.get('trains', True) for r in converted)}"),
    )  # fmt: skip
    versions = ", ".join(f"{k} {v}" for k, v in data["versions"].items())
    table = [
        (r["case"], _yes(r["same"]), _yes(r.get("equal")) if r.get("equal") else r.get("code") or "no",
         f"{r['autocast']:.1e}" if "autocast" in r else "", f"{_ratio(r):.2f}", _yes(r.get("trains", True)), r["graph"])
        for r in converted
    ]  # fmt: skip
    headers = ("model", "O0", "O1", "autocast's error", "O2's / that", "trains", "exported graph")
    problems = [
        f"- {r['case']}: {r.get('problem') or r.get('died') or r.get('harness')}"
        for r in data["rows"] if r.get("problem") or r.get("died") or r.get("harness")
    ]  # fmt: skip
    return "\n".join([
        "# Models of other libraries\n\n"
        f"Written by `reports/libraries.py` on a CPU, torch {data['torch']}, {versions}.\n\nModels have "
        "random configs and weights, and run in eval mode with fixed sizes; low is BF16. An error is the distance from "
        "the\noutput in FP32, relative to the norm of that output.\n\n"
        f"{tabulate(totals, (), 'pipe')}\n",
        tabulate(table, headers, "pipe") + "\n",
        "## Not built, refused, or failed\n\n" + ("\n".join(problems) or "None.") + "\n",
    ])  # fmt: skip


def _kept(graphs: Sequence[str]) -> str:
    return _share(sum(kind not in FAILURES for kind in graphs), len(graphs))


def _states(rows: Sequence[Found]) -> str:
    """Count the models whose converted module serves training and evaluation, with and without gradients."""
    tried = [r for r in rows if "states" in r]
    missed = ", ".join(f"{r['case']} ({len(r['states'])} missed)" for r in tried if r["states"])
    return f"{sum(not r['states'] for r in tried)} of {len(tried)} tried{f'; not {missed}' if missed else ''}"


def _ratio(row: Found) -> float:
    return float(row["O2"] / max(row.get("autocast", 0.0), 1e-9))


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / max(whole, 1):.0f} %)"


def _yes(value: Any) -> str:
    return "yes" if value else "no"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the models asked for; print and write the report, or what became of one."""
    parser = argparse.ArgumentParser(description="Convert models of other libraries and compare them with autocast.")
    parser.add_argument("--case", help="this one alone: print what becomes of it")
    parser.add_argument(
        "--library", dest="only", action="append", choices=list(BUILDERS), help="this one's; may repeat"
    )
    parser.add_argument("--limit", type=int, help="how many of each library")
    add_options(parser, RECORD, HERE)
    options, began = parser.parse_args(arguments), made()
    define_operators()
    if options.case:
        logging.disable(logging.ERROR)
        sys.stdout.write(json.dumps(work(options.case), indent=1) + "\n")
        return
    record = Record(options.record)
    record.forget(options.again, lambda e: "same" not in e or not e.get("equal", True) or "problem" in e)
    until = None if options.seconds is None else time.monotonic() + options.seconds
    each = [[f"{lib}:{n}" for n in BUILDERS[lib][1][: options.limit]] for lib in options.only or BUILDERS]
    cases = [c for row in itertools.zip_longest(*each) for c in row if c is not None]  # of every library some first
    run_all(cases, work, record, processes=options.processes, until=until, seconds=400, name="models")
    data = summary(record.found)
    sys.stdout.write(write(options.output, "libraries", {"made": began, **data}, to_markdown(data)))


if __name__ == "__main__":
    torch.set_num_threads(1)  # how a sum is shared out decides how it rounds
    main()

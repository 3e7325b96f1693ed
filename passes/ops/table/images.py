"""Interpolation, pooling, padding and patches, and functions that torch writes in Python in terms of these."""

from __future__ import annotations

from .row import COMPOSITE, FOLLOW, FP32, PROMOTE, Kinds, group, of

# fmt: off
ROWS = (
    *group(Kinds(FP32, cpu=FOLLOW), "interpolation",
        of("""upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
            _upsample_nearest_exact2d _upsample_nearest_exact3d""", commutes="forward"),
        "upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d",
        of("_upsample_bilinear2d_aa _upsample_bicubic2d_aa", no_low="cpu"),
        sensitive="rounding",
    ),
    *group(Kinds(FOLLOW, cpu=FP32), "on the CPU's list",
        "adaptive_avg_pool3d max_unpool2d max_unpool3d",
        of("adaptive_max_pool3d", out="float int", commutes="forward"),
        of("avg_pool3d", no_low="cpu"),
        of(
            "max_pool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d",
            commutes="forward",
        ),
        of("fractional_max_pool2d fractional_max_pool3d", same_dtype=True, out="float int"),
        of("trace", sensitive="range"),
        of("fake_quantize_per_tensor_affine", sensitive="rounding"),
        of("quantile nanquantile", sensitive="rounding", no_low="cpu cuda"),
    ),
    *group(Kinds(FOLLOW, cpu=FP32), "calls max_unpool2d", "max_unpool1d"),
    *group(Kinds(PROMOTE, cpu=FP32), "on the CPU's list",
        of("grid_sampler grid_sampler_2d grid_sampler_3d", sensitive="rounding", same_dtype=True),
        "_grid_sampler_2d_cpu_fallback",
    ),
    *group(
        Kinds(FOLLOW, cpu=COMPOSITE),
        "most of reflect and replicate are on the CPU's list, constant and circular are not",
        "pad",
    ),
    *group(FOLLOW, "pooling and patches",
        of("max_pool1d max_pool2d im2col", commutes="forward"),
        of("""max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d
            adaptive_max_pool2d""", out="float int", commutes="forward"),
        """avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d _adaptive_avg_pool2d _adaptive_avg_pool3d
        col2im""",
    ),
    *group(COMPOSITE, "written in Python: what it calls is on a list for some arguments",
        """interpolate upsample upsample_nearest upsample_bilinear local_response_norm lp_pool1d lp_pool2d
        lp_pool3d gaussian_nll_loss multilabel_soft_margin_loss triplet_margin_with_distance_loss gumbel_softmax""",
        of("linear_cross_entropy", since="2.13"),
    ),
)

"""Norms and softmaxes, whole and in the parts that the dispatcher sees."""

from __future__ import annotations

from .row import FOLLOW, FP32, PROMOTE, group, of

_STATISTICS = "running_mean running_var"
# The statistics are written where the argument `training` is true.
_UPDATED = ("training", False, False, *_STATISTICS.split())

# fmt: off
ROWS = (
    *group(FOLLOW, FP32, "normalises: sums and divides",
        of("layer_norm group_norm", uncast="weight bias", out="first", bounded=True, direct="default"),
        of("native_layer_norm", uncast="weight bias", out="first float float"),
        of("rms_norm", uncast="weight", out="first", bounded=True, direct="default", since="2.12"),
        sensitive="rounding", holds_eps=True,
    ),
    *group(FOLLOW, FOLLOW, "statistics and affine parameters stay FP32 beside a low input",
        of("batch_norm", out="first", writes=_UPDATED, bounded=True, holds_eps=True, direct="default"),
        of("instance_norm",
            out="first", writes=("use_input_stats", True, False, *_STATISTICS.split()), bounded=True, holds_eps=True,
        ),
        of("native_batch_norm", out="first float float", writes=_UPDATED, holds_eps=True),
        of("_native_batch_norm_legit _native_batch_norm_legit_no_training", out="first float float", holds_eps=True),
        of("_native_batch_norm_legit_functional", holds_eps=True),
        of("_batch_norm_impl_index cudnn_batch_norm miopen_batch_norm", writes=_UPDATED),
        "_batch_norm_with_update",
        uncast=f"weight bias {_STATISTICS}",
    ),
    *group(FOLLOW, FOLLOW, "statistics and affine parameters stay FP32 beside a low input",
        of("native_group_norm", uncast="weight bias", out="first float float"),
        of("_fused_rms_norm", uncast="weight", out="first float"),
        sensitive="rounding", holds_eps=True,
    ),
    *group(PROMOTE, PROMOTE, "weight times its reciprocal norm",
        "_weight_norm",
        same_dtype=True,
    ),
    *group(FOLLOW, FP32, "exponentials, then a sum and a quotient",
        of("softmax", dtype_arg=True, converts_first=True, bounded=True, at_most=1.0, direct="int"),
        of("log_softmax", dtype_arg=True, converts_first=True, bounded=True, direct="int"),
        of("logsumexp", casts_out=True, in_norm="statistic logarithm"),
        sensitive="rounding",
    ),
    *group(FOLLOW, FP32, "calls softmax",
        "softmin",
        sensitive="rounding", dtype_arg=True, converts_first=True,
    ),
    *group(FOLLOW, FOLLOW, "decomposed form of a listed op: on no list itself",
        of("_softmax", bounded=True, at_most=1.0),
        "_log_softmax _masked_softmax",
        of("_safe_softmax", dtype_arg=True, bounded=True, at_most=1.0),
        sensitive="rounding",
    ),
)

"""Matrix products, convolutions, attention and recurrent layers: the ops that gain most from 16 bits."""

from __future__ import annotations

from .row import COMPOSITE, KEEP, LOW, PROMOTE, Kinds, group, of

# fmt: off
ROWS = (
    *group(LOW, "matrix product, accumulated in FP32",
        of("linear matmul", folds=True),
        "mm bmm addmm baddbmm addbmm linalg_vecdot",
        same_dtype=True,
    ),
    *group(LOW, "calls matmul or mm for every operand",
        "linalg_matmul chain_matmul linalg_multi_dot",
        same_dtype=True,
    ),
    *group(PROMOTE, "product of two vectors", "dot vdot cross linalg_cross", same_dtype=True),
    *group(LOW, "convolution, accumulated in FP32",
        "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d",
        same_dtype=True,
    ),
    *group(LOW, "attention: a matrix product before and after an FP32 softmax",
        "scaled_dot_product_attention", same_dtype=True,
    ),
    *group(LOW, "on both of torch's lists", "prelu", same_dtype=True),
    *group(
        LOW,
        "recurrence: oneDNN takes every operand low (an LSTM with projections is a composite on a CPU), cuDNN in FP16",
        of("lstm", unprojected="cpu"),
        "rnn_tanh rnn_relu",
        same_dtype=True, recurrent=True, casts_again="bidirectional", tries_low=True, fp16_on="cuda",
    ),
    *group(LOW, "recurrent cell: two linear layers and a pointwise end, all low",
        "rnn_tanh_cell rnn_relu_cell", same_dtype=True,
    ),
    *group(Kinds(KEEP, cpu=LOW), "fused kernel of the CPU",
        of("_addmm_activation mkldnn_rnn_layer", same_dtype=True),
        "_native_multi_head_attention",
    ),
    *group(Kinds(LOW, cpu=PROMOTE), "matrix-vector product; the CPU's list leaves it out",
        of("mv addmv", same_dtype=True),
        of("addr", casts_out=True),
    ),
    *group(
        Kinds(LOW, cpu=PROMOTE),
        "conv1d to conv3d, which call it, are on the CPU's list; it is not, but for an old overload",
        of("convolution _convolution", same_dtype=True),
        "cudnn_convolution cudnn_convolution_transpose",
    ),
    *group(KEEP, "what autograd leaves of attention, of which autocast knows the op of torch's API",
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        of(
            "_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention_backward "
            "_scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward",
            uncast="logsumexp",
        ),
    ),
    *group(Kinds(LOW, cpu=KEEP), "fused kernel of CUDA",
        "_scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell _cudnn_rnn",
    ),
    *group(KEEP, "convolution of MPS, whose row lists it", "_mps_convolution"),
    *group(KEEP, "quantized: its weights are integers",
        "quantized_gru",
        recurrent=True, casts_again="bidirectional", tries_low=True,
    ),
    *group(
        Kinds(LOW, cpu=COMPOSITE), "calls bmm or mul, depending on the equation",
        "einsum", same_dtype=True, may_alias="sole",
    ),
    *group(Kinds(LOW, cpu=COMPOSITE), "on a CPU linear layers and pointwise gates, whose state may be FP32",
        of("gru", recurrent=True, casts_again="bidirectional", tries_low=True, fp16_on="cuda"),
        "gru_cell lstm_cell",
        same_dtype=True,
    ),
    *group(
        Kinds(PROMOTE, cpu=COMPOSITE), "calls mm or dot on a CPU, depending on the shapes",
        "tensordot inner", same_dtype=True,
    ),
    *group(
        Kinds(PROMOTE, cpu=COMPOSITE), "calls bmm and sums in the operands' dtype on a CPU",
        "bilinear", same_dtype=True,
    ),
    *group(COMPOSITE, "calls matmul among other ops",
        "linalg_matrix_power matrix_power linalg_pinv cov corrcoef multi_head_attention_forward",
        of("_trilinear", out="first", same_dtype=True),  # its backward rejects several dtypes
    ),
)

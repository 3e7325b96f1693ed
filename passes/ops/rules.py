"""What is known of each op, one row an op.

`KINDS` says in which dtype an op runs, per device; the tables below it say what else a pass must know. Names are those
of ATen operators without their overload ("softmax" for aten.softmax.int). An in-place form shares the row of its base.

`torch.autocast` is the source of the kinds: its lists are in the dispatcher, and a test compares. An op that calls a
listed op inside counts as what it does in effect; where that depends on shapes or arguments it is a `composite`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from .._torch import autocast_registrations, registered_autocast_dtype
from ..contract.errors import PolicyError

LOW, FP32, PROMOTE, FOLLOW, KEEP = "low", "fp32", "promote", "follow", "keep"
BANNED, COMPOSITE = "banned", "composite"


@dataclass(frozen=True)
class Rule:
    """One row: in which dtype an op runs on each device, why, and what a pass must know to obey.

    Attributes:
        name: Canonical op name.
        cpu: Kind on a CPU, one of `KIND_NAMES`.
        cuda: Kind on CUDA.
        reason: Why this kind, in one line.
        sensitive: Why low may hurt, on any device: "" (it does not), "range" or "rounding".
        casts: Arguments that are cast; () for every floating one.
        uncast: Arguments that are never cast to low: statistics, affine parameters, tables.
        same_dtype: The kernel rejects operands of different float dtypes, so all of them go to one.
        widest: Devices on which "promote" means the widest dtype of all operands, a 0-dim one among them.
        casts_out: The kernel casts what it computes to the dtype of an `out=`; others reject one of another dtype.
        dtype_arg: The op has a `dtype=` argument; an explicit one wins over the rule.
        out: What each output is when the operands are floats: "float" (the dtype the op ran in), "first" (that of
            the first floating operand, whatever the others have), "bool", "int", "complex". An op with
            overloads of one and of several outputs has the longer tuple.
        commutes: Rounding may move across the op bit for bit: "" (no), "forward", or "both" (in backward too).
        no_low: Devices on which the op lacks a low kernel.
        since: The torch version that brought the op or put it on a list, where versions differ.
        until: The torch version that took it away.
    """

    name: str
    cpu: str
    cuda: str
    reason: str = ""
    sensitive: str = ""
    casts: tuple[str, ...] = ()
    uncast: tuple[str, ...] = ()
    same_dtype: bool = False
    widest: tuple[str, ...] = ()
    casts_out: bool = False
    dtype_arg: bool = False
    out: tuple[str, ...] = ("float",)
    commutes: str = ""
    no_low: tuple[str, ...] = ()
    since: str = ""
    until: str = ""

    def kind(self, device: str) -> str:
        """Return the kind on a device; what is not a CPU goes by the list of CUDA, as torch's other devices do."""
        return self.cpu if device == "cpu" else self.cuda


KIND_NAMES: dict[str, str] = {
    LOW: "runs in the low dtype: its floating operands are cast down",
    FP32: "runs in FP32: its floating operands are cast up",
    PROMOTE: "runs in the widest dtype of its operands, as torch promotes; in place, in that of its target",
    FOLLOW: "runs in the dtype of its operand",
    KEEP: "keeps the dtypes that it had before conversion",
    BANNED: "is unsafe in low, and autocast raises",
    COMPOSITE: "is decomposed first: what autocast does inside it depends on shapes or arguments",
}

# cpu, cuda, reason, names
KINDS: tuple[tuple[str, str, str, str], ...] = (
    # Matrix products, convolutions and attention: the reason for mixed precision.
    (LOW, LOW, "matrix product, accumulated in FP32",
     "linear matmul mm bmm addmm addbmm baddbmm linalg_vecdot"),
    (LOW, LOW, "calls matmul or mm for every operand", "linalg_matmul chain_matmul linalg_multi_dot"),
    (LOW, LOW, "convolution, accumulated in FP32",
     "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d"),
    (LOW, LOW, "attention: two matrix products round an FP32 softmax", "scaled_dot_product_attention"),
    (LOW, LOW, "on both lists of torch, beside the convolution that it follows", "prelu"),
    (LOW, LOW, "recurrence: oneDNN and cuDNN take every operand low (an LSTM with projections is a composite on a CPU)",
     "lstm rnn_tanh rnn_relu"),
    (LOW, LOW, "recurrent cell: two linear layers and a pointwise end, all low", "rnn_tanh_cell rnn_relu_cell"),
    (LOW, KEEP, "fused kernel of the CPU", "_addmm_activation mkldnn_rnn_layer _native_multi_head_attention"),
    (PROMOTE, LOW, "matrix-vector product; the CPU's list leaves it out", "mv addmv addr"),
    (PROMOTE, LOW, "the CPU lists conv1d to conv3d, which call it, but not this one (but for a deprecated overload)",
     "convolution _convolution cudnn_convolution cudnn_convolution_transpose"),
    (KEEP, LOW, "fused kernel of CUDA",
     "_scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell _cudnn_rnn"),
    (COMPOSITE, LOW, "calls bmm or mul, as the equation has it", "einsum"),
    (COMPOSITE, LOW, "on a CPU linear layers and pointwise gates, whose state may be FP32", "gru gru_cell lstm_cell"),
    (COMPOSITE, PROMOTE, "calls mm or dot on a CPU, as the shapes have it", "tensordot inner"),
    (COMPOSITE, PROMOTE, "calls bmm and sums in the operands' dtype on a CPU", "bilinear"),
    (COMPOSITE, COMPOSITE, "calls matmul among other ops",
     "linalg_matrix_power matrix_power linalg_pinv cov corrcoef _trilinear multi_head_attention_forward"),
    # Losses.
    (FP32, FP32, "loss: a sum of small terms", """mse_loss l1_loss smooth_l1_loss huber_loss kl_div nll_loss
     nll_loss2d nll_loss_nd poisson_nll_loss soft_margin_loss cosine_embedding_loss hinge_embedding_loss
     margin_ranking_loss multi_margin_loss multilabel_margin_loss triplet_margin_loss
     binary_cross_entropy_with_logits"""),
    (FP32, FP32, "loss; on CUDA it calls log_softmax and nll_loss, both FP32", "cross_entropy_loss"),
    (FP32, BANNED, "loss of a probability, whose log overflows in low: use binary_cross_entropy_with_logits",
     "binary_cross_entropy"),
    (FP32, KEEP, "loss: a sum of small terms; no low kernel", "ctc_loss"),
    (FP32, PROMOTE, "loss: a sum of small terms", "multilabel_margin_loss_forward"),
    # CUDA's FP32 list, on which a CPU keeps the operand's dtype.
    (FOLLOW, FP32, "normalises: sums and divides", "layer_norm native_layer_norm group_norm rms_norm"),
    (FOLLOW, FP32, "exponentials, then a sum and a quotient", "softmax log_softmax logsumexp"),
    (FOLLOW, FP32, "calls softmax", "softmin"),
    (FOLLOW, FP32, "grows without bound, or steep: rounding is amplified",
     "exp expm1 log log10 log1p log2 rsqrt reciprocal sinh cosh tan acos asin erfinv softplus"),
    (PROMOTE, FP32, "power: leaves the range of FP16", "pow"),
    (FOLLOW, FP32, "calls pow", "square"),
    (FOLLOW, FP32, "sum of many terms", "sum cumsum cumprod"),
    (FP32, FP32, "product of many terms", "prod"),
    (FOLLOW, FP32, "norm: a sum of powers",
     "norm frobenius_norm nuclear_norm linalg_norm linalg_vector_norm linalg_matrix_norm renorm"),
    (PROMOTE, FP32, "distance: a sum of powers", "dist cosine_similarity"),
    (FP32, FP32, "distance: a sum of powers", "cdist"),
    (KEEP, FP32, "distance: a sum of powers; no low kernel on a CPU", "pdist"),
    (FOLLOW, FP32, "interpolation", """upsample_nearest1d upsample_nearest2d upsample_nearest3d
     upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d
     _upsample_nearest_exact2d _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"""),
    (PROMOTE, COMPOSITE, "calls norm on the difference", "pairwise_distance"),
    (FOLLOW, COMPOSITE, "calls sum, norm or cumsum among other ops",
     "sum_to_size trapezoid trapz cumulative_trapezoid normalize"),
    # The CPU's FP32 list.
    (FP32, FOLLOW, "on the CPU's list", """adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d max_pool3d
     fractional_max_pool2d fractional_max_pool3d max_unpool2d max_unpool3d reflection_pad1d reflection_pad2d
     replication_pad1d replication_pad2d replication_pad3d trace fake_quantize_per_tensor_affine quantile
     nanquantile"""),
    (FP32, FOLLOW, "calls max_unpool2d", "max_unpool1d"),
    (FP32, PROMOTE, "on the CPU's list", "grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback"),
    (FP32, KEEP, "on the CPU's list", "polar view_as_complex stft"),
    (FP32, KEEP, "linear algebra: no low kernel", """cholesky cholesky_inverse cholesky_solve geqrf inverse
     linalg_cholesky linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
     linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_qr linalg_solve
     linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve orgqr ormqr pinverse qr svd
     triangular_solve _lu_with_info"""),
    (FP32, FP32, "linear algebra: no low kernel; on CUDA's list too", "linalg_matrix_sqrth"),
    (FP32, KEEP, "Fourier transform: no low kernel on a CPU, partly one on CUDA", """fft_fft fft_fft2 fft_fftn
     fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2
     fft_rfftn"""),
    (COMPOSITE, FOLLOW, "most of reflect and replicate are on the CPU's list, constant and circular are not", "pad"),
    # Functions that Python writes in terms of others.
    (COMPOSITE, COMPOSITE, "written in Python: what it calls is on a list for some arguments", """interpolate
     upsample upsample_nearest upsample_bilinear local_response_norm lp_pool1d lp_pool2d lp_pool3d
     gaussian_nll_loss multilabel_soft_margin_loss triplet_margin_with_distance_loss gumbel_softmax
     linear_cross_entropy"""),
    # Both devices promote.
    (PROMOTE, PROMOTE, "elementwise in several operands", """add sub rsub mul div floor_divide fmod remainder
     maximum minimum fmax fmin where clamp clamp_min clamp_max atan2 hypot logaddexp logaddexp2 xlogy
     special_xlog1py special_zeta copysign nextafter heaviside ldexp addcmul addcdiv lerp outer kron
     cartesian_prod block_diag max min complex igamma igammac special_gammainc special_gammaincc"""),
    (PROMOTE, PROMOTE, "joins tensors", "cat stack hstack vstack dstack column_stack row_stack pad_sequence"),
    (PROMOTE, PROMOTE, "broadcasts tensors against each other", "meshgrid broadcast_tensors"),
    (PROMOTE, PROMOTE, "product of two vectors", "dot vdot cross linalg_cross"),
    (PROMOTE, PROMOTE, "comparison",
     "eq ne lt le gt ge isclose allclose equal isin logical_and logical_or logical_xor"),
    (PROMOTE, PROMOTE, "writes one tensor into another", """index_put _unsafe_index_put index_add index_copy
     index_reduce index_fill scatter scatter_add scatter_reduce put masked_scatter masked_fill slice_scatter
     select_scatter diagonal_scatter as_strided_scatter copy fill"""),
    (PROMOTE, PROMOTE, "looks values up", "searchsorted bucketize embedding_bag"),
    (PROMOTE, PROMOTE, "weight times its reciprocal norm", "_weight_norm"),
    # One operand decides.
    (FOLLOW, FOLLOW, "elementwise", """abs neg positive sign sgn signbit relu relu6 leaky_relu elu celu selu
     gelu silu mish sigmoid hardsigmoid hardswish hardtanh hardshrink softshrink softsign tanhshrink threshold
     log_sigmoid glu rrelu tanh sin cos atan sqrt erf erfc exp2 asinh acosh atanh sinc lgamma
     mvlgamma digamma polygamma i0 logit deg2rad rad2deg ceil floor round trunc frac frexp nan_to_num
     conj_physical conj resolve_conj resolve_neg real special_entr special_ndtr special_ndtri special_log_ndtr
     special_erfcx special_i0 special_i0e special_i1 special_i1e special_digamma special_psi special_erfc
     special_exp2 special_gammaln special_logit special_multigammaln special_polygamma special_round
     special_sinc"""),
    (FOLLOW, FOLLOW, "mean and spread", """mean nanmean var std var_mean std_mean nansum logcumsumexp
     count_nonzero segment_reduce diff gradient vander"""),
    (FOLLOW, FOLLOW, "selects values", """amax amin aminmax topk sort msort argsort argmax argmin median
     nanmedian mode kthvalue cummax cummin unique _unique2 unique_consecutive unique_dim histc"""),
    (FOLLOW, FOLLOW, "tests values",
     "isnan isinf isfinite isposinf isneginf isreal logical_not all any nonzero nonzero_static argwhere"),
    (FOLLOW, FOLLOW, "statistics and affine parameters stay FP32 beside a low input", """batch_norm
     instance_norm native_batch_norm native_group_norm _native_batch_norm_legit
     _native_batch_norm_legit_no_training _native_batch_norm_legit_functional _batch_norm_impl_index
     _batch_norm_with_update cudnn_batch_norm _fused_rms_norm"""),
    (FOLLOW, FOLLOW, "the decomposed form of a listed op is on no list",
     "_softmax _log_softmax _safe_softmax _masked_softmax"),
    (FOLLOW, FOLLOW, "pooling and patches", """max_pool1d max_pool1d_with_indices max_pool2d
     max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d adaptive_avg_pool1d
     adaptive_avg_pool2d adaptive_max_pool1d adaptive_max_pool2d _adaptive_avg_pool2d _adaptive_avg_pool3d
     im2col col2im"""),
    (FOLLOW, FOLLOW, "random mask times its operand", """dropout dropout1d dropout2d dropout3d feature_dropout
     alpha_dropout feature_alpha_dropout native_dropout"""),
    (FOLLOW, FOLLOW, "looks rows up: the table keeps its dtype, its rows are cast after", "embedding"),
    (FOLLOW, FOLLOW, "moves values", """view reshape flatten unflatten view_as reshape_as permute transpose t
     numpy_T mT movedim squeeze unsqueeze slice select narrow split split_with_sizes unsafe_split
     unsafe_split_with_sizes chunk unsafe_chunk unbind tensor_split hsplit vsplit dsplit diagonal diag
     diag_embed diagflat linalg_diagonal adjoint mH matrix_H ravel atleast_1d atleast_2d atleast_3d as_strided
     detach alias contiguous clone lift lift_fresh roll flip fliplr flipud rot90 tril triu pixel_shuffle
     pixel_unshuffle channel_shuffle native_channel_shuffle expand expand_as broadcast_to repeat tile unfold
     constant_pad_nd reflection_pad3d _pad_circular view_as_real fft_fftshift fft_ifftshift repeat_interleave
     index index_select gather take take_along_dim masked_select _unsafe_index _unsafe_masked_index
     _reshape_alias _pack_padded_sequence _pad_packed_sequence"""),
    (FOLLOW, FOLLOW, "moves values into a tensor of its own", """alias_copy as_strided_copy detach_copy
     diagonal_copy expand_copy narrow_copy permute_copy select_copy slice_copy split_copy split_with_sizes_copy
     squeeze_copy t_copy transpose_copy unbind_copy unfold_copy unsqueeze_copy view_copy"""),
    (FOLLOW, FOLLOW, "filled to the shape of its operand", """zeros_like ones_like full_like empty_like
     new_zeros new_ones new_full new_empty new_empty_strided zero"""),
    (FOLLOW, FOLLOW, "moves or sums the shards of a tensor between processes", "from_local to_local redistribute"),
    # Dtypes as written.
    (KEEP, KEEP, "made with the dtype that is written", """zeros ones full empty empty_strided empty_permuted
     arange linspace logspace eye tensor scalar_tensor range tril_indices triu_indices hann_window
     hamming_window blackman_window bartlett_window kaiser_window fft_fftfreq fft_rfftfreq from_file as_tensor
     one_hot bincount combinations affine_grid_generator"""),
    (KEEP, KEEP, "random: another dtype draws another stream", """rand randn randint randperm rand_like
     randn_like randint_like normal uniform bernoulli multinomial poisson exponential geometric cauchy
     log_normal random binomial _standard_gamma _sample_dirichlet rrelu_with_noise"""),
    (KEEP, KEEP, "a cast: the author's own", "to type_as chalf"),
    (KEEP, KEEP, "leaves tensors: its value must be the original one", """item _local_scalar_dense is_nonzero
     _assert_async _assert_tensor_metadata sym_constrain_range_for_size histogram histogramdd"""),
    (KEEP, KEEP, "complex or double result", """imag angle view_as_complex_copy float_power istft fft_hfft2
     fft_hfftn fft_ihfft2 fft_ihfftn"""),
    (KEEP, KEEP, "linear algebra that torch's lists leave out", """det logdet slogdet linalg_det linalg_slogdet
     linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve lu_unpack linalg_ldl_factor
     linalg_ldl_factor_ex linalg_ldl_solve linalg_matrix_exp matrix_exp linalg_solve_ex linalg_solve_triangular
     linalg_vander"""),
    (KEEP, KEEP, "sparse layout", "to_sparse to_dense to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc"),
    (KEEP, KEEP, "of integers or bits",
     "bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift gcd lcm"),
)  # fmt: skip

# Why low may hurt, on any device: CUDA's FP32 lists, and beside them spreads, losses and what is made of exponentials.
SENSITIVE: dict[str, str] = {
    "range": """exp expm1 exp2 sinh cosh tan pow square reciprocal rsqrt sum nansum cumsum cumprod prod norm
     frobenius_norm nuclear_norm linalg_norm linalg_vector_norm linalg_matrix_norm renorm dist cdist pdist
     pairwise_distance var var_mean mse_loss l1_loss smooth_l1_loss huber_loss kl_div nll_loss nll_loss2d
     nll_loss_nd poisson_nll_loss soft_margin_loss cosine_embedding_loss hinge_embedding_loss
     margin_ranking_loss multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward
     triplet_margin_loss binary_cross_entropy_with_logits binary_cross_entropy cross_entropy_loss ctc_loss trace
     trapezoid trapz cumulative_trapezoid sum_to_size vander lgamma mvlgamma digamma polygamma""",
    "rounding": """softmax softmin _softmax _safe_softmax _masked_softmax log_softmax _log_softmax logsumexp
     logcumsumexp logaddexp logaddexp2 xlogy special_xlog1py layer_norm native_layer_norm group_norm
     native_group_norm rms_norm _fused_rms_norm cosine_similarity log log10 log1p log2 acos asin acosh atanh
     erfinv logit softplus std std_mean upsample_nearest1d upsample_nearest2d upsample_nearest3d
     upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d
     _upsample_nearest_exact2d _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
     grid_sampler grid_sampler_2d grid_sampler_3d quantile nanquantile fake_quantize_per_tensor_affine
     linalg_matrix_sqrth""",
}

# Mixed float dtypes raise in the kernel, so the operands must agree before it.
SAME_DTYPE = """linear matmul linalg_matmul mm bmm mv addmv dot vdot inner einsum tensordot linalg_vecdot cross
     linalg_cross bilinear addmm addbmm baddbmm chain_matmul linalg_multi_dot conv1d conv2d conv3d conv_tbc
     conv_transpose1d conv_transpose2d conv_transpose3d _convolution convolution lerp masked_scatter index_put
     _unsafe_index_put index_add index_copy index_reduce scatter scatter_add scatter_reduce put prelu
     grid_sampler grid_sampler_2d grid_sampler_3d scaled_dot_product_attention embedding_bag lstm gru rnn_tanh
     rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _addmm_activation mkldnn_rnn_layer cdist
     binary_cross_entropy nll_loss nll_loss2d nll_loss_nd cross_entropy_loss multi_margin_loss linalg_solve
     linalg_solve_ex linalg_lu_solve linalg_ldl_solve lu_solve linalg_solve_triangular triangular_solve
     linalg_tensorsolve linalg_lstsq cholesky_solve linalg_householder_product orgqr ormqr complex polar
     heaviside allclose isclose _weight_norm meshgrid cartesian_prod fractional_max_pool2d fractional_max_pool3d"""

# Torch's own promote lists: every operand goes to the widest dtype among them, a 0-dim one counts and is cast too.
WIDEST: dict[tuple[str, ...], str] = {
    ("cpu",): "cat stack index_copy",
    ("cuda",): "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot inner vdot",
}

# An explicit dtype= wins over the rule.
DTYPE_ARG = """softmax softmin log_softmax _safe_softmax sum nansum mean nanmean prod cumsum cumprod norm
     linalg_norm linalg_vector_norm linalg_matrix_norm zeros_like ones_like full_like empty_like rand_like
     randn_like randint_like new_zeros new_ones new_full new_empty new_empty_strided zeros ones full empty
     empty_strided empty_permuted arange linspace logspace eye range rand randn randint randperm normal to
     tensor as_tensor scalar_tensor tril_indices triu_indices hann_window hamming_window blackman_window
     bartlett_window kaiser_window fft_fftfreq fft_rfftfreq from_file"""

# Kernels that cast what they compute to the dtype of an `out=`: pointwise ones, and sums.
CASTS_OUT = """acos acosh add addcdiv addcmul addr angle asin asinh atan atan2 atanh cat column_stack copysign cos cosh
     cumprod cumsum deg2rad digamma div dstack erf erfc erfinv exp exp2 expm1 floor_divide fmax fmin fmod hstack hypot
     i0 igamma igammac kron ldexp lgamma log log10 log1p log2 logaddexp logaddexp2 logit logsumexp maximum mean minimum
     mul mvlgamma nanmean nansum nextafter outer polygamma pow rad2deg reciprocal remainder rsqrt sigmoid sin sinc sinh
     special_entr special_i0e special_i1 special_i1e special_ndtr special_polygamma special_xlog1py sqrt square stack
     sub sum tan tanh vstack xlogy"""

UNCAST: dict[tuple[str, ...], str] = {
    ("weight", "bias", "running_mean", "running_var"): """batch_norm instance_norm native_batch_norm
     _native_batch_norm_legit _native_batch_norm_legit_no_training _native_batch_norm_legit_functional
     _batch_norm_impl_index _batch_norm_with_update cudnn_batch_norm""",
    ("weight", "bias"): "layer_norm native_layer_norm group_norm native_group_norm",
    ("weight",): "embedding embedding_bag rms_norm _fused_rms_norm",
}

# What comes out when floats go in, where it is not one tensor in the dtype that the op ran in.
OUT: dict[tuple[str, ...], str] = {
    ("bool",): """eq ne lt le gt ge isclose allclose equal isin logical_and logical_or logical_xor logical_not
     isnan isinf isfinite isposinf isneginf isreal all any signbit is_nonzero""",
    ("int",): """argmax argmin argsort searchsorted bucketize nonzero nonzero_static argwhere count_nonzero
     one_hot bincount multinomial randperm tril_indices triu_indices linalg_matrix_rank""",
    ("float", "int"): """topk sort median nanmedian mode kthvalue cummax cummin max min max_pool1d_with_indices
     max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
     fractional_max_pool2d fractional_max_pool3d frexp _pack_padded_sequence _pad_packed_sequence
     linalg_cholesky_ex linalg_inv_ex linalg_ldl_factor linalg_lu_factor linalg_solve_ex""",
    ("float", "int", "int"): """unique _unique2 unique_consecutive unique_dim linalg_ldl_factor_ex
     linalg_lu_factor_ex _lu_with_info""",
    ("float", "float"): "var_mean std_mean aminmax linalg_qr qr linalg_eigh linalg_slogdet slogdet",
    ("float", "float", "float"): "linalg_svd svd",
    ("float", "float", "int", "float"): "linalg_lstsq",
    ("float", "bool"): "native_dropout",
    ("first", "int", "int", "int"): "embedding_bag",
    ("first",): """masked_fill index_fill slice_scatter select_scatter diagonal_scatter as_strided_scatter copy
     fill batch_norm instance_norm layer_norm group_norm rms_norm embedding view_as reshape_as expand_as""",
    ("first", "float", "float"): """native_layer_norm native_group_norm native_batch_norm
     _native_batch_norm_legit _native_batch_norm_legit_no_training""",
    ("first", "float"): "_fused_rms_norm",
    ("complex",): """complex polar view_as_complex stft fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn
     fft_ihfft fft_ihfft2 fft_ihfftn fft_rfft fft_rfft2 fft_rfftn linalg_eigvals""",
    ("complex", "complex"): "linalg_eig",
}

# Rounding may move across: every output element is one input element, or its negative or absolute value.
# In backward too, unless the gradient of an element is a sum, or goes to one of several that rounding has made equal.
COMMUTES: dict[str, str] = {
    "both": """view reshape flatten unflatten view_as reshape_as permute transpose t numpy_T mT movedim squeeze
     unsqueeze slice select narrow split split_with_sizes unsafe_split unsafe_split_with_sizes chunk
     unsafe_chunk unbind tensor_split hsplit vsplit dsplit diagonal diag diag_embed diagflat linalg_diagonal
     ravel atleast_1d atleast_2d atleast_3d detach alias contiguous clone roll flip fliplr flipud rot90 tril
     triu pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle cat stack hstack vstack dstack
     column_stack row_stack where neg abs positive _reshape_alias alias_copy detach_copy diagonal_copy
     narrow_copy permute_copy select_copy slice_copy split_copy split_with_sizes_copy squeeze_copy t_copy
     transpose_copy unbind_copy unsqueeze_copy view_copy""",
    "forward": """expand expand_as expand_copy broadcast_to repeat tile unfold unfold_copy relu relu6 index
     index_select gather take take_along_dim masked_select _unsafe_index repeat_interleave max_pool1d max_pool2d
     max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d
     adaptive_max_pool2d adaptive_max_pool3d amax amin max min topk sort msort cummax cummin median kthvalue
     maximum minimum im2col reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
     replication_pad2d replication_pad3d upsample_nearest1d upsample_nearest2d upsample_nearest3d
     _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d""",
}

NO_LOW: dict[tuple[str, ...], str] = {
    ("cpu", "cuda"): """cholesky cholesky_inverse cholesky_solve geqrf inverse linalg_cholesky
     linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
     linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_qr linalg_solve
     linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve orgqr ormqr pinverse qr svd
     triangular_solve _lu_with_info det logdet slogdet linalg_det linalg_slogdet linalg_lu linalg_lu_factor
     linalg_lu_factor_ex linalg_lu_solve linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve linalg_solve_ex
     linalg_solve_triangular linalg_matrix_sqrth quantile nanquantile ctc_loss cdist pdist polar complex
     view_as_complex""",
    ("cpu",): """fft_fft fft_fft2 fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft
     fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn stft avg_pool3d
     multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward _upsample_bilinear2d_aa
     _upsample_bicubic2d_aa linalg_vander special_log_ndtr special_ndtri special_erfcx special_zeta histogram
     histogramdd""",
}

# What has a low kernel for the forward only, as torch's own tests say; beyond autocast it stays FP32.
NO_LOW_BACKWARD = frozenset(["special_i1", "special_i1e"])

# Arguments for which an op lacks a low kernel on any device, though it has one otherwise.
NO_LOW_FOR: dict[str, tuple[str, tuple[Any, ...]]] = {
    "linalg_matrix_norm": ("ord", (2, -2, "nuc")),
    "linalg_norm": ("ord", ("nuc",)),
    "norm": ("p", ("nuc",)),
}

# Arguments for which an op sums or multiplies many values into one; () where it always does.
ACCUMULATES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "index_add": ("", ()), "scatter_add": ("", ()), "scatter": ("reduce", ("add", "multiply")),
    "scatter_reduce": ("reduce", ("sum", "prod", "mean")), "index_reduce": ("reduce", ("prod", "mean")),
    "segment_reduce": ("reduce", ("sum", "prod", "mean")), "index_put": ("accumulate", (True,)),
    "_unsafe_index_put": ("accumulate", (True,)), "put": ("accumulate", (True,)),
}  # fmt: skip

SINCE: dict[str, str] = {"2.12": "rms_norm", "2.13": "linear_cross_entropy", "2.14": "linalg_matrix_sqrth"}
UNTIL: dict[str, str] = {"2.14": "cholesky qr"}


def _by_name(table: Mapping[Any, str]) -> dict[str, Any]:
    """Turn value -> names into name -> value."""
    return {name: value for value, names in table.items() for name in names.split()}


def _build() -> dict[str, Rule]:
    sensitive, uncast, out = _by_name(SENSITIVE), _by_name(UNCAST), _by_name(OUT)
    commutes, no_low, widest = _by_name(COMMUTES), _by_name(NO_LOW), _by_name(WIDEST)
    since, until = _by_name(SINCE), _by_name(UNTIL)
    same_dtype, dtype_arg, casts_out = (set(names.split()) for names in (SAME_DTYPE, DTYPE_ARG, CASTS_OUT))
    return {
        name: Rule(
            name,
            cpu,
            cuda,
            reason,
            sensitive=sensitive.get(name, ""),
            uncast=uncast.get(name, ()),
            same_dtype=name in same_dtype,
            widest=widest.get(name, ()),
            casts_out=name in casts_out,
            dtype_arg=name in dtype_arg,
            out=out.get(name, ("float",)),
            commutes=commutes.get(name, ""),
            no_low=no_low.get(name, ()),
            since=since.get(name, ""),
            until=until.get(name, ""),
        )
        for cpu, cuda, reason, names in KINDS
        for name in names.split()
    }


RULES: Mapping[str, Rule] = _build()

# Rules of custom ops, which their users register. The one state of this module, and only `register_rule` writes it.
_custom: dict[str, Rule] = {}


def rule(name: str) -> Rule | None:
    """Return the row of an op, of the table or registered; an in-place name gives the row of its base."""
    return RULES.get(name) or _custom.get(name) or RULES.get(name.removesuffix("_"))


def lookup(name: str, device: str, low: torch.dtype | None = None) -> tuple[Rule, str]:
    """Return the row of an op and its kind on a device; an unknown op is kept.

    `low` is the dtype of the conversion: a custom op that was registered with `torch.library.register_autocast` for
    another low dtype is kept.
    """
    found = rule(name)
    if found is None and "::" in name:
        found = _from_register_autocast(name, device, low)
    if found is None:
        found = Rule(name, KEEP, KEEP, "unknown op")
    return found, found.kind(device)


class Table(tuple[Rule, ...]):
    """Rows of the table, in order; prints as one line a row."""

    __slots__ = ()

    def __str__(self) -> str:
        """Write name, kinds and reason of every row."""
        width = max((len(r.name) for r in self), default=0)
        kinds = max(map(len, KIND_NAMES))
        return "\n".join(f"{r.name:{width}}  cpu: {r.cpu:{kinds}}  cuda: {r.cuda:{kinds}}  {r.reason}" for r in self)


def rules() -> Table:
    """Return every row, those of custom ops last."""
    return Table((*RULES.values(), *_custom.values()))


# Kernels that take operands of several floating dtypes and cast the narrower ones up as they read them.
PROMOTING = frozenset(["add", "sub", "rsub", "mul", "div", "maximum", "minimum", "where", "cat", "stack"])


def register_rule(op: Any, kind: str, **facts: Any) -> Rule:
    """Register the rule of a custom op, for both devices.

    Args:
        op: The op or its name: `torch.ops.my_lib.my_op`, an overload of it, or "my_lib::my_op".
        kind: One of `KIND_NAMES`, but "banned" and "composite".
        **facts: Fields of `Rule`, such as `sensitive="range"`, `same_dtype=True`, or `cuda=` for another kind there.

    Raises:
        PolicyError: Unknown kind or fact, an op that the table has, or one that was registered otherwise before.
    """
    name = _op_name(op)
    where = f"register_rule({name!r})"
    if name in RULES:
        raise PolicyError(f"{where}: torch's own op has a rule; override it with Policy(ops={{{name!r}: ...}})")
    kinds = [k for k in KIND_NAMES if k not in (BANNED, COMPOSITE)]
    for given in (kind, facts.get("cuda", kind)):
        if given not in kinds:
            raise PolicyError(f"{where}: {given!r} is no kind{_nearest(given, kinds)}; one of {', '.join(kinds)}")
    for fact, value in facts.items():
        _check_fact(where, fact, value)
    plain: dict[str, Any] = {fact: tuple(value) if isinstance(value, list) else value for fact, value in facts.items()}
    new = replace(Rule(name, kind, kind, "registered by the user"), **plain)
    if _custom.setdefault(name, new) != new:
        raise PolicyError(f"{where}: it was registered otherwise before, as {_custom[name]}")
    return new


_WORDS = {"sensitive": ("", "range", "rounding"), "commutes": ("", "forward", "both")}


def _check_fact(where: str, fact: str, value: Any) -> None:
    """Raise unless `fact` is a field of `Rule` that can hold `value`."""
    known = [f.name for f in fields(Rule) if f.name not in ("name", "cpu")]
    if fact not in known:
        raise PolicyError(f"{where}: no fact is named {fact!r}{_nearest(fact, known)}")
    wanted = type(getattr(Rule("", "", ""), fact))
    if not isinstance(value, (list, tuple) if wanted is tuple else wanted):
        raise PolicyError(f"{where}: {fact}= takes a {wanted.__name__}, not {value!r}")
    words = _WORDS.get(fact)
    if words and value not in words:
        raise PolicyError(f"{where}: {fact}={value!r}{_nearest(value, words)}; one of {', '.join(map(repr, words))}")


def _op_name(op: Any) -> str:
    """Return "namespace::op" for an op in any of its forms, the bare name for an op of ATen."""
    if isinstance(op, torch._ops.OpOverload):
        op = op._schema.name
    elif isinstance(op, torch._ops.OpOverloadPacket):
        op = op._qualified_op_name
    elif not isinstance(op, str):
        op = getattr(op, "_qualname", op)  # what torch.library.custom_op returns
    if not isinstance(op, str):
        raise PolicyError(f"register_rule: {op!r} is no operator; give torch.ops.my_lib.my_op or 'my_lib::my_op'")
    return op.removeprefix("aten::")


def _nearest(name: Any, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _from_register_autocast(name: str, device: str, low: torch.dtype | None) -> Rule | None:
    """Return the rule that `torch.library.register_autocast` gave a custom op, or None."""
    if name not in autocast_registrations("cpu" if device == "cpu" else "cuda"):
        return None
    dtype = registered_autocast_dtype(name, device)
    if dtype is None:
        return Rule(name, KEEP, KEEP, "it has an autocast kernel of its own, which cannot be read")
    reason = f"torch.library.register_autocast: {dtype}"
    if dtype == torch.float32:
        return Rule(name, FP32, FP32, reason)
    if dtype in (torch.float16, torch.bfloat16) and low in (None, dtype):
        return Rule(name, LOW, LOW, reason)
    return Rule(name, KEEP, KEEP, f"{reason}, which this conversion does not use")

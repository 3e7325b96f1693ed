"""The op table agrees with the installed torch: with its lists, and with what autocast does to every op."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes._torch import FakeTensorMode, autocast_registrations, pytree
from passes.contract.devices import DEVICES
from passes.contract.errors import PolicyError
from passes.ops import ops, rules
from passes.ops.rules import BANNED, COMPOSITE, FOLLOW, FP32, KEEP, KIND_NAMES, LOW, PROMOTE, RULES, Rule
from tests.support.helpers import OTHER_RELEASES, autocast_runs_lstms
from tests.support.processes import in_another_process

aten = torch.ops.aten
ELIGIBLE = (torch.float32, torch.bfloat16, torch.float16)

# Rows that are on no list of torch, but run low or in FP32 because all that they call is.
IN_EFFECT = {
    "cpu": """linalg_matmul chain_matmul linalg_multi_dot lstm rnn_tanh rnn_relu rnn_tanh_cell rnn_relu_cell nll_loss_nd
        max_unpool1d""",
    "cuda": """linalg_matmul lstm rnn_tanh rnn_relu gru nll_loss_nd cross_entropy_loss softmin square linalg_norm""",
}
# Registered by the part of torch that is built for CUDA alone.
ONLY_IN_CUDA_BUILDS = {"_cudnn_rnn"}


def listed(device: str) -> set[str]:
    """Return the ATen ops with an autocast kernel, without overloads."""
    names = (n.removeprefix("aten::") for n in autocast_registrations(device) if n.startswith("aten::"))
    # Its other overload, which is the one that models call, is on no list.
    return {n.partition(".")[0] for n in names if (device, n) != ("cpu", "_convolution.deprecated")}


@pytest.mark.parametrize("device", DEVICES)
def test_every_op_on_torchs_list_has_a_row_that_says_so(device: str) -> None:
    kinds = {name: rules.lookup(name, device)[1] for name in listed(device)}
    assert not {n: k for n, k in kinds.items() if k not in (LOW, FP32, PROMOTE, BANNED)}


@pytest.mark.parametrize("device", DEVICES)
def test_every_low_or_fp32_row_is_on_torchs_list_or_calls_only_what_is(device: str) -> None:
    kinds = {n: rules.lookup(n, device)[1] for n in RULES}
    named = listed(device) | ONLY_IN_CUDA_BUILDS | OTHER_RELEASES
    unlisted = {n for n, kind in kinds.items() if n not in named and kind in (LOW, FP32, BANNED)}
    assert unlisted == set(IN_EFFECT[DEVICES[device].lists].split()) | ({"mkldnn_rnn_layer"} & unlisted)


@pytest.mark.parametrize("device", DEVICES)
def test_an_op_that_torch_promotes_takes_the_widest_dtype(device: str) -> None:
    promoted = {n for n in listed(device) if rules.lookup(n, device)[1] == PROMOTE}
    assert promoted == {n for n, r in RULES.items() if DEVICES[device].lists in r.widest} - {"inner"}


def test_a_row_is_an_aten_op_or_a_function_of_torch() -> None:
    from torch.distributed.tensor import DTensor

    spaces: tuple[Any, ...] = (torch, torch.nn.functional, torch.functional, DTensor)
    here = RULES.keys() - OTHER_RELEASES
    assert not {n for n in here if not hasattr(aten, n) and not any(hasattr(s, n) for s in spaces)}


def arguments(name: str) -> set[str]:
    packet = getattr(aten, name, None)
    return {a.name for o in packet.overloads() for a in getattr(packet, o)._schema.arguments} if packet else set()


def test_arguments_that_a_row_names_exist() -> None:
    assert not {n: r.uncast for n, r in RULES.items() if not set(r.uncast + r.casts) <= arguments(n)}


def test_a_row_says_whether_there_is_a_dtype_argument() -> None:
    wrong = {n for n, r in RULES.items() if hasattr(aten, n) and r.dtype_arg != ("dtype" in arguments(n))}
    # Theirs is not for what they compute: a reading of the same bits, an assertion, a layout.
    assert wrong == {"view", "view_copy", "_assert_tensor_metadata", "to_dense"}


def test_whatever_cuda_keeps_in_fp32_is_sensitive_everywhere() -> None:
    assert not {n for n, r in RULES.items() if r.cuda in (FP32, BANNED) and not r.sensitive}


# What autocast does to every op, on a CPU.

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def t(*shape: int) -> Tensor:
    return torch.randn(shape)


def _recurrent(gates: int, states: int, layers: int = 1) -> tuple[Any, ...]:
    """Return the arguments of an RNN over (3, 2, 4) with a hidden size of 5."""
    n, state = gates * 5, t(layers, 2, 5)
    weights = [w for i in range(layers) for w in (t(n, 5 if i else 4), t(n, 5), t(n), t(n))]
    return t(3, 2, 4), [state, t(1, 2, 5)] if states == 2 else state, weights, True, layers, 0.0, False, False, False


def _cell(gates: int, states: int) -> tuple[Any, ...]:
    n = gates * 5
    return t(2, 4), [t(2, 5), t(2, 5)] if states == 2 else t(2, 5), t(n, 4), t(n, 5), t(n), t(n)


def calls_by_hand() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield calls of ops that torch's own sample inputs do not reach."""
    row, image, volume = t(2, 3, 7), t(2, 3, 7, 8), t(2, 3, 5, 6, 7)
    labels, mask = torch.tensor([1, 0, 2]), torch.tensor([[True, False, True]])
    yield from {
        "linalg_matmul": (t(3, 4), t(4, 5)), "conv_tbc": (t(5, 2, 3), t(2, 3, 4), t(4)),
        "_addmm_activation": (t(5), t(3, 4), t(4, 5)), "lstm": _recurrent(4, 2), "rnn_tanh": _recurrent(1, 1, 2),
        "rnn_relu": _recurrent(1, 1), "gru": _recurrent(3, 1), "lstm_cell": _cell(4, 2), "gru_cell": _cell(3, 1),
        "rnn_tanh_cell": _cell(1, 1), "rnn_relu_cell": _cell(1, 1), "chain_matmul": ([t(3, 4), t(4, 5), t(5, 2)],),
        "convolution": (row, t(4, 3, 3), None, [1], [0], [1], False, [0], 1),
        "_convolution": (row, t(4, 3, 3), None, [1], [0], [1], False, [0], 1, False, False, True, True),
        "nll_loss": (t(3, 4), labels), "nll_loss2d": (t(2, 3, 4, 5), torch.zeros(2, 4, 5).long()),
        "nll_loss_nd": (t(3, 4), labels),
        "multilabel_margin_loss_forward": (t(3, 4), torch.zeros(3, 4).long(), 1), "frobenius_norm": (t(3, 4), [0, 1]),
        "nuclear_norm": (t(3, 4),), "max_pool1d": (row, [2]), "max_pool1d_with_indices": (row, [2]),
        "max_pool2d": (image, [2, 2]),
        "max_pool3d": (volume, [2, 2, 2]), "reflection_pad1d": (row, [1, 2]), "reflection_pad2d": (image, [1, 2, 3, 0]),
        "reflection_pad3d": (volume, [1, 2, 3, 0, 1, 1]), "replication_pad1d": (row, [1, 2]), "inverse": (t(3, 3),),
        "replication_pad2d": (image, [1, 2, 3, 0]), "replication_pad3d": (volume, [1, 2, 3, 0, 1, 1]), 
        "fake_quantize_per_tensor_affine": (t(3, 4), 0.1, 0, 0, 255), "orgqr": (t(4, 3), t(3)),
        "row_stack": ([t(3), t(3)],),
        "pad_sequence": ([t(3, 2), t(4, 2)],), "_unsafe_index_put": (t(3, 4), [labels], t(3, 4)), "copy": (t(3), t(3)),
        "_weight_norm": (t(3, 4), t(3, 1)), "_softmax": (t(3, 4), 1, False), "_log_softmax": (t(3, 4), 1, False),
        "_safe_softmax": (t(3, 4), 1), "_masked_softmax": (t(1, 3), mask, 1, 0),
        "_adaptive_avg_pool2d": (image, [2, 2]),
        "_adaptive_avg_pool3d": (volume, [2, 2, 2]), "col2im": (t(1, 12, 12), [4, 5], [2, 2], [1, 1], [0, 0], [1, 1]),
        "native_dropout": (t(3, 4), 0.5, True), "dropout": (t(3, 4), 0.5, True), "feature_dropout": (image, 0.5, True),
        "alpha_dropout": (t(3, 4), 0.5, True), "feature_alpha_dropout": (image, 0.5, True),
        "_upsample_bicubic2d_aa": (image, [3, 4], False),
        "_native_batch_norm_legit_no_training": (image, t(3), t(3), t(3), t(3).abs(), 0.1, 1e-5), "adjoint": (t(3, 4),),
        "alias": (t(3),), "native_channel_shuffle": (t(1, 4, 3, 2), 2), "_pad_circular": (row, [1, 1]),
        "_reshape_alias": (t(4), [2, 2], [2, 1]),
        "_unsafe_index": (t(3, 4), [labels]), "zero": (t(3),), "lift": (t(3),), "detach": (t(3),),
        "contiguous": (t(3, 4).t(),),
        "unsafe_split_with_sizes": (t(5), [2, 3]), "type_as": (t(3), t(3)), "cdist": (t(3, 4), t(5, 4)),
        "polar": (t(3), t(3)),
        "_batch_norm_impl_index": (image, t(3), t(3), None, None, True, 0.1, 1e-5, False),
        "_fused_rms_norm": (t(3, 4), [4], t(4), None),
        "unique_dim": (t(3, 4), 0), "numpy_T": (t(3, 4),), "embedding_bag": (t(5, 4), labels, torch.tensor([0, 2])),
        "linalg_matrix_exp": (t(3, 3).triu(),), "pinverse": (t(3, 4),), "linalg_cond": (t(3, 3),),
        "block_diag": ([t(2, 2), t(1, 3)],),
    }.items()  # fmt: skip
    yield from {
        "huber_loss": (t(3, 4), t(3, 4)), "kl_div": (t(3, 4), t(3, 4)),
        "poisson_nll_loss": (t(3), t(3).abs(), True, False, 1e-8, 1),
        "cosine_embedding_loss": (t(3, 4), t(3, 4), torch.tensor([1, -1, 1])),
        "hinge_embedding_loss": (t(3), torch.tensor([1, -1, 1])),
        "margin_ranking_loss": (t(3), t(3), t(3).sign()), "cross_entropy_loss": (t(3, 4), labels),
        "grid_sampler": (image, t(2, 4, 4, 2), 0, 0, False),
        "ctc_loss": (t(5, 1, 4).log_softmax(2), torch.tensor([[1, 2]]), [5], [2]), "adaptive_max_pool1d": (row, [2]),
        "adaptive_max_pool2d": (image, [2, 2]), "adaptive_max_pool3d": (volume, [2, 2, 2]),
        "max_pool2d_with_indices": (image, [2, 2]),
        "max_pool3d_with_indices": (volume, [2, 2, 2]),
        "fractional_max_pool2d": (image, [2, 2], [3, 3], torch.rand(2, 3, 2)),
        "fractional_max_pool3d": (volume, [2, 2, 2], [3, 3, 3], torch.rand(2, 3, 3)),
        "batch_norm": (image, t(3), t(3), t(3), t(3).abs(), True, 0.1, 1e-5, False),
        "max_unpool2d": (t(1, 1, 2, 2), torch.tensor([[[[0, 3], [9, 15]]]]), [4, 4]), "_lu_with_info": (t(3, 3),),
        "max_unpool3d": (t(1, 1, 1, 2, 2), torch.tensor([[[[[0, 3], [9, 15]]]]]), [1, 4, 4], [1, 1, 1], [0, 0, 0]),
        "_grid_sampler_2d_cpu_fallback": (image, t(2, 4, 4, 2), 0, 0, False), "where": (mask, t(2, 3), t(2, 3)),
        "cartesian_prod": ([t(3), t(4)],),
        "broadcast_tensors": ([t(3), t(4, 1)],), "polygamma": (1, t(3).abs()), "_unique2": (t(9).round(),),
        "nonzero": (t(3).round(),),
        "instance_norm": (image, t(3), t(3), None, None, True, 0.1, 1e-5, False), "roll": (t(3, 4), [1]),
        "view_as_real": (torch.randn(3, dtype=torch.complex64),),
        "index": (t(3, 4), [labels]), "upsample_nearest1d": (row, [9]), "upsample_nearest2d": (image, [9, 5]),
        "upsample_nearest3d": (volume, [4, 9, 5]),
        "_upsample_nearest_exact1d": (row, [9]), "_upsample_nearest_exact2d": (image, [9, 5]),
        "_upsample_nearest_exact3d": (volume, [4, 9, 5]),
        "upsample_linear1d": (row, [9], False), "upsample_bilinear2d": (image, [9, 5], False),
        "upsample_bicubic2d": (image, [9, 5], False),
        "upsample_trilinear3d": (volume, [4, 9, 5], False), "linalg_lstsq": (t(4, 3), t(4, 2)), "norm": (t(3, 4), 2),
        "rms_norm": (t(3, 4), [4], t(4)),
        "vander": (t(3),), "special_round": (t(3),), "slogdet": (t(3, 3),), "det": (t(3, 3),), "pdist": (t(3, 4),),
        "matrix_H": (t(3, 4),),
        "select_copy": (t(3, 4), 0, 1), "slice_copy": (t(3, 4), 1, 1, 3), "split_copy": (t(4), 2),
        "detach_copy": (t(3),), "lift_fresh": (t(3),),
        "special_gammainc": (t(3).abs(), t(3).abs()), "special_gammaincc": (t(3).abs(), t(3).abs()),
        "special_polygamma": (1, t(3).abs()),
        "special_multigammaln": (t(3).abs() + 3, 2), "triplet_margin_loss": (t(3, 4), t(3, 4), t(3, 4)),
        "rrelu": (t(3), 0.1, 0.3, True),
        "_native_batch_norm_legit_functional": (image, t(3), t(3), t(3), t(3).abs(), True, 0.1, 1e-5),
        "embedding": (t(5, 4), labels),
        "l1_loss": (t(3, 4), t(3, 4)), "mse_loss": (t(3, 4), t(3, 4)), "smooth_l1_loss": (t(3, 4), t(3, 4)),
        "soft_margin_loss": (t(3), t(3).sign()),
        "multi_margin_loss": (t(3, 4), labels), "multilabel_margin_loss": (t(3, 4), torch.zeros(3, 4).long()),
        "pairwise_distance": (t(3, 4), t(3, 4)),
        "binary_cross_entropy": (t(3).sigmoid(), t(3).sigmoid()),
        "scaled_dot_product_attention": (t(1, 2, 3, 4), t(1, 2, 3, 4), t(1, 2, 3, 4), t(3, 3)),
    }.items()  # fmt: skip
    # The composites, with the shapes that decide.
    for a, b in ((t(4), t(4)), (t(3, 4), t(5, 4)), (t(), t(3))):
        yield "inner", (a, b)
    for equation, a, b in (("i,j->ij", t(3), t(4)), ("bij,bjk->bik", t(2, 3, 4), t(2, 4, 5))):
        yield "einsum", (equation, [a, b])
    for name in ("softsign", "tanhshrink", "softmin"):
        yield name, (t(3, 4), 1) if name == "softmin" else (t(3, 4),)
    for name, size in (("dropout1d", row), ("dropout2d", image), ("dropout3d", volume)):
        yield name, (size, 0.5, True)
    yield "normalize", (t(3, 4),)
    yield "unique", (t(9).round(),)
    yield "max_unpool1d", (t(1, 1, 2), torch.tensor([[[0, 3]]]), [2])
    yield "conv2d", (image, t(4, 3, 3, 3), t(4))
    for name in ("digamma", "erfc", "exp2", "gammaln", "i0", "logit", "psi", "sinc"):
        yield f"special_{name}", (t(5),)
    yield "tensordot", (t(3, 4), t(4, 5), [1], [0])
    yield "tensordot", (t(3, 4), t(3, 4), [0, 1], [0, 1])
    yield "bilinear", (t(3, 4), t(3, 5), t(2, 4, 5), t(2))
    yield "_trilinear", (t(3, 4), t(2, 4, 5), t(3, 5), [1, 3], [0], [1, 2], [2, 3])
    for mode, size in itertools.product(("constant", "reflect", "replicate", "circular"), (row, image)):
        yield "pad", (size, [1, 1] * (size.dim() - 2), mode)
    for power in (1, 3, -1):
        yield "linalg_matrix_power", (t(3, 3), power)
        yield "matrix_power", (t(3, 3), power)
    for name, shape in (("linalg_pinv", (3, 4)), ("cov", (3, 6)), ("corrcoef", (3, 6))):
        yield name, (t(*shape),)


def function(name: str) -> Any:
    """Return the ATen op of that name, or else the function of torch."""
    return next(getattr(space, name) for space in (aten, F, torch) if hasattr(space, name))


@functools.cache
def every_call() -> dict[str, list[Call]]:
    """Return calls of ATen ops by canonical name: by hand, and the sample inputs of torch's own tests that fit."""
    torch.default_generator.manual_seed(0)
    found: dict[str, list[Call]] = defaultdict(list)
    for name, args in calls_by_hand():
        found[name].append((function(name), args, {}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

        for info in op_db:
            spellings = info.aten_name, info.name.removeprefix("nn.functional."), info.name.replace(".", "_")
            packet = next((getattr(aten, n) for n in spellings if hasattr(aten, n)), None)
            if packet is None or packet._qualified_op_name.endswith("_") or torch.float32 not in info.dtypes:
                continue
            samples = list(itertools.islice(info.sample_inputs_func(info, "cpu", torch.float32, False), 12))
            for sample in samples[:: max(1, len(samples) // 3)]:
                call = (packet, (sample.input, *sample.args), sample.kwargs)
                if result(packet, call[1:], autocast=False) is not None:
                    found[ops.canonical(packet._qualified_op_name.partition("::")[2])].append(call)
    return found


def copied(tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, tree)


def is_eligible(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in ELIGIBLE


def cast(tree: Any, dtype_of: Callable[[int], torch.dtype]) -> Any:
    """Cast the floating tensors in a tree, each to what is asked for its position among them."""
    count = itertools.count()
    return pytree.tree_map(lambda x: x.to(dtype_of(next(count))) if is_eligible(x) else x, tree)


def variants(args: Any) -> Iterator[Any]:
    """Yield arguments with every operand low, every one FP32, and the first one apart."""
    low, fp32 = torch.bfloat16, torch.float32
    yield cast(args, lambda i: low)
    yield cast(args, lambda i: fp32)
    if sum(map(is_eligible, pytree.tree_leaves(args))) > 1:
        yield cast(args, lambda i: fp32 if i else low)
        yield cast(args, lambda i: low if i else fp32)


def obeyed(rule: Rule, kind: str, args: Any) -> Any:
    """Return arguments cast as a rule of a kind says, for a run without autocast."""
    if kind == LOW:
        return cast(args, lambda i: torch.bfloat16)
    if kind == FP32 and not (rule.dtype_arg and isinstance(args[1].get("dtype"), torch.dtype)):
        return cast(args, lambda i: torch.float32)
    held = {x.dtype for x in pytree.tree_leaves(args) if is_eligible(x)}
    if kind == PROMOTE and len(held) > 1 and (rule.same_dtype or "cpu" in rule.widest):
        return cast(args, lambda i: torch.float32)
    return args


def result(op: Callable[..., Any], args: Any, autocast: bool) -> Any:
    """Return what a call gives, or None when it raises."""
    torch.default_generator.manual_seed(0)
    given, named = copied(args)
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            return pytree.tree_leaves(op(*given, **named))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None


def bits_equal(a: Any, b: Any) -> bool:
    if a is None or b is None or len(a) != len(b):
        return False
    return all(
        x.dtype == y.dtype and torch.equal(plain(x), plain(y)) if isinstance(x, Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


def plain(x: Tensor) -> Tensor:
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.nan_to_num() if x.is_floating_point() else x


# Nothing to compare: what they return is not defined, and for the first one differs in the last bit from run to run.
UNDEFINED = {"linalg_lstsq", "empty_like", "new_empty", "new_empty_strided", "empty", "empty_strided", "empty_permuted"}
if torch.__version__ < "2.13":
    UNDEFINED.add("addmv")  # it took operands of several dtypes, and rounded as its kernel liked


def disagreements(kind_of: Callable[[Rule], str], names: Callable[[Rule], bool]) -> dict[str, list[str]]:
    """Return, by op, the calls whose results under autocast are not those of the kind; an op never run maps to []."""
    found: dict[str, list[str]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rule in filter(names, RULES.values()):
            ran, wrong = False, []
            for op, args, kwargs in every_call().get(rule.name, []):
                for given in variants((args, kwargs)):
                    real = result(op, given, autocast=True)
                    if real is None or not any(isinstance(x, Tensor) and x.layout == torch.strided for x in real):
                        continue
                    ran = True
                    if not bits_equal(real, result(op, obeyed(rule, kind_of(rule), given), autocast=False)):
                        dtypes = [str(x.dtype) for x in pytree.tree_leaves(given) if is_eligible(x)]
                        wrong.append(f"{op} of {dtypes} gives {[str(x.dtype) for x in real if isinstance(x, Tensor)]}")
            if wrong or not ran:
                found[rule.name] = wrong
    return found


def test_each_row_does_on_a_cpu_what_autocast_does_bit_for_bit() -> None:
    found = disagreements(lambda r: r.cpu, lambda r: r.cpu != COMPOSITE and r.name not in UNDEFINED)
    unable = set() if autocast_runs_lstms() else {"lstm"}  # it raises, where the row is obeyed
    wrong = {name: calls for name, calls in found.items() if calls and name not in unable}
    assert not wrong, json.dumps(wrong, indent=1)
    # Rows that nothing above calls: of CUDA alone, of shards, without floating operands, or a tensor for a result.
    since = {"native_group_norm"} if torch.__version__ < "2.13" else set()  # called by torch's samples since then
    assert {n for n, calls in found.items() if not calls} - OTHER_RELEASES - since == set(NOT_CALLED.split())


NOT_CALLED = """
    _cudnn_rnn _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell cudnn_batch_norm
    miopen_batch_norm quantized_gru
    cudnn_convolution cudnn_convolution_transpose mkldnn_rnn_layer _native_multi_head_attention _assert_async
    _assert_tensor_metadata _local_scalar_dense allclose equal is_nonzero item sym_constrain_range_for_size
    bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor bincount gcd lcm
    one_hot affine_grid_generator as_tensor asarray bartlett_window blackman_window eye fft_fftfreq fft_rfftfreq
    from_file hamming_window hann_window kaiser_window range scalar_tensor tensor tril_indices triu_indices
    _sample_dirichlet _standard_gamma binomial poisson rand randn random randperm rrelu_with_noise
    _pack_padded_sequence _pad_packed_sequence imag istft view_as_complex_copy to_dense to_sparse to_sparse_bsc
    to_sparse_bsr to_sparse_csc to_sparse_csr from_local to_local redistribute
"""


@pytest.mark.parametrize("kind", [LOW, FP32, PROMOTE])
def test_no_kind_fits_a_composite(kind: str) -> None:
    composites = {n for n, r in RULES.items() if r.cpu == COMPOSITE and hasattr(aten, n)}  # others are Python's
    unfit = disagreements(lambda r: kind, lambda r: r.name in composites)
    assert {n for n, calls in unfit.items() if calls} == composites


# Fake CUDA tensors go through the real autocast kernels of CUDA, without a GPU; some ops abort the process there, so
# the cases run in one of their own, and begin again after the one that died.


def cuda_cases() -> list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
    """Return name, function and arguments of each case of torch's own test of autocast on CUDA, as fake tensors."""
    from torch.testing._internal.autocast_test_lists import AutocastTestLists

    lists = AutocastTestLists(torch.device("cuda"))
    found = []
    for group, cases in vars(lists).items():
        for name, args, *rest in cases:
            space = {"nn": torch._C._nn, "li": aten}.get(group[:2], torch)
            call = getattr(Tensor if group.startswith("methods") else space, name, None) or getattr(F, name, None)
            kwargs = next((r for r in rest if isinstance(r, dict)), {})
            if callable(call):
                found.append((name, call, args if isinstance(args, tuple) else (args,), kwargs))
    return found


def cuda_dtypes(start: int) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield, from a case on, its name, the dtypes that autocast gives and what the row says; no dtypes: it raised."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float16)
    with FakeTensorMode(), torch.no_grad():
        for name, call, args, kwargs in cuda_cases()[start:]:
            row, kind = rules.lookup(ops.canonical(name), "cuda")
            try:
                real = floats(call(*args, **kwargs))
            except Exception as error:  # whatever a fake kernel lacks
                yield name, [], ["banned"] if kind == BANNED and "unsafe to autocast" in str(error) else []
                continue
            held = {x.dtype for x in pytree.tree_leaves((args, kwargs)) if is_eligible(x)}
            widest = torch.float32 if torch.float32 in held else torch.float16
            says = {LOW: torch.float16, FP32: torch.float32}.get(kind, widest)
            if row.dtype_arg and isinstance(kwargs.get("dtype"), torch.dtype):
                says = kwargs["dtype"]
            yield name, real, [str(says)] * len(real) if row.out[0] in ("float", "first") else real


def floats(made: Any) -> list[str]:
    return [str(x.dtype) for x in pytree.tree_leaves(made) if isinstance(x, Tensor) and x.is_floating_point()]


def write_cuda_dtypes(start: int, file: Path) -> None:
    """Write each case at once, for the next may end the process."""
    with file.open("w", encoding="utf-8", buffering=1) as lines:
        for case in cuda_dtypes(start):
            lines.write(json.dumps(case) + "\n")


def test_each_row_does_on_cuda_what_autocast_does_by_dtype(tmp_path: Path) -> None:
    seen: list[Any] = []
    for _ in range(12):
        try:
            in_another_process(write_cuda_dtypes, len(seen), tmp_path / "cases")
            died = False
        except AssertionError:
            died = True
        seen += map(json.loads, (tmp_path / "cases").read_text(encoding="utf-8").splitlines())
        if not died:
            break
        seen.append(["aborted", [], []])
    assert not [case for case in seen if case[1] and case[1] != case[2]]
    assert sum(bool(real) for _, real, _ in seen) >= 100
    assert ["binary_cross_entropy", [], ["banned"]] in seen


# Models.


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
def test_every_module_of_torch_nn_exports_to_ops_that_have_a_row(training: bool) -> None:
    made = modules()
    classes = {n for n, c in vars(nn).items() if isinstance(c, type) and issubclass(c, nn.Module)}
    named = {n for n in classes if not n.startswith("Lazy")}
    assert named - set(made) <= set(NOT_EXPORTED.split())
    logging.getLogger("torch").setLevel(logging.ERROR)
    parts, inputs = [m.train(training) for m, _ in made.values()], [given for _, given in made.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nn.LSTM gathers its weights in forward
        program = torch.export.export(All(parts), (inputs,))
    unknown = {n: ops.name(n) for n in program.graph.nodes if ops.name(n) and rules.rule(ops.name(n)) is None}
    assert set(unknown.values()) <= {"getitem"}


# Custom ops.


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Rule]:
    """Give the test a registry of its own."""
    fresh: dict[str, Rule] = {}
    monkeypatch.setattr(rules, "_custom", fresh)
    return fresh


def test_a_registered_rule_is_looked_up_and_listed(registry: dict[str, Rule]) -> None:
    made = rules.register_rule("my_lib::norm", FOLLOW, cuda=FP32, sensitive="range", uncast=["weight"])
    assert rules.lookup("my_lib::norm", "cpu") == (made, FOLLOW)
    assert rules.lookup("my_lib::norm", "cuda") == (made, FP32)
    assert (made.sensitive, made.uncast) == ("range", ("weight",))
    assert list(rules.rules())[-1] == made


@pytest.mark.parametrize(
    ("op", "kind", "facts", "says"),
    [
        ("my::op", "lo", {}, "did you mean 'low'"),
        ("my::op", "composite", {}, "is not a kind"),
        ("my::op", "low", {"cuda": "fp23"}, "did you mean 'fp32'"),
        ("my::op", "low", {"sensitve": "range"}, "did you mean 'sensitive'"),
        ("my::op", "low", {"sensitive": "ranges"}, "did you mean 'range'"),
        ("my::op", "low", {"uncast": "weight"}, "takes a tuple"),
        ("my::op", "low", {"same_dtype": 1}, "takes a bool"),
        ("softmax", "low", {}, "Policy"),
        (torch.ops.aten.softmax.int, "low", {}, "Policy"),
        (3, "low", {}, "not an operator"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(
    registry: dict[str, Rule], op: Any, kind: str, facts: dict[str, Any], says: str
) -> None:
    with pytest.raises(PolicyError, match=says):
        rules.register_rule(op, kind, **facts)
    assert not registry


def test_registering_twice_is_fine_unless_it_differs(registry: dict[str, Rule]) -> None:
    first = rules.register_rule("my::op", LOW)
    assert rules.register_rule("my::op", LOW) == first
    with pytest.raises(PolicyError, match="registered before with cpu='low'"):
        rules.register_rule("my::op", FP32)
    assert registry == {"my::op": first}


def test_an_unknown_op_is_kept() -> None:
    row, kind = rules.lookup("my_lib::unheard_of", "cpu")
    assert (kind, row.reason) == (KEEP, "unknown op")


def test_an_in_place_op_has_the_row_of_its_base() -> None:
    assert rules.rule("add_") is RULES["add"]


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, LOW), (torch.float32, FP32)])
def test_a_rule_of_register_autocast_is_read(dtype: torch.dtype, kind: str, by_name: bool) -> None:
    name = f"fxamp_test_rules::op_{kind}_{by_name}"
    if by_name:
        torch.library.define(name, "(Tensor x) -> Tensor")
        torch.library.impl(name, "cpu", torch.sin)
        torch.library.register_autocast(name, "cpu", dtype)
    else:
        defined = torch.library.custom_op(name, torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor")
        defined.register_autocast("cpu", dtype)
        assert rules._op_name(defined) == name
    row, found = rules.lookup(name, "cpu")
    assert (found, str(dtype) in row.reason) == (kind, True)
    assert rules.lookup(name, "cuda")[1] == KEEP
    assert rules.lookup(name, "cpu", low=torch.float16)[1] == (KEEP if kind == LOW else FP32)


def test_the_table_is_a_list_that_prints() -> None:
    table = rules.rules()
    assert len(table) >= len(RULES)
    assert table[0] == next(iter(RULES.values()))
    assert table[:3] == tuple(RULES.values())[:3]
    assert RULES["softmax"] in table
    lines = str(table).splitlines()
    assert len(lines) == len(table)
    assert any(line.split()[:5] == ["softmax", "cpu:", "follow", "cuda:", "fp32"] for line in lines)


def test_every_kind_and_field_is_explained() -> None:
    assert set(KIND_NAMES) == {k for r in RULES.values() for k in (r.cpu, r.cuda)}
    assert not [f.name for f in fields(Rule) if f"{f.name}: " not in (Rule.__doc__ or "")]

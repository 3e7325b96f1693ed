"""What autocast does to every op is what its row says: bit for bit on a CPU, by dtype on CUDA."""

from __future__ import annotations

import functools
import itertools
import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from passes._torch import FakeTensorMode, pytree
from passes.ops import ops, rules
from passes.ops.rules import BANNED, COMPOSITE, FP32, LOW, PROMOTE, RULES, Rule
from tests.support.helpers import OTHER_RELEASES, autocast_runs_lstms
from tests.support.processes import in_another_process

aten = torch.ops.aten
ELIGIBLE = (torch.float32, torch.bfloat16, torch.float16)


# On a CPU.

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
    if kind == PROMOTE and len(held) > 1 and rule.same_dtype:
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
    miopen_batch_norm quantized_gru _mps_convolution
    cudnn_convolution cudnn_convolution_transpose mkldnn_rnn_layer _native_multi_head_attention _assert_async
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention
    _scaled_dot_product_cudnn_attention_backward _log_softmax_backward_data
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

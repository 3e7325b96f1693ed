"""Casts, calls that compute nothing (metadata, assertions, values that Python gets), and calls with graphs inside."""

from __future__ import annotations

from .row import HIGHER_ORDER as PREFIX
from .row import KEEP, group, of


def _named(names: str) -> str:
    return " ".join(f"{PREFIX}{name}" for name in names.split())


# fmt: off
ROWS = (
    *group(KEEP, "a cast in your code",
        of("to", dtype_arg=True, is_cast=True, may_alias="first", of_integers=True, in_norm="arithmetic"),
        of("type_as", is_cast=True, may_alias="first", of_integers=True),
        "chalf",
    ),
    *group(KEEP, "gives Python a value, which must be the original one",
        of("item", out=""),
        "_local_scalar_dense _assert_async sym_constrain_range_for_size",
        of("is_nonzero", out="bool"),
        of("_assert_tensor_metadata", out="", asks="asserts"),
        of("histogram histogramdd", no_low="cpu"),
    ),
)
# Calls that are no operators of ATen, or compute nothing of tensors; `fxamp.rules()` does not list them.
QUERIES = (
    *group(KEEP, "reads a shape, a dtype or other metadata, and no values",
        of("getitem", asks="item", may_alias="first", commutes="both"),
        of("getattr", asks="attribute", out=""),
        of("size stride dim numel is_contiguous", asks="shape", out=""),
        of("sym_size sym_stride sym_numel sym_storage_offset", asks="shape", out=""),
        of("is_floating_point is_complex result_type", asks="dtype", out=""),
        of("element_size", asks="dtype", out="", shows_bits="always"),
    ),
    *group(KEEP, "chooses kernels of attention for a region of the program",
        "torch.nn.attention._backend_from_string torch.nn.attention._sdpa_kernel",
        asks="mode", out="",
    ),
    *group(KEEP, "gives Python a value, or writes into a tensor",
        "storage_offset get_device data_ptr tolist _assert_scalar",
        of("setitem", same_dtype=True, in_place=True),  # index_put, where an index is a tensor
        out="",
    ),
    *group(KEEP, "takes over the storage of another tensor", "set", may_alias="all"),
)
# Higher-order ops.
HIGHER_ORDER = (
    *group(KEEP, "calls one body over its operands",
        of(_named("wrap"), operands_at=1),
        of(_named("tag_activation_checkpoint wrap_activation_checkpoint"), operands_at=1, recomputed=True),
        of(_named("invoke_subgraph"), operands_at=2),
        higher_order=True, bodies="entered",
    ),
    *group(KEEP, "calls bodies that must agree, or that get their own outputs as inputs again",
        _named("cond while_loop scan associative_scan map_impl map"),
        higher_order=True, bodies="fixed",
    ),
    *group(KEEP, "runs its body in another mode",
        of(_named("wrap_with_set_grad_enabled"), switches="grad"),
        of(_named("wrap_with_autocast"), switches="autocast"),
        higher_order=True,
    ),
)

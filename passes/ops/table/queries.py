"""Casts, and calls that compute nothing: metadata, assertions, and values that Python gets."""

from __future__ import annotations

from .row import KEEP, group, of

# fmt: off
ROWS = (
    *group(KEEP, KEEP, "a cast in your code",
        of(
            "to", dtype_arg=True, is_cast=True, may_alias="first", of_integers=True, in_norm="arithmetic",
            direct="dtype",
        ),
        of("type_as", is_cast=True, may_alias="first", of_integers=True, direct="default"),
        "chalf",
    ),
    *group(KEEP, KEEP, "gives Python a value, which must be the original one",
        of("item", out=""),
        "_local_scalar_dense _assert_async sym_constrain_range_for_size",
        of("is_nonzero", out="bool"),
        of("_assert_tensor_metadata", out="", asks="dtype"),
        of("histogram histogramdd", no_low="cpu"),
    ),
)
# Calls that are no operators of ATen, or compute nothing of tensors; `fxamp.rules()` does not list them.
QUERIES = (
    *group(KEEP, KEEP, "reads a shape, a dtype or other metadata, and no values",
        of("getitem", asks="item", may_alias="first", commutes="both"),
        of("getattr size stride dim numel is_contiguous", asks="shape", out=""),
        of("sym_size sym_stride sym_numel sym_storage_offset", asks="shape", out=""),
        of("is_floating_point is_complex element_size result_type", asks="dtype", out=""),
    ),
    *group(KEEP, KEEP, "chooses kernels of attention for a region of the program",
        "torch.nn.attention._backend_from_string torch.nn.attention._sdpa_kernel",
        asks="mode", out="",
    ),
    *group(KEEP, KEEP, "gives Python a value, or writes into a tensor",
        "storage_offset get_device data_ptr tolist _assert_scalar",
        of("setitem", same_dtype=True),  # index_put, where an index is a tensor
        out="",
    ),
)

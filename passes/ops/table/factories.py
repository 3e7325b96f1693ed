"""Ops that make tensors: filled, counted or random."""

from __future__ import annotations

from .row import FOLLOW, KEEP, group, of

# fmt: off
ROWS = (
    *group(FOLLOW, FOLLOW, "filled to the shape of its operand",
        of("zeros_like ones_like empty_like new_zeros new_ones new_empty new_empty_strided", dtype_arg=True),
        of("full_like new_full", dtype_arg=True, fills=True),
        "zero",
    ),
    *group(KEEP, KEEP, "made with the dtype that is written",
        of(
            "zeros ones empty eye hann_window hamming_window blackman_window bartlett_window",
            dtype_arg=True, factory=True,
        ),
        of("full tensor scalar_tensor", dtype_arg=True, fills=True, factory=True),
        of("empty_strided empty_permuted kaiser_window fft_fftfreq fft_rfftfreq from_file", dtype_arg=True),
        of("arange", dtype_arg=True, factory=True, counts=True),
        of("linspace logspace", dtype_arg=True, exact=True, factory=True),
        of("range", dtype_arg=True, counts=True),
        of("tril_indices triu_indices", dtype_arg=True, out="int", factory=True),
        of("as_tensor", dtype_arg=True, may_alias="first", factory=True),
        of("asarray", dtype_arg=True, may_alias="first"),
        of("one_hot", out="int"),
        of("bincount", out="integer"),
        "combinations affine_grid_generator",
    ),
    *group(KEEP, KEEP, "random: another dtype draws another stream",
        of("rand randn randint", dtype_arg=True, exact=True, factory=True),
        of("randperm", dtype_arg=True, exact=True, out="int", factory=True),
        of("rand_like randn_like randint_like", dtype_arg=True, exact=True),
        of("normal", dtype_arg=True, exact=True, redraws="always", factory=True),
        of("uniform", redraws="2.13"),
        """bernoulli poisson exponential geometric cauchy log_normal binomial _standard_gamma _sample_dirichlet
        rrelu_with_noise""",
        of("multinomial", out="int"),
        of("random", redraws="always"),
    ),
)

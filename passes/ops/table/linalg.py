"""Linear algebra, Fourier transforms and complex numbers."""

from __future__ import annotations

from .row import FP32, KEEP, Kinds, group, of

# fmt: off
ROWS = (
    *group(Kinds(KEEP, cpu=FP32), "linear algebra: no low kernel",
        of("cholesky", until="2.14"),
        """cholesky_inverse geqrf inverse linalg_cholesky linalg_inv linalg_tensorinv pinverse linalg_cond
        linalg_eigvalsh linalg_svdvals""",
        of("""cholesky_solve linalg_householder_product linalg_solve linalg_tensorsolve lu_solve orgqr ormqr
            triangular_solve""", same_dtype=True),
        of("linalg_cholesky_ex linalg_inv_ex", out="float integer"),
        of("linalg_eig", out="complex complex"),
        of("linalg_eigvals", out="complex"),
        of("linalg_lstsq", same_dtype=True, out="float float int float"),
        of("linalg_matrix_rank", out="integer"),
        of("linalg_qr linalg_eigh", out="float float"),
        of("linalg_svd svd", out="float float float"),
        of("qr", out="float float", until="2.14"),
        of("_lu_with_info", out="float integer integer"),
        no_low="cpu cuda",
    ),
    *group(FP32, "linear algebra: no low kernel; on CUDA's list too",
        "linalg_matrix_sqrth",
        sensitive="rounding", no_low="cpu cuda", since="2.14",
    ),
    *group(KEEP, "linear algebra that torch's lists leave out",
        of("det logdet linalg_det linalg_lu", no_low="cpu cuda"),
        of("slogdet linalg_slogdet", out="float float", no_low="cpu cuda"),
        of("linalg_lu_factor linalg_ldl_factor", out="float integer", no_low="cpu cuda"),
        of("linalg_lu_factor_ex linalg_ldl_factor_ex", out="float integer integer", no_low="cpu cuda"),
        of("linalg_lu_solve linalg_ldl_solve linalg_solve_triangular", same_dtype=True, no_low="cpu cuda"),
        "lu_unpack linalg_matrix_exp matrix_exp",
        of("linalg_solve_ex", same_dtype=True, out="float integer", no_low="cpu cuda"),
        of("linalg_vander", no_low="cpu"),
    ),
    *group(Kinds(KEEP, cpu=FP32), "Fourier transform: no low kernel on a CPU, partly one on CUDA",
        of(
            "fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_rfft fft_rfft2 fft_rfftn",
            out="complex",
        ),
        "fft_hfft fft_irfft fft_irfft2 fft_irfftn",
        no_low="cpu",
    ),
    *group(Kinds(KEEP, cpu=FP32), "on the CPU's list",
        of("polar", same_dtype=True, no_low="cpu cuda"),
        of("view_as_complex", no_low="cpu cuda"),
        of("stft", no_low="cpu"),
        out="complex",
    ),
    *group(KEEP, "complex or double result",
        of("imag", may_alias="first"),
        of("angle", casts_out=True),
        "view_as_complex_copy float_power istft",
        of("fft_hfft2 fft_hfftn", no_low="cpu"),
        of("fft_ihfft2 fft_ihfftn", out="complex", no_low="cpu"),
    ),
)

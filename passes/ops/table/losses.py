"""Losses: sums of small terms."""

from __future__ import annotations

from .row import BANNED, FP32, KEEP, PROMOTE, group, of

# fmt: off
ROWS = (
    *group(FP32, FP32, "loss: a sum of small terms",
        """mse_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss soft_margin_loss cosine_embedding_loss
        hinge_embedding_loss margin_ranking_loss binary_cross_entropy_with_logits l1_loss triplet_margin_loss""",
        of("nll_loss nll_loss2d nll_loss_nd", same_dtype=True),
        of("multi_margin_loss", same_dtype=True, no_low="cpu"),
        of("multilabel_margin_loss", no_low="cpu"),
        sensitive="range", loss=True,
    ),
    *group(FP32, FP32, "loss; on CUDA it calls log_softmax and nll_loss, both FP32",
        "cross_entropy_loss",
        sensitive="range", loss=True, same_dtype=True,
    ),
    *group(FP32, BANNED, "loss of a probability, whose log overflows in low: use binary_cross_entropy_with_logits",
        "binary_cross_entropy",
        sensitive="range", loss=True, same_dtype=True,
    ),
    *group(FP32, KEEP, "loss: a sum of small terms; no low kernel",
        "ctc_loss",
        sensitive="range", loss=True, no_low="cpu cuda",
    ),
    *group(FP32, PROMOTE, "loss: a sum of small terms",
        "multilabel_margin_loss_forward",
        sensitive="range", loss=True, no_low="cpu",
    ),
)

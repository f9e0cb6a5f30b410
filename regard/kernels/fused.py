"""torch's scaled_dot_product_attention, with the kernel that suits how it is called; and ours where it learns."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp

from regard.kernels.native_train import attend, attends


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """q (b h t d), k and v (b g s d). On a GPU, without cuDNN where lengths may change from call to call: it takes some
    60 ms to plan for each new shape, in which the others have long finished. Compiled code has fixed shapes and may
    have it. On a CPU, causal attention that learns has kernels of its own."""
    grouped, torchs = q.shape[1] != k.shape[1], F.scaled_dot_product_attention
    run = partial(torchs, q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped)
    if torch.compiler.is_compiling():
        return run()
    if mask is None and causal and not dropout and attends(q, k, v):
        return attend(q, k, v, scale)
    if not (q.is_cuda and cudnn_sdp_enabled()):
        return run()
    enable_cudnn_sdp(False)
    try:
        return run()
    finally:
        enable_cudnn_sdp(True)

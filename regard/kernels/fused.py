"""torch's scaled_dot_product_attention, with the kernel that suits how it is called."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **given: Any) -> Tensor:
    """On a GPU, without cuDNN where lengths may change from call to call: it takes some 60 ms to plan for each new
    shape, in which the others have long finished. Compiled code has fixed shapes and may have it."""
    if torch.compiler.is_compiling() or not (q.is_cuda and cudnn_sdp_enabled()):
        return F.scaled_dot_product_attention(q, k, v, mask, **given)
    enable_cudnn_sdp(False)
    try:
        return F.scaled_dot_product_attention(q, k, v, mask, **given)
    finally:
        enable_cudnn_sdp(True)

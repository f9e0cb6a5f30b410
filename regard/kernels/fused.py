"""torch's scaled_dot_product_attention, with the kernel that suits how it is called; and ours where it learns."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp

from regard.kernels.native_train import attend, attends


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **given: Any) -> Tensor:
    """On a GPU, without cuDNN where lengths may change from call to call: it takes some 60 ms to plan for each new
    shape, in which the others have long finished. Compiled code has fixed shapes and may have it. On a CPU, causal
    attention that learns has kernels of its own."""
    if torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(q, k, v, mask, **given)
    if mask is None and given["is_causal"] and not given.get("dropout_p") and attends(q, k, v):
        return attend(q, k, v, given["scale"])
    if not (q.is_cuda and cudnn_sdp_enabled()):
        return F.scaled_dot_product_attention(q, k, v, mask, **given)
    enable_cudnn_sdp(False)
    try:
        return F.scaled_dot_product_attention(q, k, v, mask, **given)
    finally:
        enable_cudnn_sdp(True)

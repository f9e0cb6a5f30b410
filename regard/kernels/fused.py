"""torch's scaled_dot_product_attention, with the kernel that suits how it is called; and ours on a CPU."""

from __future__ import annotations

import threading
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp

from regard.kernels.c.train import attend, attends


def fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None, dropout: float = 0.0
) -> Tensor:  # fmt: skip
    """q (b h t d), k and v (b g s d). On a GPU, without cuDNN where lengths may change from call to call: it takes some
    60 ms to plan for each new shape, in which the others have long finished. Compiled code has fixed shapes and may
    have it. On a CPU, causal attention has kernels of its own."""
    grouped, torchs = q.shape[1] != k.shape[1], F.scaled_dot_product_attention
    run = partial(torchs, q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped)
    if torch.compiler.is_compiling():
        return run()
    if mask is None and causal and not dropout and attends(q, k, v):
        return attend(q, k, v, scale)
    if not q.is_cuda:
        return run()
    with _without_cudnn:
        return run()


def side_by_side(q: Tensor, v: Tensor) -> bool:
    """Whether `by_document` takes these: on a GPU, in half precision."""
    if not q.is_cuda or torch.compiler.is_compiling():
        return False
    size, narrow = q.shape[-1], _half(q) in (torch.bfloat16, torch.float16)
    return narrow and size == v.shape[-1] and size % 8 == 0 and size <= 256


def by_document(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, causal: bool, scale: float
) -> Tensor:
    """Attention within documents that lie end to end in q (b h t d), k and v (b g t d): no mask is made.

    Document i has tokens ends[i] to ends[i + 1]. It is the flash kernel under torch's varlen attention, called without
    what differs between torch's versions."""
    flat = (x.transpose(1, 2).flatten(0, 1).to(_half(x)) for x in (q, k, v))  # bt h d
    sizes = (ends, ends, longest, longest)
    flash = torch.ops.aten._flash_attention_forward
    out = flash(*flat, *sizes, 0.0, causal, False, scale=scale)[0]
    return out.unflatten(0, (len(q), -1)).transpose(1, 2)


def _half(x: Tensor) -> torch.dtype:
    """The type that autocast would have a product of x made in."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


class _WithoutCudnn:
    """torch has one switch for the whole process: off from when the first thread enters until the
    last one leaves, then as it was."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.before = cudnn_sdp_enabled()
                enable_cudnn_sdp(False)
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                enable_cudnn_sdp(self.before)


_without_cudnn = _WithoutCudnn()

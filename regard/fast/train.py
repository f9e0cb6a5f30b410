"""What lets a model fit and run fast, applied from outside to one that is finished: recomputing, bf16, compiling."""

from __future__ import annotations

import ctypes
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.attention import Context
from regard.attention.multihead import GroupedQueryAttention
from regard.block import Block, Stack
from regard.errors import UsageError, nearest
from regard.fast.specialise import replace, share, unlike
from regard.kernels.c import native
from regard.kernels.c.train import bias_gelu, gelu_tanh, parted, takes_bias
from regard.layers import FeedForward

PRECISIONS = ("fp32", "bf16")
WORTH = 1_000_000  # parameters for which C code is compiled, if it is not yet
TRIM, MMAP = -1, -3  # what glibc's mallopt calls M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
M = TypeVar("M", bound=nn.Module)


def precision(name: str, device: torch.device | str) -> AbstractContextManager[object]:
    """The context to run an objective in. "bf16" is autocast: products and attention in bf16, weights, gradients,
    norms, softmax, loss and the optimiser in fp32. (bf16 weights would lose every update below 1/256 of a weight.)"""
    if name not in PRECISIONS:
        raise UsageError(f"precision {name!r} is unknown; {nearest(name, PRECISIONS)}")
    if name == "fp32":
        return nullcontext()
    return torch.autocast(torch.device(device).type, torch.bfloat16)


def masters(model: M) -> M:
    """The model in float32, in place, if a weight that learns is narrower: bf16 loses every update below 1/256 of a
    weight. A body that is frozen beside LoRA, whose own weights are float32, stays as it is."""
    narrow = any(p.requires_grad and p.dtype.itemsize < 4 for p in model.parameters())
    return model.float() if narrow else model


def keep_freed() -> None:
    """Let this process keep the memory it frees, which every step wants again: new pages from the system took a quarter
    of a bf16 step on a CPU. It is glibc that can; elsewhere nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(TRIM, 2**31 - 1)
        if not mallopt(MMAP, 2**30):
            mallopt(MMAP, 2**25)  # the most that older ones take


def native_code(model: nn.Module, precision: str) -> None:
    """Have the C code of regard.kernels.c.train compiled where a run on a CPU gains by it."""
    slow = any(
        isinstance(m, GroupedQueryAttention) or (isinstance(m, FeedForward) and m.act is gelu_tanh)
        for m in model.modules()
    )
    if (slow or precision == "bf16") and sum(p.numel() for p in model.parameters()) >= WORTH:
        native.build()


class Recomputed(Block):
    """A block that keeps only its input for the backward pass and computes the rest again there.

    About a third more work; activations of one block instead of all."""

    same_as = Block

    def forward(self, x: Tensor, ctx: Context, cross: Context | None = None) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x, ctx, cross)
        # All blocks share it, and it has a gradient: made here, outside.
        ctx.bias(ctx.pos)
        return checkpoint(super().forward, x, ctx, cross, use_reentrant=False)


def checkpointed(model: M, layers: bool | tuple[int, ...] = True) -> M:
    """The same model, blocks of each tower recomputed in the backward pass, all or those of these numbers; parameters
    and their names stay as they are."""
    towers = [list(m.blocks) for m in model.modules() if isinstance(m, Stack)]
    most = max(map(len, towers), default=0)
    numbers = layers if isinstance(layers, tuple) else range(most)
    for n in (n for n in numbers if not 0 <= n < most):
        raise UsageError(
            f"train.activation_checkpointing names layer {n}; the model has 0 to {most - 1}"
        )
    chosen = {id(block) for blocks in towers for i, block in enumerate(blocks) if i in numbers}

    def again(block: Block, _: nn.Module) -> Block | None:
        return share(Recomputed, block) if id(block) in chosen else None

    if not replace(model, {Block: again}):
        raise UsageError(
            "activation checkpointing needs a model of blocks; a recurrent one has none"
        )
    return model


class Joined(GroupedQueryAttention):
    """Self-attention whose queries, keys and values are one product, and so the gradient by its input."""

    same_as = GroupedQueryAttention

    def project_qkv(self, x: Tensor, ctx: Context) -> tuple[Tensor, dict[str, Tensor]]:
        if not torch.is_grad_enabled():
            return super().project_qkv(x, ctx)
        parts = (self.wq, self.wk, self.wv)
        weight = torch.cat([part.weight for part in parts])
        none = self.wk.weight.new_zeros(self.wk.out_features)
        each: list[Tensor] = [none if part.bias is None else part.bias for part in parts]
        bias = torch.cat(each) if self.config.bias else None
        q, k, v = parted(F.linear(x, weight, bias), [part.out_features for part in parts])
        return self.as_queries(q, ctx), self.as_entries(k, v, ctx)


class Biased(FeedForward):
    """Its first bias is added where GELU is computed, in float32 on a CPU; elsewhere products add it for nothing."""

    same_as = FeedForward

    def project_up(self, x: Tensor) -> Tensor:
        if not takes_bias(x, self.up.bias):
            return super().project_up(x)
        return bias_gelu(F.linear(x, self.up.weight), self.up.bias)


def _joined(part: GroupedQueryAttention, block: nn.Module) -> nn.Module | None:
    own = isinstance(block, Block) and block.attention is part
    return share(Joined, part) if own and not unlike(part) else None


def _biased(ffn: FeedForward, _: nn.Module) -> nn.Module | None:
    plain = not unlike(ffn) and ffn.up.bias is not None and ffn.gate is None
    return share(Biased, ffn) if plain and ffn.act is gelu_tanh else None


def joined(model: M) -> M:
    """The same model, the products of each self-attention's input made one while it trains, and the bias before GELU a
    part of GELU; names stay."""
    replace(model, {GroupedQueryAttention: _joined, FeedForward: _biased})
    return model


def compiled(model: M) -> M:
    """The same model, its towers compiled by torch for each shape they are called with, up to torch's limit of such
    shapes; after that they run as they are. Parameters keep their names."""
    towers = [m for m in model.modules() if isinstance(m, Stack)]
    if not towers:
        raise UsageError("train.compile needs a model of blocks; a recurrent one has none")
    for tower in towers:
        tower.compile(dynamic=False)
    return model

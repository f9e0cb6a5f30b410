"""Teams whose processes hold a part of the model each: FSDP2, and tensor parallel.

Tensor parallel splits the work of a layer (Shoeybi et al. 2019, arXiv:1909.08053):

    wq wk wv, up gate: cut by their outputs; each process computes its heads and its columns of the middle;
    wo, down: cut by their inputs; their products are summed over the group.

All else (embeddings, norms, the model's head) every process of the group has whole and computes alike, with the same
random numbers. (So dropout inside a layer falls alike on each process's part of it.)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from regard.attention.multihead import GroupedQueryAttention
from regard.block import Block, Stack
from regard.config import divisors
from regard.data.batch import IGNORE, Batch
from regard.errors import UsageError
from regard.layers import FeedForward
from regard.models.adapt import low_ranks
from regard.train.parallel import Ddp, Inside, Parallel


class Fsdp(Ddp):
    """FSDP2: each parameter is cut along its first axis; blocks are put together when they are called."""

    def __init__(self, config: Parallel, kind: str):
        super().__init__(config, kind)
        self.evaluates = True  # a block is put together by all
        self.mesh = init_device_mesh(kind, (self.world,))

    def wrap(self, model: nn.Module) -> nn.Module:
        self.keep(model)
        return self.sharded(model)

    def keep(self, model: nn.Module) -> None:
        """What the model was before it was cut, without its weights."""
        if low_ranks(model):
            raise UsageError("LoRA is not shared out; train it with train.parallel.mode = ddp")
        self.empty = copied(model, {n: p.detach().to("meta") for n, p in model.named_parameters()})

    def sharded(self, model: nn.Module) -> nn.Module:
        root = Inside(model)
        shards = [m for m in model.modules() if isinstance(m, Block)] + [root]
        for module in shards:
            shard = fully_shard(module, mesh=self.mesh)
            shard.set_gradient_divide_factor(1.0)
            shard.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        root.register_forward_hook(cut_again)
        return root

    def hold(self) -> AbstractContextManager[object]:
        return nullcontext()  # whole gradients would fill the memory that sharing saves

    def stops(self, flag: bool) -> bool:
        return self.any(flag)

    def even(self, parts: list[Batch], count: int) -> list[Batch]:
        """Where there are fewer, a row that is not counted stands for a part: no process may call a block alone."""
        row = parts[0].each(lambda x: x[:1])
        spare = replace(row, labels=torch.full_like(row.labels, IGNORE))
        return parts + [spare] * (count - len(parts))

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kept = {}
        for name, x in tensors.items():  # one at a time is whole beside the parts
            made = gathered(x.detach())
            if self.rank == 0:
                kept[name] = made.cpu()
        return kept

    def plain(self, model: Any) -> Any:
        named = self.whole(dict(model.named_parameters()))
        return copied(self.empty, named) if self.rank == 0 else None

    def part(self, named: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        cut = {}
        for key, x in tensors.items():
            like = named.get(key.partition(":")[0])
            if isinstance(like, DTensor) and x.shape == like.shape:
                x, mesh = x.to(like.device), like.device_mesh
                x = distribute_tensor(x, mesh, like.placements, src_data_rank=None)
            cut[key] = x
        return cut


def gathered(x: Tensor) -> Tensor:
    """A tensor put together, the parts of parts first."""
    if not isinstance(x, DTensor):
        return x
    for axis in range(x.device_mesh.ndim):
        x = x.redistribute(placements=[Replicate()] * (axis + 1) + list(x.placements[axis + 1 :]))
    return x.to_local()


def cut_again(root: Any, args: Any, out: Any) -> None:
    """Without a backward pass, which does so, the root's parameters would stay whole."""
    if not torch.is_grad_enabled():
        root.reshard()


def copied(model: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The model with other tensors as its parameters, which are not copied; tied ones stay tied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(tensors[n], requires_grad=p.requires_grad)
        for n, p in model.named_parameters()
    }
    memo[id(model.origin)] = model.origin
    return copy.deepcopy(model, memo)


# --- tensor parallel -----------------------------------------------------------------------------------------------


class Split(Fsdp):
    """`degree` processes split the layers; `world` / `degree` such groups share batch and weights as in FSDP."""

    def __init__(self, config: Parallel, kind: str):
        super().__init__(config, kind)
        self.degree = config.degree or self.world
        shape = (self.world // self.degree, self.degree)
        both = init_device_mesh(kind, shape, mesh_dim_names=("data", "tensor"))
        self.mesh, self.layers = both["data"], both["tensor"]
        self.share, self.shares = self.mesh.get_local_rank(), self.mesh.size()
        self.group = self.mesh.get_group()

    def wrap(self, model: nn.Module) -> nn.Module:
        self.keep(model)
        check(model, self.degree)
        for block in (m for m in model.modules() if isinstance(m, Block)):
            parallelize_module(block, self.layers, plan(block))
            for attention in attentions(block):
                attention.h, attention.g = attention.h // self.degree, attention.g // self.degree
        if self.shares > 1:
            return self.sharded(model)
        for p in model.parameters():
            if isinstance(p, DTensor) and p.requires_grad:  # norms of heads have a gradient of each
                p.register_hook(partial(DTensor.redistribute, placements=p.placements))
        return Inside(model)


def attentions(block: Block) -> list[Any]:
    return [part for part in (block.attention, block.cross) if part is not None]


def plan(block: Block) -> dict[str, Any]:
    """How torch is to cut the block's layers, by name."""
    outputs, inputs = ("wq", "wk", "wv", "up", "gate"), ("wo", "down")
    heads = SequenceParallel(sequence_dim=2, use_local_output=True)  # b t h d
    styles: dict[str, Any] = {"q_norm": heads, "k_norm": heads}
    styles |= {n: ColwiseParallel() for n in outputs} | {n: RowwiseParallel() for n in inputs}
    names = [name for name, _ in block.named_modules()]
    return {n: styles[n.split(".")[-1]] for n in names if n.split(".")[-1] in styles}


def check(model: nn.Module, degree: int) -> None:
    """Whether the model's layers can be split so."""
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    why = "it has no blocks" if not blocks else ""
    counts = []
    for block in blocks:
        if any(type(a) is not GroupedQueryAttention for a in attentions(block)):
            why = "its attention is not multi-head or grouped-query"
        elif type(block.ffn) is not FeedForward:
            why = "its feed-forward is a mixture of experts"
        elif any(a.sinks is not None for a in attentions(block)):
            why = "its attention has sinks"
        elif any(a.config.qk_norm_whole for a in attentions(block)):
            why = "its queries have a norm over all heads"
        else:
            counts += [n for a in attentions(block) for n in (a.h, a.g)]
            counts.append(block.ffn.config.ffn_dim)
    if any(m.relative is not None for m in model.modules() if isinstance(m, Stack)):
        why = "it has relative position biases"
    if why:
        raise UsageError(
            f"train.parallel.mode = tensor cannot split this model: {why}; choose ddp or fsdp"
        )
    if any(n % degree for n in counts):
        fit = divisors(math.gcd(*counts))
        raise UsageError(
            f"{degree} processes cannot split this model's heads, key/value heads and feed-forward "
            f"({', '.join(map(str, sorted(set(counts))))}) evenly; set train.parallel.degree to one of {fit}, "
            f"or the mode to ddp or fsdp"
        )

"""How a new model starts: the weights of each family as its paper and transformers draw them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.compressed import CompressedAttention, Compressor, GroupedLinear
from regard.attention.disentangled import DistanceVectors
from regard.attention.multihead import GroupedQueryAttention
from regard.attention.ssd import StateSpaceDual
from regard.block import LayerTables, Mix, Stack
from regard.config import Amount, settings
from regard.layers import (
    FeedForward,
    Gain,
    HeadNorm,
    LabelHead,
    LayerScale,
    LMHead,
    Projection,
    RMSNorm,
    TokenBatchNorm,
    Xielu,
)
from regard.models.embedding import PatchEmbedding, TokenEmbedding
from regard.models.pair import Pair
from regard.models.pool import QueryPool
from regard.models.sound import SoundEmbedding, waves
from regard.moe import MixtureOfExperts
from regard.position import Learned, PositionVectors, RelativeBias


@settings
class Start:
    """Weights are normal with deviation `std`, biases 0, norms 1. What the schemes do otherwise:

    "gpt2": what writes into the stream has std / sqrt(2 layers), so that depth does not widen it;
    "t5": a matrix has std / sqrt(inputs), queries by sqrt(head_dim) less, for scores are not scaled; tables have `std`;
    "uniform": matrices lie within 1 / sqrt(inputs), tables have 1 / sqrt(dim) where the embedding multiplies by
    sqrt(dim), so that words and positions weigh alike. The paper of 2017 does not say; with Xavier's wider matrices
    small models of its kind learned worse (bench/LOG.md, Multi30k);
    "nanochat": as "gpt2", but for the feed-forward;
    "deit": class tokens and positions are 0;
    "modernbert": as "gpt2", the dense layer of a head and its vocabulary too; of labels 1 / sqrt(dim);
    "mamba": what a state writes into the stream lies within 1 / sqrt(inputs);
    "t5gemma": what gives the logits, where it is not tied, has std / sqrt(vocab);
    "clip", "siglip": by the width and depth of each part, whatever `std` is: see `_clip` and `_siglip`."""

    scheme: str = "normal"
    std: Amount = 0.02


def start_of(config: Any) -> Start:
    """Of a model of no family: 2017's for norms after the sum, GPT-2's for norms before it."""
    tower = getattr(config, "decoder", None) or getattr(config, "tower", None)
    return Start("uniform" if getattr(tower, "order", "") == "post" else "gpt2")


BIASED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm)


@torch.no_grad()
def initialize(model: nn.Module, start: Start, layers: int = 1) -> None:
    """Draw all weights anew, in place. Cells of recurrent models keep torch's own start. `layers`: of the body that a
    head is for."""
    for part in model.modules():
        if isinstance(part, (nn.Linear, nn.Conv2d)):
            _matrix(part.weight, start)
        elif isinstance(part, nn.Conv1d):
            _matrix(part.weight.flatten(1), start)
        elif isinstance(part, (nn.LayerNorm, RMSNorm, HeadNorm)):
            nn.init.constant_(part.weight, 0.0 if getattr(part, "plus_one", False) else 1.0)
        elif isinstance(part, MixtureOfExperts):
            for weight in (part.gate, part.up, part.down):
                _matrix(weight, start)
        elif isinstance(part, (LayerTables, GroupedLinear, Mix)):
            nn.init.normal_(part.weight, std=start.std)
        elif isinstance(part, (TokenEmbedding, PositionVectors, DistanceVectors, PatchEmbedding)):
            _tables(part, start)
        elif isinstance(part, LMHead) and part.weight is not None:
            wide = start.scheme == "uniform"
            nn.init.normal_(part.weight, std=part.weight.shape[1] ** -0.5 if wide else start.std)
        elif isinstance(part, Stack) and part.relative is not None:
            inputs = part.config.dim if start.scheme == "t5" else 1
            for bias in part.relative.modules():
                for weight in bias.parameters() if isinstance(bias, RelativeBias) else ():
                    nn.init.normal_(weight, std=start.std / inputs**0.5)
        if isinstance(part, BIASED) and part.bias is not None:
            nn.init.zeros_(part.bias)
        _rarer(part, start)
    if start.scheme in ("clip", "siglip"):
        return {"clip": _clip, "siglip": _siglip}[start.scheme](model)
    layers = max((len(p.blocks) for p in model.modules() if isinstance(p, Stack)), default=layers)
    _redraw(model, start, layers)


def _redraw(model: nn.Module, start: Start, layers: int) -> None:
    """What a part has another start for than for the matrices inside it."""
    for part in model.modules():
        if isinstance(part, Stack) and start.scheme in ("gpt2", "modernbert", "nanochat"):
            writes: tuple[str, ...] = ("wo.weight", "down.weight", "ffn.down")
            writes = writes[:1] if start.scheme == "nanochat" else writes
            for name, weight in (x for block in part.blocks for x in block.named_parameters()):
                if name.endswith(writes):
                    nn.init.normal_(weight, std=start.std / (2 * len(part.blocks)) ** 0.5)
        if isinstance(part, (LMHead, LabelHead)) and start.scheme == "modernbert":
            for matrix in (getattr(part.dense, "weight", None), getattr(part, "weight", None)):
                if matrix is not None:
                    nn.init.normal_(matrix, std=start.std / (2 * layers) ** 0.5)
            if isinstance(part, LabelHead):
                nn.init.normal_(part.out.weight, std=part.out.in_features**-0.5)
        if isinstance(part, LMHead) and start.scheme == "t5gemma" and part.weight is not None:
            nn.init.normal_(part.weight, std=start.std / part.weight.shape[0] ** 0.5)
        if isinstance(part, GroupedQueryAttention) and start.scheme == "t5":
            part.wq.weight.div_(part.d**0.5)
        _matrices_of(part, start)


def _matrices_of(part: nn.Module, start: Start) -> None:
    """What a part has otherwise than its matrices are drawn by themselves."""
    if isinstance(part, StateSpaceDual) and start.scheme == "mamba":
        _matrix(part.wo.weight, Start("uniform"))
    # gpt-oss, whose they are
    if isinstance(part, GroupedQueryAttention) and part.sinks is not None:
        nn.init.normal_(part.sinks, std=start.std)
    # ERNIE 4.5, likewise
    if isinstance(part, MixtureOfExperts) and part.config.wide_router:
        nn.init.zeros_(part.router.weight)
    if isinstance(part, MixtureOfExperts) and part.router.bias is not None:
        nn.init.normal_(part.router.bias, std=start.std)
        for name in ("gate_bias", "up_bias", "down_bias"):
            nn.init.zeros_(getattr(part, name))


def _rarer(part: nn.Module, start: Start) -> None:
    """Parts that few models have."""
    if isinstance(part, Gain):
        nn.init.ones_(part.weight)
    elif isinstance(part, Xielu):
        part.start()
    elif isinstance(part, MixtureOfExperts) and part.gains is not None:
        nn.init.ones_(part.gains)
    elif isinstance(part, TokenBatchNorm):
        for one, zero in ((part.weight, part.bias), (part.var, part.mean)):
            nn.init.ones_(one)
            nn.init.zeros_(zero)
    elif isinstance(part, Mix):
        nn.init.zeros_(part.bias)
        nn.init.ones_(part.scale)
    elif isinstance(part, Compressor):
        nn.init.zeros_(part.bias)
    elif isinstance(part, CompressedAttention):
        nn.init.zeros_(part.sinks)
    elif isinstance(part, LayerScale):
        nn.init.constant_(part.weight, part.start)
    elif isinstance(part, Pair):
        nn.init.constant_(part.scale, part.config.scale)
    elif isinstance(part, QueryPool):
        nn.init.normal_(part.query, std=start.std)
    elif isinstance(part, SoundEmbedding):
        part.position.copy_(waves(*part.position.shape))


def _clip(model: nn.Module) -> None:
    """CLIP's: what reads the stream, and what the feed-forward writes, narrower in a deeper tower."""
    for part in model.modules():
        if isinstance(part, Stack):
            wide = part.config.dim**-0.5
            deep = wide * (2 * len(part.blocks)) ** -0.5
            stds = {
                "wq": deep,
                "wk": deep,
                "wv": deep,
                "wo": wide,
                "up": wide / 2**0.5,
                "down": deep,
            }
            for name, linear in part.named_modules():
                if isinstance(linear, nn.Linear):
                    nn.init.normal_(linear.weight, std=stds[name.rpartition(".")[2]])
        elif isinstance(part, Projection):
            nn.init.normal_(part.out.weight, std=part.out.in_features**-0.5)
        elif isinstance(part, (TokenEmbedding, PositionVectors, PatchEmbedding)):
            for name, table in part.named_parameters(recurse=False):
                nn.init.normal_(table, std=table.shape[1] ** -0.5 if name == "extra" else 0.02)
            if isinstance(part, PatchEmbedding):
                nn.init.normal_(part.project.weight, std=0.02)


# The deviation of a normal number that is cut off at two of them.
CUT = 0.87962566103423978


def _siglip(model: nn.Module) -> None:
    """SigLIP's: Xavier's in blocks, deviation 1 / sqrt(inputs) elsewhere."""
    for part in model.modules():
        if isinstance(part, (nn.Linear, nn.Conv2d)):
            nn.init.trunc_normal_(part.weight, std=part.weight[0].numel() ** -0.5 / CUT)
        elif isinstance(part, (TokenEmbedding, PositionVectors, PatchEmbedding)):
            for table in part.parameters(recurse=False):
                nn.init.normal_(table, std=table.shape[1] ** -0.5)
    for part in model.modules():
        if isinstance(part, GroupedQueryAttention):
            for linear in (part.wq, part.wk, part.wv, part.wo):
                nn.init.xavier_uniform_(linear.weight)
        elif isinstance(part, FeedForward):
            for linear in (part.up, part.down):
                nn.init.xavier_uniform_(linear.weight)
                nn.init.normal_(linear.bias, std=1e-6)
    for part in model.modules():
        if isinstance(part, QueryPool):
            dim = part.query.shape[1]
            nn.init.uniform_(part.query, -((3 / dim) ** 0.5), (3 / dim) ** 0.5)
            # Queries, keys and values are one matrix of theirs, and what they are read by is as elsewhere.
            for name, linear in part.attention.named_children():
                if name in ("wq", "wk", "wv") and isinstance(linear, nn.Linear):
                    nn.init.uniform_(linear.weight, -((1.5 / dim) ** 0.5), (1.5 / dim) ** 0.5)
                elif isinstance(linear, nn.Linear):
                    nn.init.trunc_normal_(linear.weight, std=dim**-0.5 / CUT)


def _matrix(weight: Tensor, start: Start) -> None:
    """(out in), a stack of them, or the kernels of a convolution (out in h w)."""
    inputs = weight[0].numel() if weight.dim() == 4 else weight.shape[-1]
    if start.scheme == "uniform":
        nn.init.uniform_(weight, -(inputs**-0.5), inputs**-0.5)
    else:
        nn.init.normal_(weight, std=start.std / (inputs**0.5 if start.scheme == "t5" else 1))


def _tables(
    part: TokenEmbedding | PositionVectors | DistanceVectors | PatchEmbedding, start: Start
) -> None:
    std = 0.02 if start.scheme == "uniform" else start.std
    for name, table in part.named_parameters(recurse=False):
        nn.init.normal_(table, std=std)
        if isinstance(part, PatchEmbedding) and start.scheme == "deit":
            nn.init.zeros_(table)
        if isinstance(part, TokenEmbedding) and name == "weight" and start.scheme == "uniform":
            nn.init.normal_(table, std=table.shape[1] ** -0.5 if part.config.scaled else std)
    c = part.config
    if isinstance(part, PositionVectors) and isinstance(c, Learned) and c.skip is not None:
        part.weight[c.offset - 1].zero_()  # of padding

"""One small example of every mechanism and of its variants; the laws run over this table.

Everything is float64 and stirred, so that a law holds to 1e-10 or not at all, and no weight is accidentally 0 or 1.
"""

from typing import TypeVar

import torch
from torch import Tensor, nn

from regard.attention import (
    DSA,
    GQA,
    MLA,
    SSD,
    Attention,
    Compressed,
    Context,
    DeltaRule,
    Disentangled,
)
from regard.block import PerLayer, Streams, Tower
from regard.layers import LM, MLP, Norm
from regard.mask import Causal, Mask, Span
from regard.models import Tokens, Transformer, TransformerConfig
from regard.position import (
    Alibi,
    LongRope,
    Proportional,
    Rope,
    Sinusoidal,
    T5Bias,
    Temperature,
)

DIM, VOCAB = 24, 19
TIGHT = {
    "rtol": 1e-9,
    "atol": 1e-10,
}  # float64 rounding after a few layers; a wrong formula is far off

_TURNS = Rope(layout="interleaved")
_LATENT = MLA(heads=3, latent=10, head_dim=6, rope_dim=4, rope=Rope(layout="interleaved"))
_GROUPED = GQA(heads=6, kv_heads=2, head_dim=8, rope=Rope())
_SOME = Rope(scaling=Proportional(share=0.4, factor=1.5))
_LONG = LongRope(short=(1.0, 1.5), long=(2.0, 3.0), original_len=64, factor=4.0)

MECHANISMS: dict[str, Attention] = {
    "mha": GQA(heads=3),
    "gqa_rope": _GROUPED,
    "mqa": GQA(heads=4, kv_heads=1, head_dim=5, value_dim=3, bias=True, out_bias=True),
    "partial_rope": GQA(heads=3, head_dim=8, rope=Rope(layout="interleaved", partial=0.5)),
    "window": GQA(heads=6, kv_heads=3, head_dim=4, rope=Rope(), window=4),
    "softcap": GQA(heads=4, kv_heads=2, softcap=1.5),
    "sinks": GQA(heads=4, kv_heads=2, sinks=True, rope=Rope(), head_dim=6),
    "gated": GQA(heads=4, kv_heads=2, head_dim=6, value_dim=5, bias=True, gated=True, rope=Rope()),
    "qk_norm": GQA(heads=3, qk_norm=1e-6, rope=Rope(), head_dim=6, scale=0.7),
    "qk_norm_whole": GQA(heads=6, kv_heads=2, head_dim=4, qk_norm=1e-6, qk_norm_whole=True),
    "qk_norm_plus_one": GQA(heads=3, qk_norm=1e-6, qk_norm_plus_one=True, rope=Rope(), head_dim=6),
    "qk_norm_bare": GQA(
        heads=3, qk_norm=1e-6, qk_norm_bare=True, rope=Rope(), head_dim=6, scale=0.7
    ),
    "qk_norm_last": GQA(
        heads=3, kv_heads=1, qk_norm=1e-6, qk_norm_last=True, rope=Rope(), head_dim=6
    ),
    "qk_norm_by_head": GQA(heads=4, kv_heads=2, qk_norm=1e-5, qk_norm_by_head=True, rope=Rope()),
    "clip": GQA(heads=4, kv_heads=2, head_dim=6, rope=Rope(), clip=0.8),
    "chunk": GQA(heads=6, kv_heads=3, head_dim=4, rope=Rope(), chunk=4),
    "temperature": GQA(heads=3, head_dim=6, rope=Rope(), temperature=Temperature(3, 0.6, 1)),
    "value_is_key": GQA(4, 2, head_dim=6, value_is_key=True, qk_norm=1e-6, v_norm=1e-6, rope=_SOME),
    "longrope": GQA(heads=3, head_dim=8, rope=Rope(partial=0.5, scaling=_LONG, wide=True)),
    "mla": _LATENT,
    "mla_query_latent": MLA(3, latent=10, head_dim=6, rope_dim=4, query_latent=7, rope=Rope()),
    "mla_plain": MLA(3, latent=7, normed=False, bias=True, out_bias=True),
    "mla_no_positions": MLA(3, latent=10, head_dim=6, rope_dim=4),
    "mla_wide_value": MLA(3, latent=8, head_dim=5, value_dim=9, query_latent=8, normed=False),
    "mla_window": MLA(3, latent=10, head_dim=6, rope_dim=4, rope=Rope(), window=5),
    "mla_temperature": MLA(3, 10, 6, 4, rope=Rope(), temperature=Temperature(2, 0.8)),
    # the indexer is told positions, by RoPE or by sinusoids: equal tokens would tie but for rounding
    "dsa_mla": DSA(_LATENT, index_heads=2, index_dim=8, topk=3, rope_dim=4),
    "dsa_gqa": DSA(_GROUPED, index_heads=3, index_dim=6, topk=4, rope_dim=4),
    "dsa_query_latent": DSA(MLA(3, latent=10, head_dim=6, query_latent=7), 2, 8, topk=2),
    "dsa_window_sinks": DSA(GQA(4, 2, window=6, sinks=True, rope=Rope()), 2, 8, 3, rope_dim=2),
    "dsa_gated": DSA(GQA(4, 2, gated=True, rope=Rope()), 2, 8, 3, rope_dim=2),
    "dsa_interleaved": DSA(_LATENT, 2, 8, topk=3, rope_dim=4, rope_layout="interleaved"),
    "dsa_chunk": DSA(GQA(4, 2, chunk=6, rope=Rope()), 2, 8, 3, rope_dim=2),
    "dsa_fp8": DSA(_LATENT, 2, 16, topk=3, rope_dim=4, hadamard=True, precision="fp8"),
    "dsa_hadamard": DSA(_GROUPED, 2, 8, topk=3, rope_dim=2, hadamard=True),
    "compressed": Compressed(3, 8, 5, local=3, rope=_TURNS, rope_dim=4, groups=2, rank=5, rate=3),
    "compressed_sparse": Compressed(
        4,
        6,
        7,
        2,
        _TURNS,
        4,
        groups=4,
        rank=3,
        rate=2,
        overlap=True,
        topk=2,
        index_heads=7,
        index_dim=6,
    ),
    # As below: a query and a key are unit vectors of few features, each made of few.
    "compressed_near": Compressed(2, 8, 12, local=4, rope=Rope(), rope_dim=2, rank=4, eps=0.1),
    # Norms with a large eps: where a query meets no key, a small one divides by nearly 0, so that rounding the weights
    # alone to 8 bits turns gradients by half their size.
    "delta": DeltaRule(key_heads=3, key_dim=9, value_dim=5, eps=0.3),
    "delta_grouped": DeltaRule(2, value_heads=6, key_dim=10, value_dim=7, conv=2, eps=0.3),
    "disentangled": Disentangled(3, span=4, max_distance=9, norm=1e-3),
    "disentangled_own": Disentangled(4, 5, span=3, max_distance=None, norm=None, shared=False),
    "delta_channels": DeltaRule(
        3, None, 9, 5, 3, 0.3, channels=True, rank=4, gate="sigmoid", reach=2.0
    ),
    "ssd": SSD(heads=6, head_dim=5, groups=2, key_dim=7, conv=3, bias=True, eps=0.3),
    "ssd_bounded": SSD(
        3, 4, key_dim=9, conv_bias=False, eps=0.3, least=0.2, most=0.9, steps=(0.1, 2.0)
    ),
}

# States are seen by no probe and go from left to right alone.
STATES = [name for name, config in MECHANISMS.items() if isinstance(config, (DeltaRule, SSD))]

TOWERS: dict[str, dict] = {name: {"attention": a} for name, a in MECHANISMS.items()} | {
    "gqa_t5": {"attention": GQA(4, 2), "relative": T5Bias(4, 8, 16, causal=True)},
    "gqa_t5_each": {
        "attention": GQA(4, 2),
        "relative": T5Bias(4, 8, 16, causal=True),
        "relative_shared": False,
    },
    "mqa_alibi": {"attention": GQA(6, 1), "relative": Alibi(6)},
    "alibi_coarse": {"attention": GQA(12, 1), "relative": Alibi(12, scale=0.7, coarse=True)},
    "mla_alibi": {"attention": MECHANISMS["mla"], "relative": Alibi(3)},
    "dsa_t5": {"attention": MECHANISMS["dsa_mla"], "relative": T5Bias(3, 8, 16, causal=True)},
    "dsa_alibi": {"attention": MECHANISMS["dsa_gqa"], "relative": Alibi(6)},
    "softcap_sinks_t5": {
        "attention": GQA(4, 2, softcap=2.0, sinks=True),
        "relative": T5Bias(4, 8, 16, causal=True),
    },
    "ssd_alone": {"attention": MECHANISMS["ssd"], "ffn": None},
    "ssd_gqa": {
        "attention": (MECHANISMS["ssd"], MECHANISMS["gqa_rope"]),
        "ffn": (None, MLP(32, "gelu")),
        "order": ("pre", "inner"),
    },
    "delta_gqa": {"attention": (MECHANISMS["delta_grouped"], MECHANISMS["gqa_rope"])},
    "one_block": {"attention": MECHANISMS["gqa_rope"], "blocks": (0, 0)},
    "borrowing": {"attention": _GROUPED, "borrowing": 1},
    "streams": {"attention": _GROUPED, "streams": Streams(3, rounds=4)},
    "per_layer": {"attention": _GROUPED, "per_layer": PerLayer(5, VOCAB)},
    "no_first_norm": {"attention": MECHANISMS["mha"], "first_norm": False},
    "norms_plus_one": {"attention": _GROUPED, "norm": Norm(1e-6, rms=True, plus_one=True)},
    "one_norm": {"attention": _GROUPED, "norm": Norm(plus_one=True), "order": "shared"},
    "norms_no_bias": {"attention": _GROUPED, "norm": Norm(biased=False), "order": "sandwich"},
    "norms_no_weight": {"attention": _GROUPED, "norm": Norm(biased=False, weighted=False)},
    "residual_gain": {"attention": _GROUPED, "residual_gain": 0.4},
    "mixed": {"attention": (MECHANISMS["window"], MECHANISMS["dsa_mla"])},
}

# What `make test` runs of a law over the towers (tests/wide.py).
FEW = ["gqa_rope", "window", "softcap_sinks_t5", "longrope", "mla_query_latent", "mla_alibi"]
FEW += ["dsa_mla", "dsa_fp8", "delta_gqa", "one_block", "norms_no_bias", "mixed"]

OPTIONS: dict[str, dict] = {  # layouts at sizes that make them grow, wrap around and turn pages
    "contiguous": {"capacity": 2},
    "ring": {"chunk": 5},
    "paged": {"pages": 24, "page": 3},
}


M = TypeVar("M", bound=nn.Module)


def stir(module: M) -> M:
    """float64, and parameters that matter: norms away from 1, biases and sinks away from 0."""
    module = module.double().eval()
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() > 1:
                p.normal_(std=1.3 * p.shape[-1] ** -0.5)
            else:
                p.add_(0.3 * torch.randn_like(p))
    return module


def layer(config: Attention, dim: int = DIM, memory_dim: int | None = None) -> nn.Module:
    return stir(config.make(dim, memory_dim))


def context(size: int, mask: Mask | None = None, **more: object) -> Context:
    return Context(Span.run(0, size), mask or Causal(), **more)  # type: ignore[arg-type]


def decoder(name: str, *, layers: int = 2, causal: bool = True, **more: object) -> Transformer:
    """A small language model of TOWERS[name]; sinusoids where the attention itself knows no positions."""
    tower = {"ffn": MLP(32, "gelu"), "causal": causal, **TOWERS[name], **more}
    if "blocks" in tower:
        tower["blocks"] = (0,) * layers
    first = tower["attention"][0] if isinstance(tower["attention"], tuple) else tower["attention"]
    blind = getattr(first, "rope", None) is None and "relative" not in tower
    tokens = Tokens(VOCAB, Sinusoidal(64) if blind else None)
    return stir(Transformer(TransformerConfig(tokens, Tower(DIM, layers, **tower), LM(tied=False))))


def ids(batch: int, size: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (batch, size), generator=torch.Generator().manual_seed(seed))


def options(model: Transformer, layout: str, longest: int) -> dict:
    """How to make a cache of this layout; a ring for a model without windows keeps everything."""
    chosen = dict(OPTIONS.get(layout, {}))
    if layout == "ring" and None in model.windows():
        chosen["window"] = longest
    return chosen

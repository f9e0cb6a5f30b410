"""What type checkers and editors know of the public names, which __init__.py finds when they are used."""

from regard import presets
from regard.attention import (
    ATTENTION,
    BACKENDS,
    CROSS,
    DSA,
    GQA,
    MLA,
    SSD,
    Context,
    DeltaRule,
    attend,
)
from regard.block import FEED_FORWARDS, ORDERS, Order, Tower
from regard.cache import LAYOUTS, CacheSpec, Contiguous, Paged, Ring
from regard.checkpoint import from_hf, load
from regard.checkpoint.families import FAMILIES
from regard.decode.engine import Engine
from regard.decode.generate import generate, stream, translate
from regard.decode.settings import Request, Result, Settings
from regard.decode.warm import warm
from regard.errors import UsageError
from regard.evaluation.model import answer, classify, embed, fill
from regard.evaluation.run import evaluate
from regard.fast.cpu import prepare
from regard.labs.run import lab
from regard.layers import LM, MLM, MLP, NORMS, Answer, BatchNorm, Classify, Norm, Tag
from regard.mask import Causal, Chunk, Documents, Full, Padding, Prefix, Span, Visible, Window
from regard.models import (
    Canvas,
    EncoderDecoderConfig,
    Model,
    PainterConfig,
    Patches,
    RecurrentConfig,
    Seq2SeqConfig,
    Tokens,
    TransformerConfig,
)
from regard.moe import MoE
from regard.position import (
    POSITIONS,
    RELATIVE,
    SCALINGS,
    Alibi,
    Learned,
    Linear,
    Llama3,
    Rope,
    Sinusoidal,
    T5Bias,
    Temperature,
    Yarn,
)
from regard.presets import PRESETS, build
from regard.see.look import look
from regard.see.probe import Probe
from regard.training.finetune import finetune
from regard.training.run import RunConfig, train
from regard.training.trainer import Trainer

__version__: str
__all__ = [
    "ATTENTION",
    "Alibi",
    "Answer",
    "BACKENDS",
    "BatchNorm",
    "CROSS",
    "CacheSpec",
    "Canvas",
    "Causal",
    "Chunk",
    "Classify",
    "Context",
    "Contiguous",
    "DSA",
    "DeltaRule",
    "Documents",
    "EncoderDecoderConfig",
    "Engine",
    "FAMILIES",
    "FEED_FORWARDS",
    "Full",
    "GQA",
    "LAYOUTS",
    "LM",
    "Learned",
    "Linear",
    "Llama3",
    "MLA",
    "MLM",
    "MLP",
    "MoE",
    "Model",
    "NORMS",
    "Norm",
    "ORDERS",
    "Order",
    "POSITIONS",
    "PRESETS",
    "Padding",
    "Paged",
    "PainterConfig",
    "Patches",
    "Prefix",
    "Probe",
    "RELATIVE",
    "RecurrentConfig",
    "Request",
    "Result",
    "Ring",
    "Rope",
    "RunConfig",
    "SCALINGS",
    "SSD",
    "Seq2SeqConfig",
    "Settings",
    "Sinusoidal",
    "Span",
    "T5Bias",
    "Tag",
    "Temperature",
    "Tokens",
    "Tower",
    "Trainer",
    "TransformerConfig",
    "UsageError",
    "Visible",
    "Window",
    "Yarn",
    "answer",
    "attend",
    "build",
    "classify",
    "embed",
    "evaluate",
    "fill",
    "finetune",
    "from_hf",
    "generate",
    "lab",
    "load",
    "look",
    "prepare",
    "presets",
    "stream",
    "train",
    "translate",
    "warm",
]

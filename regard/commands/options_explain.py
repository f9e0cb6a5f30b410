"""What explain can be told: a topic, and numbers under the names that topics give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from regard.commands.parse import Switch

Many = Annotated[tuple[float, ...], arg(metavar="N ...", help_behavior_hint="")]
One = Annotated[tuple[float, ...], arg(metavar="N", help_behavior_hint="")]
Text = Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")]


@dataclass(frozen=True)
class Explain:
    """A mechanism in a formula, in numbers that you may change, and the file that implements it.

    regard explain                                            the topics
    regard explain softmax 1 2 3                              numbers: the first thing that a topic takes
    regard explain online-softmax --x 1 3 2 --v 1 2 3         one step a key
    regard explain kv-cache --tokens 4096 --kv-heads 2
    """

    topic: Annotated[Positional[str | None], arg(metavar="[TOPIC]", help_behavior_hint="")] = None
    """what to explain; all are listed if left out"""
    numbers: Annotated[
        Positional[tuple[float, ...]], arg(metavar="[N ...]", help_behavior_hint="")
    ] = ()
    """for the first option that the topic takes"""
    x: Many = ()
    """scores, logits or a vector, as the topic says"""
    a: Many = ()
    """of [a, a, 2a]"""
    q: Many = ()
    """a query, or queries"""
    k: Many = ()
    """keys, one after the other"""
    v: Many = ()
    """values"""
    w: Many = ()
    """weights or probabilities"""
    pos: Many = ()
    """positions or distances"""
    tokens: Many = ()
    """how many tokens"""
    steps: Many = ()
    """steps of training, or back in time"""
    dim: Many = ()
    """width of the model, or of a vector"""
    rank: Many = ()
    """of LoRA, or of MLA's query latent"""
    patch: Many = ()
    """sides of a patch"""
    size: One = ()
    """side of an image"""
    heads: One = ()
    kv_heads: One = ()
    head_dim: One = ()
    latent: One = ()
    """of MLA"""
    rope_dim: One = ()
    """of MLA"""
    layers: One = ()
    window: One = ()
    """of a mask"""
    width: One = ()
    """of a kernel, or inside a feed-forward"""
    topk: One = ()
    p: One = ()
    """mass of top-p"""
    temperature: One = ()
    beams: One = ()
    base: One = ()
    """of the frequencies"""
    buckets: One = ()
    """of T5's bias"""
    eps: One = ()
    alpha: One = ()
    """of LoRA"""
    label: One = ()
    warmup: One = ()
    text: Text = None
    """what was said, for bleu"""
    reference: Text = None
    """what should have been said"""
    json: Switch = False
    """one JSON object"""

"""regard explain: a mechanism in the terminal."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from regard.cli.shared import Switch
from regard.errors import UsageError

Many = Annotated[tuple[str, ...] | None, arg(metavar="N ...", help_behavior_hint="")]
One = Annotated[tuple[str, ...] | None, arg(metavar="N", help_behavior_hint="")]
Text = Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")]


@dataclass(frozen=True)
class Options:
    """A mechanism in a formula, in numbers that you may change, and the file that implements it.

    regard explain                                            the topics
    regard explain softmax 1 2 3                              numbers: the first thing that a topic takes
    regard explain online-softmax --x 1 3 2 --v 1 2 3         one step per key
    regard explain attention --q "1 0; 0 1" --k "1 0; 0 1; 1 1" --v "1; 2; 4"
    regard explain kv-cache --tokens 4096 --kv-heads 2
    """

    # what to explain; all are listed if left out
    topic: Annotated[Positional[str | None], arg(metavar="[TOPIC]", help_behavior_hint="")] = None
    # for the first option that the topic takes
    numbers: Annotated[
        Positional[tuple[str, ...]], arg(metavar="[N ...]", help_behavior_hint="")
    ] = ()
    x: Many = None  # scores, logits or a vector, as the topic says
    a: Many = None  # of [a, a, 2a]
    q: Many = None  # a query, or queries: rows are divided by semicolons
    k: Many = None  # keys, one after the other
    v: Many = None  # values
    w: Many = None  # weights or probabilities
    pos: Many = None  # positions or distances
    tokens: Many = None  # how many tokens
    steps: Many = None  # steps of training, or back in time
    dim: Many = None  # width of the model, or of a vector
    rank: Many = None  # of LoRA, or of MLA's query latent
    patch: Many = None  # sides of a patch
    size: One = None  # side of an image
    heads: One = None
    kv_heads: One = None
    head_dim: One = None
    latent: One = None  # of MLA
    rope_dim: One = None  # of MLA
    layers: One = None
    window: One = None  # of a mask
    width: One = None  # of a kernel, or inside a feed-forward
    topk: One = None
    p: One = None  # mass of top-p
    temperature: One = None
    beams: One = None
    base: One = None  # of the frequencies
    buckets: One = None  # of T5's bias
    eps: One = None
    alpha: One = None  # of LoRA
    label: One = None
    warmup: One = None
    text: Text = None  # what was said, for bleu
    reference: Text = None  # what should have been said
    json: Switch = False  # one JSON object


def run(options: Options) -> int:
    from regard.learn.explain import explained, listed

    given = {n: x for n, x in dataclasses.asdict(options).items() if x is not None}
    topic, numbers, as_json = given.pop("topic", None), given.pop("numbers"), given.pop("json")
    if topic is None and given:
        raise UsageError("say which topic: regard explain TOPIC; regard explain lists them")
    print(listed(as_json) if topic is None else explained(topic, numbers, given, as_json=as_json))
    return 0

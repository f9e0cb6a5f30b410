"""What can be learned, one row per task: how data is read, what is minimised, what a token sees, what
is measured. A new task is a row here and the functions that it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from regard.data.corrupt import Corruption, DrawPrefix, Infill, MaskTokens, Spans
from regard.data.feed import Batch
from regard.layers import Answer, Classify, Tag
from regard.mask import Mask
from regard.training import index_losses, objectives

# What T5 calls them.
SENTINELS = tuple(f"<extra_id_{i}>" for i in range(100))
_CLASSES = ("accuracy", "f1", "loss")
_MASKS = ("iou", "accuracy", "loss")


class Task(NamedTuple):
    """`reads`: how data becomes batches, a row of regard.data.config.KINDS. `objective`: what is
    minimised. `models`: the kinds of model it is for; `presets`: what to name instead of others.
    `mask`: what the tokens of a batch see; it gives None where the model's own mask holds.
    `metrics`: those of an evaluation, the best model's first; `other_metrics` suit too.
    `head`: for so many classes; None: words are predicted. `recipe`: settings of a tokenizer that is
    learned for it. `corruption`: of its text, made of the tokenizer's Marks and a config's [noise].
    `packed`: whole documents may share a row; `smoothed`: labels may be smoothed; `sampled`: its
    decoder may read its own words; `compared`: its objective takes [prefer], a reference model and a
    tally of rewards; `foretells`: MTP layers learn beside it; `continued`: samples go on with a text;
    `indexed`: it trains the indexers of sparse attention; `leaves`: freezes the rest of a model, where
    a task trains a part of it alone."""

    reads: str
    objective: Callable[..., tuple[Tensor, Tensor]]
    models: tuple[str, ...]
    presets: str
    mask: Callable[[Batch], Mask | None] = objectives.own_mask
    metrics: tuple[str, ...] = ("loss", "perplexity")
    other_metrics: tuple[str, ...] = ()
    head: Callable[[int], Any] | None = None
    recipe: Mapping[str, Any] = {"task": "mlm"}
    corruption: Callable[..., Corruption] | None = None
    packed: bool = False
    smoothed: bool = True
    sampled: bool = False
    compared: bool = False
    foretells: bool = False
    continued: bool = False
    indexed: bool = False
    leaves: Callable[[Any], Any] | None = None


# Kinds of model, and presets to name instead of others.
_GPT = (("decoder",), "gpt2 or llama")
_TEXT = (("decoder", "recurrent model"), "gpt2 or llama")
_BERT = (("encoder",), "bert-base or roberta-base")
_ANY = (("encoder", "decoder", "encoder-decoder"), "bert-base or gpt2")
_PAIR = (("encoder-decoder",), "vaswani-base or t5-small")
_VIT = (("model of pictures",), "vit-small or deit-small")
_PAINTER = (("painter",), "painter")
_DSA = (("decoder",), "deepseek-v3.2")
# Settings that several rows have.
_LM: dict[str, Any] = {"mask": objectives.causal_mask, "recipe": {"task": "lm"}, "packed": True}
_PREFIX = {**_LM, "mask": objectives.prefix_mask, "corruption": lambda marks: DrawPrefix()}
_MLM: dict[str, Any] = {"mask": objectives.document_mask, "corruption": MaskTokens, "packed": True}
_CHATML: dict[str, Any] = {"task": "lm", "more": ("<|im_start|>", "<|im_end|>")}
_CHAT: dict[str, Any] = {**_LM, "recipe": _CHATML, "continued": True, "foretells": True}
_PREFER: dict[str, Any] = {
    "metrics": ("loss", *objectives.REWARDS),
    "recipe": _CHATML,
    "smoothed": False,
}
_SPANS = {"task": "seq2seq", "more": SENTINELS}
ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_BLEU: dict[str, Any] = {"metrics": ("bleu", "chrf", "loss", "perplexity")}
_BLEU |= {"other_metrics": ("bleu_lc", *ROUGE, "exact"), "recipe": {"task": "seq2seq"}}
_BLEU["sampled"] = True
_SAID = {**_BLEU, "metrics": ("loss", "perplexity")}
_SAID |= {"other_metrics": ("bleu", "bleu_lc", "chrf", *ROUGE, "exact")}
_SPAN: dict[str, Any] = {"metrics": ("exact", "f1", "loss"), "head": lambda classes: Answer()}
_INDEX: dict[str, Any] = {**_LM, "metrics": ("loss",), "indexed": True}
_WARM_UP: dict[str, Any] = {"smoothed": False, "leaves": index_losses.indexers}
TASKS: dict[str, Task] = {
    "lm": Task("lm", objectives.causal, *_TEXT, **_LM, continued=True, foretells=True),
    # Of conversations, what the assistant says.
    "chat": Task("chat", objectives.causal, *_TEXT, **_CHAT),
    # Of two answers, that the better one is likelier.
    "prefer": Task("prefer", objectives.prefer, *_GPT, **_PREFER, compared=True),
    "prefix": Task("lm", objectives.prefix, *_GPT, **_PREFIX),
    "mlm": Task("mlm", objectives.masked, *_BERT, **_MLM),
    "spans": Task("mlm", objectives.seq2seq, *_PAIR, recipe=_SPANS, corruption=Spans),
    "infill": Task("mlm", objectives.seq2seq, *_PAIR, recipe={"task": "infill"}, corruption=Infill),
    "seq2seq": Task("seq2seq", objectives.seq2seq, *_PAIR, **_BLEU),
    "classify": Task("classify", objectives.classify, *_ANY, metrics=_CLASSES, head=Classify),
    "tag": Task("tag", objectives.classify, *_ANY, metrics=_CLASSES, head=Tag),
    "answer": Task("answer", objectives.answer, *_ANY, **_SPAN, smoothed=False),
    "image": Task("image", objectives.classify, *_VIT, metrics=_CLASSES, head=Classify),
    # A class for each patch of a picture.
    "segment": Task("segment", objectives.classify, *_VIT, metrics=_MASKS, head=Tag),
    "caption": Task("caption", objectives.seq2seq, ("captioner",), "captioner", **_SAID),
    # The picture that a text asks for.
    "draw": Task("draw", objectives.draw, *_PAINTER, metrics=("nearest", "loss"), smoothed=False),
    # The two stages of sparse attention's indexer.
    "dense_index": Task("lm", index_losses.dense_index, *_DSA, **{**_INDEX, **_WARM_UP}),
    "sparse_index": Task("lm", index_losses.sparse_index, *_DSA, **_INDEX),
}

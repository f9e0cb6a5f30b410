"""A trained model made ready to run on this machine, and asked for what it was trained to say: labels, vectors, the
words behind masks, or where in a text the answer to a question stands."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.checkpoint import load
from regard.checkpoint.hf import MODULES, POOLING, widen
from regard.data.feed import types_of
from regard.data.read import Pictures
from regard.data.tokens import Coder
from regard.decode.defaults import folder_settings
from regard.decode.generate import GREEDY, generate, special_of, tokenizer_of
from regard.errors import DATA, RUN, Fault, UsageError, blaming, check_choice, notice
from regard.fast.cpu import Prepared, perplexity, prepare
from regard.files import TRAINED, json_object
from regard.kernels.linear import half_is_fast
from regard.layers import MLM, Answer, Classify, Tag
from regard.machine import pick_device
from regard.models import Model, Painter, Pair, Patches, Sound, Transformer
from regard.models.adapt import class_names
from regard.models.transformer import mean_real
from regard.text import needed
from regard.training.measure import best_spans, context_of

DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}
POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# The names of the classes and their probabilities, the most probable first.
Ranking = list[tuple[str, float]]
T = TypeVar("T")


def classify(
    model: str | Path | Model,
    texts: Sequence[str | Path],
    *,
    rows: int = 32,
    overlong: str = "error",
    device: str = "auto",
    quantize: str = "none",
) -> list[Ranking]:
    """For each text (or the file of a picture, where the model reads those) the labels and their
    probabilities, the most probable first; [] for an empty text. `model` is a folder, a run's
    folder, or a model, prepared or not; `quantize`: hold weights in "int8" or "int4"; `rows` of
    texts are a batch; `overlong` texts are an "error", or "truncate" cuts them."""
    classifier = Classifier(Opened(model, device=device, quantize=quantize), overlong)
    batches = batched(texts, rows)
    return [one for block in batches for one in classifier(classifier.read(*block))]


def embed(
    model: str | Path | Model,
    texts: Sequence[str],
    *,
    normalize: bool = False,
    pooling: str = "auto",
    rows: int = 32,
    overlong: str = "error",
    device: str = "auto",
    quantize: str = "none",
) -> np.ndarray:
    """Vectors (texts, width) in float32, of length 1 if `normalize`; NaN for an empty text. `model`
    is a folder, a run's folder, or a model, prepared or not; `quantize`: hold weights in "int8" or
    "int4"; `pooling`: "mean" of the last states, "cls" the first one, "auto" what the model was
    trained with; `rows` of texts are a batch; `overlong` texts are an "error", or "truncate" cuts
    them."""
    opened = Opened(model, device=device, quantize=quantize)
    embedder = Embedder(opened, normalize, overlong, pooling)
    return stacked([one for block in batched(texts, rows) for one in embedder(*block)])


def batched(texts: Sequence[T], rows: int) -> Iterator[tuple[Sequence[T], int]]:
    """Some texts at a time, and how many there were before."""
    return ((texts[start : start + rows], start) for start in range(0, len(texts), rows))


class Opened:
    """A model, or one from its folder or its run's, ready to run: packed for the CPU, or as it is
    on a GPU, where the engine finds its graph. A prepared model is taken as it is."""

    def __init__(
        self,
        model: str | Path | Model,
        *,
        device: str = "auto",
        dtype: str = "auto",
        quantize: str = "none",
    ):
        place, why = pick_device(device)
        self.ours = not isinstance(model, Model)
        if isinstance(model, Prepared) and (dtype, quantize) != ("auto", "none"):
            asked = quantize if quantize != "none" else dtype
            raise UsageError(
                f"this model is already prepared in {model.precision}; leave {asked} out, or give the original"
            )
        with blaming(DATA):
            model = loaded(model, place, dtype, packed=True)
            self.tokenizer = tokenizer_of(model)
            folder_settings(model)
        place = next(model.parameters()).device
        # The model as it was, until it is packed.
        self.plain: Model = model
        self.precision = precision_of(model, dtype) if quantize == "none" else quantize
        self.packs = quantize != "none" or (place.type == "cpu" and not isinstance(model, Prepared))
        if quantize == "none":
            self.precision = str(getattr(self.model, "precision", self.precision))
        self.about = f"{place} ({why}), {self.precision}"

    @functools.cached_property
    def model(self) -> Any:
        """Made when it is first asked for: until then `compare` may run the plain one, of which nothing is left
        afterwards if it came from a folder, so that never both are in memory."""
        if self.packs:
            self.plain = prepare(self.plain, self.precision, consume=self.ours)
        return self.plain

    @functools.cached_property
    def coder(self) -> Coder:
        """Texts as ids; made once, as it copies the tokenizer."""
        return Coder(needed(self.tokenizer))

    def compare(self, prompt: Any) -> str:
        """What quantization costs, in a line: perplexity of the prompt, or of the plain model's
        answer to it where the prompt is a source; nothing where nothing is quantized, or it is
        packed already. A prompt that leaves no room is refused later."""
        if "model" in self.__dict__ or not self.packs:
            return ""
        plain = self.plain
        longest = getattr(plain.config, "max_len", None)
        given = needed(self.tokenizer).encode(prompt) if isinstance(prompt, str) else prompt
        if longest is not None and len(given) >= longest:
            return ""
        if self.ours:
            widen(plain)
        place = next(plain.parameters()).device
        what, source, ids = "the prompt", None, given
        if plain.reads_source:
            what = "the plain model's answer"
            source = torch.as_tensor(given, device=place)[None]
            start = special_of(plain).start or 0
            how: Any = {"max_new_tokens": 32, **GREEDY}
            ids = [start, *generate(plain, [given], **how)[0].ids]
        if len(ids) < 2:
            return ""
        rows = torch.tensor([ids], device=place)
        before = perplexity(plain, rows, source)
        change = f"{before:.4g} -> {perplexity(self.model, rows, source):.4g}"
        return f"{self.precision}: perplexity of {what} {change} ({len(ids)} tokens)"


def loaded(
    model: str | Path | Model, device: torch.device, dtype: str, packed: bool = False
) -> Model:
    """A model as it is, or from its folder or its run's; one that will be `packed` in the type it is stored in, which
    is widened weight by weight then."""
    if isinstance(model, Model):
        return model
    kind: Any = DTYPES[dtype]
    stored = packed and kind is None
    opened = load(model, device=device, dtype="stored" if stored else kind, mapped=packed)
    # Cells are not packed: they compute in the type they have, and stay.
    if packed and not opened.towers:
        widen(opened)
        for p in opened.parameters():
            p.data = p.data.clone()
    return opened


def precision_of(model: Model, asked: str) -> str:
    """What the model runs in. On a CPU half precision is bf16, or fp32 where the CPU has no bf16
    and none was asked."""
    weight = next(model.parameters())
    if weight.device.type != "cpu":
        return NAMES.get(weight.dtype, str(weight.dtype))
    half = weight.dtype.itemsize < 4
    return "bf16" if half and (asked == "bf16" or half_is_fast()) else "fp32"


def trained_length(model: Model) -> int | None:
    """The longest row the model was trained on; None where its folder does not say."""
    length = model.origin.config.get(TRAINED) if model.origin is not None else None
    return length if isinstance(length, int) and length > 0 else None


def notice_length(model: Model, length: int) -> None:
    """Say that so many tokens are more than the model was trained on."""
    trained = trained_length(model)
    if trained is not None and length > trained:
        past = f"{length:,} tokens are past the {trained:,} that this model was trained on"
        notice(f"{past}; what is beyond may be worth little")


def read_by(model: Any) -> Any:
    """The config of what a model reads first, of a pair what its texts are."""
    of = model.config.text if isinstance(model, Pair) else model.config
    return getattr(of, "source", None) or getattr(of, "embedding", None)


def patches_of(model: Any) -> Patches | None:
    """What a model that reads pictures cuts them into."""
    first = read_by(model)
    return first if isinstance(first, Patches) else None


def reads_text(model: Any) -> bool:
    return not isinstance(read_by(model), (Patches, Sound))


def check_reads_text(model: Any) -> None:
    if isinstance(read_by(model), Sound):
        raise UsageError("this model reads sound: regard transcribe MODEL FILE.wav")
    if patches_of(model) is not None:
        how = (
            "classify" if isinstance(getattr(model.config, "head", None), Classify) else "generate"
        )
        raise UsageError(f"this model reads images: regard {how} MODEL picture.png")


def segments(model: Any) -> bool:
    """Whether it gives each patch of a picture a class."""
    return patches_of(model) is not None and isinstance(getattr(model.config, "head", None), Tag)


def draw(opened: Opened, texts: Sequence[str]) -> Tensor:
    """The pictures (n c h w) that a painter draws of texts, about -1 for black and 1 for white."""
    rows = [row for row in Rows(opened, "error")(texts) if row is not None]
    if len(rows) < len(texts) or not rows:
        raise UsageError("there is no text to draw; give some words")
    with torch.inference_mode():
        return opened.model(*padded(rows, next(opened.model.parameters()).device)).float().cpu()


def segmented(opened: Opened, file: Path) -> list[list[str]]:
    """The names of the classes of a picture's patches, row by row."""
    model, patches = opened.model, patches_of(opened.model)
    assert patches is not None
    picture = Pictures(patches, model.origin).file(file)
    device, side = next(model.parameters()).device, patches.size // patches.patch
    with torch.inference_mode():
        best = model(picture[None].to(device))[0].argmax(-1).unflatten(0, (side, side)).tolist()
    names = class_names(model)
    return [[names[i] for i in row] for row in best]


# --- labels ---------------------------------------------------------------------------------------


class Classifier:
    """An opened model that has a classification head."""

    def __init__(self, opened: Opened, overlong: str = "error", name: str = "MODEL"):
        self.model, patches = opened.model, patches_of(opened.model)
        if segments(self.model):
            raise UsageError(
                "this model labels patches of a picture: regard generate MODEL picture.png"
            )
        if not isinstance(getattr(self.model.config, "head", None), Classify):
            why = "this model has no classification head; answers would be random; train one"
            how = f'a config with task = "classify" and [model] folder = "{name}"'
            raise Fault(f"{why}: {how}, then regard train CONFIG", DATA)
        self.names = class_names(self.model)
        self.pictures = None if patches is None else Pictures(patches, self.model.origin)
        if patches is None:
            self.rows = Rows(opened, overlong)

    def read(
        self, texts: Sequence[str | Path], start: int = 0, name: str = "texts"
    ) -> list[Tensor | None]:
        """Ids of texts, or pictures of files; None for what is empty. `start` counts those
        before."""
        if self.pictures is None:
            return self.rows([str(text) for text in texts], start, name)
        return [self.pictures.file(Path(x)) if str(x).strip() else None for x in texts]

    @torch.inference_mode()
    def __call__(self, examples: Sequence[Tensor | None]) -> list[Ranking]:
        given = [x for x in examples if x is not None]
        if not given:
            return [[] for _ in examples]
        device = next(self.model.parameters()).device
        inputs = padded(given, device) if self.pictures is None else [torch.stack(given).to(device)]
        answers = [zip(self.names, row) for row in self.model(*inputs).float().softmax(-1).tolist()]
        ranked = iter([sorted(pairs, key=lambda pair: -pair[1]) for pairs in answers])
        return [[] if x is None else next(ranked) for x in examples]


class Rows:
    """Texts as rows of ids, with the tokens the model expects around them. What spells a special
    token is text."""

    def __init__(self, opened: Opened, overlong: str):
        if overlong not in ("error", "truncate"):
            raise UsageError(f"overlong is {overlong!r}; choose error or truncate")
        self.coder, self.overlong = opened.coder, overlong
        self.longest = context_of(opened.model)

    def __call__(
        self, texts: Sequence[str], start: int = 0, name: str = "texts"
    ) -> list[Tensor | None]:
        """None for a text without tokens; `start` counts the lines before."""
        before, after = self.coder.before, self.coder.after
        room = None if self.longest is None else self.longest - len(before) - len(after)
        rows: list[Tensor | None] = []
        encoded = self.coder.encode([text if text.strip() else "" for text in texts])
        for number, (text, ids) in enumerate(zip(texts, encoded, strict=True), start + 1):
            if room is not None and len(ids) > room and self.overlong == "error":
                count = f"{len(ids) + len(before) + len(after)} tokens"
                why = f"line {number} of {name} has {count}, the model's context is {self.longest}"
                cut = "say overlong='truncate' (--overlong truncate)"
                raise Fault(f"{why}; split the line, or {cut}", DATA)
            whole = [*before, *ids[:room], *after] if text.strip() else []
            rows.append(torch.tensor(whole) if whole else None)
        return rows


def padded(rows: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Rows of ids side by side, and how long each is if they differ."""
    sizes = torch.tensor([len(row) for row in rows])
    ids = pad_sequence(list(rows), batch_first=True)
    return ids.to(device), None if (sizes == sizes[0]).all() else sizes.to(device)


# --- vectors --------------------------------------------------------------------------------------


class Embedder:
    """An opened model that reads text, or pictures, or (a pair of models) either.

    An encoder gives its pooled vector where it has a pooler (BERT's, on the first token), else the
    mean of the last hidden states of the text's tokens; so do decoders (whose last state has read
    everything but was trained for the next token) and, with the encoder's states, encoder-decoders.
    Folders of sentence-transformers say which of these, and whether vectors get length 1.
    """

    def __init__(
        self,
        opened: Opened,
        normalize: bool = False,
        overlong: str = "error",
        pooling: str = "auto",
    ):
        self.model = opened.model
        patches = self.model.config.image.embedding if isinstance(self.model, Pair) else None
        patches = patches or patches_of(self.model)
        if patches is None or self.model.reads_source:
            check_reads_text(self.model)
        self.pictures = None if patches is None else Pictures(patches, self.model.origin)
        files = {} if self.model.origin is None else self.model.origin.files
        self.normalize = normalize or b".Normalize" in files.get(MODULES, b"")
        self.pooling = _pooling(files.get(POOLING), pooling)
        # A pair without a tokenizer still reads pictures.
        blind = self.pictures is None
        reads = reads_text(self.model) and (blind or opened.tokenizer is not None)
        self.rows: Any = Rows(opened, overlong) if reads else None

    def __call__(
        self, texts: Sequence[str], start: int = 0, name: str = "texts"
    ) -> list[np.ndarray | None]:
        """A vector for each text, None for an empty one; `start` counts the lines before."""
        if self.rows is None:
            raise UsageError("this model reads images: regard embed MODEL picture.png")
        return self.vectors(self.rows(texts, start, name), start)

    def vectors(self, rows: Sequence[Tensor | None], start: int = 0) -> list[np.ndarray | None]:
        """A vector for each row of ids or picture."""
        given = [ids for ids in rows if ids is not None]
        vectors = iter(embedded(self.model, given, self.normalize, self.pooling) if given else ())
        each = [None if ids is None else next(vectors) for ids in rows]
        for number, vector in enumerate(each, start + 1):
            if vector is not None and not np.isfinite(vector).all():
                hint = "try dtype='fp32' (--dtype fp32)"
                raise Fault(f"the vector of line {number} is not finite; {hint}", RUN)
        return each


def _pooling(stored: bytes | None, asked: str) -> str:
    check_choice("pooling", asked, ("auto", *POOLINGS.values()))
    if asked != "auto" or stored is None:
        return asked
    with blaming(DATA):
        modes = json_object(stored, POOLING).items()
    on = [key for key, value in modes if key.startswith("pooling_mode") and value is True]
    if len(on) != 1 or on[0] not in POOLINGS:
        why = f"{POOLING} says {' and '.join(on) or 'nothing'}, known are {' or '.join(POOLINGS)}"
        raise Fault(f"{why}; choose pooling='mean' or 'cls' (--pooling)", DATA)
    return POOLINGS[on[0]]


@torch.inference_mode()
def embedded(
    model: Any, given: Sequence[Tensor], normalize: bool = False, pooling: str = "auto"
) -> np.ndarray:
    """Vectors (b m) of rows of ids, or of pictures (c h w)."""
    device = next(model.parameters()).device
    if given[0].is_floating_point():
        vectors = seen(model, torch.stack(list(given)).to(device), pooling)
        return (F.normalize(vectors, dim=-1) if normalize else vectors).cpu().numpy()
    ids, lengths = padded(given, device)
    if isinstance(model, Pair):
        if pooling != "auto":
            raise UsageError("a pair of models pools as it was trained; leave pooling out")
        vectors = model.texts(ids, lengths)
    elif pooling == "auto" and isinstance(model, Transformer):
        vectors = model.pool(ids, lengths)
    else:
        read = model.reads_source or isinstance(model, Painter)
        states = model.encode(ids, lengths)[0] if read else model.hidden(ids, lengths)
        vectors = states[:, 0] if pooling == "cls" else mean_real(states, lengths)
    vectors = vectors.float()
    return (F.normalize(vectors, dim=-1) if normalize else vectors).cpu().numpy()


def seen(model: Any, pictures: Tensor, pooling: str) -> Tensor:
    """Vectors (b m) of pictures (b c h w)."""
    if pooling == "auto" or isinstance(model, Pair):
        return (model.images(pictures) if isinstance(model, Pair) else model.pool(pictures)).float()
    states = model.hidden(pictures).float()
    return states[:, 0] if pooling == "cls" else states.mean(1)


def grouped(rows: Sequence[Tensor], sizes: Sequence[int], places: int) -> Iterator[list[Tensor]]:
    """Rows of so many tokens each, one after the other, as many at a time as lie side by side in so
    many places; one at least, however long."""
    group: list[Tensor] = []
    longest = 0
    for row, size in zip(rows, sizes):
        if group and max(longest, size) * (len(group) + 1) > places:
            yield group
            group, longest = [], 0
        group.append(row)
        longest = max(longest, size)
    if group:
        yield group


def stacked(vectors: Sequence[np.ndarray | None]) -> np.ndarray:
    """(texts, width); rows of empty texts are NaN."""
    width = next((len(v) for v in vectors if v is not None), 0)
    empty = np.full(width, np.nan, np.float32)
    rows = [empty if vector is None else vector for vector in vectors]
    return np.array(rows, np.float32).reshape(len(rows), width)


# --- words behind masks, and answers in a text ----------------------------------------------------

# How people write a mask, beside the tokenizer's own.
MASKS = ("[MASK]", "<mask>")
# Tokens that two windows of a long text share, or half a window where that is less.
OVERLAP = 128


class Found(NamedTuple):
    """Characters `start` to `end` of the context are `text`; all None where the context has no answer. `score`: the
    probability of the first token times that of the last."""

    text: str | None
    start: int | None
    end: int | None
    score: float


def fill(
    model: str | Path | Model | Opened,
    text: str,
    *,
    top: int = 5,
    device: str = "auto",
    quantize: str = "none",
) -> list[Ranking]:
    """For each mask in the text the `top` most probable tokens and their probabilities. A mask is the tokenizer's own
    mask token, [MASK] or <mask>. `model` is a folder, a run's folder, or a model, prepared or not; `quantize`: hold
    weights in "int8" or "int4"."""
    filler = Filler(_opened(model, device, quantize))
    return list(filler(filler.read(text), top))


def _opened(model: str | Path | Model | Opened, device: str, quantize: str) -> Opened:
    if isinstance(model, Opened):
        return model
    return Opened(model, device=device, quantize=quantize)


class Filler:
    """An opened model that has a head which fills masks."""

    def __init__(self, opened: Opened):
        self.opened, self.model = opened, opened.model
        if not isinstance(getattr(self.model.config, "head", None), MLM):
            hint = 'an encoder-decoder writes instead: regard generate MODEL "..."'
            if not self.model.reads_source:
                hint = 'train one: a config with task = "mlm", then regard train CONFIG'
            raise Fault(f"this model has no head that fills masks; {hint}", DATA)
        own = needed(opened.tokenizer).tokens.get("mask_token")
        mask = opened.coder.mask
        if own is None or mask is None:
            raise Fault("the tokenizer of this model has no mask token", DATA)
        self.own, self.mask, self.coder = own, mask, opened.coder

    def read(self, text: str) -> Tensor:
        """Ids of a text that has masks."""
        for mask in MASKS:
            text = text.replace(mask, self.own)
        ids = torch.tensor(self.coder.tokenizer.encode(text))
        limit = context_of(self.model)
        if not torch.eq(ids, self.mask).any():
            why = f"put {self.own} where a word is to be found"
            raise UsageError(f"the text has no mask; {why}")
        if limit is not None and len(ids) > limit:
            why = f"the text has {len(ids):,} tokens, the model's context is {limit:,}"
            raise Fault(f"{why}; give fewer words around the mask", DATA)
        return ids

    @torch.inference_mode()
    def __call__(self, ids: Tensor, top: int) -> Iterator[Ranking]:
        """One mask after the other."""
        vocab = self.coder.vocab
        if not 1 <= top <= vocab:
            raise UsageError(f"top is {top}; give a number from 1 to {vocab:,}, the vocabulary")
        place = next(self.model.parameters()).device
        places = torch.eq(ids, self.mask).nonzero()[:, 0].to(place)
        logits = self.model(ids[None].to(place))[0, places, :vocab]
        best = logits.float().softmax(-1).topk(top)
        for row, values in zip(best.indices, best.values):
            yield list(zip(self.coder.tokens(row.tolist()), values.tolist()))


@torch.inference_mode()
def answer(
    model: str | Path | Model | Opened,
    question: str,
    context: str,
    *,
    longest: int = 30,
    device: str = "auto",
    quantize: str = "none",
) -> Found:
    """The piece of the context, of at most `longest` tokens, that answers the question. `model` is a folder, a run's
    folder, or a model, prepared or not; `quantize`: hold weights in "int8" or "int4".

    A context that does not fit is read in windows that overlap, each scored alone. The answer is the span whose two
    logits sum to the most in any of them; there is none if even the smallest logits of a window's first token, which
    stands for that, sum to more (as BERT has it for SQuAD 2.0). Probabilities are of the tokens of the window's
    context, and of none."""
    opened = _opened(model, device, quantize)
    net: Any = opened.model
    if not isinstance(getattr(net.config, "head", None), Answer):
        how = 'a config with task = "answer" and [model] folder = "MODEL", then regard train CONFIG'
        raise Fault(f"this model has no head that finds answers; train one: {how}", DATA)
    if longest < 1:
        raise UsageError(f"longest is {longest}; give a number from 1")
    coder = opened.coder
    (asked,), ((ids, places),) = coder.encode([question]), coder.located([context])
    if not asked or not ids:
        raise UsageError(f"the {'context' if asked else 'question'} is empty; give a text")
    head = [*coder.before, *asked, *coder.between]
    limit = context_of(net)
    room = len(ids) if limit is None else limit - len(head) - len(coder.after)
    if room < 2 and limit is not None:
        why = f"the question has {len(asked):,} tokens, the model's context is {limit:,}"
        raise Fault(f"{why}: no room for a text beside it; shorten the question", DATA)
    step = max(room - min(OVERLAP, room // 2), 1)
    best, nothing = (-torch.inf, (0, 0), 0.0), (torch.inf, 0.0)
    for window in range(0, max(len(ids) - room, 0) + step, step):
        part = ids[window : window + room]
        row = torch.tensor([[*head, *part, *coder.after]], device=next(net.parameters()).device)
        types = {}
        if coder.divider is not None and net.config.embedding.types > 1:
            types = {"types": types_of(row, coder.divider)}
        logits = net(row, **types)[0].float().cpu()  # t 2
        logits[1 : len(head)] = logits[len(head) + len(part) :] = -torch.inf
        p, ((span,), ((total,),)) = logits.softmax(0), best_spans(logits[None], longest)
        (a, b), score = span.tolist(), float(total)
        if score > best[0]:
            place = (window + a - len(head), window + b - len(head))
            best = score, place, float(p[a, 0] * p[b, 1])
        nothing = min(nothing, (float(logits[0].sum()), float(p[0].prod())))
    if nothing[0] >= best[0]:
        return Found(None, None, None, nothing[1])
    start, end = places[best[1][0]][0], places[best[1][1]][1]
    return Found(context[start:end], start, end, best[2])

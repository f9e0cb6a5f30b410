"""From a config to a trainer: tokenizer, data, model, head and adapter, what is measured, where it
is kept."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.checkpoint import load as load_model
from regard.checkpoint.adapter import load_adapter, save_adapter
from regard.checkpoint.hf import Origin, cast
from regard.checkpoint.hf import save as save_model
from regard.config import having, to_dict
from regard.data.config import CHATS, KINDS, Data, Loaded, text_roles
from regard.data.config import load as load_data
from regard.data.corrupt import Marks
from regard.data.feed import Feed, Objective, TextFeed
from regard.data.image_feed import CaptionFeed, DrawingFeed, ImageFeed
from regard.data.read import LongText, Text, records, wording
from regard.data.tokens import Coder, shown
from regard.data.train_tokenizer import train_tokenizer, write_files
from regard.errors import DATA, Fault, UsageError, blaming, notice
from regard.fast import train as fast
from regard.files import TRAINED, read_files
from regard.layers import LM, MLM, Classify, Tag
from regard.models import Painter, Pair, Patches, Sound
from regard.models.adapt import class_names, labels, with_head, with_labels, without_dropout
from regard.presets import PRESETS, build
from regard.text import CHATML, Tokenizer, needed, special_ids
from regard.text.chat import strange_marks
from regard.training.checkpoint import Checkpoints, whole
from regard.training.config import Config, recipe_of
from regard.training.index_losses import sparse_layers
from regard.training.measure import context_of
from regard.training.measure import measure as measured
from regard.training.objectives import REWARDS, Tally, learns_mtp
from regard.training.parallel import SingleProcess
from regard.training.tasks import SENTINELS, TASKS
from regard.training.trainer import Figures, Measure, Trainer, flat

TEMPLATE = "chat_template.jinja"
CARRIED = ("tokenizer.json", "tokenizer_config.json", TEMPLATE, "chat_template.json")


def assemble(
    config: Config, folder: Path, device: torch.device, keep: int, team: SingleProcess
) -> tuple[Trainer, list[str], list[str]]:
    """All that `config` names, joined: a trainer, the classes, and what the user should know of this
    run. The first process prepares tokenizer and data, the others read them."""
    start = start_of(config)
    with blaming(2, files=DATA):
        files, coder, loaded = team.first(lambda: read_data(config, start, folder))
    config = replace(config, train=config.train.counted(loaded.feed.epoch))
    torch.manual_seed(config.train.seed)
    own = own_labels(config.task, start)
    model = make_model(config, start, coder, loaded.classes)
    check_fits(model, loaded, config.data)
    model.origin.files = {**model.origin.files, **files}
    model.origin.config = folder_config(config, model, start, coder, loaded.classes)
    ended(model.origin, loaded.notes.get("ends", []))
    texts = label_notices(own, loaded)
    if spelt := dict.fromkeys(loaded.notes.get("spelt", [])):
        names = f"{', '.join(spelt):.200}"
        texts.append(
            f"messages spell {names}, special tokens; there they are learned as plain text"
        )
    texts += notices(config, model, coder)
    stored = next(model.parameters()).dtype
    model = fast.masters(config.learning(model, device))
    compared = TASKS[config.task].compared
    foretold = TASKS[config.task].foretells and learns_mtp(model)
    tally = Tally() if compared or foretold else None
    if compared and without_dropout(model):
        texts.append("preferences are learned without dropout: what is compared has none")
    objective = objective_of(config, model, coder, tally)
    feed = config.fed(loaded.feed, marks(coder))
    trainer = Trainer(
        model,
        feed,
        objective,
        config.train,
        *kept_in(folder / "checkpoints", model, keep, config.adapt.low_rank),
        measure=measuring(config, objective, feed, loaded.classes, coder, tally),
        team=team,
        tally=tally,
    )
    return trainer, loaded.classes, texts + type_notices(config, model, stored)


def folder_config(
    config: Config, model: Any, start: Any, coder: Coder | None, classes: list[str]
) -> dict[str, Any]:
    """What config.json of the saved folders says beside the model's shape: special tokens, the longest row, labels."""
    tokens = {}
    saved = model.origin.config
    if coder is not None:
        # One that the tokenizer lacks is null: a family's own number, which readers take where there
        # is none, would mean another token.
        tokens = {"eos_token_id": coder.end, "pad_token_id": coder.pad, "bos_token_id": coder.start}
        tokens["decoder_start_token_id"] = coder.start
    # A model that brings its tokenizer knows its special tokens.
    brought = start is not None and "folder" not in config.tokenizer
    saved = {**tokens, **saved} if brought else {**saved, **tokens}
    # A folder that does not say its longest row was trained elsewhere, on rows nobody knows.
    before = 0 if start is None else start.origin.config.get(TRAINED)
    length = config.data.length
    if before is not None and length is not None:
        saved[TRAINED] = max(before, length)
    return {**saved, **labels(classes)}


def objective_of(config: Config, model: Any, coder: Coder | None, tally: Tally | None) -> Objective:
    """What is minimised, with a tally of what else is told of it; of preferences with what they are compared with."""
    objective: Any = config.objective
    if tally is None:
        return objective
    if not TASKS[config.task].compared:
        return partial(objective, tally=tally)
    given = config.prefer.reference or not config.adapt.low_rank
    reference = reference_of(config, model, coder) if given else None
    return partial(objective, reference=reference, tally=tally)


def kept_in(
    folder: Path, model: Any, keep: int, small: bool
) -> tuple[Checkpoints, Callable[[Path], Any]]:
    """Where checkpoints are kept, and what reads one: whole models, or `small` ones, adapters alone."""
    # The plan says whether transformers can read the folders.
    save: Callable[..., Any] = save_adapter if small else partial(save_model, tell=False)
    load: Callable[..., Any] = partial(load_adapter, into=model) if small else load_model
    return Checkpoints(folder, save, keep, partial(written, small=small)), load


def type_notices(config: Config, model: Any, stored: torch.dtype) -> list[str]:
    """Whether the folder's weights are computed with in another type than they are `stored` in."""
    if stored == next(model.parameters()).dtype:
        return []
    how = "trained and saved in float32"
    if config.adapt.low_rank and model.origin.stored:
        how = "computed with in float32, which this CPU multiplies"
    return [f"the folder's weights are {str(stored).removeprefix('torch.')}; they are {how}"]


def reference_of(config: Config, model: Any, coder: Coder | None) -> Any:
    """What preferences are compared with, frozen: a folder's model, or the one that is about to learn. In its type, of
    its parts and on its device: before the first step a model and its copy give the same bits."""
    if not config.prefer.reference:
        reference = copy.deepcopy(model)
    else:
        with blaming(DATA):
            reference = load_model(config.prefer.reference, dtype="stored")
        check_suits(config.task, reference, coder)
        weight = next(model.parameters())
        reference = cast(reference, weight.dtype).to(weight.device)
    reference = reference if config.train.parallel.mode == "tensor" else fast.joined(reference)
    return reference.requires_grad_(False).eval()


def ended(origin: Origin, ends: list[int]) -> None:
    """Have what decodes this model stop at these tokens too: of a chat, those that answers end with."""
    name = "generation_config.json"
    eos = special_ids(origin.files, origin.config).eos
    if new := [i for i in dict.fromkeys(ends) if i not in eos]:
        both = {"eos_token_id": [*eos, *new]}
        origin.config = {**origin.config, **both}
        if name in origin.files:
            data = {**json.loads(origin.files[name]), **both}
            origin.files = {**origin.files, name: json.dumps(data, indent=2).encode()}


def start_of(config: Config, **how: Any) -> Any:
    """The model that `config` names a folder of, if it does."""
    with blaming(DATA):
        folder, size = (config.model.get(name) for name in ("folder", "size"))
        if folder is None:
            return None
        return load_model(folder, dtype="stored", image_size=size, **how)


def read_data(
    config: Config, start: Any, folder: Path
) -> tuple[dict[str, bytes], Coder | None, Loaded]:
    reads = TASKS[config.task].reads
    files = tokenizer_files(config, start, folder) if KINDS[reads].texts else {}
    if template := config.data.template_file():
        templates = {} if start is None else needed(Tokenizer.from_files(files, {})).templates
        if templates.get("default", template.decode()) != template.decode():
            how = "leave data.template out to go on with it"
            notice(f"template = {config.data.template!r} takes the place of the model's own; {how}")
        files = {**files, TEMPLATE: template}
    with blaming(DATA):
        coder = Coder(needed(Tokenizer.from_files(files, {}))) if files else None
    if start is not None:
        check_suits(config.task, start, coder)
    own = own_labels(config.task, start)
    loaded = load_data(reads, config.data, coder, folder / "data", config.train.seed, own)
    return files, coder, loaded


def make_model(config: Config, start: Any, coder: Coder | None, classes: list[str]) -> Any:
    """The preset with its changes, or the folder's model; with a head that suits the task."""
    model = start
    if model is None:
        model = fresh(config, 0 if coder is None else coder.vocab)
        model.origin = Origin(model.family)
    elif others := [name for name in config.model if name not in ("folder", "size")]:
        raise UsageError(f"[model] folder is taken as it is; leave {', '.join(others)} out")
    check_suits(config.task, model, coder, trained=start is not None)
    new_head = TASKS[config.task].head
    if new_head is None:
        return model
    wanted, own = new_head(len(classes)), own_labels(config.task, model)
    if own and classes[: len(own)] == own:
        return model if len(classes) == len(own) else with_labels(model, len(classes))
    if not classes and isinstance(getattr(model.config, "head", None), type(wanted)):
        return model
    return with_head(model, wanted)


def own_labels(task: str, model: Any) -> list[str]:
    """The labels that a model's head has already, in its order; [] where the task needs a new head."""
    make = TASKS[task].head
    head = getattr(getattr(model, "config", None), "head", None)
    if make is None or not isinstance(head, Classify | Tag) or type(head) is not type(make(1)):
        return []
    return class_names(model)


def label_notices(own: list[str], loaded: Loaded) -> list[str]:
    """What becomes of a head's labels: they keep their meaning, whatever the data's are."""

    def listed(names: Iterable[str]) -> str:
        return f"{', '.join(names):.200}"

    classes, used = loaded.classes, loaded.notes.get("labels", [])
    if not own:
        return []
    if classes[: len(own)] != own:
        keep = (
            own == [str(i) for i in range(len(own))] and " (labels that are numbers would keep it)"
        )
        why = f"the model's labels ({listed(own)}) are not the data's ({listed(used)})"
        return [f"{why}: its head is replaced by a new one{keep or ''}"]
    texts = []
    if not {*used} & {*classes}:
        pairs = listed(f"{i} = {own[int(i)]}" for i in used)
        texts.append(f"the data's labels are numbers, which are taken for the model's: {pairs}")
    elif absent := [name for name in own if name not in used]:
        texts.append(f"no example has the label {listed(absent)}; the head keeps it")
    if new := classes[len(own) :]:
        texts.append(f"new labels: {listed(new)}; the others keep their place in the head")
    return texts


def fresh(config: Config, vocab: int, device: str | None = None) -> Any:
    """The preset with its changes. Unless they say a size, its tables are as large as the
    tokenizer's vocabulary, and its context is as long as the rows it is trained on: later positions
    would stay as they were drawn. (But not that of an encoder-decoder, whose two sides differ in
    length.)"""
    preset, length = config.model["preset"], config.data.length
    changes = {k: v for k, v in config.model.items() if k != "preset"}
    if preset == "transformer":
        raise UsageError('preset "transformer" is unknown; that of 2017 is preset = "vaswani-base"')
    if preset not in PRESETS:
        return build(preset)  # tells the known ones
    data = to_dict(PRESETS[preset][1]())
    sizes = {n: vocab for n in ("vocab", "source_vocab") if vocab and having(data, n)}
    if length is not None and "max_len" in data and "decoder" not in data:
        sizes["max_len"] = length
    try:
        return build(preset, device=device, **{**sizes, **flat(changes, parts=True)})
    except UsageError:
        raise
    except (ValueError, ArithmeticError, RuntimeError) as error:  # torch's, of sizes that cannot be
        if "memory" in str(error):
            raise
        why = str(error).partition("\n")[0]
        raise UsageError(f"[model] cannot be built: {why}; look at {', '.join(changes)}") from None


def written(model: Any, small: bool) -> int:
    """Bytes of the folder that the model is saved to: its weights, or an adapter's, and what goes
    along."""
    origin = model.origin
    learned = (p for p in model.parameters() if p.requires_grad)
    weights = sum(p.nbytes for p in learned) if small else whole(model)
    carried = 0 if small else sum(x.nbytes for x in origin.tensors.values())
    return weights + carried + sum(map(len, origin.files.values()))


def measuring(
    config: Config,
    objective: Objective,
    feed: Feed,
    classes: list[str],
    coder: Coder | None,
    tally: Tally | None = None,
) -> Measure | None:
    """The loss, what the best model is best at, rewards and samples, of the held-out part; nothing where
    none is held out."""
    if next(feed.evaluation(), None) is None:
        return None
    always = ("perplexity", *REWARDS)
    names = ["loss", *(n for n in TASKS[config.task].metrics if n in always), config.train.metric]
    what: Any = (config.task, feed, coder and coder.tokenizer, objective, names)
    how: Any = {"classes": classes, "precision": config.train.precision, "tally": tally}

    def figures(model: Any, between: Callable[[], None]) -> Figures:
        result = measured(model, *what, **how, between=between)
        signed = {"signatures": result.signatures} if result.signatures else {}
        return result.values, {"samples": result.samples, **signed}

    return figures


def tokenizer_files(config: Config, start: Any, folder: Path) -> dict[str, bytes]:
    """The tokenizer that is named, the model's own, or one that is learned now and kept in the
    run's folder."""
    if "folder" in config.tokenizer:
        return read_files(Path(config.tokenizer["folder"]), CARRIED)
    if start is not None and CARRIED[0] in start.origin.files:
        if config.tokenizer:
            raise UsageError(
                "[model] folder comes with its tokenizer, so [tokenizer] is not used; leave it out, or say folder in it"
            )
        return {n: start.origin.files[n] for n in CARRIED if n in start.origin.files}
    home = folder / "tokenizer"
    if (home / CARRIED[0]).is_file():
        return read_files(home, CARRIED)
    recipe = recipe_of(config)
    assert recipe is not None
    files = train_tokenizer(texts_of(config), recipe)
    if TASKS[config.task].reads in CHATS:
        files[TEMPLATE] = CHATML.encode()
    # The first of them last: where it is, all are.
    write_files(home, {name: files[name] for name in reversed(CARRIED) if name in files})
    return files


def texts_of(config: Config) -> Iterator[Text]:
    """All texts of the training data, each side for itself."""
    roles = text_roles(TASKS[config.task].reads, config.data)
    for record in records(config.data.source(), roles, long=True):
        for role in roles:
            value = record[role]
            text = wording(value) if isinstance(value, list | None) else value
            if not isinstance(text, str | LongText):
                raise Fault(f"{record.where}: {role} must be text, got {shown(value)}", DATA)
            yield text


def notices(config: Config, model: Any, coder: Coder | None = None) -> list[str]:
    """What a config does that its user may not expect; an error where indexers of sparse attention would choose
    without being trained."""
    texts = []
    length, longest, layers = config.data.length, context_of(model), sparse_layers(model)
    if layers and not TASKS[config.task].indexed and config.adapt.method == "full":
        most = min(layer.config.topk for layer in layers)
        why = f'task = "{config.task}" gives the indexers of sparse attention no gradient'
        how = 'task = "dense_index", then task = "sparse_index" trains them'
        if length is None or length > most:
            rows = "any length" if length is None else f"{length} tokens"
            raise UsageError(
                f"{why}, and they would choose {most} keys in rows of {rows}: say data.length = {most}, which is dense "
                f'attention; {how}; or [adapt] method = "lora", which leaves them as they are'
            )
        texts.append(f"{why}: attention to {length} tokens is dense, topk = {most}; later {how}")
    if "preset" in config.model and length is not None and length < (longest or 0):
        texts.append(
            f"positions from {length} to {longest} will not be trained: data.length = {length}, the model's context is "
            f"{longest}"
        )
    return texts + tell_marks(config.task, config.data.template, coder)


def tell_marks(task: str, template: str, coder: Coder | None) -> list[str]:
    """Which marks a chat template writes that the tokenizer lacks, if any."""
    with suppress(UsageError):  # of a template that wants other messages
        if coder is not None and (TASKS[task].reads == "chat" or template):
            lost = ", ".join(strange_marks(coder.tokenizer))
            why = "for which the tokenizer has no token: they are read as plain text, or as unknown"
            how = "data.template can name one with marks that it has"
            return [f"the chat template writes {lost}, {why}; {how}"] if lost else []
    return []


def marks(coder: Coder | None) -> Marks | None:
    if coder is None:
        return None
    numbers = [coder.tokenizer.core.token_to_id(name) for name in SENTINELS]
    sentinels = tuple(i for i in numbers if i is not None)
    ends = (coder.start, coder.end, coder.pad)
    return Marks(coder.vocab, coder.reserved, coder.mask, sentinels, *ends, coder.stops)


# --- does the model suit task, tokenizer and data ---------------------------------------------------


def kind_of(model: Any) -> str:
    """What a model is, in a word."""
    reads = [getattr(model.config, name) for name in model.towers.values()]
    if reads and isinstance(reads[0], Patches):
        return "captioner" if model.reads_source else "model of pictures"
    if reads and isinstance(reads[0], Sound):
        return "model of sound"
    if isinstance(model, Pair):
        return "pair of models"
    if isinstance(model, Painter):
        return "painter"
    if model.reads_source:
        return "encoder-decoder"
    if not model.towers:
        return "recurrent model"
    return "decoder" if model.config.tower.causal else "encoder"


def check_suits(task: str, model: Any, coder: Coder | None, trained: bool = True) -> None:
    """Refuse a model that the task is not for, or that has fewer tokens than the tokenizer; `trained`: it came with its
    weights."""
    row = TASKS[task]
    kind = kind_of(model)
    head = getattr(model.config, "head", None)
    if kind not in row.models:
        raise UsageError(
            f"the task {task} is for {' or '.join(_a(k) for k in row.models)}, and [model] is {_a(kind)}; say preset = "
            f"{row.presets}, or another task"
        )
    sparse_layers(model, needed=row.indexed)
    # Models without towers are language models, and have no other head; what draws has its own.
    worded = isinstance(head, LM | MLM) or not model.towers or isinstance(model, Painter)
    if row.head is None and not worded:
        what = "no head" if head is None else f"a head of another kind ({head.kind})"
        raise UsageError(
            f"the task {task} says words, and [model] has {what}; name a language model"
        )
    c = model.config
    places = [(c, "vocab"), (c, "source_vocab")]
    places += [(getattr(c, name), "vocab") for name in model.towers.values()]
    sizes = [getattr(part, name) for part, name in places if hasattr(part, name)]
    if coder is not None and sizes and coder.vocab > min(sizes):
        what = "[tokenizer] out to use the model's own" if trained else "vocab out of [model]"
        raise UsageError(
            f"the tokenizer has {coder.vocab:,} tokens, the model {min(sizes):,}: they do not belong together; "
            f"leave {what}"
        )


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def check_fits(model: Any, loaded: Loaded, data: Data) -> None:
    """Refuse examples that the model cannot read: longer than its context, pictures of another size, packed ones for
    a recurrent model."""
    c, feed = model.config, loaded.feed
    if isinstance(feed, ImageFeed):
        shape = feed.pictures.values.shape[1:]
        drawn = isinstance(feed, DrawingFeed)
        want = c.canvas if drawn else c.source if isinstance(feed, CaptionFeed) else c.embedding
        if shape != (want.size, want.size, want.channels):
            raise UsageError(
                f"the pictures are {' x '.join(map(str, shape))}, the model "
                f"{'draws' if drawn else 'reads'} {want.size} x {want.size} x "
                f"{want.channels}; say other size and channels in [model], or scale them by data.size"
            )
        first = feed.labels.at(np.array([0]))[0]
        if first.ndim and len(first) != want.count:
            raise UsageError(
                f"the data have classes of {len(first):,} patches of a picture, the model reads {want.count:,}; "
                "say another patch in [model]"
            )
    packed = isinstance(feed, TextFeed) and feed.pack == "documents"
    if packed and not model.towers:
        raise UsageError(
            "a recurrent model carries its state on, so documents cannot share a row; say data.pack = stream or none"
        )
    most, limit = context_of(model), data.length
    size = max(part.longest or 0 for part in (feed, feed.held) if part is not None)
    if most is not None and size > most:
        if limit is not None and limit > most:
            what = f"data.length = {limit}, but the model's context is {most} tokens"
            raise UsageError(f"{what}; say data.length = {most}, or a larger max-len in [model]")
        if isinstance(feed, ImageFeed):
            why = f"a caption has {size:,} tokens, the model's context is {most:,}"
            raise UsageError(f"{why}; shorten it, or say a larger max-len in [model]")
        raise UsageError(
            f"an example has {size:,} tokens, the model's context is {most:,}; say data.length = {most} and "
            "data.overlong = truncate or drop, or a larger max-len in [model]"
        )

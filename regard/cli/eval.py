"""Ask a trained model: regard eval for metrics, classify for labels of lines or pictures, embed for
vectors of lines, fill for the tokens behind masks, answer for the answer to a question in a text."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg
from tyro.conf import UseAppendAction as Many

from regard.cli import shared as cli
from regard.cli.main import tell
from regard.errors import CHECK, DATA, RUN, Fault, UsageError
from regard.files import write_whole

if TYPE_CHECKING:
    from regard.data.read import Pictures
    from regard.evaluation.model import Embedder, Ranking


@dataclass(frozen=True)
class Options:
    """Measure a model on data.

    regard eval MODEL --data test.tsv                             loss, and what suits the model's task
    regard eval MODEL --data test.en --target test.de --metric bleu --metric chrf
    regard eval MODEL --data test.tsv --metric accuracy --min 0.9    exit 5 if it is less
    regard eval MODEL --data test.tsv --shots 3 --shots-from train.tsv    a language model, by examples in its prompt
    """

    model: cli.Folder
    data: cli.Files  # text, tsv, csv, jsonl, also gz and xz; an image folder or npz
    target: cli.Files = ()  # the other side of parallel files; classes of npy and idx files
    # loss, perplexity, bleu, bleu_lc, chrf, rouge (or rouge1, rouge2, rougeL, rougeLsum), exact, accuracy, f1;
    # default: those of the task; sts of vectors, with columns text, second and label
    metric: Annotated[Many[tuple[str, ...]], arg(metavar="NAME")] = ()
    # exit 5 if the first metric is worse than this
    min: Annotated[float | None, arg(metavar="VALUE")] = None
    beams: int = 4  # of translation; 1 is greedy
    # tokens of a row; default: as in training, else the model's context, of a language model 1024
    # at most
    length: cli.Count = None
    # what happens to examples that are longer; text of a language model is cut into rows
    overlong: cli.Overlong = "error"
    # a language model is given N examples (source, target) in the prompt of each question; 0: none
    shots: cli.Count = None
    shots_from: cli.Files = ()  # files that these come from; default: the training data of the run
    template: str = r"{source}\n{target}\n\n"  # how an example is written
    seed: int = 0  # another number, other examples
    pooling: cli.Pooling = "auto"  # of sts, as in regard embed
    json: cli.Switch = False  # one JSON object
    reading: cli.Reading = cli.Reading()
    machine: cli.Machine = cli.Machine()


def run(options: Options) -> int:
    from regard.evaluation.run import Shots, evaluate
    from regard.see.format import aligned, strict
    from regard.training.measure import METRICS, better

    if options.min is not None and not math.isfinite(options.min):
        raise UsageError(f"--min is {options.min}; give a finite number")
    for name in ("shots_from", "template", "seed"):
        if options.shots is None and getattr(options, name) != getattr(Options, name):
            raise UsageError(f"--{name.replace('_', '-')} is for prompts with examples: --shots N")
    same = ("target", "beams", "length", "overlong", "shots_from", "pooling")
    given = {name: getattr(options, name) for name in same} | asdict(options.machine)
    given |= {"metrics": options.metric, "reading": options.reading.settings()}
    if options.shots is not None:
        template = options.template.replace("\\n", "\n")
        given["shots"] = Shots(options.shots, template, options.seed)
    result = evaluate(options.model, options.data, **given)
    cli.talk(f"{result.task}: {result.data}")
    if options.json:
        print(json.dumps(strict(asdict(result)), ensure_ascii=False))
    else:
        rows = [(n, f"{v:.4f}", result.signatures.get(n, "")) for n, v in result.metrics.items()]
        print(aligned([("metric", "value", "signature"), *rows], right=(1,)))
    name, value = next(iter(result.metrics.items()))
    if options.min is not None and better(name, options.min, value):
        kind = "at least" if METRICS[name] else "at most"
        raise Fault(f"{name} is {value:.6g}, asked for {kind} {options.min:g}", CHECK)
    return 0


@dataclass(frozen=True)
class LmEvalOptions:
    """EleutherAI's lm-eval on a model folder; every flag is lm-eval's own (regard lm-eval run --help).

    regard lm-eval --model_args pretrained=MODEL --tasks my_task --include_path tasks/
    regard lm-eval --model_args pretrained=MODEL,dtype=bf16 --tasks my_task --include_path tasks/ --batch_size auto
    """

    # flags of lm-eval; the model is this one where none is named
    arguments: Annotated[Positional[tuple[str, ...]], arg(metavar="FLAG ...")] = ()


def lm_eval(options: LmEvalOptions) -> int:
    from regard.data.read import needed

    needed("lm_eval", "regard lm-eval", "lm-eval")
    from regard.evaluation.harness import main

    main(options.arguments)
    return 0


@dataclass(frozen=True)
class ClassifyOptions:
    """Label lines with a trained classifier: the label, a tab, its probability.

    regard classify MODEL reviews.txt
    echo "a fine film" | regard classify MODEL --json
    """

    model: cli.Folder
    # text file, one example per line; a picture, a folder of pictures, npz or npy; - is stdin: lines,
    # or names of pictures
    file: cli.File = "-"
    top: int = 1  # this many labels per line, the most probable first
    rows: int = 32  # examples in a batch
    overlong: cli.Overlong = "error"  # what happens to a line longer than the model's context
    json: cli.Switch = False  # one JSON object per line: label, probability, all probabilities
    machine: cli.Machine = cli.Machine()


@dataclass(frozen=True)
class EmbedOptions:
    """One vector per line or picture: the model's pooled vector, or the mean of its last hidden states.

    regard embed MODEL lines.txt > vectors.jsonl
    regard embed MODEL lines.txt --output vectors.npy --normalize
    regard embed MODEL pictures/                   of a model of pictures, or a pair of models such as CLIP
    """

    model: cli.Folder
    # text file, one example per line; a picture, a folder of pictures, npz or npy; - is stdin: lines
    file: cli.File = "-"
    # write a NumPy array (lines, width) instead of JSON lines on stdout
    output: Annotated[str | None, arg(metavar="FILE.npy")] = None
    normalize: cli.Switch = False  # vectors of length 1
    # mean: of the last states; cls: the first one; auto: as the model was trained
    pooling: cli.Pooling = "auto"
    rows: int = 32  # lines in a batch
    overlong: cli.Overlong = "error"  # what happens to a line longer than the model's context
    machine: cli.Machine = cli.Machine()


def classify(options: ClassifyOptions) -> int:
    from regard.evaluation.model import Classifier

    cli.check_counts(options, "top", "rows")
    cli.check_file(options.file)
    opened = cli.open_model(options.model, options.machine)
    classifier = Classifier(opened, options.overlong, options.model)
    rows = 1 if cli.is_typed(options.file) else options.rows
    if classifier.pictures is not None and options.file != "-":
        blocks: Iterable[Any] = picture_blocks(classifier.pictures, options.file, rows)
    else:
        lines = cli.line_blocks(options.file, rows)
        blocks = (([""] * len(block[0]), classifier.read(*block)) for block in lines)
    for names, examples in blocks:
        for name, ranking in zip(names, classifier(examples), strict=True):
            sys.stdout.write(shown(ranking, name, options) + "\n")
        sys.stdout.flush()
    return 0


def picture_blocks(reader: Pictures, path: str, rows: int) -> Iterator[tuple[Any, Any]]:
    """Names to print, where there are several files, and pictures: of a folder, an array or one
    file."""
    from regard.data.read import SUFFIXES

    if Path(path).is_dir():
        files = sorted(f for f in Path(path).rglob("*") if f.suffix.lower() in SUFFIXES)
        if not files:
            raise Fault(f"{path} has no pictures: PNG or JPEG files", DATA)
        pictures = ((str(file), reader.file(file)) for file in files)
    elif path.endswith((".npy", ".npz")):
        pictures = (("", x) for x in reader.array(Path(path)))
    else:
        pictures = (("", reader.file(file)) for file in [Path(path)])
    while block := list(islice(pictures, rows)):
        yield [name for name, _ in block], [x for _, x in block]


def shown(ranking: Ranking, name: str, options: ClassifyOptions) -> str:
    if not options.json:
        cells = [cell for label, p in ranking[: options.top] for cell in (label, f"{p:.4f}")]
        return "\t".join([*cells, name] if name else cells)
    label, highest = ranking[0] if ranking else (None, None)
    answer = {"label": label, "probability": highest, "probabilities": dict(ranking)}
    return json.dumps({**answer, **({"file": name} if name else {})}, ensure_ascii=False)


def embed(options: EmbedOptions) -> int:
    import numpy as np

    from regard.evaluation.model import Embedder, stacked

    cli.check_counts(options, "rows")
    if options.output is not None and not options.output.endswith(".npy"):
        raise UsageError(f"--output {options.output}: give a name that ends in .npy")
    cli.check_file(options.file)
    opened = cli.open_model(options.model, options.machine)
    embedder = Embedder(opened, options.normalize, options.overlong, options.pooling)
    whole = []
    for vectors in embeddings(embedder, options):
        if options.output is not None:
            whole += vectors
            continue
        for vector in vectors:
            # float32 in the fewest digits that tell it; null for an empty line
            numbers = None if vector is None else [float(str(x)) for x in vector]
            sys.stdout.write(json.dumps({"embedding": numbers}) + "\n")
        sys.stdout.flush()
    if options.output is not None:
        path, file = Path(options.output), io.BytesIO()
        np.save(file, stacked(whole), allow_pickle=False)
        try:
            write_whole(path, file.getvalue())
        except OSError as error:
            raise Fault(f"cannot write {path}: {error.strerror}", RUN) from None
    return 0


def embeddings(embedder: Embedder, options: EmbedOptions) -> Iterator[Any]:
    """The vectors of a file, block after block: of its pictures, where it has some, else of its lines."""
    from regard.data.read import SUFFIXES

    path = options.file
    pictured = path.endswith((*SUFFIXES, ".npy", ".npz")) or Path(path).is_dir()
    if embedder.pictures is not None and (pictured or embedder.rows is None) and path != "-":
        for _, block in picture_blocks(embedder.pictures, path, options.rows):
            yield embedder.vectors(block)
        return
    for block in cli.line_blocks(path, 1 if cli.is_typed(path) else options.rows):
        yield embedder(*block)


@dataclass(frozen=True)
class FillOptions:
    """The most probable tokens behind each mask of a text: the token, a tab, its probability.

    regard fill MODEL "Paris is the [MASK] of France."
    regard fill MODEL "[MASK] is the [MASK] of France." --top 3    an empty line between two masks
    """

    model: cli.Folder
    # text with one [MASK] or several (<mask>, or the tokenizer's own); stdin if left out or -
    text: Annotated[Positional[str | None], arg(metavar="[TEXT]")] = None
    top: int = 5  # this many tokens for each mask
    json: cli.Switch = False  # one JSON object for each mask: the tokens and their probabilities
    machine: cli.Machine = cli.Machine()


@dataclass(frozen=True)
class AnswerOptions:
    """Find the answer to a question in a text: the answer, a tab, its probability.

    regard answer MODEL --question "Who came?" --context "It was Ann who came."
    regard answer MODEL --question "Who came?" --json < story.txt     where it stands, too
    """

    model: cli.Folder
    question: cli.Text = None  # what is asked
    # the text that has the answer; stdin if left out or -; a long one is read in windows
    context: cli.Text = None
    # one JSON object: answer, start, end (characters of the context), score; null where it has none
    json: cli.Switch = False
    longest: int = 30  # tokens of an answer at most
    machine: cli.Machine = cli.Machine()


def fill(options: FillOptions) -> int:
    from regard.evaluation.model import fill

    cli.check_counts(options, "top")
    text = cli.given_text(options.text)
    opened = cli.open_model(options.model, options.machine)
    for number, ranking in enumerate(fill(opened, text, top=options.top)):
        if options.json:
            tokens = [{"token": token, "probability": p} for token, p in ranking]
            print(json.dumps({"mask": number, "tokens": tokens}, ensure_ascii=False))
            continue
        lines = [f"{token}\t{p:.4f}" for token, p in ranking]
        print("\n".join(["", *lines] if number else lines))
    return 0


def answer(options: AnswerOptions) -> int:
    from regard.evaluation.model import answer

    cli.check_counts(options, "longest")
    if options.question is None:
        raise UsageError('say what is asked: --question "..."')
    context = cli.given_text(options.context)
    opened = cli.open_model(options.model, options.machine)
    found = answer(opened, options.question, context, longest=options.longest)
    if options.json:
        names = ("answer", "start", "end", "score")
        print(json.dumps(dict(zip(names, found)), ensure_ascii=False))
        return 0
    if found.text is None:
        tell("note", "the text has no answer to this question")
    line = " ".join((found.text or "").splitlines())
    print(f"{line}\t{found.score:.4f}")
    return 0

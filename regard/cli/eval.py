"""regard eval: a model and data in, a small table of metrics out."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Annotated

from tyro.conf import UseAppendAction as Many
from tyro.conf import arg

from regard.cli import shared as cli
from regard.errors import CHECK, Fault, UsageError


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
    # loss, perplexity, bleu, bleu_lc, chrf, exact, accuracy, f1; default: those of the task; sts of vectors, with
    # columns text, second and label
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
    from regard.evaluate.run import Shots, evaluate
    from regard.see.format import aligned, strict
    from regard.train.measure import METRICS, better

    if options.min is not None and not math.isfinite(options.min):
        raise UsageError(f"--min is {options.min}; give a finite number")
    for name in ("shots_from", "template", "seed"):
        if options.shots is None and getattr(options, name) != getattr(Options, name):
            raise UsageError(f"--{name.replace('_', '-')} is for prompts with examples: --shots N")
    shots, template = options.shots, options.template.replace("\\n", "\n")
    result = evaluate(
        options.model,
        options.data,
        target=options.target,
        metrics=options.metric,
        beams=options.beams,
        length=options.length,
        overlong=options.overlong,
        reading=options.reading.settings(),
        shots=None if shots is None else Shots(shots, template, options.seed),
        shots_from=options.shots_from,
        pooling=options.pooling,
        **asdict(options.machine),
    )
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

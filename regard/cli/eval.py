"""regard eval: a model and data in, a small table of metrics out."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Annotated

from tyro.conf import UseAppendAction as Many
from tyro.conf import arg

from regard.cli.parse import Count, Files, Folder, Machine, Overlong, Reading, Switch
from regard.cli.shared import aligned, talk
from regard.errors import CHECK, Fault, UsageError


@dataclass(frozen=True)
class Options:
    """Measure a model on data.

    regard eval MODEL --data test.tsv                             loss, and what suits the model's task
    regard eval MODEL --data test.en --target test.de --metric bleu --metric chrf
    regard eval MODEL --data test.tsv --metric accuracy --min 0.9    exit 5 if it is less
    """

    model: Folder
    data: Files
    """text, tsv, csv, jsonl, also gz and xz; an image folder or npz"""
    target: Files = ()
    """the other side of parallel files; classes of npy and idx files"""
    metric: Annotated[Many[tuple[str, ...]], arg(metavar="NAME")] = ()
    """loss, perplexity, bleu, bleu_lc, chrf, exact, accuracy, f1; default: those of the task"""
    min: Annotated[float | None, arg(metavar="VALUE")] = None
    """exit 5 if the first metric is worse than this"""
    beams: int = 4
    """of translation; 1 is greedy"""
    length: Count = None
    """tokens of a row; default: as in training, else the model's context, of a language model 1024 at most"""
    overlong: Overlong = "error"
    """what happens to examples that are longer; text of a language model is cut into rows"""
    json: Switch = False
    """one JSON object"""
    reading: Reading = field(default_factory=Reading)
    machine: Machine = field(default_factory=Machine)


def run(options: Options) -> int:
    from regard.evaluate.run import evaluate
    from regard.train.measure import METRICS, better

    if options.min is not None and not math.isfinite(options.min):
        raise UsageError(f"--min is {options.min}; give a finite number")
    result = evaluate(
        options.model,
        options.data,
        target=options.target,
        metrics=options.metric,
        beams=options.beams,
        length=options.length,
        overlong=options.overlong,
        reading=options.reading.settings(),
        **asdict(options.machine),
    )
    talk(f"{result.task}: {result.data}")
    if options.json:
        finite = {n: v if math.isfinite(v) else None for n, v in result.metrics.items()}
        print(json.dumps({**asdict(result), "metrics": finite}, ensure_ascii=False))
    else:
        rows = [(n, f"{v:.4f}", result.signatures.get(n, "")) for n, v in result.metrics.items()]
        print(aligned([("metric", "value", "signature"), *rows], right=(1,)))
    name, value = next(iter(result.metrics.items()))
    if options.min is not None and better(name, options.min, value):
        kind = "at least" if METRICS[name] else "at most"
        raise Fault(f"{name} is {value:.6g}, asked for {kind} {options.min:g}", CHECK)
    return 0

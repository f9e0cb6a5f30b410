"""What train, eval, classify, embed, plan, report, compare, recipes and doctor can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import Positional, arg
from tyro.conf import UseAppendAction as Many

from regard.cli.data import Reading
from regard.cli.parse import Count, Folder, Machine, Switch


@dataclass(frozen=True)
class TrainRun:
    """Train a model from a TOML file; stop it any way you like, and go on with --resume.

    regard train story.toml                          into runs/story
    regard train story.toml --train.optim.lr 3e-4    change one setting
    regard train --resume runs/story                 go on after a stop, to the same bits
    regard train --resume runs/story --train.steps 2000      train longer
    regard train story.toml --smoke --output-dir try      three steps, an evaluation, a save, a reload
    """

    config: Annotated[Positional[str], arg(metavar="CONFIG")]
    """a TOML file with task, [model], [data], [tokenizer], [train]; with --resume the run's folder"""
    output_dir: Annotated[str | None, arg(metavar="FOLDER")] = None
    """the run's folder; default: runs/ and the config's name"""
    resume: Switch = False
    """go on from the newest sound checkpoint, with the run's own settings"""
    overwrite: Switch = False
    """start anew in a folder that has a run"""
    smoke: Switch = False
    """three steps, to find at once what would fail later"""
    keep: Count = None
    """checkpoints that stay, beside the best; default: 2"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    quiet: Switch = False
    """no progress lines"""
    force: Switch = False
    """start although the plan says that memory or disk will not do"""
    log_to: Annotated[Many[tuple[str, ...]], arg(metavar="TRACKER")] = ()
    """tensorboard, wandb or trackio, where they are installed"""
    changes: Annotated[dict[str, str], arg(metavar="NAME VALUE")] = field(default_factory=dict)
    """settings of the config, changed: the same as --NAME VALUE with a dot in NAME"""


@dataclass(frozen=True)
class Eval:
    """Measure a model on data.

    regard eval MODEL --data test.tsv                             loss, and what suits the model's task
    regard eval MODEL --data test.en --target test.de --metric bleu --metric chrf
    regard eval MODEL --data test.tsv --metric accuracy --min 0.9    exit 5 if it is less
    """

    model: Folder
    data: Annotated[Many[tuple[str, ...]], arg(metavar="FILE")]
    """text, tsv, csv, jsonl, also gz and xz; an image folder or npz"""
    target: Annotated[Many[tuple[str, ...]], arg(metavar="FILE")] = ()
    """the other side of parallel files; classes of npy and idx files"""
    metric: Annotated[Many[tuple[str, ...]], arg(metavar="NAME")] = ()
    """loss, perplexity, bleu, bleu_lc, chrf, exact, accuracy, f1; default: those of the task"""
    min: Annotated[float | None, arg(metavar="VALUE")] = None
    """exit 5 if the first metric is worse than this"""
    beams: int = 4
    """of translation; 1 is greedy"""
    length: Count = None
    """tokens of a row; default: as in training, else the model's context, of a language model 1024 at most"""
    overlong: Literal["error", "truncate"] = "error"
    """what happens to examples that are longer; text of a language model is cut into rows"""
    json: Switch = False
    """one JSON object"""
    reading: Reading = field(default_factory=Reading)
    machine: Machine = field(default_factory=Machine)


@dataclass(frozen=True)
class Classify:
    """Label lines with a trained classifier: the label, a tab, its probability.

    regard classify MODEL reviews.txt
    echo "a fine film" | regard classify MODEL --json
    """

    model: Folder
    file: Annotated[Positional[str], arg(metavar="[FILE]")] = "-"
    """text file, one example a line; a picture, a folder of pictures, npz or npy; - is stdin: lines, or names of
    pictures"""
    top: int = 1
    """this many labels a line, the most probable first"""
    rows: int = 32
    """examples in a batch"""
    overlong: Literal["error", "truncate"] = "error"
    """what happens to a line that is longer than the model's context"""
    json: Switch = False
    """one JSON object a line: label, probability, all probabilities"""
    machine: Machine = field(default_factory=Machine)


@dataclass(frozen=True)
class Embed:
    """One vector a line: the model's pooled vector, or the mean of its last hidden states.

    regard embed MODEL lines.txt > vectors.jsonl
    regard embed MODEL lines.txt --output vectors.npy --normalize
    """

    model: Folder
    file: Annotated[Positional[str], arg(metavar="[FILE]")] = "-"
    """text file, one example a line; - is stdin"""
    output: Annotated[str | None, arg(metavar="FILE.npy")] = None
    """write a NumPy array (lines, width) instead of JSON lines on stdout"""
    normalize: Switch = False
    """vectors of length 1"""
    rows: int = 32
    """lines in a batch"""
    overlong: Literal["error", "truncate"] = "error"
    """what happens to a line that is longer than the model's context"""
    machine: Machine = field(default_factory=Machine)


@dataclass(frozen=True)
class Merge:
    """Write an adapter and the model it stands on as one model folder, which needs neither.

    regard merge runs/tuned/best merged              then: regard generate merged "Once upon a time"
    """

    adapter: Annotated[Positional[str], arg(metavar="ADAPTER")]
    """a folder with adapter.json, as training with LoRA writes it"""
    out: Annotated[Positional[str], arg(metavar="OUT")]
    """the new folder; one that has files in it is refused"""


@dataclass(frozen=True)
class Convert:
    """Bring in a model that is not stored as safetensors: pickled weights, or a GGUF file with its tokenizer.

    regard convert model-Q4_K_M.gguf model           then: regard generate model "Once upon a time"
    regard convert old-folder new-folder             pytorch_model.bin and the like, with config.json beside it
    """

    source: Annotated[Positional[str], arg(metavar="SOURCE")]
    """a GGUF file, a folder with config.json and pickled weights, or one such file in it"""
    folder: Annotated[Positional[str], arg(metavar="FOLDER")]
    """the new folder; one that has files in it is refused"""
    dtype: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """type of the weights; auto: as they are stored, fp16 for what is quantised"""


@dataclass(frozen=True)
class Plan:
    """What a run will need, before it is begun: parameters, memory, disk, work and time. Nothing is trained.

    regard plan story.toml
    regard plan story.toml --model.layers 12 --train.precision bf16
    regard plan MODEL                                what a model folder needs to run
    """

    config: Annotated[Positional[str], arg(metavar="CONFIG|MODEL")]
    """a TOML file as for regard train, or a model folder"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    output_dir: Annotated[str | None, arg(metavar="FOLDER")] = None
    """the run's folder, whose data and tokenizer are used if they are there; default: runs/ and the config's name"""
    keep: int = 2
    """checkpoints that stay, beside the best"""
    json: Switch = False
    """one JSON object"""
    changes: Annotated[dict[str, str], arg(metavar="NAME VALUE")] = field(default_factory=dict)
    """settings of the config, changed: the same as --NAME VALUE with a dot in NAME"""


@dataclass(frozen=True)
class Report:
    """A run as one self-contained HTML page: curves, samples, attention, how to reproduce it.

    regard report runs/story                      writes runs/story/report.html
    """

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """the folder of a run"""
    output: Annotated[str | None, arg(metavar="FILE")] = None
    """default: report.html in the run's folder; a name that ends in .md gives Markdown"""
    json: Switch = False
    """what the report says, as one JSON object on stdout; nothing is written"""


@dataclass(frozen=True)
class Compare:
    """Runs side by side: what differs in their settings, and their curves and figures.

    regard compare runs/a runs/b                      a table
    regard compare runs/a runs/b --output compare.html
    """

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN")]
    """two folders of runs or more"""
    output: Annotated[str | None, arg(metavar="FILE")] = None
    """also write one HTML page, or Markdown"""
    json: Switch = False
    """one JSON object"""


@dataclass(frozen=True)
class Recipes:
    """Configs that are known to work, each with its data.

    regard recipes list
    regard recipes show dates
    regard recipes copy dates my-dates       writes my-dates.toml and its data
    """

    action: Annotated[Positional[Literal["list", "show", "copy"]], arg(metavar="ACTION")] = "list"
    """list, show or copy"""
    name: Annotated[Positional[str | None], arg(metavar="[RECIPE]")] = None
    """which recipe"""
    to: Annotated[Positional[str | None], arg(metavar="[TO]")] = None
    """copy: name of the new file, without .toml; default: the recipe's"""
    json: Switch = False
    """one JSON object"""


@dataclass(frozen=True)
class Doctor:
    """What this machine has and can do, and whether Regard works here. Paste it with a bug report.

    regard doctor
    """

    json: Switch = False
    """one JSON object"""


WORK: dict[str, type] = {
    "train": TrainRun,
    "eval": Eval,
    "classify": Classify,
    "embed": Embed,
    "merge": Merge,
    "convert": Convert,
    "plan": Plan,
    "report": Report,
    "compare": Compare,
    "recipes": Recipes,
    "doctor": Doctor,
}

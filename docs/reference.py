"""The reference of the site as Markdown, from the code itself: public names with their signatures and docstrings,
settings with type, default and meaning, commands with their flags, presets, and the words of `regard explain`.

What a setting or a flag means is the comment beside it or above it in its dataclass."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
import typing
from typing import Any

import regard
from regard.cli.main import COMMANDS, command_of
from regard.cli.settings import default, kind, meaning, rows, sizes_of
from regard.config import alternatives
from regard.data.train_tokenizer import Recipe
from regard.decode.settings import Settings
from regard.learn.explain import CHAPTERS, find
from regard.presets import PRESETS
from regard.training.config import Config

HOMES = {
    "Models: build, load, save": (
        "regard.checkpoint", "regard.checkpoint.families", "regard.presets", "regard.models", "regard.fast.cpu",
    ),
    "Write text": ("regard.decode.generate", "regard.decode.settings", "regard.decode.engine", "regard.decode.warm"),
    "Train and measure": (
        "regard.training.run", "regard.training.finetune", "regard.training.trainer", "regard.evaluation.run",
        "regard.evaluation.model",
    ),
    "Look inside": ("regard.see.look", "regard.see.probe", "regard.labs.run"),
    "Attention": ("regard.attention", "regard.block", "regard.moe", "regard.layers"),
    "Masks": ("regard.mask",),
    "Positions": ("regard.position",),
    "Caches": ("regard.cache",),
    "Errors": ("regard.errors",),
}  # fmt: skip
# Modules.
MODULES = {"Models: build, load, save": ("presets",)}


# --- types as links to their tables ---------------------------------------------------------------------------------


def linked(cls: type) -> str:
    return f"[{cls.__name__}](#{cls.__name__.lower()})"


def within(*roots: Any) -> list[type]:
    """The dataclasses that these lead to by their fields, each once, in the order of reading."""
    found: dict[type, None] = {}

    def visit(hint: Any) -> None:
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            if hint not in found:
                found[hint] = None
                visit(tuple(typing.get_type_hints(hint, include_extras=True).values()))
            return
        inside = hint if isinstance(hint, tuple) else typing.get_args(hint)
        every = alternatives(hint)
        for each in inside if every == [hint] else every:
            visit(each)

    visit(roots)
    return list(found)


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def table(head: str, lines: list[tuple[str, ...]]) -> str:
    columns = head.split("|")
    rule = "|".join("---" for _ in columns)
    body = ("| " + " | ".join(map(cell, line)) + " |" for line in lines)
    return "\n".join([f"| {' | '.join(columns)} |", f"|{rule}|", *body])


def prose(text: str | None) -> str:
    """A docstring as Markdown: what is indented in it is code."""
    return inspect.cleandoc(text or "")


# --- the pages ------------------------------------------------------------------------------------------------------

TABLES = {
    "data": "[data]", "train": "[train]", "optim": "train.optim", "schedule": "train.schedule",
    "parallel": "train.parallel", "smoothing": "[smoothing]", "noise": "[noise]", "adapt": "[adapt]",
    "recipe": "[tokenizer]", "scheduledsampling": "[scheduled-sampling]",
}  # fmt: skip


def settings_page() -> str:
    parts = [
        "# Settings of a training config",
        "Every key of the TOML file that `regard train` reads, with type, default and meaning, as the code has them."
        " On the command line each is a flag: `--train.optim.lr 3e-4`. What a key is called elsewhere (`learning_rate`,"
        " `batch_size`) is named by the error. `[model]` takes `preset` or `folder`, and every setting of"
        " [the parts of a model](model.md).",
    ]
    for cls in [*within(Config), Recipe]:
        name = TABLES.get(cls.__name__.lower())
        title = cls.__name__ if name is None else f"{cls.__name__}: {name}"
        parts += [f'<a id="{cls.__name__.lower()}"></a>', f"## {title}", prose(cls.__doc__)]
        parts.append(
            table("key|type|default|meaning", [(f"`{n}`", *rest) for n, *rest in rows(cls, linked)])
        )
    return "\n\n".join(parts) + "\n"


def model_page() -> str:
    parts = [
        "# Settings of the parts of a model",
        "A model is data: frozen dataclasses, in Python as they stand here, in TOML under `[model]` with `kind` to tell"
        ' one part from another: `attention = { kind = "mla", heads = 8, latent = 64 }`. A plain name changes every'
        " place that has it (`layers`, `dim`, `heads`), a dotted one a single place (`tower.attention.window`).",
    ]
    models = ("Transformer", "EncoderDecoder", "Recurrent", "Seq2Seq", "Painter")
    roots = [getattr(regard, f"{name}Config") for name in models]
    for cls in within(*roots):
        word = next((f.default for f in dataclasses.fields(cls) if f.name == "kind"), None)
        parts += [f"## {cls.__name__}", prose(cls.__doc__), f'`kind = "{word}"`' if word else ""]
        parts.append(
            table("key|type|default|meaning", [(f"`{n}`", *rest) for n, *rest in rows(cls, linked)])
        )
    return "\n\n".join(filter(None, parts)) + "\n"


def decoding_page() -> str:
    return "\n\n".join([
        "# Settings of decoding",
        "What `regard.generate`, `stream`, `translate` and a `regard.Request` take beside model and prompts.",
        table("key|type|default|meaning", [(f"`{n}`", *rest) for n, *rest in rows(Settings, linked)]),
    ]) + "\n"  # fmt: skip


def commands_page() -> str:
    parts = [
        "# Commands",
        "Every command with its flags, from the dataclass that `--help` prints. Text goes to stdout, talk to stderr."
        " Exit codes: 0 done, 1 failed while running, 2 wrong command line, 3 device or package missing, 4 model"
        " folder or data missing or broken, 5 a check that was asked for failed, 130 interrupted.",
        table(
            "command|what it does",
            [(f"[{n}](#regard-{n.replace(' ', '-')})", t) for n, t in COMMANDS.items()],
        ),
    ]
    for name in COMMANDS:
        head, *examples = prose(options_of(name).__doc__).splitlines()
        shown = textwrap.dedent("\n".join(examples)).strip()
        parts += [f"## regard {name}", head, f"```console\n{shown}\n```" if shown else ""]
        parts.append(table("flag|type|default|meaning", flags(options_of(name))))
    return "\n\n".join(filter(None, parts)) + "\n"


def options_of(command: str) -> Any:
    return command_of(command.split()[0])[0]


def flags(cls: Any) -> list[tuple[str, ...]]:
    """The flags of a command, groups of them flattened."""
    found: list[tuple[str, ...]] = []
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(field.default):
            found += flags(type(field.default))
            continue
        marks = getattr(hint, "__metadata__", ())
        places = [mark for mark in marks if getattr(mark, "metavar", None)]
        place = places[0].metavar if places else ""
        flag = f"--{field.name.replace('_', '-')}"
        if any("Positional" in repr(mark) for mark in marks):
            flag, place = place or field.name.upper(), ""
        said = place or kind(hint)
        others = [name for mark in marks for name in getattr(mark, "aliases", None) or ()]
        names = ", ".join(f"`{name}`" for name in (flag, *others))
        found.append((names, said, default(field), meaning(cls, field, hint)))
    return found


def presets_page() -> str:
    lines = []
    for name, (about, make) in PRESETS.items():
        sizes = sizes_of(make())
        lines.append((f"`{name}`", about if isinstance(about, str) else "", *sizes))
    return "\n\n".join([
        "# Presets",
        'Models by name: `regard.build("gpt2", layers=2)` in Python, `preset = "gpt2"` under `[model]`. Any setting of'
        " [their parts](model.md) can be changed; widths follow `dim`, and are as here where nothing is said.",
        table("preset|family|layers|dim|heads|vocab", lines),
    ]) + "\n"  # fmt: skip


def glossary_page(pages: dict[str, str]) -> str:
    """The topics of `regard explain` with every word that finds them."""
    parts = [
        "# Words",
        "Every topic of `regard explain`, by chapter, with other words that people use for it: any of them finds it,"
        " in the terminal and in the search above.",
    ]
    for chapter, topics in CHAPTERS.items():
        parts.append(f"## {chapter}")
        for name, words in topics.items():
            topic = find(name)
            page = f" · [page]({pages[name]})" if name in pages else ""
            parts += [f"### {name}", f"{topic.question} `regard explain {name}`{page}"]
            parts += [f"```text\n{topic.formula}\n```", f"Also: {words}." if words else ""]
    return "\n\n".join(filter(None, parts)) + "\n"


def api_page() -> str:
    parts = [
        "# API",
        "Every public name: `import regard`, then `regard.NAME`. The names and signatures are frozen by a test.",
    ]
    for title, homes in HOMES.items():
        parts.append(f"## {title}")
        names = [
            *MODULES.get(title, ()),
            *(n for n, home in regard._WHERE.items() if home in homes),
        ]
        for name in sorted(names, key=str.lower):
            parts += [f"### regard.{name}", *entry(name, getattr(regard, name))]
    return "\n\n".join(filter(None, parts)) + "\n"


def entry(name: str, what: Any) -> list[str]:
    if isinstance(what, dict):
        return [f"A table: {', '.join(f'`{key}`' for key in what)}."]
    if inspect.ismodule(what):
        return [prose(what.__doc__)]
    lines = [
        signature(name, what),
        f"Source: [{place(what)}](../../{place(what)})",
        prose(what.__doc__),
    ]
    if inspect.isclass(what):
        for method, function in methods(what):
            if inspect.isfunction(function):
                lines += [
                    f"**.{method}**",
                    signature(method, function, skip=1),
                    prose(function.__doc__),
                ]
    return lines


def methods(cls: type) -> list[tuple[str, Any]]:
    own = {
        n: x
        for c in reversed(cls.__mro__)
        if c.__module__.startswith("regard.")
        for n, x in vars(c).items()
    }
    return [
        (n, getattr(x, "__func__", x))
        for n, x in own.items()
        if not n.startswith("_") and inspect.unwrap(getattr(x, "__func__", x)).__doc__
    ]


def place(what: Any) -> str:
    return what.__module__.replace(".", "/") + (
        "/__init__.py" if what.__module__ == "regard" else ".py"
    )


def signature(name: str, what: Any, skip: int = 0) -> str:
    """The call as one would define it; in lines of their own where it is long."""
    # An exception has none.
    given = (
        inspect.Signature()
        if isinstance(what, type) and issubclass(what, Exception)
        else inspect.signature(what)
    )
    parameters, each = list(given.parameters.values())[skip:], []
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not any(x.startswith("*") for x in each):
            each.append("*")
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        hint = f": {p.annotation}" if isinstance(p.annotation, str) else ""
        value = "" if p.default is p.empty else f" = {p.default!r}" if hint else f"={p.default!r}"
        each.append(f"{star}{p.name}{hint}{value}".replace("<factory>", "..."))
    back = f" -> {given.return_annotation}" if isinstance(given.return_annotation, str) else ""
    text = f"{name}({', '.join(each)}){back if back != ' -> None' else ''}"
    if len(text) > 90:
        text = f"{name}(\n" + "".join(f"    {x},\n" for x in each) + f"){back}"
    return f"```python\n{text}\n```"

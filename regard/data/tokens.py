"""A tokenizer as training data needs it, many texts at once and the special tokens apart from the text; and how records
become ids in shards, a function for each way to read data (see regard.data.config.KINDS)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
from tokenizers import decoders

from regard.data.feed import IGNORE, UNANSWERED
from regard.data.pictures import pictures, segmented
from regard.data.read import length_of, records
from regard.data.shards import Writer, token_dtype
from regard.data.source import DataError, LongText, Record, Source, Text, parts_of
from regard.errors import UsageError
from regard.text.build import blaming
from regard.text.chat import Learned, Rendered, learned_rows, rendered_chat
from regard.text.tokenizer import Located, Tokenizer, check_unicode

Ids = tuple[int, ...]
SIDES = ("chosen", "rejected")
# Columns that are a chat of one turn: what is asked (with what it is about), and what is answered.
TURNS = ("system", "prompt", "input", "response")
# Characters that are encoded at once, of many texts, and of one.
CHUNK = 1 << 20
PIECE = 1 << 18
# Characters on each side of a cut that are compared; cuts of a kind that are tried.
AROUND, CUTS = 200, 32


class Coder:
    """Texts -> ids, without special tokens; a text that spells one is text.

    A model that reads one text expects `before` text `after`, of two: `before` text `between` text `after`. A decoder
    begins with `start` and ends with `end`; None is what the tokenizer does not have. `reserved` are all special
    tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.vocab = tokenizer, tokenizer.vocab
        core, special = tokenizer.core, tokenizer.special
        self.before, self.between, self.after, typed = _template(tokenizer)
        # The token after which a second text begins, where the second is of another type (BERT's segments).
        self.divider = self.between[-1] if self.between and typed else None
        self.end = special.eos[0] if special.eos else None
        self.end_text = "" if self.end is None else core.id_to_token(self.end) or ""
        starts = (special.start, special.bos, special.pad, self.end)
        self.start = next((i for i in starts if i is not None), None)
        self.pad = special.pad if special.pad is not None else self.end or 0
        self.unknown = special.unk
        mask = tokenizer.tokens.get("mask_token")
        self.mask = None if mask is None else core.token_to_id(mask)
        added = core.get_added_tokens_decoder().items()
        self.reserved = tuple(sorted(i for i, token in added if token.special))
        # Marian cuts each side by another model.
        self._plain = None if tokenizer.parts.source else tokenizer.literal(core)

    @property
    def fingerprint(self) -> str:
        parts = self.tokenizer.parts
        sides = [
            core.to_str().encode() for core in (parts.core, parts.source, parts.target) if core
        ]
        # Twice, source and target: so it was when the shards were made that runs go on with.
        return hashlib.sha256(b"".join(sides * 2)).hexdigest()

    def encode(self, texts: Sequence[str], *, target: bool = False) -> list[list[int]]:
        if self._plain is None:
            cut = self.tokenizer.encode_target if target else self.tokenizer.encode
            return [cut(text, special=False, literal=True) for text in texts]
        try:
            encodings = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeError):
            for text in texts:
                check_unicode(text, f"the text {text!r:.40}")
            raise
        return [encoding.ids for encoding in encodings]

    def located(self, texts: Sequence[str]) -> list[Located]:
        """The same with the first character of each token and the one behind its last."""
        if self._plain is None:
            raise UsageError("a tokenizer of two sides does not tell which characters a token has")
        return self.tokenizer.located_all(texts, literal=True)

    @property
    def stops(self) -> tuple[int, ...]:
        """Tokens that end a sentence: a full stop, ! or ?, perhaps with a quote or a line break behind it."""
        pieces = self.tokenizer.core.get_vocab().items()
        ends = sorted(i for piece, i in pieces if re.search("[.!?][\"'ĊĠ▁\\s]*$", piece))
        return tuple(i for i in ends if i not in self.reserved)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The pieces, one per id; those of a byte-level vocabulary as the text they stand for, if it is whole."""
        core = self.tokenizer.core
        pieces = [core.id_to_token(i) or f"<{i}>" for i in ids]
        if not isinstance(core.decoder, decoders.ByteLevel):
            return pieces
        texts = [core.decode([i], skip_special_tokens=False) for i in ids]
        return [text if text and "\ufffd" not in text else raw for text, raw in zip(texts, pieces)]


def _template(tokenizer: Tokenizer) -> tuple[Ids, Ids, Ids, bool]:
    """What the tokenizer puts before, between and after texts; whether the second of two is of type 1."""
    if tokenizer.parts.source is not None:
        return (), (), tuple(tokenizer.special.eos[:1]), False
    with blaming("the tokenizer does not take two texts"):
        pair = tokenizer.core.encode("x", "x", add_special_tokens=True)
        alone = tokenizer.core.encode("x", add_special_tokens=True)
    text = [i for i, special in enumerate(alone.special_tokens_mask) if not special]
    if not text:
        return (), (), tuple(alone.ids), False
    before = alone.ids[: text[0]]
    after = alone.ids[text[-1] + 1 :]
    inner = slice(len(before), len(pair.ids) - len(after))
    if pair.ids[: inner.start] != before or pair.ids[inner.stop :] != after:
        # It has no form for two texts.
        return tuple(before), tuple(after), tuple(after), any(pair.type_ids)
    marks = zip(pair.ids[inner], pair.special_tokens_mask[inner])
    between = tuple(i for i, special in marks if special)
    return tuple(before), between, tuple(after), any(pair.type_ids)


# --- records -> ids in shards ----------------------------------------------------------------------------------------


@dataclass
class Filling:
    """Shards while they are written. `coder` is None for pictures alone; `classes` are those of the training data,
    `labels` those that the model's head has already."""

    writer: Writer
    source: Source
    coder: Any
    classes: list[str] | None
    labels: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.count = {"records": 0, "empty": 0, "tokens": 0, "unknown": 0}
        self.spelled = self.length = 0
        self.end_text = "" if self.coder is None else self.coder.end_text

    def chunks(self, *roles: str) -> Iterator[list[Record]]:
        """Records, as many as are encoded at once; one that is long comes by itself."""
        chunk: list[Record] = []
        size = 0
        for record in records(self.source, roles, long=True):
            self.count["records"] += 1
            more = length_of(record)
            self.length += more
            long = more > 2 * PIECE or isinstance(record.get("text"), LongText)
            if long and chunk:
                yield chunk
                chunk = []
                size = 0
            chunk.append(record)
            size += more
            if long or size > CHUNK:
                yield chunk
                chunk = []
                size = 0
        if chunk:
            yield chunk

    def numbers(self, classes: Callable[[], list[str]]) -> Numbers:
        """Of the training data's classes, or of those found here."""
        return Numbers(self.classes or joined_classes(classes(), self.labels), self.labels)

    def texts(self, chunk: list[Record], role: str) -> list[str]:
        for record in chunk:
            if not isinstance(record[role], str):
                raise DataError(f"{record.where}: {role} must be text, got {shown(record[role])}")
        texts = [record[role] for record in chunk]
        self.spell(texts)
        return texts

    def spell(self, texts: Iterable[str]) -> None:
        """Count where a text spells the token that ends a document."""
        if self.end_text:
            self.spelled += sum(text.count(self.end_text) for text in texts)

    def piece(self, text: str) -> list[int]:
        """The ids of a piece of a long text."""
        self.spell([text])
        return self.counted(self.coder.encode([text]))[0]

    def counted(self, rows: list[list[int]]) -> list[list[int]]:
        self.count["tokens"] += sum(map(len, rows))
        if self.coder.unknown is not None:
            self.count["unknown"] += sum(row.count(self.coder.unknown) for row in rows)
        return rows

    def add(self, **columns: list[list[int]]) -> list[int]:
        """Write rows; those without a token on some side are left out. The numbers of the rows that are kept."""
        sides = list(columns.values())
        kept = [i for i in range(len(sides[0])) if all(side[i] for side in sides)]
        self.count["empty"] += len(sides[0]) - len(kept)
        for name, side in columns.items():
            self.writer.extend(name, [side[i] for i in kept], token_dtype(self.coder.vocab))
        return kept

    def done(self, **notes: Any) -> None:
        if self.count["records"] == self.count["empty"]:
            raise DataError(f"{', '.join(self.source.paths)}: every example is empty")
        self.writer.notes = {**self.count, **notes}
        if self.spelled:
            self.writer.notes["spelled"] = self.spelled
        if self.source.sample and self.length >= self.source.sample:
            self.writer.notes["sampled"] = True


def fill_documents(filling: Filling, masked: bool = False) -> None:
    """What the model expects in front, the text, the end token (`masked`: what it expects behind).
    Of a pair the source is only read, the target learned."""
    coder = filling.coder
    end = [] if coder.end is None else [coder.end]
    paired = bool(filling.source.beside) or "target" in filling.source.columns
    roles = ("source", "target") if paired else ("text",)
    prompts: list[int] = []
    after = [*coder.after] if masked else end
    for chunk in filling.chunks(*roles):
        text = None if paired or len(chunk) > 1 else chunk[0]["text"]
        if isinstance(text, LongText) or (isinstance(text, str) and len(text) > 2 * PIECE):
            encoded = (filling.piece(part) for part in pieces(text, coder))
            whole = chain([coder.before], encoded, [after])
            filling.writer.long("ids", whole, token_dtype(coder.vocab))
            continue
        parts = [filling.counted(coder.encode(filling.texts(chunk, role))) for role in roles]
        rows = [[*coder.before, *chain(*each), *after] if each[-1] else [] for each in zip(*parts)]
        kept = filling.add(ids=rows)
        if paired:
            prompts += [len(coder.before) + len(parts[0][i]) for i in kept]
    if paired:
        filling.writer.array("prompts", np.array(prompts, np.int64))
    filling.done()


def pieces(text: Text, coder: Coder) -> Iterator[str]:
    """A text in pieces of about PIECE characters whose ids, end to end, are those of the whole: encoding it at once
    takes a hundred bytes and more for a character."""
    return parts_of(text, 2 * PIECE, partial(_end_of_piece, coder))


def _end_of_piece(coder: Coder, text: str, first: int) -> int | None:
    """Where a piece that begins at `first` ends: between two words if it can, and where it leaves the ids of the text
    around it as they are."""
    near = text[first + PIECE : first + 2 * PIECE]
    kinds = (r"(?<=\w) (?=\w)", r"(?<=\S)(?=\s)", "")
    for spot in chain(*(islice(re.finditer(kind, near), CUTS) for kind in kinds)):
        cut = first + PIECE + spot.start()
        left = text[max(cut - AROUND, 0) : cut]
        right = text[cut : cut + AROUND]
        one, two, both = coder.encode([left, right, left + right])
        if one + two == both:
            return cut
    return None


# A chat, or a prompt and its answer, that is not encoded yet.
Pending = Rendered | tuple[str, str]


def fill_chats(filling: Filling) -> None:
    """Conversations by the model's chat template; what the assistant said is learned."""
    coder = filling.coder
    ends = set[int]()
    hidden = set[str]()
    turns = [role for role in TURNS if role in filling.source.columns]
    if turns and not {"prompt", "response"} <= {*turns}:
        raise UsageError("columns: a chat has prompt and response, perhaps input and system")

    def rows(record: Record) -> list[dict[str, Pending]]:
        messages = asked_and_answered(record) if turns else record["messages"]
        chats = rendered_chat(coder.tokenizer, messages, record.get("tools"), hidden=hidden)
        return [{"ids": chat} for chat in chats]

    for ids, said in fill_learned(filling, turns or ("messages", "tools"), rows, ("ids",)):
        last = (i for i, yes in zip(reversed(ids), reversed(said)) if yes)
        ends.update(islice((i for i in last if i in coder.reserved), 1))
    # Special tokens that an answer ends with, and those that messages spell.
    filling.done(ends=sorted(ends), spelt=sorted(hidden))


def asked_and_answered(record: Record) -> list[dict[str, str]]:
    """The messages of a record with the columns TURNS; `input` and `system` may be empty."""
    texts = {role: record.get(role) or "" for role in TURNS}
    for role, text in texts.items():
        if not isinstance(text, str):
            raise UsageError(f"{role} must be text, it is {text!r:.60}")
        if role in ("prompt", "response") and not text.strip():
            raise UsageError(f"{role} is empty; leave the example out")
    asked = "\n\n".join(filter(None, (texts["prompt"], texts["input"])))
    spoken = (("system", texts["system"]), ("user", asked), ("assistant", texts["response"]))
    return [{"role": role, "content": text} for role, text in spoken if text]


def fill_preferences(filling: Filling) -> None:
    """Two answers to one prompt, the better one first. Texts stand as they are; messages are written by the model's
    chat template, the turns that both answers share among the prompt."""
    coder = filling.coder
    hidden = set[str]()

    def row(record: Record) -> list[dict[str, Pending]]:
        prompt = record["prompt"]
        answers = [record[side] for side in SIDES]
        for side, answer in zip(SIDES, answers):
            if not answer or (isinstance(answer, str) and not answer.strip()):
                raise UsageError(f"{side} is empty; leave the pair out")
        if answers[0] == answers[1]:
            raise UsageError("chosen and rejected are the same; leave the pair out")
        if prompt is None and str in map(type, answers):
            raise UsageError("it has no prompt, and answers that are texts need one")
        if all(isinstance(x, str) for x in (prompt, *answers)):
            return [{side: (prompt, x) for side, x in zip(SIDES, answers)}]
        else:
            talks = [conversation(prompt, answer) for answer in answers]
            shared = next((i for i, (a, b) in enumerate(zip(*talks)) if a != b), 0)
            pair = [rendered_chat(coder.tokenizer, x, None, shared, hidden)[0] for x in talks]
            return [dict(zip(SIDES, pair))]

    for _ in fill_learned(filling, ("prompt", *SIDES), row, SIDES):
        pass
    filling.done(spelt=sorted(hidden))


def conversation(prompt: Any, answer: Any) -> list[Any]:
    """An answer with what it answers; one that begins with another's turn has it in it."""
    turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else [*answer]
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    first = turns[0] if isinstance(turns[0], dict) else {}
    opens = first.get("role", first.get("from")) in ("assistant", "gpt")
    return [*asked, *turns] if opens else turns


def encoded(coder: Coder, waiting: Sequence[Pending]) -> list[Learned]:
    """The ids of chats, and of answers behind their prompts, and which of them are learned."""
    chats = iter(learned_rows([x for x in waiting if isinstance(x, Rendered)]))
    texts = iter(
        coder.encode([x for pair in waiting if not isinstance(pair, Rendered) for x in pair])
    )
    end = [] if coder.end is None else [coder.end]
    done = []
    for each in waiting:
        if isinstance(each, Rendered):
            done.append(next(chats))
            continue
        head = [*coder.before, *next(texts)]
        tail = [*next(texts), *end]
        done.append(([*head, *tail], [False] * len(head) + [True] * len(tail)))
    return done


def fill_learned(
    filling: Filling,
    roles: Sequence[str],
    rows_of: Callable[[Record], list[dict[str, Pending]]],
    names: Sequence[str],
) -> Iterator[Learned]:
    """Columns of ids, and beside each which of them are learned; the same one by one. What is alike in a chunk is
    encoded together."""
    for chunk in filling.chunks(*roles):
        waiting: list[dict[str, Pending]] = []
        for record in chunk:
            try:
                waiting += rows_of(record)
            except UsageError as error:
                raise DataError(f"{record.where}: {error}") from None
        done = iter(encoded(filling.coder, [row[n] for row in waiting for n in names]))
        rows = [{n: next(done) for n in names} for _ in waiting]
        yield from (row[n] for row in rows for n in names)
        kept = filling.add(**{n: filling.counted([row[n][0] for row in rows]) for n in names})
        for n in names:
            filling.writer.extend(f"{n}_learned", [rows[i][n][1] for i in kept], "uint8")


def fill_pairs(filling: Filling) -> None:
    for chunk in filling.chunks("source", "target"):
        read = filling.counted(filling.coder.encode(filling.texts(chunk, "source")))
        written = filling.counted(filling.coder.encode(filling.texts(chunk, "target"), target=True))
        filling.add(source=read, target=written)
    filling.done()


def fill_classified(filling: Filling) -> None:
    """One or two texts, and their class."""
    more = ["second"] if "second" in filling.source.columns else []
    number = filling.numbers(lambda: classes_of(filling.source, "label"))
    labels: list[int] = []
    for chunk in filling.chunks("text", "label", *more):
        chosen = [number[name_of(record["label"], record.where)] for record in chunk]
        parts = [filling.coder.encode(filling.texts(chunk, role)) for role in ("text", *more)]
        between = [*filling.coder.between] if more else []
        rows = [[*one, *between, *chain(*rest)] if one else [] for one, *rest in zip(*parts)]
        labels += [chosen[i] for i in filling.add(ids=filling.counted(rows))]
    filling.writer.array("labels", np.array(labels, np.int64))
    filling.done(**number.notes)


def fill_tagged(filling: Filling) -> None:
    """Words and a tag for each: the first token of a word has its tag, the others are not counted."""
    number = filling.numbers(lambda: classes_of(filling.source, "tags"))
    for chunk in filling.chunks("words", "tags"):
        ids = []
        labels = []
        for record in chunk:
            words = record["words"]
            tags = record["tags"]
            if not isinstance(words, list) or not isinstance(tags, list) or len(words) != len(tags):
                raise DataError(
                    f"{record.where}: words and tags must be lists of one length, got {record!r:.80}"
                )
        texts = [" ".join(map(str, record["words"])) for record in chunk]
        for record, (row, spans) in zip(chunk, filling.coder.located(texts)):
            ends = np.cumsum([len(str(word)) + 1 for word in record["words"]]).tolist()
            tags = [number[name_of(tag, record.where)] for tag in record["tags"]]
            label = [IGNORE] * len(row)
            word = -1
            for i, (_, end) in enumerate(spans):
                here = int(np.searchsorted(ends, end - 1, side="right"))
                if here != word and here < len(tags):
                    label[i], word = tags[here], here
            ids.append(row)
            labels.append(label)
        kept = filling.add(ids=filling.counted(ids))
        filling.writer.extend("labels", [labels[i] for i in kept], "int32")
    filling.done(**number.notes)


def fill_answers(filling: Filling) -> None:
    """A question and a text; the label is the first and the last token of the answer in the text, UNANSWERED where it
    has none (start and end are None), IGNORE where it cannot be found."""
    spans: list[tuple[int, int]] = []
    for chunk in filling.chunks("text", "second", "start", "end"):
        questions = filling.coder.encode(filling.texts(chunk, "text"))
        contexts = filling.coder.located(filling.texts(chunk, "second"))
        rows = []
        labels = []
        for record, question, (ids, places) in zip(chunk, questions, contexts):
            head = [*question, *filling.coder.between]
            rows.append(head + ids)
            if record["start"] is None and record["end"] is None:
                labels.append((UNANSWERED, UNANSWERED))
                continue
            try:
                start = int(record["start"])
                end = int(record["end"])
            except (TypeError, ValueError):
                raise DataError(
                    f"{record.where}: start and end of an answer are numbers of characters, counted from 0; got "
                    f"{record!r:.80}"
                ) from None
            inside = [i for i, (a, b) in enumerate(places) if a < end and b > start]
            span = (len(head) + inside[0], len(head) + inside[-1]) if inside else (IGNORE, IGNORE)
            labels.append(span)
        spans += [labels[i] for i in filling.add(ids=filling.counted(rows))]
    filling.writer.array("labels", np.array(spans, np.int64).reshape(-1, 2))
    filling.done()


def fill_pictures(filling: Filling) -> None:
    images, names = pictures(filling.source)
    number = filling.numbers(lambda: ordered(set(names)))
    filling.writer.array("images", images)
    filling.writer.array("labels", np.array([number[name] for name in names], np.int64))
    filling.writer.notes = {"records": len(images), "empty": 0, **number.notes}


def fill_segmented(filling: Filling) -> None:
    """Pictures, and the class of each patch, row by row."""
    images, labels = segmented(filling.source)
    names, numbers = np.unique(labels, return_inverse=True)
    number = filling.numbers(lambda: ordered({*names.tolist()}))
    known = np.array([number[name] for name in names.tolist()], np.int64)
    filling.writer.array("images", images)
    filling.writer.array("labels", known[numbers].reshape(len(labels), -1))
    filling.writer.notes = {"records": len(images), "empty": 0, **number.notes}


def fill_captions(filling: Filling) -> None:
    """Pictures, and what is said of each."""
    images, texts = pictures(filling.source)
    rows = filling.counted(filling.coder.encode(texts))
    if lacking := rows.count([]):
        raise DataError(f"{lacking:,} of {len(rows):,} pictures have no caption")
    filling.count["records"] = len(rows)
    filling.add(target=rows)
    filling.writer.array("images", images)
    filling.done()


class Numbers(dict[str, int]):
    """The classes, each with its number. A label that is a number may be that of one of the model's `labels`, where
    none of them is called so."""

    def __init__(self, classes: Sequence[str], labels: Sequence[str] = ()):
        super().__init__((name, i) for i, name in enumerate(classes))
        self.counted = bool(labels) and not any(name.isdecimal() for name in classes)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> int:
        self.used.add(name)
        return super().__getitem__(name)

    def __missing__(self, name: str) -> int:
        if self.counted and name.isdecimal() and int(name) < len(self):
            return int(name)
        raise DataError(
            f"label {name!r} is not among the classes of the training data: {', '.join(self)[:200]}"
        )

    @property
    def notes(self) -> dict[str, Any]:
        """The classes, and the labels that examples have."""
        return {"classes": list(self), "labels": ordered(self.used, least=0)}


def joined_classes(found: list[str], labels: Sequence[str]) -> list[str]:
    """The classes of data for a head with these labels, which keep their places: then come those that are new. Where
    the two have nothing in common, the data's alone, unless they are the numbers of the labels."""
    numbers = all(name.isdecimal() and int(name) < len(labels) for name in found)
    if numbers and not any(name.isdecimal() for name in labels):
        return [*labels]
    if not {*found} & {*labels}:
        return found
    return [*labels, *(name for name in found if name not in labels)]


def classes_of(source: Source, role: str) -> list[str]:
    """All classes in the data, sorted."""
    names: set[str] = set()
    for record in records(source, (role,)):
        value = record[role]
        each = value if isinstance(value, list) else [value]
        names |= {name_of(v, record.where) for v in each}
    # The first examples may all be of one class.
    return ordered(names, least=1 if source.sample else 2)


def ordered(names: set[str], least: int = 2) -> list[str]:
    if len(names) < least:
        raise DataError(f"every label is {min(names, default='')!r}; give data with two classes")
    numbers = all(name.isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name), name) if numbers else (0, name))


def name_of(label: Any, where: str) -> str:
    if not isinstance(label, str | int):
        raise DataError(f"{where}: a label must be a name or a whole number, got {shown(label)}")
    return str(label)


def shown(value: Any) -> str:
    """A value as the file has it."""
    return "null" if value is None else f"{value!r:.60}"

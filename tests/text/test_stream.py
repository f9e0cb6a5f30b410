"""Streams: joined they are the whole text, no piece cuts a character, stop strings end them wherever tokens are cut."""

import json
import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from regard.errors import UsageError
from regard.text import Stream, Tokenizer, needed
from regard.text.tokenizer import _BYTES, Whole
from tests.text import tiny
from tests.text.tiny import ALL, TEXTS, dump
from tests.wide import wide

every = pytest.mark.parametrize(
    "name", wide(ALL, keep=["gpt2", "bert", "t5", "llama", "odd_decoder"])
)
LIVE = [name for name in ALL if name != "odd_decoder"]

HARD = [
    "😀",
    "👩‍👩‍👧",
    "🇩🇪",
    "e\u0301",
    "\u0301",
    "ש",
    "م",
    "\u200f",
    "\u202e",
    "\0",
    "\ufffd",
    "\ufe0f",
    " ",
    "▁",
    "##",
    "</w>",
    "<0xE2>",
]
texts = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
        st.sampled_from(HARD),
        st.sampled_from(tiny.CORPUS[:6]),
    ),
    max_size=6,
).map("".join)
stops = st.lists(st.text(" \nabdeno😀é,.", min_size=1, max_size=5), max_size=3)


@cache
def load(name: str) -> Tokenizer:
    return needed(Tokenizer.from_files(ALL[name]()))


def chunks(ids: list[int], seed: int) -> list[list[int]]:
    """The ids in lists of random length."""
    rng, found = random.Random(seed), []
    while ids:
        n = rng.choice([0, 1, 1, 1, 2, 5])
        found.append(ids[:n])
        ids = ids[n:]
    return found


def streamed(stream: Stream, ids: list[int], seed: int = 0) -> list[str]:
    return [*(stream.push(chunk) for chunk in chunks(ids, seed)), stream.finish()]


@every
@given(text=texts, seed=st.integers(0, 99), special=st.booleans())
def test_stream_of_a_text_is_its_decoding(name: str, text: str, seed: int, special: bool) -> None:
    tokenizer = load(name)
    ids = tokenizer.encode(text, literal=special)
    stream = Stream(tokenizer, skip_special=special)
    assert "".join(streamed(stream, ids, seed)) == tokenizer.decode(ids, skip_special=special)
    assert stream.consumed == len(ids) and stream.stopped is None


@every
@given(data=st.data())
def test_stream_of_any_ids_is_their_decoding(name: str, data: st.DataObject) -> None:
    """Ids that no text has: halves of characters, invalid bytes, special tokens, ids beyond the vocabulary."""
    tokenizer = load(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab + 2), max_size=40))
    skip = data.draw(st.booleans())
    stream = Stream(tokenizer, skip_special=skip)
    assert "".join(streamed(stream, ids, len(ids))) == tokenizer.decode(ids, skip_special=skip)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@given(
    raw=st.lists(st.one_of(st.binary(max_size=8), texts.map(str.encode)), max_size=5).map(b"".join)
)
def test_stream_of_raw_bytes_is_their_decoding(name: str, raw: bytes) -> None:
    """Every byte a token of its own, so that each character is cut everywhere; invalid UTF-8 too."""
    tokenizer = load(name)
    table = {b: c for c, b in _BYTES.items()}
    pieces = [table[b] if name == "gpt2" else f"<0x{b:02X}>" for b in raw]
    ids = [i for i in map(tokenizer.core.token_to_id, pieces) if i is not None]
    assert len(ids) == len(raw)
    found = streamed(Stream(tokenizer), ids)
    assert "".join(found) == tokenizer.decode(ids)
    if name == "gpt2":
        assert "".join(found) == raw.decode("utf-8", "replace")


@every
@given(text=texts.filter(lambda t: "\ufffd" not in t))
def test_pieces_never_cut_a_character(name: str, text: str) -> None:
    tokenizer = load(name)
    ids = tokenizer.encode(text)
    assert all("\ufffd" not in piece for piece in streamed(Stream(tokenizer), ids))


@pytest.mark.parametrize("name", LIVE)
def test_words_come_as_soon_as_they_are_certain(name: str) -> None:
    tokenizer = load(name)
    ids = tokenizer.encode(tiny.CORPUS[0], special=False)
    stream = Stream(tokenizer)
    shown = "".join(stream.push([i]) for i in ids)
    assert shown == tokenizer.decode(ids)


def test_emoji_over_several_tokens_comes_in_one_piece() -> None:
    tokenizer = load("gpt2")
    ids = tokenizer.encode("🦜", special=False)
    assert len(ids) > 1
    assert streamed(Stream(tokenizer), [*ids, *ids], seed=3)[-1] == ""
    stream = Stream(tokenizer)
    assert [stream.push([i]) for i in ids] == [""] * (len(ids) - 1) + ["🦜"]


def test_invalid_bytes_are_shown_at_the_end() -> None:
    tokenizer = load("gpt2")
    ids = tokenizer.encode("🦜", special=False)[:-1]
    stream = Stream(tokenizer)
    assert stream.push(ids) == ""
    assert stream.finish() == tokenizer.decode(ids) == "\ufffd"


@every
@given(prompt=texts, text=texts)
def test_stream_after_a_prompt_continues_it(name: str, prompt: str, text: str) -> None:
    tokenizer = load(name)
    before, ids = tokenizer.encode(prompt, special=False), tokenizer.encode(text, special=False)
    found = "".join(streamed(Stream(tokenizer, after=before), ids))
    assert found == tokenizer.decode(ids, after=before)
    assert tokenizer.decode(before) + found == tokenizer.decode(before + ids)


@pytest.mark.parametrize("name", LIVE)
def test_kept_state_does_not_grow_with_the_text(name: str) -> None:
    tokenizer = load(name)
    stream = Stream(tokenizer, ["never said", "nor this"])
    ids = tokenizer.encode(tiny.CORPUS[0], special=False)
    sizes = []
    for _ in range(50):
        stream.push(ids)
        kept = {n: x for n, x in vars(stream._text).items() if n != "spelling"}
        sizes.append(len(repr((kept, stream._text.text.getstate()))) + len(stream._held))
    assert max(sizes) < 500 and max(sizes) - min(sizes) < 100


# --- stop strings -------------------------------------------------------------------------------------------------


def cut(text: str, stop: list[str]) -> tuple[str, str | None]:
    """By definition: read character by character until a stop string is complete."""
    for end in range(1, len(text) + 1):
        done = [s for s in stop if text[:end].endswith(s)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


@every
@given(text=texts, stop=stops, seed=st.integers(0, 99))
def test_stop_string_ends_the_text_before_it(
    name: str, text: str, stop: list[str], seed: int
) -> None:
    tokenizer = load(name)
    ids = tokenizer.encode(text)
    stream = Stream(tokenizer, stop)
    pieces = streamed(stream, ids, seed)
    expected, matched = cut(tokenizer.decode(ids), stop)
    assert "".join(pieces) == expected
    assert stream.stopped == matched
    assert stream.consumed == len(ids) or matched is not None


@every
@given(text=texts, stop=stops)
def test_ids_consumed_are_those_up_to_the_stop(name: str, text: str, stop: list[str]) -> None:
    """One id fewer would not have stopped, and the number does not depend on how the ids were handed over."""
    tokenizer = load(name)
    ids = tokenizer.encode(text)
    whole, single = Stream(tokenizer, stop), Stream(tokenizer, stop)
    whole.push(ids)
    for i in ids:
        single.push([i])
    assert (whole.stopped, whole.consumed) == (single.stopped, single.consumed)
    if whole.stopped:
        fewer = Stream(tokenizer, stop)
        fewer.push(ids[: whole.consumed - 1])
        assert fewer.stopped is None
        assert whole.push([5]) == whole.finish() == ""


def test_bytes_are_shown_character_by_character() -> None:
    """However long a run of byte pieces is, nothing waits for its end, and a stop string inside it is found."""
    tokenizer = load("llama")
    text = "鱻🦜" * 50
    ids = [tokenizer.core.token_to_id(f"<0x{b:02X}>") for b in text.encode()]
    assert None not in ids
    stream, shown = Stream(tokenizer), ""
    for i in ids:
        shown += stream.push([i])
        assert len(text.encode()[: stream.consumed]) - len(shown.encode()) < 4
    assert shown == text
    stopped = Stream(tokenizer, "🦜")
    assert stopped.push(ids) == "鱻" and stopped.consumed == len("鱻🦜".encode())


def test_wrong_byte_costs_itself_alone() -> None:
    tokenizer = load("llama")
    raw = "é".encode() + b"\xff" + "ß".encode() + b"\xe9\xb1"
    ids = [tokenizer.core.token_to_id(f"<0x{b:02X}>") for b in raw]
    assert tokenizer.decode(ids) == "é\ufffdß\ufffd\ufffd"


def test_stop_string_over_tokens_never_shows() -> None:
    tokenizer = load("gpt2")
    ids = tokenizer.encode("One\n\nQuestion: two", special=False)
    stream = Stream(tokenizer, "\n\nQuestion:")
    pieces = [stream.push([i]) for i in ids]
    assert "".join(pieces) == "One" and stream.stopped == "\n\nQuestion:"
    assert tokenizer.decode(ids[: stream.consumed]) == "One\n\nQuestion:"


def test_beginning_of_a_stop_string_is_shown_when_it_ends_otherwise() -> None:
    tokenizer = load("gpt2")
    stream = Stream(tokenizer, ["abcd"])
    assert stream.push(tokenizer.encode("xab")) == "x"
    assert stream.push(tokenizer.encode("ce")) == "abce"
    assert stream.push(tokenizer.encode("abc")) == ""
    assert stream.finish() == "abc" and stream.stopped is None


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [7], [None], ["\ud83d"]])
def test_stop_that_is_no_text_is_refused(stop: object) -> None:
    with pytest.raises(UsageError, match="stop"):
        Stream(load("gpt2"), stop)  # type: ignore[arg-type]


# --- decoders as other folders have them --------------------------------------------------------------------------

DECODERS = {
    "gemma": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    ),
    "metaspace first": decoders.Metaspace(prepend_scheme="first"),
    "metaspace never": decoders.Metaspace(prepend_scheme="never"),
    "three spaces": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 3, 0)]
    ),
    "strip each": decoders.Sequence([decoders.Strip("▁", 1, 0), decoders.WordPiece("##", False)]),
    "fused then replaced": decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]
    ),
    "byte level twice": decoders.Sequence([decoders.ByteLevel(), decoders.ByteLevel()]),
    "ctc": decoders.CTC(),
}


@pytest.mark.parametrize("kind", wide(DECODERS, keep=["gemma", "strip each", "ctc"]))
@given(data=st.data())
def test_stream_follows_every_decoder(kind: str, data: st.DataObject) -> None:
    tokenizer = with_decoder(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab), max_size=20))
    assert "".join(streamed(Stream(tokenizer), ids)) == tokenizer.decode(ids)
    before = data.draw(st.lists(st.integers(300, tokenizer.vocab), max_size=5))
    joined = tokenizer.decode(before) + "".join(streamed(Stream(tokenizer, after=before), ids))
    assert joined == tokenizer.decode(before + ids) or kind == "ctc"


@cache
def with_decoder(kind: str) -> Tokenizer:
    data = json.loads(load("llama").core.to_str())
    data["decoder"] = json.loads(DECODERS[kind].__getstate__())
    return needed(Tokenizer.from_files({"tokenizer.json": dump(data)}))


def test_decoder_that_needs_the_whole_text_gives_it_at_the_end() -> None:
    tokenizer = load("odd_decoder")
    stream = Stream(tokenizer)
    assert isinstance(stream._text, Whole)
    assert stream.push(tokenizer.encode("the dog")) == "" and stream.finish() == "the dog"


def test_decoder_that_panics_is_a_usage_error() -> None:
    data = json.loads(load("llama").core.to_str())
    data["decoder"] = {"type": "Strip", "content": "a", "start": 0, "stop": 9}
    tokenizer = needed(Tokenizer.from_files({"tokenizer.json": dump(data)}))
    ids = [i for i in tokenizer.encode("a", special=False) if len(tokenizer.pieces([i])[0]) == 1]
    ids = ids or [tokenizer.vocab - 1]
    with pytest.raises(UsageError, match="cannot be decoded"):
        tokenizer.decode([*ids, tokenizer.core.token_to_id("a")])
    with pytest.raises(UsageError, match="cannot be decoded"):
        Stream(tokenizer).push([tokenizer.core.token_to_id("a")])


@pytest.mark.parametrize("text", TEXTS)
def test_stories_stream_is_its_decoding(text: str, shared: object) -> None:
    tokenizer = needed(Tokenizer.from_folder(f"{shared}/weights/stories260K"))
    ids = tokenizer.encode(text)
    assert "".join(streamed(Stream(tokenizer), ids)) == tokenizer.decode(ids)

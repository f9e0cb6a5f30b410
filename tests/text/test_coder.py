"""A tokenizer as training data needs it."""

import pytest

from regard.data.tokens import Coder
from regard.data.train_tokenizer import Recipe, train_tokenizer
from regard.errors import UsageError
from regard.text import Tokenizer, needed
from tests.text.tiny import ALL, TEXTS

every = pytest.mark.parametrize("name", ALL)


def tokenizer(name: str) -> Tokenizer:
    return needed(Tokenizer.from_files(ALL[name]()))


@every
def test_many_texts_are_encoded_as_one_by_one(name: str) -> None:
    ours = tokenizer(name)
    coder, texts = Coder(ours), [*TEXTS, ""]
    want = [ours.encode(text, special=False, literal=True) for text in texts]
    assert coder.encode(texts) == want
    said = [ours.encode_target(text, special=False, literal=True) for text in texts]
    assert coder.encode(texts, target=True) == said


@every
def test_ends_make_what_the_model_expects(name: str) -> None:
    ours = tokenizer(name)
    coder, text = Coder(ours), "The dog plays"
    inner = ours.encode(text, special=False)
    assert [*coder.before, *inner, *coder.after] == ours.encode(text)


def test_two_texts_are_joined_as_the_tokenizer_joins_them() -> None:
    files = train_tokenizer(["ab"], Recipe("chars", task="mlm"))
    for ours in (tokenizer("roberta"), needed(Tokenizer.from_files(files))):
        coder = Coder(ours)
        one, other = coder.encode(["a", "b"])
        pair = ours.core.encode("a", "b", add_special_tokens=True).ids
        assert [*coder.before, *one, *coder.between, *other, *coder.after] == pair
    bert = Coder(tokenizer("bert"))  # built from vocab.txt, without a form for two texts
    assert bert.between == bert.after == (bert.tokenizer.core.token_to_id("[SEP]"),)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "llama"])
def test_located_tokens_know_their_characters(name: str) -> None:
    coder, text = Coder(tokenizer(name)), "The dogs play, größer"
    ((ids, places),) = coder.located([text])
    assert [ids] == coder.encode([text]) and len(places) == len(ids)
    covered = {c for a, b in places for c in range(a, b)}
    assert {i for i, c in enumerate(text) if c != " "} <= covered
    with pytest.raises(UsageError, match="two sides"):
        Coder(tokenizer("marian")).located([text])


def test_special_tokens_are_named() -> None:
    bert, t5, gpt2 = (Coder(tokenizer(name)) for name in ("bert", "t5", "gpt2"))
    source = bert.tokenizer
    assert bert.mask == source.core.token_to_id("[MASK]") and bert.mask in bert.reserved
    assert bert.unknown == source.special.unk and bert.pad == source.special.pad
    assert t5.start == t5.pad == 0 and t5.end == 1 and t5.after == (1,)
    assert gpt2.end == gpt2.pad and gpt2.before == gpt2.after == ()


def test_pieces_are_shown_as_text_where_they_are_whole() -> None:
    coder = Coder(tokenizer("gpt2"))
    ids = coder.encode(["The dog 😀"])[0]
    shown = coder.tokens(ids)
    assert len(shown) == len(ids) and "".join(shown[:2]).startswith("The")
    assert "\ufffd" not in "".join(shown)
    assert coder.tokens([10**6]) == ["<1000000>"]


def test_text_that_is_no_unicode_is_named() -> None:
    with pytest.raises(UsageError, match="half a surrogate pair"):
        Coder(tokenizer("gpt2")).encode(["fine", "bad \ud800"])

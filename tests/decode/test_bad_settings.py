"""What a user can get wrong is said before anything runs: what was asked, and what is possible."""

from typing import Any

import pytest
import torch

from regard.attention import GQA
from regard.block import Tower
from regard.cache import FIRST
from regard.decode.engine import Engine
from regard.decode.settings import DEFAULTS, FOREIGN_NAMES, Request, Settings
from regard.errors import Notice, UsageError
from regard.layers import LM, MLP
from regard.models import Tokens, TransformerConfig
from regard.position import Learned
from tests.decode.tiny import VOCAB, model, request, run

NAN, INF = float("nan"), float("inf")
HUGE = 10**400  # more than any float holds

BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": NAN}, "temperature is nan; give a number from 0.0 to 100.0"),
    ({"temperature": INF}, "temperature is inf; give a number from 0.0 to 100.0"),
    ({"temperature": -0.5}, "temperature is -0.5; give a number from 0.0 to 100.0"),
    ({"temperature": "warm"}, "temperature is 'warm'; give a number from 0.0 to 100.0"),
    ({"temperature": True}, "temperature is True; give a number"),
    ({"temperature": None}, "temperature is None; give a number"),
    ({"top_k": -1}, "top_k is -1; give a number from 0"),
    ({"top_k": 2.5}, "top_k is 2.5; give a whole number from 0"),
    ({"top_k": HUGE}, "top_k is 1000.*; give a number from 0 to"),
    ({"top_p": 1.01}, "top_p is 1.01; give a number from 0.0 to 1.0"),
    ({"top_p": -0.1}, "top_p is -0.1; give a number from 0.0 to 1.0"),
    ({"min_p": 2}, "min_p is 2.0; give a number from 0.0 to 1.0"),
    ({"min_p": NAN}, "min_p is nan; give a number from 0.0 to 1.0"),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; give a number from 0.01 to"),
    ({"presence_penalty": INF}, "presence_penalty is inf; give a number from -100.0 to 100.0"),
    ({"frequency_penalty": -1e308}, "frequency_penalty is -1e\\+308; give a number from"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0; give a number from 1"),
    ({"max_new_tokens": 10**9}, "max_new_tokens is 1000000000; give a number from 1 to 1000000"),
    ({"max_new_tokens": 5.0}, "max_new_tokens is 5.0; give a whole number"),
    ({"min_new_tokens": -1}, "min_new_tokens is -1; give a number from 0"),
    ({"min_new_tokens": 9, "max_new_tokens": 5}, "min_new_tokens=9 .* max_new_tokens=5; .* 0 to 5"),
    ({"seed": 2**64}, "seed is .*; give a number from -9223372036854775808 to"),
    ({"samples": 0}, "samples is 0; give a number from 1 to 1024"),
    ({"samples": 10**6, "temperature": 1.0}, "samples is 1000000; give a number from 1 to 1024"),
    ({"samples": 3}, "samples=3 would all be the same at temperature 0; raise temperature"),
    ({"beams": 0}, "beams is 0; give a number from 1 to 1024"),
    ({"beams": 10**7}, "beams is 10000000; give a number from 1 to 1024"),
    ({"beams": 4, "temperature": 0.7}, "does not draw: leave temperature=0.7 out, or beams"),
    ({"beams": 4, "samples": 2, "temperature": 1.0}, "does not draw: leave temperature"),
    ({"beams": 4, "top_p": 0.9}, "does not draw: leave top_p=0.9 out, or beams"),
    ({"beams": 4, "lookup": 2}, "beam search does not guess ahead: leave lookup and draft out"),
    ({"beams": 4, "n_best": 5}, "n_best=5 of 4 beams; give a number from 1 to 4"),
    ({"n_best": 2}, "n_best=2 of 1 beams; give a number from 1 to 1"),
    ({"length_penalty": -101.0}, "length_penalty is -101.0; give a number from -100.0"),
    ({"length_penalty": NAN}, "length_penalty is nan; give a number from -100.0 to 100.0"),
    ({"early_stopping": "soon"}, "early_stopping is 'soon'; choose heuristic, never, first"),
    ({"early_stopping": 1}, "early_stopping is 1; choose heuristic, never, first"),
    ({"overflow": "slide"}, "overflow is 'slide'; choose error, crop, sinks"),
    ({"overflow": "crop", "beams": 2}, "leave overflow='crop' out, or beams"),
    ({"overflow": "sinks", "beams": 2}, "leave overflow='sinks' out, or beams"),
    ({"top_logprobs": 21}, "top_logprobs is 21; give a number from 0 to 20"),
    ({"top_logprobs": True}, "top_logprobs is True; give a whole number from 0 to 20"),
    ({"top_logprobs": 2, "beams": 2}, "leave top_logprobs=2 out, or beams"),
    ({"prompt_logprobs": 3}, "prompt_logprobs is 3; give True or False"),
    ({"logprobs": 3}, "no setting 'logprobs'; here it is top_logprobs"),
    ({"lookup": 1000}, "lookup is 1000; give a number from 0 to 64"),
    ({"eos": 3}, "eos is 3; give a list of token ids"),
    ({"eos": ["</s>"]}, "'</s>' is not a token id; give a whole number"),
    ({"banned": [1.5]}, "1.5 is not a token id"),
    ({"forced_first": "a"}, "'a' is not a token id"),
    ({"logit_bias": {4: NAN}}, "logit_bias is {token: bias, ...}, each bias a number from -1e9"),
    ({"logit_bias": [4]}, "logit_bias is {token: bias, ...}"),
    ({"logit_bias": {"x": 1.0}}, "'x' is not a token id"),
    ({"temprature": 1.0}, "no setting 'temprature'; did you mean 'temperature'"),
    ({"typical_p": 0.5}, "no setting 'typical_p'; it is gone: give top_p or min_p"),
    ({"num_beam_groups": 2}, "it is gone: beams do not avoid each other; draw samples"),
    ({"renormalize_logits": 1}, "renormalize_logits is 1; give True or False"),
    ({"begin_suppress_tokens": 3}, "begin_suppress_tokens is 3; give a list of token ids"),
    ({"forced_last": 1.0}, "1.0 is not a token id"),
    ({"banned": [True]}, "True is not a token id"),
]
BAD += [
    ({"logit_bias": given}, "logit_bias is {token: bias, ...}, each bias a number from -1e9")
    for given in ({4: 1.1e9}, {4: -1.1e9}, {4: True}, {4: "much"}, [(4, 1.0), (4, 1.0, 2)], [(4,)])
]
BAD += [
    ({"sequence_bias": given}, "sequence_bias has .*; give {\\(id, id, ...\\): bias, ...}, each bias")
    for given in (
        {(4, 5): INF}, {(4, 5): NAN}, {(4, 5): 1.1e9}, {(4, 5): -1.1e9}, {(4, 5): True}, {(): 1.0}, {4: 1.0},
        [4], [((4, 5),)], [((4, 5), 1.0, 2.0)], [((4, 5), 1.0), ((4, 5), "much")],
    )
]  # fmt: skip
BAD += [
    ({"exponential_decay_length_penalty": given}, "is .*; give \\(tokens before it begins, factor\\)")
    for given in (
        3, (3,), (3, 1.5, 2), (-1, 1.5), (1_000_001, 1.5), (3.0, 1.5), (True, 1.5), (3, 0), (3, -0.5), (3, 100.5),
        (3, "much"), (3, NAN),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    "given, says", BAD, ids=[f"{i}-{'-'.join(g)}" for i, (g, _) in enumerate(BAD)]
)
def test_settings_say_what_is_possible(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Settings.of(given)


def test_settings_take_whole_numbers_lists_and_dicts() -> None:
    s = Settings.of({"temperature": 1, "eos": [2], "logit_bias": {7: 1, 3: -2.0}})
    assert s == Settings(temperature=1.0, eos=(2,), logit_bias=((3, -2.0), (7, 1)))


def test_early_stopping_may_be_said_as_in_transformers() -> None:
    for theirs, ours in ((True, "first"), (False, "heuristic"), ("never", "never")):
        assert Settings.of({"early_stopping": theirs}).early_stopping == ours


def test_names_of_other_libraries_are_not_ours() -> None:
    """A hint for a setting that we have would never be read; each names settings that we have."""
    assert not set(FOREIGN_NAMES) & set(DEFAULTS)
    for hint in FOREIGN_NAMES.values():
        assert hint.split()[0].strip(",") in {*DEFAULTS, "stop", "draft_model"}


def test_settings_at_their_limits_are_taken() -> None:
    Settings(temperature=100.0, top_p=0.0, min_p=1.0, seed=-(2**63), samples=1024, lookup=64)
    Settings(beams=1024, n_best=1024, length_penalty=-100.0)
    Settings(max_new_tokens=1_000_000, min_new_tokens=1_000_000, top_logprobs=20, min_p=0)
    Settings(logit_bias=((0, 1e9), (1, -1e9)), sequence_bias=(((0,), -1e9), ((1, 0), -INF)))
    for decay in ((0, 100), (1_000_000, 1e-9)):
        Settings(exponential_decay_length_penalty=decay)


def test_sequences_may_be_lists_and_settings_have_no_others() -> None:
    s = Settings.of({"sequence_bias": [[[4, 5], 1.0], [[6], -2]]})
    assert s.sequence_bias == (((4, 5), 1.0), ((6,), -2))
    with pytest.warns(Notice, match="called overflow='error' now"):
        assert Settings.of({"overflow": "refuse"}).overflow == "error"
    with pytest.raises(AttributeError, match="Settings has no heat"):
        _ = s.heat


# --- requests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids, settings, says",
    [
        ([], {}, "the prompt is empty; give at least one token"),
        ([1, VOCAB], {}, f"token {VOCAB} is outside the vocabulary \\(0 to {VOCAB - 1}\\)"),
        ([0, VOCAB - 1, VOCAB], {}, f"token {VOCAB} is outside the vocabulary"),
        ([-1], {}, "token -1 is outside the vocabulary"),
        ([1], {"sequence_bias": (((3, 79), 1.0),)}, "token 79 is outside the vocabulary"),
        ([1], {"begin_suppress_tokens": (80,)}, "token 80 is outside the vocabulary"),
        (
            [1],
            {"banned": tuple(range(1, VOCAB)), "eos": (0,), "min_new_tokens": 1},
            f"all {VOCAB} tokens are banned; leave at least one",
        ),
        ([1.0], {}, f"token 1.0 is no whole number; give ids from 0 to {VOCAB - 1}"),
        ([True], {}, "token True is no whole number"),
        ([1], {"eos": (99,)}, "token 99 is outside the vocabulary"),
        ([1], {"banned": (-3,)}, "token -3 is outside the vocabulary"),
        ([1], {"logit_bias": ((50, 1.0),)}, "token 50 is outside the vocabulary"),
        ([1], {"forced_first": 77}, "token 77 is outside the vocabulary"),
        ([1], {"forced_last": 78}, "token 78 is outside the vocabulary"),
        (
            [1],
            {"banned": tuple(range(VOCAB))},
            f"all {VOCAB} tokens are banned; leave at least one",
        ),
        (
            [1] * 30,
            {"max_new_tokens": 200},
            "30 \\+ 200 tokens need 58 pages of 4, the pool has 20",
        ),
        ([1], {"max_new_tokens": 30, "beams": 4}, "1 \\+ 30 tokens in 4 rows need 32 pages of 4"),
    ],
)
def test_request_says_what_is_wrong(ids: list[Any], settings: dict[str, Any], says: str) -> None:
    engine = Engine(model("gqa_rope"), page=4, pages=20)
    with pytest.raises(UsageError, match=says):
        engine.submit(Request(ids, Settings(**settings)))
    assert engine.idle


def test_request_over_the_context_says_both_numbers_and_the_ways_out() -> None:
    """By `max_len` or by the table of learned positions, whichever is less."""
    tower = Tower(8, 1, GQA(2), MLP(8))
    for config in (
        TransformerConfig(Tokens(9), tower, LM(), max_len=16),
        TransformerConfig(Tokens(9, Learned(16)), tower, LM()),
        TransformerConfig(Tokens(9, Learned(16)), tower, LM(), max_len=40),
    ):
        engine = Engine(config.make().eval())
        engine.submit(Request([1] * 10, Settings(max_new_tokens=6)))
        for _ in engine.run():
            pass
        says = (
            "10 tokens of prompt and 7 new ones are more than the model's context of 16; "
            "shorten the prompt, or ask for at most 6 new tokens, "
            "or go on with 16 tokens of the text: the last ones, or its first 4 and the last: overflow='crop'"
        )
        with pytest.raises(UsageError, match=says):
            engine.submit(Request([1] * 10, Settings(max_new_tokens=7)))
        for size in (16, 20):
            with pytest.raises(UsageError, match="shorten the prompt, or go on with 16 tokens"):
                engine.submit(Request([1] * size, Settings(max_new_tokens=1)))
        with pytest.raises(UsageError, match="ask for at most 1 new tokens, or go on with 16"):
            engine.submit(Request([1] * 15, Settings(max_new_tokens=2)))


def test_an_end_may_be_all_that_is_left() -> None:
    engine = Engine(model("gqa_rope"))
    s = Settings(banned=tuple(range(1, VOCAB)), eos=(0,))
    engine.submit(Request([1], s))
    ((result,),) = run(engine).values()
    assert result.ids == [] and result.finish == "eos"


def test_request_that_fills_a_pool_beside_its_source() -> None:
    """A text of 63 tokens is 16 pages, the last one is not kept; a source of 20 takes five."""
    source, s = torch.arange(20) % VOCAB, Settings(max_new_tokens=63)
    Engine(model("twin"), page=4, pages=21).submit(Request([0], s, source=source))
    says = "1 \\+ 63 tokens and a source of 5 pages need 21 pages of 4, the pool has 20"
    with pytest.raises(UsageError, match=says):
        Engine(model("twin"), page=4, pages=20).submit(Request([0], s, source=source))


@pytest.mark.parametrize("name", ["pair", "twin"])
def test_source_as_long_as_the_context_is_read(name: str) -> None:
    engine, s = Engine(model(name), page=4, pages=40), Settings(max_new_tokens=2)
    engine.submit(Request([1], s, source=torch.ones(64, dtype=torch.int32)))
    ((result,),) = run(engine).values()
    assert len(result.ids) == 2
    says = "the source has 65 tokens, the model's context is 64; shorten it"
    with pytest.raises(UsageError, match=says):
        engine.submit(Request([1], s, source=torch.ones(65, dtype=torch.long)))


def test_sinks_need_a_context_of_one_token_more() -> None:
    tower = Tower(8, 1, GQA(2), MLP(8))
    for longest in (FIRST, FIRST + 1):
        engine = Engine(TransformerConfig(Tokens(9, Learned(longest)), tower, LM()).make())
        asked = Request([1], Settings(max_new_tokens=9, overflow="sinks"))
        if longest > FIRST:
            engine.submit(asked)
            continue
        with pytest.raises(UsageError, match="no room for 4 sinks"):
            engine.submit(asked)


@pytest.mark.parametrize(
    "name, source, says",
    [
        ("gqa_rope", torch.tensor([1]), "no encoder; leave source out"),
        ("pair", None, "an encoder-decoder needs a source"),
        (
            "pair",
            torch.tensor([], dtype=torch.long),
            "whole numbers of shape \\(s,\\), one at least",
        ),
        (
            "pair",
            torch.tensor([1.0]),
            "whole numbers of shape \\(s,\\), one at least, got torch.float32",
        ),
        ("pair", torch.tensor([[1]]), "whole numbers of shape \\(s,\\), one at least"),
        ("pair", torch.tensor([2, VOCAB]), f"source token {VOCAB} is outside the vocabulary"),
        ("pair", torch.tensor([-2, 3]), "source token -2 is outside the vocabulary"),
        ("seq2seq", torch.tensor([VOCAB]), f"source token {VOCAB} is outside the vocabulary"),
        (
            "captioner",
            torch.tensor([1, 2]),
            "must be an image of real numbers of shape \\(3, 8, 8\\)",
        ),
        (
            "captioner",
            torch.zeros(3, 8, 9),
            "must be an image of real numbers of shape \\(3, 8, 8\\)",
        ),
    ],
)
def test_source_says_what_is_wrong(name: str, source: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Engine(model(name)).submit(Request([1], Settings(max_new_tokens=4), source=source))


@pytest.mark.parametrize("name", ["gru", "seq2seq"])
def test_recurrent_model_refuses_to_speculate(name: str) -> None:
    with pytest.raises(UsageError, match="cannot take tokens back.*leave lookup"):
        Engine(model(name)).submit(request(name, [1], Settings(lookup=2)))


def test_key_beyond_the_counter_is_refused() -> None:
    engine = Engine(model("gqa_rope"))
    for key in (-(2**52) - 1, 2**52, 2**60):
        with pytest.raises(UsageError, match="key is"):
            engine.submit(Request([1], key=key))
    for key in (-(2**52), 0, 2**52 - 1):
        engine.submit(Request([1], Settings(max_new_tokens=2, temperature=1.0), key=key))
    assert len(run(engine)) == 3


def test_bad_request_leaves_the_engine_as_it_was() -> None:
    engine = Engine(model("gqa_rope"))
    engine.submit(Request([1, 2]))
    with pytest.raises(UsageError):
        engine.submit(Request([VOCAB]))
    assert [e.request for e in engine.run() if e.done] == [0]


@pytest.mark.parametrize(
    "options, says",
    [
        ({"layout": "ring"}, "no layout 'ring'; choose paged or contiguous"),
        ({"rows": 0}, "rows is 0; give 1 or more"),
        ({"chunk": -1}, "chunk is -1; give 1 or more"),
        ({"page": 0}, "page is 0; give 1 or more"),
        ({"pages": 0}, "pages is 0; give 1 or more"),
    ],
)
def test_engine_says_what_is_possible(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Engine(model("gqa_rope"), **options)


def test_model_that_does_not_write_is_refused() -> None:
    encoder = TransformerConfig(Tokens(9), Tower(8, 1, GQA(2), MLP(8), causal=False)).make()
    with pytest.raises(UsageError, match="does not decode step by step"):
        Engine(encoder)

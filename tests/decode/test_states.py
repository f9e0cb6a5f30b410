"""A state that decodes: speculation takes it back, prefixes begin with it, preempted rows find it again."""

from typing import Any

import pytest
import torch

from regard.block import Tower
from regard.cache import Paged
from regard.decode.engine import Engine
from regard.decode.settings import Settings
from regard.layers import LM, MLP
from regard.models import Tokens, Transformer, TransformerConfig
from tests.decode.tiny import Counted, answers, model, prompts, request, run
from tests.laws.mechanisms import DIM, MECHANISMS, VOCAB, stir

STATES = ["delta", "delta_gqa", "delta_channels", "ssd_alone"]
NAME = "delta_gqa"  # of them the one that has pages
layouts = pytest.mark.parametrize("layout", ["contiguous", "paged"])


def hybrid() -> Transformer:
    """Three layers of states, one of attention, as Qwen3-Next has them."""
    delta, gqa = MECHANISMS["delta"], MECHANISMS["gqa_rope"]
    tower = Tower(DIM, 4, (delta, delta, delta, gqa), MLP(32, "silu", gated=True))
    return stir(Transformer(TransformerConfig(Tokens(VOCAB, None), tower, LM(tied=False))))


def ask(engine: Engine, prompt: list[int], new: int = 1, **more: Any) -> list[int]:
    engine.submit(request(NAME, prompt, Settings(max_new_tokens=new, **more)))
    return run(engine).popitem()[1][0].ids


def fed_by(
    *asked: tuple[list[int], int], net: Any = None, **options: Any
) -> tuple[list[int], list[list[int]]]:
    """Tokens fed for each (prompt, new tokens), one after the other in one engine, and the answers."""
    counted = Counted(net or model(NAME))
    engine = Engine(counted, **{"page": 4, "pages": 60} | options)
    fed, texts = [], []
    for prompt, new in asked:
        before = counted.fed
        texts.append(ask(engine, prompt, new))
        fed.append(counted.fed - before)
    return fed, texts


# --- speculation --------------------------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("drafting", ["gqa_rope", "delta", "delta_gqa"])
def test_draft_changes_no_token(name: str, drafting: str, layout: str) -> None:
    """Drafts with states of their own among them, and the model as its own draft, which is always right."""
    asked = [
        (p, Settings(max_new_tokens=14, draft=n)) for p, n in zip(prompts((5, 9, 3)), (4, 0, 7))
    ]
    plain = [(p, Settings(max_new_tokens=14)) for p, _ in asked]
    assert answers(name, asked, layout=layout, draft=model(drafting)) == answers(name, plain)


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    counted = Counted(model(NAME))
    engine = Engine(counted, draft=model(NAME))
    ask(engine, prompts((6,))[0], 21, draft=4)
    assert counted.passes == 1 + 20 // 5


@layouts
@pytest.mark.parametrize("name", ["gqa_rope", NAME])
def test_each_row_has_as_many_right_guesses_as_it_asks_for(name: str, layout: str) -> None:
    """Rows that ask for different numbers, come later and end earlier: as many steps as guesses make of each text."""
    counted = Counted(model(name))
    engine = Engine(counted, draft=model(name), layout=layout, page=4, pages=100)
    # Of 7 steps, but for the one that ends after 2; the first token comes with the prompt.
    asked = [(4, 5 * 7), (0, 2), (2, 3 * 7), (0, 7), (1, 2 * 7)]
    for prompt, (draft, after) in zip(prompts((5, 4, 9, 3, 6)), asked, strict=True):
        engine.submit(request(name, prompt, Settings(max_new_tokens=1 + after, draft=draft)))
    engine.step()
    # The prompt of this one is read after the first step of the others, and it ends with them.
    late = Settings(max_new_tokens=1 + 4 * 6, draft=3)
    engine.submit(request(name, prompts((7,), 1)[0], late))
    found = [len(result.ids) for (result,) in run(engine).values()]
    assert sorted(found) == sorted([1 + 4 * 6, *(1 + after for _, after in asked)])
    assert counted.passes == 1 + 7 + 1


def test_all_guesses_that_may_be_asked_for_can_be_taken_back() -> None:
    net, prompt = hybrid(), [*range(VOCAB)] * 4
    assert ask(Engine(net), prompt, 70, lookup=64) == ask(Engine(net), prompt, 70)


# --- prefixes -----------------------------------------------------------------------------------------------------


def test_prefix_is_read_once() -> None:
    """As many tokens are fed as with attention alone where a text goes on, or comes again."""
    (long,) = prompts((21,))
    asked = [(long, 3), (long, 3), ([*long, 3], 3)]
    fed, texts = fed_by(*asked)
    assert fed == [23, 1 + 2, 2 + 2]
    again, want = fed_by(*asked, prefix=False)
    assert texts == want and again == [23, 23, 24]


@pytest.mark.parametrize("chunk", [1, 3, 16, 512])
def test_states_are_found_whatever_the_chunk(chunk: int) -> None:
    (long,) = prompts((22,))
    assert fed_by((long, 1), (long, 1), chunk=chunk)[0] == [22, 2]


def test_prefix_begins_where_two_texts_parted() -> None:
    """The first leaves states at its own end alone; the second, which parts before, leaves them where it did."""
    a, b = prompts((21,))[0], prompts((30,), 1)[0]
    others = [[*a[:13], (a[13] + i) % VOCAB, *b[:5]] for i in (1, 2, 3)]
    fed, texts = fed_by((a, 2), *((o, 2) for o in others))
    assert fed == [22, 20, 20 - 12, 20 - 12]
    assert texts == fed_by((a, 2), *((o, 2) for o in others), prefix=False)[1]


@pytest.mark.parametrize("chunk", [512, 97, 96, 95, 94])
def test_a_call_ends_where_two_texts_parted(chunk: int) -> None:
    """However far the second goes on: no call takes that many tokens back."""
    a, b = prompts((120,))[0], prompts((80,), 1)[0]
    others = [[*a[:97], (a[97] + i) % VOCAB, *b] for i in (1, 2)]
    fed, _ = fed_by((a, 1), *((o, 1) for o in others), net=hybrid(), pages=200, chunk=chunk)
    assert fed == [120, 178, 178 - 96]


def test_next_turn_of_a_chat_begins_with_the_answer() -> None:
    (prompt,) = prompts((6,))
    (_, (answer,)) = fed_by((prompt, 20))
    turn = [*prompt, *answer, 3, 1]
    fed, texts = fed_by((prompt, 20), (turn, 2), (prompt, 1))
    assert fed == [25, len(turn) - 24 + 1, 2]
    assert texts == fed_by((prompt, 20), (turn, 2), (prompt, 1), prefix=False)[1]


def test_states_of_a_long_answer_are_kept_once() -> None:
    engine = Engine(model(NAME), page=4, pages=60)
    ask(engine, prompts((6,))[0], 40)
    assert engine.pool is not None and len(engine.pool.states) == 2  # of the prompt, of the answer


def test_states_take_no_more_memory_than_the_pages() -> None:
    engine = Engine(model(NAME), page=4, pages=20)
    for prompt in prompts([9] * 12):
        ask(engine, prompt)
    assert engine.pool is not None and engine.pool.states
    held = sum(
        x.nbytes for states in engine.pool.states.values() for s in states for x in s.values()
    )
    assert held <= engine.pool.room
    assert set(engine.pool.states) <= set(engine.pool.published)


@torch.no_grad()
def test_prompts_that_arrive_together_share_their_prefix() -> None:
    (long,) = prompts((17,))
    asked = [
        ([*long[:n], i, 7, 9], Settings(max_new_tokens=4)) for n, i in zip((17, 9, 17, 3), range(4))
    ]
    assert answers(NAME, asked) == answers(NAME, asked, prefix=False)


def test_row_begins_with_pages_only_up_to_states() -> None:
    specs = model(NAME).cache_specs()
    cache = Paged(specs, 1, pages=8, page=2, dtype=torch.float64)
    model(NAME)(torch.tensor([[1, 2, 3, 4, 5]]), cache=cache)
    cache.publish(0, ["a", "b"])
    other = Paged(specs, 1, pool=cache.pool, dtype=torch.float64)
    assert other.known(["a", "b", "c"]) == 2 and other.adopt(0, ["a", "b"]) == 0
    states = cache.state_after(0, 2)
    assert states is not None
    cache.pool.remember("a", states)
    assert other.adopt(0, ["a", "b"]) == 2


# --- rows that come and go ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("lookup", [0, 3])
def test_preempted_rows_go_on_as_they_were(prefix: bool, lookup: int) -> None:
    asked = [(p, Settings(max_new_tokens=24, lookup=lookup)) for p in prompts((7, 5, 9, 6))]
    small: Any = {"page": 4, "pages": 18, "prefix": prefix}
    assert answers(NAME, asked, **small) == answers(NAME, asked, pages=400)


@layouts
@pytest.mark.parametrize("name", STATES)
def test_beams_carry_their_states(name: str, layout: str) -> None:
    """The best of all continuations, found by hand: as many beams as there are texts of two tokens."""
    asked = [([3, 1, 4, 1], Settings(max_new_tokens=2, beams=VOCAB, n_best=3))]
    (found,) = answers(name, asked, layout=layout)
    texts = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    rows = torch.cat([torch.tensor([[3, 1, 4, 1]]).expand(len(texts), -1), texts], 1)
    with torch.no_grad():
        logp = model(name)(rows).log_softmax(-1)
    score = sum(logp[torch.arange(len(rows)), i, rows[:, i + 1]] for i in (3, 4))
    assert isinstance(score, torch.Tensor)
    assert found == [texts[i].tolist() for i in score.topk(3).indices]


def test_hybrid_of_four_layers_decodes_as_it_reads() -> None:
    net, (prompt,) = hybrid(), prompts((11,))
    ids = ask(Engine(net, page=4), prompt, 12, lookup=2)
    with torch.no_grad():
        best = net(torch.tensor([prompt + ids])).argmax(-1)[0, len(prompt) - 1 : -1]
    assert ids == best.tolist()


def test_summary_counts_the_states_of_a_row() -> None:
    """Of heads h d e numbers, and the tokens that the convolution reads; attention leaves g 2 d a token."""
    text = model(NAME).summary()
    assert f"{8 * (2 * 8 + 2 * 8)} bytes" in text
    assert f"{8 * (6 * 10 * 7 + 20 + 20 + 42):,} bytes" in text

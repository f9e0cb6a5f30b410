"""The prefix cache: what was read before is not read again, and only that."""

from dataclasses import replace

from regard.decode.engine import Engine
from regard.decode.sequence import page_keys
from regard.decode.settings import Settings
from tests.decode.tiny import Counted, answers, full, model, prompts, request, run


def fed_by(
    prefix: bool, *asked: list[int], salts: tuple[str, ...] = ("", "", "")
) -> tuple[list[int], Engine]:
    """Tokens fed for each prompt, one after the other in one engine."""
    counted = Counted(model("gqa_rope"))
    engine = Engine(counted, page=4, pages=60, prefix=prefix)
    fed = []
    for prompt, salt in zip(asked, salts):
        before = counted.fed
        engine.submit(request("gqa_rope", prompt, Settings(max_new_tokens=1), salt=salt))
        run(engine)
        fed.append(counted.fed - before)
    return fed, engine


def test_prefix_cache_skips_what_was_read_before() -> None:
    (long,) = prompts((21,))
    assert fed_by(True, long, [*long, 3], long[:10])[0] == [21, 22 - 20, 10 - 8]
    assert fed_by(False, long, [*long, 3], long[:10])[0] == [21, 22, 10]


def test_prefix_cache_feeds_the_last_token_of_a_known_prompt() -> None:
    (prompt,) = prompts((20,))  # five full pages: the last is fed again, for its logits
    assert fed_by(True, prompt, prompt)[0] == [20, 4]


def test_prefix_cache_stops_at_the_first_difference() -> None:
    (a,) = prompts((20,))
    b = [*a[:9], (a[9] + 1) % 19, *a[10:]]
    assert fed_by(True, a, b)[0] == [20, 12]


def test_prefix_cache_keeps_salts_apart() -> None:
    (a,) = prompts((20,))
    assert fed_by(True, a, a, a, salts=("mine", "yours", "mine"))[0] == [20, 20, 4]


def test_prefix_cache_finds_what_arrives_together() -> None:
    """Eight prompts that share 32 tokens and two that share 12 of them: as many tokens are fed as one by one."""
    (long,) = prompts((32,))
    many = [[*long, i] for i in range(8)] + [[*long[:12], 18, 17, i] for i in (3, 4)]
    s = Settings(max_new_tokens=2)
    fed, texts = [], []
    for together in (True, False):
        counted = Counted(model("gqa_rope"))
        engine = Engine(counted, page=4, pages=200)
        found = {}
        for i, prompt in enumerate(many):
            engine.submit(request("gqa_rope", prompt, s, key=i))
            found |= {} if together else run(engine)
        found |= run(engine)
        fed.append(counted.fed)
        texts.append([found[i][0].ids for i in range(len(many))])
        full(engine.pool)
    assert fed[0] == fed[1] == 33 + 7 + 3 + 3 + 10
    assert texts[0] == texts[1] == [t for (t,) in answers("gqa_rope", [(p, s) for p in many])]


def test_prefix_cache_lets_others_pass_while_one_is_waited_for() -> None:
    """Pairs of equal prompts: all the first ones are read together, then all the second ones."""
    many = [p for p in prompts([9] * 4) for _ in (0, 1)]
    counted = Counted(model("gqa_rope"))
    engine = Engine(counted, page=4)
    for i, prompt in enumerate(many):
        engine.submit(request("gqa_rope", prompt, Settings(max_new_tokens=1), key=i))
    assert len(run(engine)) == 8
    assert (counted.passes, counted.fed) == (2, 4 * 9 + 4 * 1)


def test_prefix_cache_holds_what_was_answered() -> None:
    """The second turn of a chat is the first, its answer and something new: only that is read."""
    (prompt,), s = prompts((10,)), Settings(max_new_tokens=11, frequency_penalty=0.8)
    for extra in ({}, {"lookup": 4}):
        counted = Counted(model("gqa_rope"))
        engine = Engine(counted, page=4)
        engine.submit(request("gqa_rope", prompt, replace(s, **extra)))
        ((first,),) = run(engine).values()
        before, second = counted.fed, [*prompt, *first.ids, 1, 2]
        engine.submit(request("gqa_rope", second, Settings(max_new_tokens=1)))
        ((result,),) = run(engine).values()
        # 20 tokens of the first turn were read, its last one was only said: 5 full pages
        assert counted.fed - before == len(second) - 20
        assert [[result.ids]] == answers("gqa_rope", [(second, Settings(max_new_tokens=1))])
        full(engine.pool)


def test_page_keys_go_on_from_those_that_are_known() -> None:
    text = prompts((23,))[0]
    whole = page_keys(text, 4, "salt")
    assert page_keys(text, 4, "salt", page_keys(text[:9], 4, "salt")) == whole


def test_page_keys_chain_over_all_tokens() -> None:
    text = list(range(12))
    keys = page_keys(text, 4)
    assert len(keys) == len(set(keys)) == 3
    assert page_keys(text[:11], 4) == keys[:2]
    assert all(len(key) == 32 for key in keys)
    # hash((-1,)) == hash((-2,)): Python's own hash would take these for the same
    assert page_keys([2**61 - 1, 1], 2) != page_keys([0, 1], 2)
    for i in range(12):
        other = [*text[:i], 99, *text[i + 1 :]]
        assert [a == b for a, b in zip(keys, page_keys(other, 4))] == [k < i // 4 for k in range(3)]


def test_prefix_cache_forgets_the_least_recently_used() -> None:
    """A small pool serves many prompts; what it forgot is read again, and the texts are right."""
    many = prompts([12] * 10)
    counted = Counted(model("gqa_rope"))
    engine = Engine(counted, page=4, pages=9)
    order = [*range(10), 9, 0]
    fed = []
    for prompt in (many[i] for i in order):
        before = counted.fed
        engine.submit(request("gqa_rope", prompt, Settings(max_new_tokens=3)))
        (found,) = run(engine).values()
        ((expect,),) = answers("gqa_rope", [(prompt, Settings(max_new_tokens=3))])
        assert found[0].ids == expect
        fed.append(counted.fed - before)
    assert fed == [12 + 2] * 10 + [4 + 2, 12 + 2]
    full(engine.pool)

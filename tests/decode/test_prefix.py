"""The prefix cache: what was read before is not read again, and only that."""

from regard.decode.engine import Engine
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


def test_page_keys_chain_over_all_tokens() -> None:
    from regard.decode.prefill import page_keys

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

"""generate, stream and translate: one path to the same text, for plain and prepared models."""

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.decode.engine import Engine
from regard.decode.generate import Job, Unanswered, stream
from regard.errors import UsageError
from tests.test_cli import folder

LINES = ["The dog plays in the park", "", "Hund", "A small dog", " ", "park"]


def whole(pieces: Generator[str, None, regard.Result]) -> tuple[list[str], regard.Result]:
    """All pieces, and the result that a generator returns."""
    found = []
    while True:
        try:
            found.append(next(pieces))
        except StopIteration as end:
            return found, end.value


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.5, "seed": 3},  # bytes that are no characters, and held-back ones
        {"stop": ["\x13", "zz"]},
        {"lookup": 4},
        {"draft_model": True},
        {"temperature": 1.0, "draft_model": True, "draft": 3},
        {"eos": (5, 48), "temperature": 2.0},
    ],
    ids=str,
)
def test_stream_is_generate_in_pieces(settings: dict[str, Any]) -> None:
    model = regard.load(folder("gpt2"))
    if "draft_model" in settings:
        settings = {**settings, "draft_model": model}
    (want,) = regard.generate(model, "The dog 😀", max_new_tokens=40, **settings)
    pieces, got = whole(stream(model, "The dog 😀", max_new_tokens=40, **settings))
    assert "".join(pieces) == want.text and got == want
    assert all(pieces), "a piece is text"
    assert len(pieces) <= len(want.ids) + 1  # one a token, and perhaps a rest


def test_stream_without_a_tokenizer_gives_the_ids() -> None:
    model = regard.load(folder("bare"))
    (want,) = regard.generate(model, [5, 9, 2], max_new_tokens=6)
    pieces, got = whole(stream(model, [5, 9, 2], max_new_tokens=6))
    assert pieces == [] and got == want and got.text is None


def test_stream_is_one_answer() -> None:
    with pytest.raises(UsageError, match="a stream is one answer"):
        next(stream(regard.load(folder("gpt2")), "a", beams=2))


def test_text_is_made_with_each_token_only_where_it_is_wanted() -> None:
    model = regard.load(folder("gpt2"))
    assert Job(model, (), {}).requests("a")[0].stop is None
    assert Job(model, "x", {}).requests("a")[0].stop is not None
    assert Job(model, (), {}, live=True).requests("a")[0].stop is not None


@pytest.mark.parametrize("name", ["gpt2", "t5", "marian"])
def test_prepared_models_answer_as_plain_ones(name: str) -> None:
    plain = regard.load(folder(name))
    ready = regard.prepare(plain, "fp32")
    for settings in ({}, {"beams": 3, "n_best": 2}, {"samples": 2, "temperature": 0.8}):
        want, got = (
            regard.generate(m, ["The dog", "a"], max_new_tokens=6, **settings)  # type: ignore[arg-type]
            for m in (plain, ready)
        )
        assert [(r.ids, r.text) for r in got] == [(r.ids, r.text) for r in want]
    if name != "gpt2":
        assert regard.translate(ready, LINES) == regard.translate(plain, LINES)


def test_longest_requests_go_first_and_answers_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, submit = [], Engine.submit

    def recorded(self: Engine, request: Any) -> int:
        sizes.append(len(request.source))
        return submit(self, request)

    model = regard.load(folder("t5"))
    want = [regard.translate(model, [line], max_new_tokens=6)[0] for line in LINES]
    monkeypatch.setattr(Engine, "submit", recorded)
    assert regard.translate(model, LINES, rows=8, max_new_tokens=6) == want
    assert len(sizes) == 4 and sizes == sorted(sizes, reverse=True)


def test_rows_are_refilled_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    batches, model = [], regard.load(folder("t5"))
    step = model.next_logits

    def recorded(ids: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        batches.append(len(ids))
        return step(ids, *rest, **more)

    monkeypatch.setattr(model, "next_logits", recorded)
    regard.translate(model, ["Hund", "park"] * 4, beams=2, rows=4, max_new_tokens=5, eos=())
    # beams that begin together end together: 4 times 1 pass of the prompts, then 4 steps of 4 rows
    assert sorted(batches) == [2] * 4 + [4] * 16


def test_prompt_may_be_an_array_of_numpy() -> None:
    model = regard.load(folder("bare"))
    (want,) = regard.generate(model, [5, 9, 2], max_new_tokens=4)
    one, two = np.array([5, 9, 2]), np.array([[5, 9, 2], [5, 9, 2]], dtype=np.int32)
    for prompt, count in ((one, 1), (list(one), 1), ([one, one], 2), (two, 2)):
        results = regard.generate(model, prompt, max_new_tokens=4)
        assert [r.ids for r in results] == [want.ids] * count
    with pytest.raises(UsageError, match="whole numbers"):
        regard.generate(model, np.array([0.5]))


def test_answer_that_fails_leaves_the_others_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = regard.load(folder("bare"))
    want, step = regard.generate(model, [[5, 9], [5, 2]], max_new_tokens=4), model.next_logits

    def spoilt(ids: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        return step(ids, *rest, **more).masked_fill((ids == 3).any(1)[:, None], torch.nan)

    monkeypatch.setattr(model, "next_logits", spoilt)
    assert 3 not in [i for r in want for i in r.ids], "the others must not say it"
    prompts = [[5, 9], [3, 1], [5, 2]]
    with pytest.warns(
        RuntimeWarning, match="1 of 3 answers could not be completed: .*not a number"
    ):
        first, bad, last = regard.generate(model, prompts, max_new_tokens=4)
    assert [first.ids, last.ids] == [r.ids for r in want]
    assert (bad.finish, bad.ids) == ("error", []) and "not a number" in str(bad.error)


def test_stream_that_fails_says_so_at_its_end() -> None:
    model = regard.load(folder("gpt2"))
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(Unanswered, match="not a number") as told:
        list(regard.stream(model, "a"))
    assert told.value.code == 1


@pytest.mark.parametrize("name", ["t5", "marian"])
def test_translations_of_a_line_stay_together(name: str) -> None:
    model = regard.load(folder(name))
    best = regard.translate(model, LINES, beams=3, max_new_tokens=6)
    several = regard.translate(model, LINES, beams=3, max_new_tokens=6, n_best=3)
    assert [texts[0] for texts in several] == best
    assert [len(texts) for texts in several] == [3 if line.strip() else 1 for line in LINES]
    alone = [regard.translate(model, [x], beams=3, max_new_tokens=6, n_best=3)[0] for x in LINES]
    assert several == alone


@pytest.mark.parametrize("prompts", [[None], None, 3, {"a"}, [[1, None]], [[1.5]], [[True]]])
def test_prompt_that_is_none_is_told(prompts: Any) -> None:
    with pytest.raises(UsageError, match="a prompt is text or a list of whole numbers"):
        regard.generate(regard.load(folder("bare")), prompts)


@pytest.mark.parametrize("name", ["bare", "t5"])
def test_prompts_may_be_whole_numbers_of_any_kind(name: str) -> None:
    model, ids = regard.load(folder(name)), [5, 9, 2]
    (want,) = regard.generate(model, ids, max_new_tokens=3)
    small = torch.tensor(ids, dtype=torch.uint8)
    for prompt in (tuple(ids), small, small.numpy(), [small], [small.numpy()], small[None].numpy()):
        assert regard.generate(model, prompt, max_new_tokens=3) == [want]


@pytest.mark.parametrize(
    "name, hint",
    [
        ("num_beams", "here it is beams"),
        ("num_return_sequences", "here it is samples when drawing, n_best of beams"),
        ("do_sample", "here it is temperature"),
        ("max_length", "here it is max_new_tokens"),
        ("max_tokens", "here it is max_new_tokens"),
        ("num_beam_groups", "it is gone: beams do not avoid each other"),
        ("typical_p", "it is gone: give top_p or min_p"),
        ("temprature", "did you mean 'temperature'"),
    ],
)
def test_settings_of_others_are_told_ours(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"generate has no setting '{name}'; {hint}"):
        regard.generate(regard.load(folder("bare")), [5], **{name: 2})


def test_settings_of_the_folder_are_taken_and_may_be_overruled() -> None:
    model = regard.load(folder("gpt2"))
    assert model.origin is not None
    model.origin.files["generation_config.json"] = (
        b'{"forced_bos_token_id": 7, "forced_eos_token_id": [9], "bad_words_ids": [[3], [4, 5]]}'
    )
    found = Job(model, (), {}).settings
    assert (found.forced_first, found.forced_last, found.banned) == (7, 9, (3,))
    found = Job(model, (), {"forced_first": None, "banned": (8,)}).settings
    assert (found.forced_first, found.banned) == (None, (8,))


@pytest.mark.parametrize("stop", ["", [""], [3]])
def test_stop_strings_are_checked_before_anything_runs(stop: Any) -> None:
    with pytest.raises(UsageError, match="stop must be"):
        Job(regard.load(folder("gpt2")), stop, {})

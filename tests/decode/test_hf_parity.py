"""The same tokens as transformers' `generate`, on tiny random models of every family that writes.

Both sides run in float32 and round differently, so equal ids also need texts without near-ties: the seeds are fixed.
"""

import functools
from itertools import product
from typing import Any

import pytest
import torch

import regard
from regard.decode.engine import Engine
from regard.decode.settings import Request, Result, Settings
from regard.layers import LM
from tests.checkpoint.families import CASES, HEADS, ONE_PER_FAMILY
from tests.wide import crossed, wide

FAMILIES = [
    "gpt2", "llama-mqa", "mistral", "mixtral", "qwen2", "qwen3", "deepseek-v2", "deepseek-v3",
    "deepseek-v32-sparse", "phimoe", "llama4-chunked", "mistral4", "glm-moe-dsa", "t5", "bart", "marian",
    "mbart", "m2m-100", "bloom", "falcon-alibi", "gpt-neo", "opt-narrow-words", "xglm",
]  # fmt: skip
# The first case of every other family that writes; Whisper, whose source is a sound, is in tests/test_speech.py.
OTHERS = [
    name
    for name in ONE_PER_FAMILY
    if isinstance(HEADS[CASES[name].architecture], LM) and name not in (*FAMILIES, "whisper")
]
# Transformers counts their padding: Llama 4's queries grow by positions that begin there, and the windows that
# DeepSeek V4 compresses hold it. Alone a text has none.
ALONE = ("llama4", "deepseek-v4")
NEW = 9
EARLY = {"first": True, "heuristic": False, "never": "never"}
RAGGED, EVEN = (7, 3, 5, 1), (6, 6, 6)
LAYOUTS = ["contiguous", "paged"]
CLOSE = 1e-4  # float32 against float32, sums of at most NEW log probabilities


def flat(answers: list[list[Result]]) -> list[Result]:
    return [result for each in answers for result in each]


class Pair:
    """A transformers model, ours with the same weights, ragged prompts, and an end token that really comes."""

    def __init__(self, name: str, sizes: tuple[int, ...] = RAGGED):
        self.theirs = CASES[name].make()
        self.ours = regard.from_hf(self.theirs).eval()
        self.two = self.theirs.config.is_encoder_decoder
        g = torch.Generator().manual_seed(3)
        self.prompts = [torch.randint(3, 42, (n,), generator=g).tolist() for n in sizes]
        start = getattr(self.theirs.config, "decoder_start_token_id", None) or 0
        self.start = [start] if self.two else []
        said = [r.ids for r in flat(self.answer(Settings(max_new_tokens=NEW)))]
        # of the tokens that greedy search says late, one that it does not say at once
        late = [token for ids in said for token in ids[3:] if token not in ids[:2]]
        self.eos = late[0] if late else said[0][-1]

    def settings(self, **more: Any) -> Settings:
        return Settings.of({"max_new_tokens": NEW, "eos": (self.eos,)} | more)

    def answer(self, settings: Settings, layout: str = "contiguous") -> list[list[Result]]:
        engine = Engine(self.ours, layout=layout, page=4, pages=120)
        for prompt in self.prompts:
            source = torch.tensor(prompt) if self.two else None
            engine.submit(Request(self.start or prompt, settings, source=source))
        found = {e.request: e.done for e in engine.run() if e.done is not None}
        return [found[i] for i in range(len(self.prompts))]

    def generate(self, prompts: list[list[int]] | None = None, **options: Any) -> Any:
        """What transformers says: ids without prompt, start and end, and the score of each."""
        prompts = prompts or self.prompts
        width, pad = (
            max(map(len, prompts)),
            getattr(self.theirs.config, "pad_token_id", None) or 0,
        )
        rows, mask = [], []
        for prompt in prompts:
            blank = [0] * (width - len(prompt))
            ones = [1] * len(prompt)
            rows.append(prompt + [pad] * len(blank) if self.two else [pad] * len(blank) + prompt)
            mask.append(ones + blank if self.two else blank + ones)
        settings = {"forced_eos_token_id": None, "num_beams": 1} | options
        if self.two:
            settings["decoder_start_token_id"] = self.start[0]
        out = self.theirs.generate(
            input_ids=torch.tensor(rows), attention_mask=torch.tensor(mask), max_new_tokens=NEW, do_sample=False,
            pad_token_id=pad, eos_token_id=self.eos, return_dict_in_generate=True, output_logits=True,
            output_scores=True, **settings,
        )  # fmt: skip
        ids = [s[len(self.start) if self.two else width :] for s in out.sequences.tolist()]
        ids = [s[: s.index(self.eos)] if self.eos in s else s[:NEW] for s in ids]
        return ids, out


pair = functools.cache(Pair)


@functools.cache
def greedy(name: str, forced: bool) -> list[tuple[list[int], list[float]]]:
    """What transformers says to each prompt, and how likely each token of it was."""
    p, said = pair(name), []
    for prompts in [[x] for x in p.prompts] if name in ALONE else [p.prompts]:
        texts, out = p.generate(prompts, forced_eos_token_id=p.eos if forced else None)
        logp = torch.stack(out.logits, 1).log_softmax(-1)  # b t V
        said += [(ids, [x[i].item() for x, i in zip(row, ids)]) for row, ids in zip(logp, texts)]
    return said


@functools.cache
def searched(name: str, forced: bool, penalty: float, early: str) -> Any:
    p = pair(name)
    options: dict[str, Any] = {"forced_eos_token_id": p.eos if forced else None}
    options |= {"num_beams": 4, "length_penalty": penalty, "num_return_sequences": 2}
    return p.generate(**options, early_stopping=EARLY[early])


families = pytest.mark.parametrize("name", FAMILIES)


WAYS = FAMILIES, [False, True], LAYOUTS
FEW = [row.values for row in crossed(*WAYS) if not row.marks]
REST = [(other, False, LAYOUTS[i % 2]) for i, other in enumerate(OTHERS)]


@pytest.mark.parametrize("name, forced, layout", wide([*product(*WAYS), *REST], FEW))
def test_greedy_equals_transformers(name: str, forced: bool, layout: str) -> None:
    p, theirs = pair(name), greedy(name, forced)
    found = p.answer(p.settings(forced_last=p.eos if forced else None), layout)
    assert [r.ids for (r,) in found] == [ids for ids, _ in theirs]
    for (r,), (_, logprobs) in zip(found, theirs):
        torch.testing.assert_close(r.logprobs, logprobs, rtol=0, atol=CLOSE)


SEARCHES = [(0.6, "heuristic"), (1.0, "heuristic"), (1.4, "heuristic"), (1.4, "never"), (0.6, "first")]  # fmt: skip


SEARCHED = [
    (name, *search, (i + j) % 2 == 1)
    for i, name in enumerate(FAMILIES)
    for j, search in enumerate(SEARCHES)
]


@pytest.mark.parametrize(
    "name, penalty, early, forced",
    wide(SEARCHED, keep=[*SEARCHED[: len(SEARCHES)], *SEARCHED[:: len(SEARCHES) + 1]]),
)
def test_beams_equal_transformers(name: str, penalty: float, early: str, forced: bool) -> None:
    """Every family with every search, both with and without a forced end, in turn: a search does not know the family,
    so that each pair of the three is met. Either layout has one of the two endings: the other pairs run the same
    code."""
    p, layout = pair(name), "contiguous" if forced else "paged"
    ids, out = searched(name, forced, penalty, early)
    s = p.settings(
        beams=4,
        n_best=2,
        length_penalty=penalty,
        early_stopping=early,
        forced_last=p.eos if forced else None,
    )
    found = flat(p.answer(s, layout))
    assert [r.ids for r in found] == ids
    torch.testing.assert_close(
        [r.score for r in found], out.sequences_scores.tolist(), rtol=0, atol=CLOSE
    )


@families
def test_parity_prompts_meet_the_end_token_and_the_limit(name: str) -> None:
    p = pair(name)
    assert {r.finish for (r,) in p.answer(p.settings())} == {"eos", "length"}


# Prompts are equally long here: transformers counts padding among the tokens that were said.
BAD = list(range(4, 40, 3))
PROCESSORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition": ({"repetition_penalty": 1.6}, {"repetition_penalty": 1.6}),
    "encouragement": ({"repetition_penalty": 0.7}, {"repetition_penalty": 0.7}),
    "least_length": ({"min_new_tokens": 6}, {"min_new_tokens": 6}),
    "banned": ({"banned": BAD}, {"bad_words_ids": [[i] for i in BAD]}),
    "bias": (
        {"logit_bias": {5: 3.0, 9: -2.5, 30: 1.5}},
        {"sequence_bias": {(5,): 3.0, (9,): -2.5, (30,): 1.5}},
    ),
    "forced_first": ({"forced_first": 8}, {"forced_bos_token_id": 8}),
    "together": (
        {"repetition_penalty": 1.3, "min_new_tokens": 4, "banned": [12], "logit_bias": {5: 2.0}},
        {
            "repetition_penalty": 1.3,
            "min_new_tokens": 4,
            "bad_words_ids": [[12]],
            "sequence_bias": {(5,): 2.0},
        },
    ),
}
processed = pytest.mark.parametrize(
    "name, what",
    [
        (name, what)
        for name in ("gpt2", "llama-mqa", "deepseek-v3", "t5", "bart")
        for what in PROCESSORS
        # transformers forces a first token only right after the start token
        if what != "forced_first" or name in ("t5", "bart")
    ],
)


@processed
def test_greedy_with_processors_equals_transformers(name: str, what: str) -> None:
    p = pair(name, EVEN)
    mine, theirs = PROCESSORS[what]
    ids, _ = p.generate(**theirs)
    assert [r.ids for (r,) in p.answer(p.settings(**mine))] == ids


@processed
def test_beams_with_processors_equal_transformers(name: str, what: str) -> None:
    p = pair(name, EVEN)
    mine, theirs = PROCESSORS[what]
    ids, out = p.generate(**theirs, num_beams=3, num_return_sequences=3)
    found = flat(p.answer(p.settings(**mine, beams=3, n_best=3)))
    assert [r.ids for r in found] == ids
    torch.testing.assert_close(
        [r.score for r in found], out.sequences_scores.tolist(), rtol=0, atol=CLOSE
    )


@pytest.mark.parametrize("what", PROCESSORS)
def test_processors_change_something(what: str) -> None:
    """Else the tests above would hold for a processor that does nothing."""
    p = pair("bart", EVEN)
    assert p.answer(p.settings(**PROCESSORS[what][0])) != p.answer(p.settings())


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_searches_that_find_few_texts_are_filled_up_as_in_transformers(
    name: str, ends: bool
) -> None:
    """Of all tokens one may be said, or one and the end: four beams find fewer texts than four."""
    p = pair(name, EVEN)
    left = {42, p.eos} if ends else {42}
    bad = [i for i in range(p.theirs.config.vocab_size) if i not in left]
    # transformers never bans the end of a text by itself; a bias does.
    more = {} if ends else {"sequence_bias": {(p.eos,): -torch.inf}}
    ids, out = p.generate(
        bad_words_ids=[[i] for i in bad], num_beams=4, num_return_sequences=4, **more
    )
    found = flat(p.answer(p.settings(banned=bad, beams=4, n_best=4)))
    assert len(found) == len(ids) == 4 * len(p.prompts)
    scores = out.sequences_scores.tolist()
    likely = [i for i, score in enumerate(scores) if score > -1e8]
    assert likely and (ends or len(likely) < len(found))
    assert [found[i].ids for i in likely] == [ids[i] for i in likely]
    torch.testing.assert_close(
        [found[i].score for i in likely], [scores[i] for i in likely], rtol=0, atol=CLOSE
    )
    for i, score in enumerate(scores):
        assert i in likely or found[i].score < -1e7, score

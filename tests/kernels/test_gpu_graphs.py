"""GraphDecoder off the GPU: the eager form of its step gives the engine's tokens, in any slots, and
the plain model's logits; tests/gpu/test_graphs.py holds graphs and kernels to the same."""

import pytest
import torch

import regard
from regard.decode.engine import Engine
from regard.decode.graphs import GraphDecoder
from regard.decode.settings import Request, Settings
from regard.errors import UsageError
from regard.kernels.triton import prompt as gpu_prompt
from regard.kernels.triton import sample as gpu_sample
from regard.models import Tokens, TransformerConfig
from tests.kernels.plain import BOUND, FEW, largest_gap, ties

ROPE = regard.Rope()
ODD = regard.Rope(layout="interleaved", partial=0.5)
MECHANISMS = {
    "gqa": regard.GQA(8, 2, 32, rope=ROPE),
    "qk_norm": regard.GQA(4, 2, 32, rope=ROPE, qk_norm=1e-6),
    "window": regard.GQA(4, 4, 32, rope=ROPE, window=9, bias=True),
    "interleaved": regard.GQA(4, 2, 32, rope=ODD),
    "mla": regard.MLA(4, 64, 32, 16, rope=ROPE),
    "mla_query": regard.MLA(4, 64, 32, 16, 24, 48, rope=regard.Rope(layout="interleaved")),
}


def build(name: str, tied: bool = True) -> regard.Model:
    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"layers": 2, "dim": 64, "heads": 4, "ffn_dim": 128, "vocab": 97, "max_len": 96}
        model = regard.build("gpt2", **sizes)
    else:
        ffn, norm = regard.MLP(256, "silu", gated=True, bias=False), regard.Norm(1e-5, rms=True)
        tower = regard.Tower(128, 2, MECHANISMS[name], ffn, norm=norm)
        head = regard.LM(tied=tied and name != "qk_norm")
        model = TransformerConfig(Tokens(97), tower, head, max_len=96).make()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(3)  # so that answers differ
    return model.eval()


def requests(count: int = 9, **settings: object) -> list[Request]:
    g = torch.Generator().manual_seed(1)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    return [
        Request(
            torch.randint(0, 97, (number(1, 40),), generator=g).tolist(),
            Settings(max_new_tokens=number(1, 40), **settings),  # type: ignore[arg-type]
        )
        for _ in range(count)
    ]


def by_engine(model: regard.Model, asked: list[Request]) -> list[tuple[list[int], str]]:
    engine = Engine(model, rows=4)
    numbers = [engine.submit(Request(list(r.ids), r.settings)) for r in asked]
    done: dict[int, tuple[list[int], str]] = {}
    while len(done) < len(asked):
        for event in engine.step():
            if event.done:
                done[event.request] = event.done[0].ids, event.done[0].finish
    return [done[n] for n in numbers]


@pytest.mark.parametrize("name", [*MECHANISMS, "gpt2"])
@pytest.mark.parametrize("settings", [{}, {"eos": (5, 7, 11, 20)}], ids=["length", "eos"])
def test_graphs_give_the_engine_tokens(name: str, settings: dict) -> None:
    model, asked = build(name), requests(**settings)
    decoder = GraphDecoder(model, 3, 96, graph=False, look=8)
    want = by_engine(model, asked)
    assert [(r.ids, r.finish) for r in decoder.serve(asked)] == want
    assert [(r.ids, r.finish) for r in decoder.serve(asked, refill=False)] == want
    decoder = GraphDecoder(model, 7, 96, graph=False)  # more rows: sums are left to the norms
    assert [(r.ids, r.finish) for r in decoder.serve(asked, few=2)] == want


@pytest.mark.parametrize("rows", [2, 6])
@pytest.mark.parametrize("name", [*MECHANISMS, "gpt2"])
def test_graphs_give_the_logits_of_the_plain_model(name: str, rows: int) -> None:
    decoder = GraphDecoder(build(name), rows, 96, graph=False)
    assert largest_gap(decoder, [r.ids for r in requests(rows)], 6) < BOUND


DRAWN = [{"top_k": 20, "top_p": 0.8, "seed": 3}, {"min_p": 0.05}, {}]


@pytest.mark.parametrize("settings", DRAWN)
def test_graphs_draw_as_the_engine_draws(settings: dict) -> None:
    model, asked = build("gqa"), requests(temperature=1.1, **settings)
    decoder = GraphDecoder(model, 4, 96, graph=False)
    answers = decoder.serve(asked)
    assert [(r.ids, r.finish) for r in answers] == by_engine(model, asked)
    assert ties(model, asked, answers) <= FEW


@pytest.mark.parametrize("settings", [{}, *({"temperature": 1.1} | s for s in DRAWN)])
def test_decoder_that_is_a_little_wrong_is_noticed(settings: dict) -> None:
    model, asked = build("gqa"), requests(**settings)
    decoder = GraphDecoder(model, 4, 96, graph=False)
    answers = decoder.serve(asked)
    assert ties(model, asked, answers) <= FEW
    for block in decoder.fast.tower.blocks:
        block.attention.scale *= 1.01
    assert largest_gap(decoder, [r.ids for r in asked[:4]], 6) > 10 * BOUND
    answers[3].ids[0] = (answers[3].ids[0] + 48) % 97
    with pytest.raises(AssertionError, match="request 3: token 0"):
        ties(model, asked, answers)


def test_graphs_refuse_what_they_cannot_do() -> None:
    model = build("gqa")
    with pytest.raises(UsageError, match="on a GPU|on cpu"):
        GraphDecoder(model, 1, 96, graph=True)
    with pytest.raises(UsageError, match="context is 96"):
        GraphDecoder(model, 1, 97, graph=False)
    with pytest.raises(UsageError, match="no CUDA graph"):
        GraphDecoder(regard.build("t5-small", layers=1), graph=False)
    decoder = GraphDecoder(model, 1, 64, graph=False)
    for wrong, words in (
        (Request([1] * 60, Settings(max_new_tokens=5)), "do not fit"),
        (Request([97]), "not in 0..96"),
        (Request([]), "empty"),
        (Request([1], Settings(max_new_tokens=2, beams=2)), "beams"),
    ):
        with pytest.raises(UsageError, match=words):
            decoder.serve([wrong])


def test_packs_hold_every_token_once() -> None:
    texts, rows = [[4, 5, 6], [7] * 70, [8]], [5, 0, 3]
    t, n, s = sizes = gpu_prompt.sizes_of(texts)
    assert (t, n, s) == (128, 4, 96)
    pack = gpu_prompt.Pack.of(torch.tensor(gpu_prompt.flat(texts, rows, sizes)), sizes)
    assert pack.ids[pack.last].tolist() == [6, 7, 8, 8] and pack.rows.tolist() == [5, 0, 3, 3]
    assert torch.equal(pack.grid.flatten()[pack.back][:74], torch.arange(74))
    assert (pack.row[73:] == 3).all() and (pack.pos[73:] == 0).all() and (pack.ids[73:] == 8).all()
    for wide in range(1, 5000):
        up = gpu_prompt.up(wide)
        assert wide <= up <= max(wide + 63, wide * 5 // 4)


def test_watched_model_is_not_decoded_where_no_probe_can_see() -> None:
    watched = regard.Probe().on(build("gqa"))
    with pytest.raises(UsageError, match="a probe watches it. Use regard.generate"):
        GraphDecoder(watched, 1, 32, graph=False)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_graphs_end_a_request_without_numbers_as_the_engine_does(
    name: str, value: float, settings: dict
) -> None:
    """Requests that read a spoilt token, given or drawn; those before, beside and after them in the same slots are as
    ever."""
    model, bad = build(name, tied=False), 96
    with torch.no_grad():
        model.embedding.weight[bad] = value
    clean = [Request([i + 1, i + 2], Settings(max_new_tokens=5, **settings)) for i in range(6)]
    spoilt = [Request([3, bad, 4, 5, 6, 7], Settings(max_new_tokens=6, **settings))]
    spoilt += [Request([3, 4, 5, bad], Settings(max_new_tokens=1, **settings))]
    asked = [*clean[:2], *spoilt, *clean[2:4], *spoilt, *clean[4:]]
    for rows in (1, 3):
        found = GraphDecoder(model, rows, 96, graph=False, look=2).serve(asked, refill=False)
        assert [(r.ids, r.finish) for r in found] == by_engine(model, asked)
        for r, answer in zip(asked, found, strict=True):
            # The last token of a whole answer is written and not read.
            read = [*r.ids, *answer.ids][: len(r.ids) + r.settings.max_new_tokens - 1]
            assert answer.finish == ("error" if bad in read else "length")
            assert (answer.finish == "error") == ("not a number" in str(answer.error))
        assert sum(r.finish == "length" for r in found) >= 3


def test_greedy_choice_without_a_greatest_number_is_none() -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[1.0, 3.0, 3.0], [nan, 1.0, 2.0], [-inf] * 3, [inf, 0.0, 1.0], [-inf, -5.0, -inf]]
    assert gpu_sample.greedy(torch.tensor(rows)).tolist() == [1, -1, -1, -1, 1]


def test_prepared_model_is_refused_in_a_sentence() -> None:
    with pytest.raises(UsageError, match="prepared in bf16.*give the original"):
        GraphDecoder(regard.prepare(build("gqa"), "bf16"), 1, 32, graph=False)

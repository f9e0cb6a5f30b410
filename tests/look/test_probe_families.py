"""Whatever the model, backend and cache, and whether it runs, writes or learns: a probe changes no bit of it."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.attention import BACKENDS
from regard.attention.latent import LatentAttention
from regard.data.feed import Batch
from regard.errors import UsageError
from regard.fast.train import checkpointed, joined, precision
from regard.models import EncoderDecoder
from regard.models.embedding import PatchEmbedding
from regard.models.recurrent import Seq2Seq
from regard.see.probe import Probe
from regard.training.objectives import causal, seq2seq
from tests.checkpoint.test_native import tiny
from tests.decode.test_lean import DECODERS, PAIRS, made, story
from tests.wide import crossed, wide

WRITERS = "gpt2 llama mistral-7b mixtral-8x7b qwen2-0.5b qwen3-0.6b deepseek-v2-lite deepseek-v3 deepseek-v3.2 gru-lm"
READERS = "bert-base roberta-base distilbert-base vit-small deit-small"
TWO = "vaswani-base t5-small bart-base marian bahdanau luong captioner"
ALL, PICTURES = f"{WRITERS} {READERS} {TWO}".split(), ("vit-small", "deit-small", "captioner")
FEW = ["gpt2", "mistral-7b", "mixtral-8x7b", "deepseek-v3.2", "gru-lm", "t5-small", "luong"]
families = pytest.mark.parametrize("name", wide(ALL, keep=[*FEW, "bert-base", "vit-small"]))
decoders = pytest.mark.parametrize("name", wide(f"{WRITERS} {TWO}".split(), keep=FEW))
KINDS = ("weight", "score", "norm", "chosen")
PLAIN = [backend for backend in BACKENDS if backend != "flex"]


def given(model: Any, size: int = 7) -> tuple[Tensor, dict[str, Any]]:
    """A batch of two for any model: what it reads, and its source where it has one."""
    torch.manual_seed(1)
    ids, image = torch.randint(3, 50, (2, size)), torch.randn(2, 3, 12, 12)
    if isinstance(model, (EncoderDecoder, Seq2Seq)):
        pictures = isinstance(getattr(model, "source", None), PatchEmbedding)
        return ids, {"source": image if pictures else torch.randint(3, 50, (2, 9))}
    return (image if isinstance(model.embedding, PatchEmbedding) else ids), {}


def assert_whole(probe: Probe) -> None:
    for site, calls in probe.maps.items():
        for weight, score, norm, chosen in zip(
            calls, *(probe.of(kind)[site] for kind in KINDS[1:]), strict=True
        ):
            total = chosen.any(-1).expand(weight.shape[:3]).float()  # padding sees nothing: 0
            torch.testing.assert_close(weight.sum(-1), total)
            torch.testing.assert_close(score.softmax(-1).nan_to_num(0.0), weight)
            assert (weight[~chosen.expand_as(weight)] == 0).all() and chosen.shape[1] == 1
            assert (chosen.expand_as(score) == (score > -torch.inf)).all()
            assert norm.shape == weight.shape and (norm >= 0).all()


@families
@torch.no_grad()
def test_probe_changes_no_logit_of_any_family_on_any_backend(name: str) -> None:
    model = tiny(name)
    x, more = given(model)
    for backend in PLAIN:
        probe = Probe(what=KINDS)
        want = model(x, **more, backend=backend)
        assert torch.equal(model(x, **more, backend=backend, probe=probe), want)
        assert probe.maps or name == "gru-lm"
        assert all(chosen.any(-1).all() for (chosen,) in probe.of("chosen").values())
        assert_whole(probe)


@pytest.mark.parametrize("name", [n for n in ALL if n not in PICTURES])
@torch.no_grad()
def test_probe_changes_no_logit_of_a_padded_batch(name: str) -> None:
    model, probe = tiny(name), Probe(what=KINDS)
    x, more = given(model)
    more |= {"source_lengths": [9, 5]} if more else {}
    assert torch.equal(model(x, [7, 3], **more, probe=probe), model(x, [7, 3], **more))
    assert_whole(probe)
    for site, (chosen,) in probe.of("chosen").items():
        real = 3 if site.endswith(".self") and "encoder" not in site else 5
        assert chosen[0].any() and not chosen[1, ..., real:].any()


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
@torch.no_grad()
def test_probe_changes_no_logit_of_either_form_of_mla(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatentAttention, "core_attention", getattr(LatentAttention, form))
    model, probe = tiny(name), Probe(what=KINDS)
    x, _ = given(model)
    assert torch.equal(model(x, [7, 3], probe=probe), model(x, [7, 3]))
    assert_whole(probe)


@torch.no_grad()
def test_probe_of_a_sparse_model_marks_fewer_keys_than_are_seen() -> None:
    model, probe = tiny("deepseek-v3.2"), Probe(what="chosen")
    model(given(model)[0], probe=probe)
    for (chosen,) in probe.of("chosen").values():
        assert chosen.sum(-1).amax() == 5 and not chosen.triu(1).any()  # topk


LAYOUTS: dict[str, dict[str, int]] = {
    "contiguous": {"capacity": 2},
    "paged": {"pages": 16, "page": 4},
    "ring": {"window": 5, "chunk": 4},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@decoders
@torch.no_grad()
def test_probe_changes_no_logit_of_cached_decoding(name: str, layout: str) -> None:
    model, probe = tiny(name), Probe(what=KINDS)
    x, more = given(model)

    def logits(**watch: Any) -> Tensor:
        cache, out = model.cache(2, layout, **LAYOUTS[layout]), []
        for i, part in enumerate(x.split([4, 1, 1, 1], 1)):
            out.append(model(part, cache=cache, **(more if i == 0 else {}), **watch))
        return torch.cat(out, 1)

    assert torch.equal(logits(probe=probe), logits())
    assert all(len(calls) == 4 for site, calls in probe.maps.items() if "encoder" not in site)
    assert_whole(probe)


@families
def test_probe_changes_no_gradient(name: str) -> None:
    model, probe = tiny(name), Probe(what=KINDS)
    x, more = given(model)

    def gradients(**watch: Any) -> list[Tensor]:
        model.train().zero_grad()
        torch.manual_seed(5)  # for dropout
        model(x, **more, **watch).float().square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    want, found = gradients(), gradients(probe=probe)
    assert want and len(want) == len(found)
    assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))
    assert not any(a.requires_grad for calls in probe.maps.values() for a in calls)


@pytest.fixture
def _switched() -> None:
    """Where oneDNN has no bf16 product, torch's first one switches it off for good: let that be behind us."""
    torch.nn.functional.linear(*torch.ones(2, 64, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "name, number",
    crossed(["gpt2", "deepseek-v3.2", "t5-small", "bahdanau", "luong"], ["fp32", "bf16"]),
)
@pytest.mark.usefixtures("_switched")
def test_probe_changes_no_bit_of_a_training_step(name: str, number: str) -> None:
    """Of a trainer's objective, with blocks recomputed and products joined: loss, gradients, weights after it."""
    model, probe = tiny(name), Probe(what=KINDS)
    if name not in ("bahdanau", "luong"):
        model = joined(checkpointed(model))
    x, more = given(model)
    batch = Batch(x[:, :-1], x[:, 1:], **more)

    def step(model: Any, watched: Any) -> list[Tensor]:
        torch.manual_seed(5)  # for dropout
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        with precision(number, "cpu"):
            loss, count = (seq2seq if more else causal)(watched, batch)
        (loss / count).backward()
        optimizer.step()
        return [
            loss,
            *(p.grad for p in model.parameters() if p.grad is not None),
            *model.parameters(),
        ]

    other = copy.deepcopy(model).train()
    want, found = step(other, other), step(model.train(), probe.on(model))
    assert len(want) == len(found) > 10
    assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))
    assert probe.maps and all(len(calls) == 1 for calls in probe.maps.values())


def test_probe_refuses_compiled_code() -> None:
    """The compiler joins operations where it can: cut by a probe, they would round otherwise."""
    model, probe = tiny("gpt2"), Probe()
    model.tower.compile(backend="eager")
    x, _ = given(model)
    with torch.no_grad():
        want = model(x)
        with pytest.raises(UsageError, match="leave compile out"):
            model(x, probe=probe)
        assert torch.equal(model(x), want) and not probe.maps


def test_probe_of_recomputed_blocks_records_the_forward_alone() -> None:
    model, probe = checkpointed(tiny("gpt2").train()), Probe()
    model(given(model)[0], probe=probe).mean().backward()
    assert [len(calls) for calls in probe.maps.values()] == [1, 1]


@families
@pytest.mark.usefixtures("_switched")
@torch.no_grad()
def test_probe_changes_no_logit_under_autocast(name: str) -> None:
    model, probe = tiny(name), Probe(what=KINDS)
    x, more = given(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x, **more, probe=probe), model(x, **more))
    assert_whole(probe)


def test_probe_under_autocast_is_exact() -> None:
    model, exact, probe = (
        tiny("gpt2"),
        Probe(layers=[0], what="score"),
        Probe(layers=[0], what="score"),
    )
    x, _ = given(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = model(x)
        assert torch.equal(model(x, probe=probe), want)
    model(x, probe=exact)
    a, b = probe.of("score")["0.self"][0], exact.of("score")["0.self"][0]
    seen = b > -torch.inf
    assert (
        a.dtype == torch.float32
        and (a[seen] - b[seen]).abs().max() < 0.02 * b[seen].abs().max() + 1e-3
    )


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"beams": 3},
    "drawn": {"temperature": 0.9, "top_p": 0.95, "seed": 3, "samples": 2},
    "looked up": {"lookup": 3},
    "pages": {"layout": "paged"},
}


PLAIN_WRITERS = "t5-small vaswani-base bahdanau luong gpt2 mistral-7b deepseek-v3.2"
PREPARED = "t5-small:fp32 t5-small:bf16 gpt2:bf16 mistral-7b:int8 bahdanau:fp32"


@pytest.mark.parametrize("name, way", crossed(f"{PLAIN_WRITERS} {PREPARED}".split(), WAYS))
def test_probe_changes_no_answer_of_generate(name: str, way: str) -> None:
    name, _, number = name.partition(":")
    model, probe = tiny(name), Probe(rows=[-1], what=KINDS)
    if way == "looked up" and name in ("bahdanau", "luong"):
        pytest.skip("a recurrent state takes no guess back")
    if number:
        model = regard.prepare(model, number)
    settings: dict[str, Any] = {"max_new_tokens": 5, "eos": [], **WAYS[way]}
    prompts = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14]]
    want = regard.generate(model, prompts, **settings)
    found = regard.generate(probe.on(model), prompts, **settings)
    assert [(r.ids, r.logprobs, r.score) for r in found] == [
        (r.ids, r.logprobs, r.score) for r in want
    ]
    assert_whole(probe)
    rows = 2 * settings.get("beams", settings.get("samples", 1))
    for site, calls in probe.maps.items():
        if "encoder" not in site:
            assert {a.shape[2] for a in calls} == {1}  # one row for each call,
            assert way == "looked up" or calls[-1].shape[0] == rows  # of every beam or sample


@pytest.mark.parametrize(
    "name, number", crossed([*DECODERS, *PAIRS], ["fp32", "bf16", "int8", "int4"])
)
@torch.inference_mode()
def test_probe_changes_no_logit_of_a_prepared_model(name: str, number: str) -> None:
    """Over a ragged prompt, and steps between which rows trade places."""
    model, probe = regard.prepare(made(name), number), Probe(what=KINDS)
    some = Probe(layers=[1], heads=[0], rows=[-1])
    want = story(model, name)
    assert torch.equal(story(probe.on(model), name), want)
    assert torch.equal(story(some.on(model), name), want)
    assert_whole(probe)


def test_probe_of_beams_that_share_a_source_shows_each_its_own() -> None:
    """The first beam search step of t5, cross maps: as if the texts so far were fed one by one."""
    model, probe = tiny("t5-small"), Probe(layers=["decoder.1.cross"])
    source = [[5, 6, 7, 8], [9, 10, 11, 12]]
    regard.generate(probe.on(model), source, beams=2, max_new_tokens=2, eos=[])
    step, one = probe.maps["decoder.1.cross"][1], Probe(layers=["decoder.1.cross"])
    assert step.shape[::2] == (4, 1)
    for i, ids in enumerate(source):
        both = regard.generate(model, [ids], beams=2, n_best=2, max_new_tokens=1, eos=[])
        for j, result in enumerate(both):
            model(torch.tensor([[0, *result.ids]]), source=torch.tensor([ids]), probe=one)
            want = one.maps["decoder.1.cross"].pop()[0, :, -1]
            torch.testing.assert_close(step[2 * i + j, :, 0], want)


def test_probe_on_a_model_follows_its_invariant_twin() -> None:
    model, probe = tiny("gpt2"), Probe()
    settings: dict[str, Any] = {"max_new_tokens": 3, "eos": [], "invariant": True}
    want = regard.generate(model, [[5, 6, 7]], **settings)
    found = regard.generate(probe.on(model), [[5, 6, 7]], **settings)
    assert found[0].logprobs == want[0].logprobs and len(probe.maps["0.self"]) == 3

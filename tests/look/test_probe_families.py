"""Whatever the model, backend and cache, and whether it runs, writes or learns: a probe changes no bit of it."""

from typing import Any

import pytest
import torch

import regard
from regard.attention import BACKENDS
from regard.look.probe import Probe
from regard.models import EncoderDecoder
from regard.models.recurrent import Seq2Seq
from regard.models.vision import PatchEmbedding
from regard.train.memory import checkpointed
from tests.checkpoint.test_native import tiny

WRITERS = "gpt2 llama mistral-7b mixtral-8x7b qwen2-0.5b qwen3-0.6b deepseek-v2-lite deepseek-v3 deepseek-v3.2 gru-lm"
READERS = "bert-base roberta-base distilbert-base vit-small deit-small"
TWO = "vaswani-base t5-small bart-base marian bahdanau luong captioner"
families = pytest.mark.parametrize("name", f"{WRITERS} {READERS} {TWO}".split())
decoders = pytest.mark.parametrize("name", f"{WRITERS} {TWO}".split())
KINDS = ("weight", "score", "norm", "chosen")
PLAIN = [backend for backend in BACKENDS if backend != "flex"]


def given(model: Any, size: int = 7) -> tuple[torch.Tensor, dict[str, Any]]:
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


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@decoders
@torch.no_grad()
def test_probe_changes_no_logit_of_cached_decoding(name: str, layout: str) -> None:
    model, probe = tiny(name), Probe(what=KINDS)
    x, more = given(model)
    options = {"pages": 16, "page": 4} if layout == "paged" else {}

    def logits(**watch: Any) -> torch.Tensor:
        cache, out = model.cache(2, layout, **options), []
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

    def gradients(**watch: Any) -> list[torch.Tensor]:
        model.train().zero_grad()
        torch.manual_seed(5)  # for dropout
        model(x, **more, **watch).float().square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    want, found = gradients(), gradients(probe=probe)
    assert want and len(want) == len(found)
    assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))
    assert not any(a.requires_grad for calls in probe.maps.values() for a in calls)


def test_probe_of_recomputed_blocks_records_the_forward_alone() -> None:
    model, probe = checkpointed(tiny("gpt2").train()), Probe()
    model(given(model)[0], probe=probe).mean().backward()
    assert [len(calls) for calls in probe.maps.values()] == [1, 1]


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


@pytest.mark.parametrize(
    "name", ["t5-small", "vaswani-base", "bahdanau", "luong", "gpt2", "deepseek-v3.2"]
)
@pytest.mark.parametrize("beams", [1, 3])
def test_probe_changes_no_answer_of_generate(name: str, beams: int) -> None:
    model, probe = tiny(name), Probe(rows=[-1], what=KINDS)
    settings: dict[str, Any] = {"beams": beams, "max_new_tokens": 5, "eos": []}
    prompts = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14]]
    want = regard.generate(model, prompts, **settings)
    found = regard.generate(probe.on(model), prompts, **settings)
    assert [(r.ids, r.logprobs, r.score) for r in found] == [
        (r.ids, r.logprobs, r.score) for r in want
    ]
    assert_whole(probe)
    for site, calls in probe.maps.items():
        if "encoder" not in site:
            assert {a.shape[2] for a in calls} == {1}  # one row for each call,
            assert calls[-1].shape[0] == 2 * beams  # of every beam


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

"""Figures of a model on held-out batches: by hand, and leaving the model that is in training as it was."""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import sacrebleu
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import models, pre_tokenizers, processors

import regard
from regard.checkpoint.hf import Origin
from regard.data.feed import IGNORE, Batch
from regard.errors import UsageError
from regard.layers import Answer, Classify, Tag
from regard.text import Tokenizer, needed
from regard.training import measure as module
from regard.training import objectives
from regard.training.losses import Smoothing
from regard.training.measure import Measured, context_of, measure, spread, translations
from tests.text import tiny

SMALL: dict[str, Any] = dict(layers=1, dim=16, heads=2, ffn_dim=24)
close = pytest.approx


class Given:
    """A feed of these batches."""

    fingerprint, epoch = "given", 1

    def __init__(self, *batches: Batch):
        self.batches = batches

    def batch(self, k: int, rank: int = 0, world: int = 1) -> Batch:
        return self.batches[k % len(self.batches)]

    def evaluation(self) -> Iterator[Batch]:
        return iter(self.batches)

    def describe(self) -> str:
        return "given"


def lm(**changes: Any) -> tuple[Any, Tokenizer, Given]:
    tokenizer = needed(Tokenizer.from_files(tiny.gpt2()))
    model = regard.build("gpt2", vocab=400, max_len=24, dropout=0.1, **{**SMALL, **changes})
    model.origin = Origin("gpt2", files=tiny.gpt2())
    ids = torch.tensor([tokenizer.encode("The dog plays in the park with a ball.")[:13]] * 2)
    first = Batch(ids[:, :-1], ids[:, 1:])
    labels = ids[:, 1:].clone()
    labels[:, 5:] = IGNORE
    return model, tokenizer, Given(first, Batch(ids[:, :-1], labels, torch.tensor([5, 5])))


# --- losses -------------------------------------------------------------------------------------------------------


def test_loss_is_the_mean_over_all_labels_and_perplexity_its_exp() -> None:
    model, tokenizer, feed = lm()
    total = count = 0.0
    for batch in feed.evaluation():
        logits = model(batch.ids).detach().flatten(0, 1)
        total += float(F.cross_entropy(logits, batch.labels.flatten(), reduction="sum"))
        count += batch.tokens
    found = measure(model, "lm", feed, tokenizer, objectives.causal, ["perplexity", "loss"])
    assert list(found.values) == ["perplexity", "loss"] and found.signatures == {}
    assert found.values["loss"] == close(total / count, rel=1e-5)
    assert found.values["perplexity"] == close(torch.tensor(total / count).exp().item(), rel=1e-4)


def test_perplexity_leaves_label_smoothing_out() -> None:
    model, tokenizer, feed = lm()
    smooth = partial(objectives.causal, smoothing=Smoothing(0.2))
    plain = measure(model, "lm", feed, tokenizer, objectives.causal, ["loss", "perplexity"])
    found = measure(model, "lm", feed, tokenizer, smooth, ["loss", "perplexity"])
    assert found.values["perplexity"] == close(plain.values["perplexity"])
    assert found.values["loss"] != close(plain.values["loss"], rel=1e-6)


def test_loss_and_perplexity_cost_one_pass() -> None:
    model, tokenizer, feed = lm()
    calls = []

    def counted(model: Any, batch: Batch) -> Any:
        calls.append(batch)
        return objectives.causal(model, batch)

    measure(model, "lm", feed, tokenizer, counted, ["loss"], samples=0)
    assert len(calls) == 2
    smooth = partial(objectives.causal, smoothing=Smoothing(0.2))
    for loss in (objectives.causal, smooth):
        calls.clear()
        hook = model.tower.register_forward_hook(lambda *_: calls.append("tower"))
        measure(model, "lm", feed, tokenizer, loss, ["loss", "perplexity"], samples=0)
        hook.remove()
        assert calls.count("tower") == 2


# --- a model in training ------------------------------------------------------------------------------------------


def trained(measured: bool, kind: str) -> dict[str, torch.Tensor]:
    """Three steps with dropout, a measurement between them or not."""
    torch.manual_seed(3)
    if kind == "lm":
        model, tokenizer, feed = lm()
        task, loss, names = "lm", objectives.causal, ["loss"]
    else:
        model, tokenizer, feed = pairs(dropout=0.1)
        task, loss, names = "seq2seq", objectives.seq2seq, ["bleu", "loss"]
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(3):
        part, count = loss(model, feed.batch(k))
        (part / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        if measured:
            measure(model, task, feed, tokenizer, loss, names, samples=2)
    return {name: x.clone() for name, x in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["lm", "seq2seq"])
def test_measuring_changes_no_bit_of_training(kind: str) -> None:
    plain, watched = trained(False, kind), trained(True, kind)
    assert plain.keys() == watched.keys() and all(plain[n].equal(watched[n]) for n in plain)


def test_modes_are_restored_part_by_part_even_after_an_error() -> None:
    model, tokenizer, feed = lm()
    model.train()
    model.embedding.eval()  # a frozen part

    def fails(model: Any, batch: Batch) -> Any:
        assert not model.training
        raise RuntimeError("broken")

    before = {name: m.training for name, m in model.named_modules()}
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="broken"):
        measure(model, "lm", feed, tokenizer, fails, ["loss"])
    measure(model, "lm", feed, tokenizer, objectives.causal, ["loss"])
    assert {name: m.training for name, m in model.named_modules()} == before
    assert torch.get_rng_state().equal(state)


def test_compiled_models_are_decoded_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, feed = lm()
    stances = []

    class Stance:
        def __init__(self, name: str):
            stances.append(name)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.compiler, "set_stance", Stance)
    measure(model, "lm", feed, tokenizer, objectives.causal, ["loss"], samples=1)
    assert stances == []
    model.tower._compiled_call_impl = model.tower._call_impl  # as module.compile() leaves it
    measure(model, "lm", feed, tokenizer, objectives.causal, ["loss"], samples=1)
    assert stances == ["force_eager"]


# --- texts --------------------------------------------------------------------------------------------------------


WORDS = "the dog plays in park with a ball ein hund der spielt im mit dem".split()  # noqa: SIM905


@cache
def words() -> dict[str, bytes]:
    """A tokenizer of whole words; 0 is the start, 1 the end."""
    vocab = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {w: i + 3 for i, w in enumerate(WORDS)}
    core = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    return {
        "tokenizer.json": core.to_str().encode(),
        "tokenizer_config.json": tiny.dump({"eos_token": "</s>", "pad_token": "<pad>"}),
        "generation_config.json": tiny.dump({"decoder_start_token_id": 0}),
    }


LINES = ["the dog plays", "ein hund", "a ball in the park with the dog"]


def pairs(**changes: Any) -> tuple[Any, Tokenizer, Given]:
    """Sources, with what the model itself says to them for targets, but for one."""
    tokenizer = needed(Tokenizer.from_files(words()))
    torch.manual_seed(2)
    model = regard.build("t5-small", vocab=len(WORDS) + 3, **{**SMALL, "dropout": 0.0, **changes})
    for p in model.parameters():
        p.data *= 4  # so that what it says depends on the source
    model.origin = Origin("t5", files=words())
    sources = [tokenizer.encode(line) for line in LINES]
    said = translations(model, sources)
    said[1] = tokenizer.encode("der ball", special=False)
    whole = [paired(s, t) for s, t in zip(sources, said)]
    return model, tokenizer, Given(*whole, both(sources, said))


def paired(source: list[int], target: list[int]) -> Batch:
    ids, labels = torch.tensor([[0, *target]]), torch.tensor([[*target, 1]])
    return Batch(ids, labels, source=torch.tensor([source]))


def both(sources: list[list[int]], targets: list[list[int]]) -> Batch:
    """The first and the last example, padded."""
    one, other = paired(sources[0], targets[0]), paired(sources[2], targets[2])

    def joined(a: torch.Tensor, b: torch.Tensor, fill: int) -> torch.Tensor:
        width = max(a.shape[1], b.shape[1])
        return torch.cat([F.pad(x, (0, width - x.shape[1]), value=fill) for x in (a, b)])

    sizes = [
        torch.tensor([x.shape[1], y.shape[1]])
        for x, y in ((one.ids, other.ids), (one.source, other.source))
    ]  # type: ignore[union-attr]
    return Batch(
        joined(one.ids, other.ids, 0),
        joined(one.labels, other.labels, IGNORE),
        sizes[0],
        joined(one.source, other.source, 0),  # type: ignore[arg-type]
        sizes[1],
    )


def test_translations_are_compared_with_the_labels_text() -> None:
    model, tokenizer, feed = pairs()
    found = measure(
        model, "seq2seq", feed, tokenizer, objectives.seq2seq, ["exact", "bleu", "chrf"], samples=9
    )
    assert found.values["exact"] == close(4 / 5)
    assert len(found.samples) == 5
    wrong = [s for s in found.samples if s["text"] != s["reference"]]
    assert [(s["source"], s["reference"]) for s in wrong] == [("ein hund", "der ball")]
    texts, references = ([s[k] for s in found.samples] for k in ("text", "reference"))
    assert all(texts) and len(set(texts)) == 3
    assert found.values["bleu"] == close(sacrebleu.corpus_bleu(texts, [references]).score)
    assert found.signatures == {}


def test_translations_are_those_of_translate_whatever_the_beams() -> None:
    model, tokenizer, _ = pairs()
    for beams in (1, 3):
        found = translations(model, [tokenizer.encode(line) for line in LINES], beams=beams)
        assert [tokenizer.decode(ids) for ids in found] == regard.translate(
            model, LINES, beams=beams
        )


def test_samples_bound_what_is_decoded_for_a_loss_and_are_spread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokenizer, feed = pairs()
    sizes = []

    def counted(model: Any, sources: list[list[int]], **settings: Any) -> list[list[int]]:
        sizes.append(len(sources))
        return translations(model, sources, **settings)

    monkeypatch.setattr(module, "translations", counted)
    ask = partial(measure, model, "seq2seq", feed, tokenizer, objectives.seq2seq)
    assert len(ask(["bleu"], samples=1).samples) == 1
    assert len(ask(["loss"], samples=2).samples) == 2
    ask(["loss"], samples=0)
    assert sizes == [5, 2]
    assert spread(10, 3) == [1, 5, 8] and spread(2, 5) == [0, 1] and spread(3, None) == [0, 1, 2]


def test_language_model_goes_on_from_held_out_text() -> None:
    model, tokenizer, feed = lm()
    found = measure(model, "lm", feed, tokenizer, objectives.causal, ["loss"], samples=3)
    assert len(found.samples) == 3 and all(set(s) == {"source", "text"} for s in found.samples)
    assert "The dog plays in the park".startswith(found.samples[0]["source"])
    again = measure(model, "lm", feed, tokenizer, objectives.causal, ["loss"], samples=3)
    assert again.samples == found.samples
    full = regard.build("gpt2", vocab=400, max_len=6, **SMALL)
    full.origin = model.origin
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    short = measure(full, "lm", Given(Batch(ids, ids)), tokenizer, objectives.causal, ["loss"])
    assert context_of(full) == 6 and len(short.samples) == 1


# --- labels -------------------------------------------------------------------------------------------------------


def encoder(head: Any) -> Any:
    return regard.build("bert-base", vocab=300, max_len=16, dropout=0.0, **SMALL, head=head)


def rows(*sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(5, 300, (len(sizes), max(sizes)))
    return ids, torch.tensor(sizes)


def test_classes_are_judged_by_the_highest_logit() -> None:
    model = encoder(Classify(3))
    ids, lengths = rows(7, 4, 6, 7)
    said = model(ids, lengths).argmax(-1)
    labels = said.clone()
    labels[1] = (said[1] + 1) % 3
    labels[3] = IGNORE
    feed = Given(Batch(ids, labels, lengths))
    tokenizer = needed(Tokenizer.from_files(tiny.bert()))
    names = ["accuracy", "f1", "loss"]
    classes = ["low", "middle", "high"]
    found = measure(model, "classify", feed, tokenizer, objectives.classify, names, classes=classes)
    assert found.values["accuracy"] == close(2 / 3) and "macro" in found.signatures["f1"]
    want = F.cross_entropy(model(ids, lengths)[:3], labels[:3])
    assert found.values["loss"] == close(want.item(), rel=1e-5)
    first = found.samples[0]
    assert first["text"] == first["reference"] == classes[int(said[0])]
    assert first["source"] == tokenizer.decode(ids[0].tolist())
    assert len(found.samples) == 3 and found.samples[1]["text"] != found.samples[1]["reference"]


def test_loss_and_labels_cost_one_call() -> None:
    model = encoder(Classify(3))
    ids, lengths = rows(7, 4)
    feed, calls = Given(Batch(ids, torch.tensor([0, 1]), lengths)), []
    model.register_forward_hook(lambda *_: calls.append(1))
    for names in (["accuracy"], ["loss", "accuracy", "f1"]):
        measure(model, "classify", feed, None, objectives.classify, names)
    assert len(calls) == 2


def test_tags_are_judged_where_they_count() -> None:
    model = encoder(Tag(3))
    ids, lengths = rows(6, 4)
    said = model(ids, lengths).argmax(-1)
    labels = torch.full_like(said, IGNORE)
    labels[0, 1:5] = said[0, 1:5]
    labels[1, 2] = (said[1, 2] + 1) % 3
    feed = Given(Batch(ids, labels, lengths))
    names = ["accuracy", "f1"]
    found = measure(model, "tag", feed, None, objectives.classify, names, classes=["N", "V", "D"])
    assert found.values["accuracy"] == close(4 / 5) and "macro" in found.signatures["f1"]
    assert found.samples[0]["text"].split() == ["NVD"[i] for i in said[0, 1:5].tolist()]
    found = measure(
        model, "tag", feed, None, objectives.classify, names, classes=["O", "B-x", "I-x"]
    )
    assert "spans" in found.signatures["f1"]


def test_answers_are_the_best_span_that_ends_after_it_begins() -> None:
    logits = torch.zeros(1, 5, 2)
    logits[0, 3, 0], logits[0, 1, 1], logits[0, 4, 1] = 5.0, 9.0, 6.0  # 3..1 would be highest
    assert module._spans(logits, None).tolist() == [[3, 4]]
    logits[0, 0, 0] = 1.0
    assert module._spans(logits, torch.tensor([4])).tolist() == [[1, 1]]
    logits[0, 0, 1] = 11.0  # no answer
    assert module._spans(logits, torch.tensor([4])).tolist() == [[0, 0]]
    model = encoder(Answer())
    ids, lengths = rows(7, 5, 6)
    said = module._spans(model(ids, lengths), lengths)
    labels = said.clone()
    labels[1] = IGNORE  # cut off
    found = measure(
        model,
        "answer",
        Given(Batch(ids, labels, lengths)),
        None,
        objectives.answer,
        ["exact", "f1"],
    )
    assert found.values == {"exact": 1.0, "f1": 1.0} and len(found.samples) == 2


def test_pictures_are_judged_like_texts() -> None:
    model = regard.build("vit-small", size=8, patch=4, channels=1, **SMALL, labels=3)
    x = torch.randn(5, 1, 8, 8)
    said = model(x).argmax(-1)
    found = measure(
        model,
        "image",
        Given(Batch(x, said)),
        None,
        objectives.classify,
        ["accuracy"],
        classes="abc",
    )
    assert found.values == {"accuracy": 1.0} and found.samples[0]["source"] == "example 1"


# --- mistakes -----------------------------------------------------------------------------------------------------


def test_mistakes_are_told() -> None:
    model, tokenizer, feed = lm()
    with pytest.raises(UsageError, match="bleu does not suit the task lm; choose loss, perplexity"):
        measure(model, "lm", feed, tokenizer, objectives.causal, ["bleu"])
    with pytest.raises(UsageError, match="nothing is held out"):
        measure(model, "lm", Given(), tokenizer, objectives.causal, ["loss"])
    two, _, feed = pairs()
    with pytest.raises(UsageError, match="no tokenizer"):
        measure(two, "seq2seq", feed, None, objectives.seq2seq, ["bleu"])
    assert measure(two, "seq2seq", feed, None, objectives.seq2seq, ["loss"]).samples == []
    assert Measured() == Measured({}, {}, [])

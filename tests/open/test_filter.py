"""A stranger adds a sampling filter by one record of FILTERS: every runner takes it, and the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import regard
from regard.decode.filters import FILTERS, Filter
from regard.decode.settings import Settings
from regard.errors import UsageError
from tests.open.stranger import home, promised
from tests.open.test_runners import PROMPTS, build


def only_multiples(logits: Tensor, of: Tensor) -> Tensor:
    """Keep the ids that `of` divides; 1 keeps all."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return logits.masked_fill(ids % of.long() != 0, -torch.inf)


@pytest.fixture
def multiples() -> Iterator[str]:
    FILTERS["only_multiples"] = Filter(only_multiples, (1.0, 100.0), neutral=1.0)
    yield "only_multiples"
    del FILTERS["only_multiples"]


@pytest.mark.parametrize("runner", ["torch", "native", "graph"])
def test_added_filter_is_taken_in_every_runner(multiples: str, runner: str) -> None:
    """Beside rows without it, and with filters that have forms of their own."""
    model = build()
    model = regard.prepare(model) if runner == "native" else model
    engine = regard.Engine(model, runner="graph" if runner == "graph" else "torch")
    given = {"max_new_tokens": 20, "eos": (), "temperature": 1.0, "top_k": 40}
    each = [{}, {multiples: 3}, {multiples: 7}]
    settings = [Settings.of(given | more) for more in each]
    pairs = zip(PROMPTS, settings, strict=True)
    numbers = [engine.submit(regard.Request(prompt, s, key=5)) for prompt, s in pairs]
    done = {event.request: event.done for event in engine.run() if event.done is not None}
    free, thirds, sevenths = (done[number][0].ids for number in numbers)
    assert all(i % 3 == 0 for i in thirds) and all(i % 7 == 0 for i in sevenths)
    assert any(i % 3 for i in free) and len(set(thirds)) > 2


def test_added_filter_is_a_setting_like_the_others(multiples: str) -> None:
    model = build()
    (out,) = regard.generate(
        model, [[1, 2]], temperature=0.9, only_multiples=5, max_new_tokens=8, eos=()
    )
    assert all(i % 5 == 0 for i in out.ids)
    assert Settings.of({multiples: 2}).only_multiples == 2.0 and Settings().only_multiples == 1.0
    with pytest.raises(
        UsageError, match="only_multiples is 101.0; give a number from 1.0 to 100.0"
    ):
        Settings.of({multiples: 101})
    with pytest.raises(UsageError, match="beam search does not draw"):
        Settings.of({multiples: 2, "beams": 2})


def test_unknown_filter_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'top_p'"):
        Settings(filters=(("topp", 0.5),))


def test_added_filter_is_a_field_of_the_server(multiples: str) -> None:
    """Of all that draws; taken, refused and told by its name, as ours are."""
    pytest.importorskip("msgspec")
    pytest.importorskip("uvicorn")
    from tests.serve.running import running

    body = {"model": "demo", "prompt": "12 + 30", "max_tokens": 12, "ignore_eos": True}
    path, chat = "/v1/completions", "/v1/chat/completions"
    talk = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    with running({"demo": "demo"}) as client:
        tokenizer = client.app.workers["demo"].tokenizer
        assert tokenizer is not None
        answer = client.post(path, {**body, multiples: 5, "logprobs": 0})
        tokens = answer["choices"][0]["logprobs"]["tokens"]
        fifths = {i for i in range(0, 512, 5)}
        assert {shown.encode() for shown in tokens} <= {tokenizer.token_bytes(i) for i in fifths}
        assert client.post(chat, {**talk, multiples: 3, "top_k": -1})["choices"]
        for wrong in (0, 101, "5"):
            for where, asked in ((path, body), (chat, talk)):
                error = client.post(where, {**asked, multiples: wrong}, 400)["error"]
                assert error["param"] == multiples
        # What a beam search refuses is named too.
        error = client.post(path, {**body, multiples: 5, "beams": 2}, 400)["error"]
        assert "beam search does not draw" in error["message"]
        # /v1/responses has OpenAI's fields.
        asked = {"model": "demo", "input": "Hi", multiples: 5}
        assert client.post("/v1/responses", asked, 400)["error"]["param"] == multiples
        parts = client.get("/openapi.json")["components"]["schemas"]
        field = {"anyOf": [{"type": "number", "minimum": 1.0, "maximum": 100.0}, {"type": "null"}]}
        for name in ("Completion", "Chat"):
            assert parts[name]["properties"][multiples] == {**field, "default": None}
            assert {*FILTERS} <= parts[name]["properties"].keys()


def test_filter_costs_as_many_files_as_the_architecture_says() -> None:
    assert home(FILTERS) == "regard/decode/filters.py"
    assert len({home(FILTERS)}) == promised("add a sampling filter")

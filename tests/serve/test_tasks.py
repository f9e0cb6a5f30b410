"""Encoders, encoder-decoders, several models, keys, and looks inside."""

import base64
import io
import json
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.decode.generate import tokenizer_of
from regard.layers import Classify
from regard.models.adapt import with_head
from regard.see.probe import Probe
from regard.serve.edge import new_key
from regard.serve.model_worker import Options
from tests.serve.running import Client, running
from tests.test_cli import SMALL, folder, put
from tests.text import tiny

# A model that reads pictures of 16 x 16 pixels.
SIGHT: dict[str, Any] = dict(size=16, patch=8, labels=3, dropout=0.0, **SMALL)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home, size = (
        tmp_path_factory.mktemp("models"),
        dict(vocab=300, max_len=24, dropout=0.0, **SMALL),
    )
    torch.manual_seed(0)
    words = regard.build("bert-base", **size)
    labels = with_head(regard.build("bert-base", **size), Classify(3))
    return {
        "words": put(words.save(home / "words"), tiny.bert()),
        "labels": put(labels.save(home / "labels"), tiny.bert()),
        "t5": folder("t5"),
        "gpt2": folder("gpt2"),
        "bare": folder("bare"),
        "captioner": folder("captioner"),
        "sight": regard.build("vit-base", **SIGHT).save(home / "sight"),
    }


@pytest.fixture(scope="module")
def client(folders: dict[str, Path]) -> Iterator[Client]:
    with running(dict(folders)) as client:
        yield client


TEXTS = ["the dog", "a little dog in the park"]
# What a model is asked for, where it serves that.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": [7, 8], "max_tokens": 2}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the dog"}], "max_tokens": 2}),
    "responses": ("/v1/responses", {"input": "the dog", "max_output_tokens": 2}),
    "translations": ("/v1/translations", {"input": "the dog", "max_tokens": 2}),
    "classify": ("/v1/classify", {"input": "the dog"}),
    "fill": ("/v1/fill", {"input": "the [MASK]"}),
    "embeddings": ("/v1/embeddings", {"input": "the dog"}),
    "look": ("/v1/look", {"input": "the dog"}),
}  # fmt: skip


def picture(form: str = "png", size: int = 16) -> str:
    """A data: URL."""
    image, out = pytest.importorskip("PIL.Image"), io.BytesIO()
    pixels = np.arange(size * size * 3, dtype=np.uint8).reshape(size, size, 3)
    image.fromarray(pixels).save(out, form)
    return f"data:image/{form};base64,{base64.b64encode(out.getvalue()).decode()}"


def test_a_model_serves_what_it_says_and_refuses_the_rest(client: Client) -> None:
    """Every model, asked for everything: an answer, or a 400 that names `model` (a chat without a template,
    `messages`)."""
    for about in client.get("/v1/models")["data"]:
        for kind, (path, body) in KINDS.items():
            body = {"model": about["id"], **body}
            if about["id"] == "sight" and kind == "classify":
                body["input"] = picture()
            if about["id"] == "t5" and kind == "look":
                body["source"] = "the dog"
            status, _, content = client.request("POST", path, body)
            assert (status == 200) == (kind in about["serves"]), (about, kind, content)
            if status != 200:
                error = json.loads(content)["error"]
                template = error["code"] == "no_chat_template"
                field = {"chat": "messages", "responses": "input"}[kind] if template else "model"
                assert (status, error["param"]) == (400, field), (about, kind, content)


def test_models_tell_their_context(client: Client) -> None:
    told = {m["id"]: m["context"] for m in client.get("/v1/models")["data"]}
    assert told == {"words": 24, "labels": 24, "gpt2": 96, "bare": 40, "t5": None} | {
        name: told[name] for name in ("captioner", "sight")
    }
    assert told["sight"] is None


@pytest.mark.parametrize("form", ["png", "jpeg"])
def test_pictures_are_classified(
    client: Client, folders: dict[str, Path], form: str, tmp_path: Path
) -> None:
    url, file = picture(form), tmp_path / f"picture.{form}"
    file.write_bytes(base64.b64decode(url.partition(",")[2]))
    ((*expected,),) = regard.classify(folders["sight"], [file])
    answer = client.post("/v1/classify", {"model": "sight", "input": [url, url]})
    for row in answer["data"]:
        assert [x["label"] for x in row["labels"]] == [name for name, _ in expected]
        np.testing.assert_allclose(
            [x["score"] for x in row["labels"]], [p for _, p in expected], rtol=1e-4
        )


def test_pictures_that_are_none(client: Client) -> None:
    good = picture()
    for url in (
        "the dog", "data:image/gif;base64,R0lGOD", good[:-40] + "!", "data:image/png;base64,aGVsbG8=",
        "http://127.0.0.1/a.png", "/etc/passwd", picture(size=5000),
    ):  # fmt: skip
        error = client.post("/v1/classify", {"model": "sight", "input": [good, url]}, 400)["error"]
        assert error["param"] == "input[1]", error


def test_each_model_says_what_it_serves(client: Client) -> None:
    serves = {m["id"]: set(m["serves"]) for m in client.get("/v1/models")["data"]}
    assert serves["words"] == {"fill", "embeddings", "look"}
    assert serves["labels"] == {"classify", "embeddings", "look"}
    assert serves["t5"] == {"completions", "translations", "embeddings", "look"}
    for model, path in (("words", "/v1/completions"), ("labels", "/v1/completions")):
        error = client.post(path, {"model": model, "prompt": "a"}, 400)["error"]
        assert error["param"] == "model" and "encoder" in error["message"]


def test_vectors_labels_and_words(client: Client, folders: dict[str, Path]) -> None:
    for name in ("words", "labels", "t5"):
        answer = client.post(
            "/v1/embeddings", {"model": name, "input": TEXTS, "encoding_format": "base64"}
        )
        found = [
            np.frombuffer(base64.b64decode(row["embedding"]), np.float32) for row in answer["data"]
        ]
        np.testing.assert_array_equal(found, regard.embed(folders[name], TEXTS, normalize=True))
    answer = client.post("/v1/classify", {"model": "labels", "input": TEXTS, "top": 2})
    for row, ranking in zip(answer["data"], regard.classify(folders["labels"], TEXTS), strict=True):
        assert [(x["label"], x["score"]) for x in row["labels"]] == ranking[:2]
    answer = client.post("/v1/fill", {"model": "words", "input": "the [MASK] dog", "top": 3})
    expected = regard.fill(folders["words"], "the [MASK] dog", top=3)
    assert [[(x["token"], x["score"]) for x in mask] for mask in answer["data"]] == expected


def test_translations_with_alignment(client: Client, folders: dict[str, Path]) -> None:
    lines = ["the dog", "", "a park with a ball"]
    body = {"model": "t5", "input": lines, "beams": 3, "max_tokens": 8, "align": True}
    data = client.post("/v1/translations", body)["data"]
    # The engine's pages and a batch of its own add up in another order; the texts are the same.
    texts = regard.translate(regard.load(folders["t5"]), lines, beams=3, max_new_tokens=8)
    assert [row["text"] for row in data] == texts
    assert data[1]["align"] == [] and all(0 <= s < 2 for s, _ in data[0]["align"])
    beams = client.post(
        "/v1/completions", {"model": "t5", "prompt": lines[0], "beams": 3, "n": 2, "max_tokens": 8}
    )
    assert [c["index"] for c in beams["choices"]] == [0, 1]
    assert beams["choices"][0]["text"] == texts[0]


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {"model": "words", "input": ["a", ""]}, "input"),
    ("/v1/embeddings", {"model": "words", "input": [[10**6]]}, "input"),
    ("/v1/embeddings", {"model": "words", "input": "dog " * 200}, "input"),
    ("/v1/embeddings", {"model": "words", "input": "a", "dimensions": 7}, "dimensions"),
    ("/v1/classify", {"model": "words", "input": "a"}, "model"),
    ("/v1/fill", {"model": "words", "input": "no mask"}, "input"),
    ("/v1/fill", {"model": "labels", "input": "[MASK]"}, "model"),
    ("/v1/translations", {"model": "t5", "input": "a", "beams": 0}, "beams"),
    ("/v1/look", {"model": "words", "input": "the dog", "layers": [7]}, "layers"),
    ("/v1/look", {"model": "t5", "input": "the dog"}, "source"),
    ("/v1/look", {"model": "words"}, "id"),
    # A model without a tokenizer.
    ("/v1/completions", {"model": "bare", "prompt": "a"}, "prompt"),
    ("/v1/completions", {"model": "bare", "prompt": [[5], "a"]}, "prompt"),
    ("/v1/completions", {"model": "bare", "prompt": [5], "stop": "a"}, "stop"),
    ("/v1/completions", {"model": "bare", "prompt": [5], "echo": True}, "echo"),
    ("/tokenize", {"model": "bare", "prompt": "a"}, "prompt"),
    ("/tokenize", {"model": "bare", "messages": [{"role": "user", "content": "a"}]}, "messages"),
    ("/detokenize", {"model": "bare", "tokens": [5]}, "tokens"),
]  # type: ignore[list-item]


@pytest.mark.parametrize("path, body, param", WRONG)
def test_what_is_wrong_is_named(
    client: Client, path: str, body: dict[str, Any], param: str | None
) -> None:
    assert client.post(path, body, 400)["error"]["param"] == param


def test_a_look_is_what_a_probe_sees(demo: Client) -> None:
    body = {"model": "demo", "prompt": "12 + 30", "max_tokens": 5, "temperature": 0}
    answer = demo.post("/v1/completions", body)
    seen = demo.post(
        "/v1/look", {"model": "demo", "id": answer["id"], "layers": [1], "heads": [2, 3]}
    )
    text = answer["choices"][0]["text"]
    assert "".join(seen["tokens"]) == "12 + 30" + text and seen["maps"].keys() == {"1.self"}
    model = demo.app.workers["demo"].model
    probe, ids = Probe([1], [2, 3]), tokenizer_of(model).encode("12 + 30" + text)
    with torch.inference_mode():
        model.hidden(torch.tensor([ids]), probe=probe)
    assert seen["maps"]["1.self"] == probe.maps["1.self"][0][0].tolist()
    last = demo.post(
        "/v1/look", {"model": "demo", "input": "12 + 30", "rows": [-1], "what": "score"}
    )
    assert all(len(heads) == 4 and len(heads[0]) == 1 for heads in last["maps"].values())
    assert (
        demo.post("/v1/look", {"model": "demo", "id": "cmpl-none"}, 404)["error"]["param"] == "id"
    )


def test_looks_change_no_answer(demo: Client) -> None:
    body = {
        "model": "demo",
        "prompt": "Sort: river apple",
        "max_tokens": 60,
        "seed": 4,
        "logprobs": 1,
    }
    expected, found = demo.post("/v1/completions", body)["choices"], []
    thread = threading.Thread(
        target=lambda: found.append(demo.post("/v1/completions", body)["choices"])
    )
    thread.start()
    while thread.is_alive():
        demo.post("/v1/look", {"model": "demo", "input": "12 + 30 = 42", "rows": [-1]})
    assert found == [expected]


def test_looks_leave_others_their_time(plain: Client) -> None:
    """After a look the next one waits while something is written, and comes at once where nothing is."""
    worker, idle = plain.app.workers["demo"], list[bool]()
    assert worker.engine is not None

    class Watched(deque[Any]):
        def popleft(self) -> Any:
            idle.append(worker.engine.idle)  # type: ignore[union-attr]
            return super().popleft()

    worker.looks, worker.next_look = Watched(), float("inf")
    long = {"model": "demo", "prompt": "Sort:", "max_tokens": 200, "logit_bias": {"0": -100}}
    thread = threading.Thread(target=lambda: plain.post("/v1/completions", long))
    thread.start()
    while not worker.handles:
        assert thread.is_alive(), "the answer was there before anybody could look"
    plain.post("/v1/look", {"model": "demo", "input": "12 + 30 = 42", "rows": [-1]})
    thread.join()
    assert set(idle) == {True}
    while worker.next_look == float("inf"):
        assert worker.thread.is_alive()


def test_requests_do_not_wait_for_others_that_never_come(demo: Client) -> None:
    demo.app.active += 1
    try:
        body = {"model": "demo", "prompt": "Sort:", "max_tokens": 2}
        assert demo.post("/v1/completions", body)["usage"]["completion_tokens"] <= 2
    finally:
        demo.app.active -= 1


def test_keys_rates_and_models_in_and_out(folders: dict[str, Path], tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    ann, boss = new_key(keys, "ann", False), new_key(keys, "boss", True)
    assert ann not in keys.read_text() and keys.stat().st_mode & 0o77 == 0
    ask = {"model": "words", "input": "the [MASK]"}
    more: dict[str, Any] = {"keys": keys, "start": ["words"], "options": Options()}
    with running(dict(folders), **more) as client:
        for wrong in (None, "rg-wrong", ann[:-1]):
            client.key = wrong
            for path in ("/v1/models", "/metrics", "/tokenize", "/nowhere", "/openapi.json"):
                status, headers, content = client.request("GET", path)
                assert headers["www-authenticate"] == "Bearer"
                assert status == 401 and json.loads(content)["error"]["code"] == "invalid_api_key"
            assert client.request("GET", "/health")[0] == client.request("GET", "/ready")[0] == 200
        client.key = ann
        assert client.request("POST", "/v1/fill", ask)[0] == 200
        assert client.request("POST", "/admin/load", {"model": "labels"})[0] == 403
        assert (
            client.post("/v1/classify", {"model": "labels", "input": "a"}, 503)["error"]["code"]
            == "model_not_loaded"
        )
        client.key = boss
        assert client.request("POST", "/admin/load", {"model": "../x"})[0] == 404
        client.post("/admin/load", {"model": "labels"})
        client.post("/v1/classify", {"model": "labels", "input": "a"})
        client.post("/admin/unload", {"model": "labels"})
        client.post("/v1/classify", {"model": "labels", "input": "a"}, 503)
        client.app.memory = 1.0
        error = client.post("/admin/load", {"model": "t5"}, 400)["error"]
        assert "unload" in error["message"] and error["param"] == "model"
        # The file changes while the server runs.
        entries = json.loads(keys.read_text())
        entries["keys"][0]["requests"] = 2
        keys.write_text(json.dumps(entries))
        client.app.guard.looked = 0.0
        client.key = ann
        statuses = [client.request("GET", "/v1/models") for _ in range(3)]
        assert [s for s, _, _ in statuses] == [200, 200, 429] and int(
            statuses[2][1]["retry-after"]
        ) > 1
        keys.write_text("{")
        client.app.guard.looked = 0.0
        client.key = boss
        assert client.request("GET", "/v1/models")[0] == 200
        entries["keys"] = entries["keys"][:1]
        keys.write_text(json.dumps(entries))
        client.app.guard.looked = 0.0
        assert client.request("GET", "/v1/models")[0] == 401


def test_prompts_of_two_keys_share_no_pages(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    ann, bob = (new_key(keys, name, False) for name in ("ann", "bob"))
    with running({"demo": "demo"}, keys=keys) as client:
        salts = []
        engine = client.app.workers["demo"].engine
        assert engine is not None
        submit = engine.submit
        engine.submit = lambda request: salts.append(request.salt) or submit(request)  # type: ignore[func-returns-value, method-assign]
        for client.key, user in ((ann, "x"), (ann, "x"), (ann, "y"), (bob, "x")):
            client.post(
                "/v1/completions", {"model": "demo", "prompt": "12", "max_tokens": 1, "user": user}
            )
        assert salts[0] == salts[1] and len(set(salts)) == 3
        ran = next(iter(client.app.ran))
        client.key = bob
        client.post("/v1/look", {"model": "demo", "id": ran}, 404)

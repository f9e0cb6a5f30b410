"""`regard warm`: what the first requests would wait for is done before, for every model that writes."""

from pathlib import Path
from typing import Any

import pytest

import regard
from regard.decode import warm as warmed
from regard.decode.engine import Engine
from regard.decode.settings import Request, Settings
from tests.decode.test_warm import KINDS, said, watched  # noqa: F401
from tests.decode.tiny import MODELS, model


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_warmed(name: str) -> None:
    done = warmed.warm(model(name), rows=3, length=40)
    assert (done.kernels, done.forms, done.graphs, done.rows) == (0, 0, 0, 3)
    assert 0 < done.first + done.again < done.seconds


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Engines as if there were a GPU."""
    made = list[Engine]()

    def engine(net: Any, **more: Any) -> Engine:
        made.append(Engine(net, runner="graph", pages=400, **more))
        return made[-1]

    monkeypatch.setattr(warmed, "Engine", engine)
    return made


@pytest.mark.parametrize("name", ["gqa_rope", "mla", "delta", "twin"])
def test_no_step_is_left_to_record(
    name: str,
    watched: tuple[list[Any], list[int]],  # noqa: F811
    graphs: list[Engine],
) -> None:
    """Each number of rows and each bucket of lengths, for the usual choices."""
    keys, _ = watched
    done = warmed.warm(model(name), rows=6, length=2000)
    (engine,) = graphs
    assert engine.graph is not None and not engine.cold
    runner = engine.graph.steps
    bounds = {runner.bucket(n) for n in range(1, min(2000, runner.length) + 1)}
    steps = {(key[1:3], key[4]) for key in keys if key[0] == "step"}
    for used in (frozenset[str](), frozenset({"temperature"})):
        assert steps >= {((width, bound), used) for width in (1, 2, 4, 8) for bound in bounds}
    assert done.graphs > 0 and done.length <= 2000


def test_answers_after_it_are_the_same_and_record_nothing(
    watched: tuple[list[Any], list[int]],  # noqa: F811
    graphs: list[Engine],
) -> None:
    keys, _ = watched
    net, kinds = model("gqa_rope"), [KINDS["greedy"], KINDS["drawn"]]
    warmed.warm(net, rows=8, length=500)
    (engine,) = graphs
    before, plain = len([k for k in keys if k[0] == "step"]), Engine(net, runner="torch", rows=8)
    for rows in (1, 5, 8):
        assert said(engine, rows, kinds) == said(plain, rows, kinds)
    assert len([k for k in keys if k[0] == "step"]) == before


def test_settings_of_the_folder_are_warmed_too(
    watched: tuple[list[Any], list[int]],  # noqa: F811
    graphs: list[Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, _ = watched
    folder = ({"temperature": 0.7, "top_p": 0.9}, [])
    monkeypatch.setattr("regard.decode.defaults.folder_settings", lambda net: folder)
    warmed.warm(model("gqa_rope"), rows=2, length=300)
    assert {key[4] for key in keys if key[0] == "step"} >= {frozenset({"temperature", "top_p"})}


def test_a_fault_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model("gqa_rope")
    monkeypatch.setattr(type(net), "next_logits", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        warmed.warm(net)


def test_c_code_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.kernels.c import native

    if native.why():
        pytest.skip(native.why())
    assert warmed.built() == f"C code for {native.form()}: was compiled before"
    monkeypatch.setattr(native, "_kept", (None, "switched off by REGARD_NATIVE=0"))
    assert warmed.built() == "there is no C code: switched off by REGARD_NATIVE=0"


def test_requests_begin_differently_so_that_each_is_read() -> None:
    net = regard.build("llama", layers=1, dim=32, heads=4, vocab=100, max_len=64)
    first, second = warmed._requests(net, [20, 20])
    again, _ = warmed._requests(net, [20, 20], last=1)
    assert isinstance(first, Request) and first.settings == Settings(max_new_tokens=2)
    assert first.ids[0] != second.ids[0]
    assert first.ids[:-1] == again.ids[:-1] and first.ids[-1] != again.ids[-1]

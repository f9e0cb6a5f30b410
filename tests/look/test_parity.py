"""Bug or rounding: every planted bug is found where it was planted, and no sound model is accused."""

import copy
import dataclasses
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
from regard.attention import GQA
from regard.block import ORDERS
from regard.errors import UsageError
from regard.fast.cpu import prepare
from regard.fast.invariant import invariant
from regard.fast.watch import Watcher, watch
from regard.kernels.c import native
from regard.kernels.linear import Int8
from regard.models import Model
from regard.parity import CHECKS, Check, Given, Runner, Trace, parity, record, sample
from regard.parity.envelope import Envelope, Rounding, judge
from regard.parity.graph import why_unseen
from regard.parity.oracle import oracle, regret, steps, unit
from regard.position import LongRope, Rope
from tests.look.planted import BUGS, by_tanh, eps, no_residual, part, transposed
from tests.look.walk import MISTAKES, RUNNERS, planted, preset
from tests.look.zoo import CLEAN, MODELS, random_model, stirred
from tests.wide import wide

FUSED, PACKED = "fused against reference", "packed against plain"


def small(name: str) -> Model:
    torch.manual_seed(1)
    return stirred(MODELS[name].make(), random.Random(1))


def checked(model: Model, name: str = FUSED, tokens: int = 7, **more: Any) -> Check:
    (check,) = parity(model, sample(model, rows=2, tokens=tokens), only=[name], **more)
    return check


# --- bugs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_found_and_its_place_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug, sound = BUGS[name], small(BUGS[name].model)
    model = copy.deepcopy(sound)
    bug.plant(model, monkeypatch)
    found = checked(model, bug.check, bug.tokens, sound=sound)
    assert (found.verdict, found.where) == ("bug", bug.where)


def test_twenty_different_bugs_are_planted() -> None:
    assert len(BUGS) >= 20


def test_bug_in_one_run_leaves_the_other_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = small("gqa")
    BUGS["stale cache page"].plant(sound, monkeypatch)
    found = {check.name: check for check in parity(sound, sample(sound, rows=2, tokens=7))}
    pages = {"paged against uncached", "shared against alone", "packed in shared pages"}
    pages.add("int8 in shared pages")
    for paged in map(found.pop, pages):
        assert (paged.verdict, paged.run) == ("bug", CHECKS[paged.name][0])
        assert paged.position < 4  # in the first page
    assert {check.verdict for check in found.values()} <= {"equal", "rounding"}


@torch.no_grad()
def test_error_of_ten_roundings_is_a_bug_at_its_tensor() -> None:
    """One tensor of a clean run moved by little more than rounding can."""
    model = small("gqa")
    given = sample(model, tokens=9)
    exact, trace = oracle(model, torch.float32), Runner(model, given).alone()
    envelope = Envelope(exact, trace)
    assert judge(steps(exact, trace), envelope).verdict == "rounding"
    trace.tensors["block 1 norm 3"][1, 4] *= 1 + 200 * unit(torch.float32)
    found = judge(steps(exact, trace), envelope)
    assert (found.verdict, found.where) == ("bug", "block 1 norm 3")
    assert (found.row, found.position) == (1, 4)


def test_run_with_nan_is_a_bug() -> None:
    sound = small("gqa")
    model = copy.deepcopy(sound)
    with torch.no_grad():
        model.tower.blocks[1].ffn.up.weight[0, 0] = torch.nan
    found = checked(model, sound=sound)
    assert (found.verdict, found.where) == ("bug", "block 1 feed-forward hidden")


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_a_block_is_followed_and_its_bugs_are_named(order: str) -> None:
    config = MODELS["gqa"]
    torch.manual_seed(1)
    tower = dataclasses.replace(config.tower, order=order)
    sound = stirred(dataclasses.replace(config, tower=tower).make(), random.Random(1))
    assert checked(sound).verdict != "bug"

    def where(path: str, change: Callable[[Any], None]) -> str:
        model = copy.deepcopy(sound)
        part(path, change)(model, None)
        found = checked(model, sound=sound)
        return found.where if found.verdict == "bug" else found.verdict

    assert where("attention.wo", transposed) == "block 1 attention output"
    assert where("ffn", by_tanh) == "block 1 feed-forward hidden"
    alone = "block 1 norm 3" if order == "post" else "block 1 output"
    assert where("ffn.add", no_residual) == alone
    if order in ("sandwich", "inner"):
        assert where("attention.add.norm", eps) == "block 1 norm after attention"
        assert where("ffn.add.norm", eps) == "block 1 norm after feed-forward"
    if order != "inner":
        assert where("norm1", eps) == "block 1 norm 1"
    if order not in ("inner", "shared"):
        assert where("norm3", eps) == "block 1 norm 3"


# --- rounding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", wide(range(CLEAN), keep=range(3)))
def test_sound_random_model_is_not_accused(seed: int) -> None:
    model = random_model(seed)
    for check in parity(model, sample(model, rows=2, tokens=6, seed=seed)):
        assert check.verdict != "bug", check


def test_two_runs_of_one_kind_are_equal() -> None:
    model = small("gqa")
    runs = {"packed": lambda given: Runner(model, given).alone()}
    assert checked(model, PACKED, more=runs).verdict == "equal"
    coarse = checked(model, "bf16 against fp32")
    assert coarse.verdict == "rounding"
    assert coarse.difference > 1000 * checked(model).difference


@pytest.mark.parametrize("name", ["gqa", "experts", "t5", "mla"])
def test_packed_model_is_not_accused_and_its_bug_is_found_by_block(name: str) -> None:
    model = small(name)
    chunks = [4, 1, 1, 1]

    def judged(prepared: Model) -> Check:
        runs = {"packed": lambda given: Runner(prepared, given).cached("contiguous", chunks)}
        return checked(model, PACKED, more=runs)

    assert judged(prepare(model)).verdict != "bug"
    spoilt = copy.deepcopy(model)
    with torch.no_grad():
        getattr(spoilt, "decoder", getattr(spoilt, "tower", None)).blocks[1].norm3.weight *= 1.001
    found = judged(prepare(spoilt))
    assert (found.verdict, found.run) == ("bug", "packed")
    assert "block 1" in found.where


@pytest.mark.parametrize("name", ["gqa", "dsa", "mla", "experts", "t5"])
def test_invariant_model_is_followed_step_by_step(name: str) -> None:
    model = small(name)

    def judged(other: Model) -> Check:
        def run(given: Given) -> Trace:
            trace = Runner(invariant(other), given, "ordered").cached("contiguous", [4, 1, 2])
            assert any(name.endswith("attention output") for name in trace.tensors)
            return trace

        return checked(model, PACKED, more={"packed": run})

    assert judged(model).verdict != "bug"
    spoilt = copy.deepcopy(model)
    part("attention", lambda a: setattr(getattr(a, "attention", a), "scale", 1.0))(spoilt, None)
    assert judged(spoilt).where.endswith("block 1 attention before wo")


def test_wide_model_is_not_accused() -> None:
    """Long sums round more: the envelope must hold for 768 features too."""
    torch.manual_seed(0)
    model = regard.build("gpt2", layers=1, vocab=300, max_len=32)
    assert checked(model).verdict != "bug"


def test_choice_within_rounding_of_a_tie_is_no_bug() -> None:
    scores = torch.tensor([[3.0, 2.0, 2.0 - 1e-7, 1.0, -torch.inf]]).double()
    assert float(regret(scores, torch.tensor([[0, 1]]), 2)) == 0
    assert 0 < float(regret(scores, torch.tensor([[0, 2]]), 2)) < 2e-7
    assert float(regret(scores, torch.tensor([[0, 3]]), 2)) == 1
    assert float(regret(scores, torch.tensor([[0, 4]]), 2)) == torch.inf  # one that is hidden


def test_rounding_mode_moves_every_result_by_about_a_unit() -> None:
    x, w = torch.randn(50, 30).double(), torch.randn(20, 30).double()
    u = unit(torch.float32)
    with Rounding(u):
        y = x @ w.T
    exact = x @ w.T
    real = (x.float() @ w.float().T).double() - x.float().double() @ w.float().double().T
    assert 0.3 < float((y - exact).std() / real.std()) < 10
    with Rounding(u):
        assert torch.equal(x.transpose(0, 1)[3:], x.T[3:])  # nothing is computed


# --- every preset, in every runner --------------------------------------------------------------------------------


def test_envelope_of_int8_is_as_wide_as_its_rounding() -> None:
    """Not wider, else a mistake would pass; and not less."""
    torch.manual_seed(0)
    x, w = torch.randn(40, 100) * torch.rand(40, 1) * 9, torch.randn(30, 100) + 0.2
    exact = x.double() @ w.double().t()
    real = Int8(w, None)(x).double() - exact
    with Rounding(unit(torch.float32), int8=True):
        drawn = x.double() @ w.double().t()
    ratio = real.square().mean(1).sqrt() / (drawn - exact).square().mean(1).sqrt()
    assert 0.7 < float(ratio.mean()) < 1.4
    assert float(ratio.min()) > 0.4 and float(ratio.max()) < 2.5


# One of each family; the whole of it is `make parity`.
PRESETS = {family or name: name for name, (family, _) in reversed(regard.PRESETS.items())}
PAINTER = PRESETS.pop("painter")
PAIRS = [PRESETS.pop(name) for name in ("clip", "siglip")]
JUDGED = ("shared against alone", "packed against plain", "packed in shared pages")
JUDGED += ("unwatched against watched", "graph against plain")
JUDGED += ("int8 against plain", "int8 in shared pages")
FEW = ["gpt2", "gpt_oss", "deepseek_v32", "qwen3_next", "bert", "t5", "luong"]
families = pytest.mark.parametrize("family", wide(PRESETS, keep=FEW))
# One mistake in each, in turn.
TURNS = [(m, r) for m in MISTAKES for r in RUNNERS if (m, r) != ("page", "rows")]


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    """Small models run in C too, as large ones do."""
    native.build()


def test_painter_is_refused() -> None:
    with pytest.raises(UsageError, match="draws pictures of texts, and parity compares token by"):
        sample(preset(PAINTER))


@pytest.mark.parametrize("name", PAIRS)
def test_pair_of_models_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="reads texts and images, and parity compares token by"):
        sample(preset(name))


@families
def test_sound_preset_is_not_accused_in_any_runner(family: str) -> None:
    model = preset(PRESETS[family])
    checks = parity(model, sample(model, rows=2, tokens=7), only=JUDGED)
    assert {check.verdict for check in checks} <= {"equal", "rounding"}, checks
    has = {check.name for check in checks}
    assert {"packed against plain", "unwatched against watched"} <= has
    assert ("shared against alone" in has) == ("packed in shared pages" in has) == model.decodes
    # Of what runs as it is in a graph nothing is seen.
    assert ("graph against plain" in has) == (why_unseen(model) == "")


@families
def test_mistake_in_a_preset_is_found_in_its_place(family: str) -> None:
    model, turn = preset(PRESETS[family]), list(PRESETS).index(family)
    given = sample(model, rows=2, tokens=7)
    for mistake, runner in (TURNS * 2)[turn % len(TURNS) :]:
        result = planted(model, given, mistake, runner)
        # A model may lack it: an image has no pages, a graph no recurrent cells.
        if result is not None:
            assert result[1], (mistake, runner, result[0])
            return
    pytest.fail("no mistake can be planted")


@pytest.mark.parametrize("border", [3, 6, 16])
def test_longrope_is_sound_on_both_sides_of_its_border(border: int) -> None:
    """A text is turned by its whole length, chunk by chunk too; what a graph cannot hold is not asked of one."""
    long = LongRope((1.0, 1.3), (2.0, 3.0), original_len=border, factor=4.0)
    rope = Rope(partial=0.5, scaling=long)
    torch.manual_seed(0)
    plain = regard.build("llama", dim=32, layers=2, attention=GQA(4, 2, 8, rope=rope), vocab=50)
    sound = stirred(plain, random.Random(1))
    checks = parity(sound, sample(sound, rows=2, tokens=9))
    assert [c for c in checks if c.verdict == "bug"] == []
    assert any(c.name == "graph against plain" for c in checks) == (border >= 9)


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_is_followed_through_c_code_and_a_graph(order: str) -> None:
    """Of an order whose norms follow what is added, C code shows less in a step than in a prompt."""
    config = MODELS["gqa"]
    tower = dataclasses.replace(config.tower, order=order)
    torch.manual_seed(1)
    model = stirred(dataclasses.replace(config, tower=tower).make(), random.Random(1))
    for check in parity(model, sample(model, rows=2, tokens=7), only=JUDGED):
        assert check.verdict != "bug", check


@torch.no_grad()
def test_what_a_run_does_not_show_is_not_compared() -> None:
    """Neither are zeros taken for it: the run is followed from the tensor that is known before."""
    model = small("gqa")
    given = sample(model, rows=2, tokens=7)
    exact = oracle(model, torch.float32)
    trace = Runner(model, given).alone()
    for name in [name for name in trace.tensors if "block 0" in name]:
        trace.real[name][:, 3:] = False
        trace.tensors[name][:, 3:] = 0.0
    trace.calls.pop("block 0 attention ")
    assert judge(steps(exact, trace), Envelope(exact, trace)).verdict == "rounding"
    trace.tensors["block 0 norm 3"][:, 2] *= 1.001
    found = judge(steps(exact, trace), Envelope(exact, trace))
    assert (found.verdict, found.where, found.position) == ("bug", "block 0 norm 3", 2)


# --- transformers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["albert-ForMaskedLM", "albert-groups"])
def test_layers_that_share_a_block_are_watched_call_by_call(name: str) -> None:
    pytest.importorskip("transformers", reason="the peer of this test; it is in the dev extra")
    from tests.checkpoint.families import CASES

    theirs = CASES[name].make()
    ours = regard.from_hf(theirs)
    trace = record(theirs, ours, sample(ours, rows=2, tokens=8))
    outputs = [name for name in trace.tensors if name.endswith("output")]
    assert outputs == [f"block {i} output" for i in range(len(ours.tower.blocks))]
    runs = {"transformers": lambda given: record(theirs, ours, given)}
    assert checked(ours, "ours against transformers", more=runs).verdict != "bug"


@pytest.mark.parametrize("name", ["llama-gqa-tied", "bert-ForMaskedLM", "bart"])
def test_transformers_agrees_and_a_difference_is_named_by_block(name: str) -> None:
    pytest.importorskip("transformers", reason="the peer of this test; it is in the dev extra")
    from tests.checkpoint.families import CASES

    theirs = CASES[name].make()
    ours = regard.from_hf(theirs)
    given = sample(ours, rows=2, tokens=8)

    def judged() -> Check:
        runs = {"transformers": lambda given: record(theirs, ours, given)}
        return parity(ours, given, more=runs, only=["ours against transformers"])[0]

    assert judged().verdict != "bug"
    weights = [
        p for n, p in theirs.named_parameters() if re.search(r"\.1\..*norm.*weight", n.lower())
    ]
    block = "block 1" if weights else "decoder block 0"
    weights = weights or [p for n, p in theirs.named_parameters() if "decoder.layers.0.fc1" in n]
    with torch.no_grad():
        weights[0] *= 1.001
    found = judged()
    assert (found.verdict, found.run) == ("bug", "transformers")
    assert block in found.where


# --- what is watched, what is compared, and bad input -------------------------------------------------------------


def test_tie_of_an_indexer_is_no_bug_and_a_bug_beside_it_is_one() -> None:
    """transformers takes whatever its top-k gives of keys that the ReLU scored 0; we take the earliest."""
    pytest.importorskip("transformers", reason="the peer of this test; it is in the dev extra")
    from tests.checkpoint.families import CASES

    sparse = CASES["deepseek-v32-sparse"]
    few = {"index_n_heads": 1, "index_topk": 3}
    theirs = dataclasses.replace(sparse, settings=sparse.settings | few).make()
    ours = regard.from_hf(theirs)
    given = sample(ours, rows=4, tokens=24)

    def check() -> Check:
        runs = {"transformers": lambda given: record(theirs, ours, given)}
        return parity(ours, given, more=runs, only=["ours against transformers"])[0]

    found = check()
    assert (found.verdict, found.run) == ("tie", "transformers") and found.difference > 1e-4
    assert "block" in found.where and found.worst < 1
    with torch.no_grad():
        theirs.model.layers[1].mlp.gate.weight.mul_(1.01)
    assert check().verdict == "bug"


@torch.no_grad()
@pytest.mark.parametrize("kind", [copy.copy, prepare, invariant])
@pytest.mark.parametrize("name", MODELS)
def test_watched_model_is_the_same_to_the_bit(name: str, kind: Callable[[Model], Model]) -> None:
    model = kind(small(name))
    given = sample(model, rows=2, tokens=6)
    more = {} if given.source is None else {"source": given.source}
    more["backend"] = "ordered" if kind is invariant else "sdpa"
    twin = watch(model, Watcher())
    assert torch.equal(twin(given.ids, **more), model(given.ids, **more))
    assert [*twin.state_dict()] == [*model.state_dict()]


@torch.no_grad()
def test_recorder_notes_every_step_of_a_block() -> None:
    model = small("dsa")
    trace = Runner(model, sample(model, rows=2, tokens=6)).together()
    names = [name.removeprefix("block 1 ") for name in trace.tensors if "block 1" in name]
    assert sorted(names) == sorted(
        ("norm 1", "attention q", "attention latent", "attention k_rope", "attention index_k")
        + ("attention before wo", "attention output", "norm 3", "feed-forward hidden")
        + ("feed-forward", "output")
    )
    (call,) = trace.calls["block 1 attention "]
    assert call.chosen is not None and call.chosen.shape == (2, 6, 3)


def test_every_mechanism_gets_the_checks_that_it_has() -> None:
    def names(model: str) -> set[str]:
        return {
            check.name for check in parity(small(model), sample(small(model), rows=2, tokens=6))
        }

    absorbed, ring = "absorbed against expanded", "ring against uncached"
    here = {"packed against plain", "unwatched against watched", "int8 against plain"}
    here |= {"GPU against CPU", "ours against transformers"}
    assert names("mla") - here == set(CHECKS) - here - {ring}
    assert names("window") - here == set(CHECKS) - here - {absorbed}
    assert names("bert") - here == set(list(CHECKS)[:3]) | {"bf16 against fp32"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rows": 1}, "at least 2"),
        ({"tokens": 3}, "at least 4 tokens"),
        ({"tokens": -1}, "at least 4"),
    ],
)
def test_too_little_to_compare_is_refused(settings: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        sample(small("gqa"), **settings)


def test_short_context_is_refused_and_a_long_row_is_cut() -> None:
    config = MODELS["gqa"]
    assert sample(dataclasses.replace(config, max_len=7).make(), tokens=50).ids.shape == (3, 7)
    with pytest.raises(UsageError, match="context is 3"):
        sample(dataclasses.replace(config, max_len=3).make())


def test_weights_that_are_not_finite_are_refused() -> None:
    model = small("gqa")
    with torch.no_grad():
        model.tower.blocks[0].ffn.up.weight[0, 0] = torch.inf
    with pytest.raises(UsageError, match=r"tower\.blocks\.0\.ffn\.up\.weight"):
        parity(model)


def test_parity_leaves_the_model_as_it_was() -> None:
    model = small("dsa")
    ids = sample(model).ids
    before = model(ids)
    kinds = [type(m) for m in model.modules()]
    parity(model, Given(ids))
    assert torch.equal(model(ids), before)
    assert [type(m) for m in model.modules()] == kinds
    assert all("watcher" not in m.__dict__ for m in model.modules())

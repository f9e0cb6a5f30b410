"""What decoding holds: as many bytes as the summary says, and less than a page a row more than it must."""

import gc
import weakref

import pytest
import torch

from regard.cache import CacheSpec, Paged, Pool
from regard.decode import engine as module
from regard.decode.engine import Engine, pages_in
from regard.decode.settings import Request, Settings
from regard.errors import UsageError
from regard.models.base import cache_bytes
from tests.decode.tiny import DECODERS, model, prompts, request
from tests.laws.mechanisms import decoder

PAGE = 4
PAGED = [name for name in DECODERS if name != "delta"]  # a state needs no page


def held(pool: Pool) -> int:
    """Bytes in pages that some row holds."""
    each = sum(x[0].numel() * x.element_size() for store in pool.stores for x in store.values())
    return each * sum(n > 0 for n in pool.users)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PAGED)
def test_pool_holds_the_bytes_that_the_summary_predicts(name: str, dtype: torch.dtype) -> None:
    m = decoder(name).to(dtype)
    engine = Engine(m, page=PAGE, pages=50, chunk=4 * PAGE - 1)
    engine.submit(request(name, prompts((4 * PAGE - 1,))[0], Settings(max_new_tokens=9)))
    engine.step()  # the prompt, and one token more: full pages
    assert held(engine.pool) == 4 * PAGE * cache_bytes(m)


@pytest.mark.parametrize("name", PAGED)
def test_pool_of_n_pages_weighs_n_pages_a_blank_one_and_a_scratch_one(name: str) -> None:
    m = model(name)
    pool = Engine(m, page=PAGE, pages=50).pool
    whole = sum(x.numel() * x.element_size() for store in pool.stores for x in store.values())
    assert whole == (50 + 2) * PAGE * cache_bytes(m)


def test_contiguous_cache_weighs_what_the_summary_predicts() -> None:
    m = model("mla")
    cache = m.cache(3, capacity=20)
    whole = sum(x.numel() * x.element_size() for store in cache.slots for x in store.values())
    assert whole == 3 * 20 * cache_bytes(m)


def test_summary_prints_the_bytes_of_a_token() -> None:
    m = model("mla")
    assert f"{cache_bytes(m):,} bytes" in m.summary()


@pytest.mark.parametrize("page", [1, 3, 4, 16])
def test_paged_waste_is_below_a_page_a_sequence(page: int) -> None:
    """At every step of a ragged batch: slots held, less tokens kept, is below one page for each row."""
    engine = Engine(model("gqa_rope"), page=page, pages=300 // page, chunk=7, prefix=False)
    sizes = (1, 9, 4, 16, 7, 2)
    for i, prompt in enumerate(prompts(sizes)):
        engine.submit(request("gqa_rope", prompt, Settings(max_new_tokens=5 + 3 * i), key=i))
    looked = 0
    while not engine.idle:
        engine.step()
        caches = [cache for batch in engine.scheduler.batches.values() for cache in batch.caches()]
        assert all(isinstance(cache, Paged) for cache in caches)
        kept = [n for cache in caches for n in cache.lengths.tolist()]
        slots = page * sum(engine.pool.users)
        assert sum(kept) <= slots < sum(kept) + page * len(kept) or not kept
        looked += len(kept)
    assert looked > 50


def test_samples_waste_less_than_a_page_each_and_share_the_rest() -> None:
    engine = Engine(model("gqa_rope"), page=PAGE, pages=100, prefix=False)
    (prompt,) = prompts((22,))
    engine.submit(
        request("gqa_rope", prompt, Settings(max_new_tokens=9, temperature=1.0, samples=6))
    )
    for _ in range(6):
        engine.step()
        (batch,) = engine.scheduler.batches.values()
        lengths = batch.cache.lengths.tolist()
        own = sum(n - 20 for n in lengths)  # five full pages are common
        assert (
            20 + own
            <= PAGE * sum(n > 0 for n in engine.pool.users)
            < 20 + own + PAGE * len(lengths)
        )


CPU, GPU = torch.device("cpu"), torch.device("cuda")
# A page of 4 tokens in float32 has 96 bytes.
SPECS = [CacheSpec(token={"k": (2,)}), CacheSpec(token={"k": (1, 3), "v": (1,)}, state={"s": (3,)})]


def pages(
    memory: float | None, device: torch.device = CPU, dtype: torch.dtype = torch.float32, rows: int = 2,
    longest: int | None = None, far: int | None = None, states: bool = False
) -> int:  # fmt: skip
    specs = SPECS if states else [CacheSpec(token=spec.token) for spec in SPECS]
    return pages_in(memory, device, specs, 4, dtype, rows, longest, far)


def test_pages_are_as_many_as_memory_holds() -> None:
    assert [pages(n) for n in (96, 191, 192, 9600)] == [1, 1, 2, 100]
    assert pages(960, dtype=torch.bfloat16) == 20 and pages(960, dtype=torch.float64) == 5
    with pytest.raises(UsageError, match="95 bytes hold no page of 4 tokens"):
        pages(95)
    for bad in (0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="give bytes, or a share"):
            pages(bad)


def test_pages_are_no_more_than_texts_and_sources_need() -> None:
    assert [pages(10**6, longest=n) for n in (1, 4, 5, 9)] == [2, 2, 4, 6]
    assert pages(10**6, longest=9, rows=3) == 9
    assert [pages(10**6, longest=9, far=n) for n in (0, 1, 4, 5)] == [6, 8, 8, 10]
    assert pages(192, longest=9) == 2
    # Where nobody says how much memory, and it is not a GPU's.
    assert pages(None) == pages(None, longest=9) == 1024
    assert [pages(None, far=n) for n in (0, 4000, 4096, 5000)] == [2048, 2048, 2048, 1024 + 1250]


def test_memory_may_be_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_memory", lambda device: 960 if device == CPU else 9600)
    assert [pages(share) for share in (0.5, 0.75, 1)] == [5, 7, 10]
    assert pages(None, GPU) == 90 and pages(0.5, GPU) == 50 and pages(960, GPU) == 10


def test_states_lie_beside_the_pages() -> None:
    """One for each row, of which there are a power of two, in float32 at least."""
    for rows, places in ((1, 1), (2, 2), (5, 8), (8, 8)):
        for dtype, size, each in (
            (torch.float32, 96, 12), (torch.bfloat16, 48, 12), (torch.float64, 192, 24)
        ):  # fmt: skip
            for n in (1, 3):
                have = n * size + places * each
                assert pages(have, dtype=dtype, rows=rows, states=True) == n
                if n > 1:
                    assert pages(have - 1, dtype=dtype, rows=rows, states=True) == n - 1
    with pytest.raises(UsageError, match="^0 bytes hold no page"):
        pages(20, rows=8, states=True)
    alone = [CacheSpec(state={"s": (3,)})]
    assert pages_in(24 + 16 * 5, CPU, alone, 4, torch.float32, 2, None) == 5


@pytest.mark.parametrize("runner", ["torch", "graph"])
@pytest.mark.parametrize("beams", [1, 2])
def test_memory_of_an_engine_goes_with_its_last_reference(runner: str, beams: int) -> None:
    """Without the garbage collector: the next engine finds the device's memory free."""
    net = model("gqa_rope")
    gc.disable()
    try:
        engine = Engine(net, runner=runner, rows=4)
        engine.submit(Request([1, 2, 3], Settings(max_new_tokens=4, beams=beams)))
        assert [e for e in engine.run() if e.done is not None]
        gone, pool = weakref.ref(engine), weakref.ref(engine.pool)
        del engine
        assert gone() is None and pool() is None
    finally:
        gc.enable()

"""Recomputed activations and bf16: the same model, the same gradient."""

import copy
import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard.attention import GQA
from regard.attention.multihead import GroupedQueryAttention
from regard.block import Block, Tower
from regard.data.feed import Batch, Prefetch
from regard.errors import UsageError
from regard.fast.specialise import unlike
from regard.fast.train import Joined, checkpointed, compiled, joined, masters, precision
from regard.layers import MLP, Classify
from regard.models import (
    EncoderDecoder,
    EncoderDecoderConfig,
    Recurrent,
    RecurrentConfig,
    Tokens,
)
from regard.models.adapt import quantize, with_head
from regard.position import T5Bias
from regard.training import objectives
from regard.training.checkpoint import Checkpoints
from regard.training.config import Adapt, adapted
from regard.training.index_losses import sparse_index
from regard.training.objectives import causal, seq2seq
from regard.training.optim import Optim, Optimizer
from regard.training.trainer import Trainer
from tests.laws.mechanisms import DIM, TOWERS, VOCAB, decoder, ids
from tests.train import toy
from tests.train.toy import Toy
from tests.wide import crossed, wide


def t5() -> EncoderDecoder:
    def tower(causal: bool, **more: Any) -> Tower:
        bias = T5Bias(3, 8, 16, causal=causal)
        return Tower(DIM, 2, GQA(3), MLP(16), causal=causal, relative=bias, dropout=0.1, **more)

    towers = tower(False), tower(True, cross=GQA(3))
    tokens = Tokens(VOCAB)
    return EncoderDecoder(EncoderDecoderConfig(tokens, towers[0], tokens, towers[1])).double()


def gradients(model: nn.Module, objective: Any, batch: Batch) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(3)  # dropout falls alike
    loss, count = objective(model, batch)
    (loss / count).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", TOWERS)
def test_checkpointed_model_has_the_same_gradient(name: str) -> None:
    model = decoder(name, dropout=0.1).train()
    batch = Batch(ids(2, 9), ids(2, 9, seed=2))
    want = gradients(model, causal, batch)
    again = gradients(checkpointed(copy.deepcopy(model)), causal, batch)
    assert want.keys() == again.keys()
    for key, x in want.items():
        torch.testing.assert_close(again[key], x, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", TOWERS)
def test_joined_products_give_the_same_gradient(name: str) -> None:
    model = decoder(name).double()
    x = ids(3, 9)
    batch = Batch(x[:, :-1], x[:, 1:])
    plain = gradients(copy.deepcopy(model), causal, batch)
    again = joined(copy.deepcopy(model))
    known = any(
        type(block.attention) is GroupedQueryAttention and not unlike(block.attention)
        for block in model.tower.blocks
    )
    assert any(isinstance(m, Joined) for m in again.modules()) == known
    found = gradients(again, causal, batch)
    assert found.keys() == plain.keys()
    for key, grad in found.items():
        torch.testing.assert_close(grad, plain[key], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("packed, method", crossed([False, True], ["full", "lora", "qlora"]))
def test_compiled_tower_is_one_graph(method: str, packed: bool) -> None:
    """Each place at which the compiler gives up costs more than compiling gains. What adapters put into a layer is in
    each of them; from layer to layer goes what goes in a full training too."""
    layers = 2 if method == "full" else 1
    sizes: dict[str, Any] = dict(dim=32, layers=layers, heads=2, kv_heads=1, ffn_dim=32, vocab=20)
    model: Any = regard.build("llama", **sizes, max_len=8)
    model = quantize(model) if method == "qlora" else model
    model = joined(adapted(model, Adapt(method, targets="all")) if method != "full" else model)
    torch._dynamo.reset()
    model.tower.compile(dynamic=False, backend="aot_eager", fullgraph=True)
    ids = torch.randint(20, (2, 8))
    with precision("bf16", "cpu"):
        loss, _ = causal(model.train(), Batch(ids, ids, doc=ids.sort().values if packed else None))
        loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("layers", wide([1, 2], keep=[1]))
def test_compiled_towers_give_the_same_gradient(layers: int) -> None:
    model = decoder("mha", layers=layers).double()
    x = ids(3, 9)
    batch = Batch(x[:, :-1], x[:, 1:])
    plain = gradients(copy.deepcopy(model), causal, batch)
    for key, grad in gradients(compiled(joined(copy.deepcopy(model))), causal, batch).items():
        torch.testing.assert_close(grad, plain[key], rtol=1e-9, atol=1e-12)


def test_batches_made_ahead_are_the_batches() -> None:
    ahead = Prefetch(Toy(), 0, 1)
    for k in (0, 1, 2, 7, 8, 3):
        assert ahead.batch(k).ids.equal(Toy().batch(k).ids)


def test_checkpointed_towers_share_their_relative_bias() -> None:
    model = t5()
    batch = Batch(
        ids(2, 6), ids(2, 6, seed=2), source=ids(2, 8, seed=3), source_lengths=torch.tensor([8, 5])
    )
    want = gradients(model, seq2seq, batch)
    again = gradients(checkpointed(copy.deepcopy(model)), seq2seq, batch)
    assert any("relative" in key for key in want)
    for key, x in want.items():
        torch.testing.assert_close(again[key], x, rtol=1e-12, atol=1e-14)


def test_checkpointed_model_trains_its_indexer_alike() -> None:
    model = decoder("dsa_mla")
    batch = Batch(ids(2, 9), ids(2, 9, seed=2))
    want = gradients(model, sparse_index, batch)
    again = gradients(checkpointed(copy.deepcopy(model)), sparse_index, batch)
    for key, x in want.items():
        torch.testing.assert_close(again[key], x, rtol=1e-12, atol=1e-14)


def test_checkpointed_model_keeps_its_names_and_can_be_copied() -> None:
    model = decoder("mha")
    made = copy.deepcopy(checkpointed(copy.deepcopy(model)))
    assert made.state_dict().keys() == model.state_dict().keys()
    blocks = [m for m in made.modules() if isinstance(m, Block)]
    with torch.no_grad():
        made.embedding.weight.zero_()  # a copy runs on its own weights
        assert not torch.allclose(made(ids(1, 5)), model(ids(1, 5)))
    assert len(blocks) == 2


def test_checkpointed_model_saves_less_for_the_backward_pass() -> None:
    def saved(model: nn.Module) -> int:
        sizes: list[int] = []
        hooks = torch.autograd.graph.saved_tensors_hooks
        with hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
            model.hidden(ids(2, 40))  # type: ignore[operator]
        return sum(sizes)

    model = decoder("mha", layers=4)
    assert saved(checkpointed(copy.deepcopy(model))) < saved(model) / 5


def test_checkpointed_needs_blocks() -> None:
    with pytest.raises(UsageError, match="recurrent"):
        checkpointed(Recurrent(RecurrentConfig(9, 8)))


# --- bf16 ---------------------------------------------------------------------------------------------------------


# rounding changes what an untrained indexer chooses, and so the function
CHOOSE = ("mixed", "compressed_sparse")
SMOOTH = [name for name in TOWERS if "dsa" not in name and name not in CHOOSE]


@pytest.mark.parametrize("name", SMOOTH)
def test_bf16_gradient_is_the_fp32_gradient_to_rounding(name: str) -> None:
    """fp32 in and out, and near: 8 bits in each product, a few layers, sharp random weights."""
    model = decoder(name).float()
    batch = Batch(ids(4, 9), ids(4, 9, seed=2))
    want = gradients(model, causal, batch)
    with precision("bf16", "cpu"):
        loss, count = causal(model, batch)
    assert loss.dtype == torch.float32 and loss.isfinite()
    model.zero_grad()
    (loss / count).backward()
    for key, p in model.named_parameters():
        assert p.grad is not None and p.grad.dtype == torch.float32
        # A bias on keys of distances adds the same to all scores of a query: its gradient is 0 but for rounding.
        least = 1e-2 if key.endswith("distance_k.bias") else 1e-3
        error = (p.grad - want[key]).norm() / want[key].norm().clamp(min=least)
        assert error < 0.1, key


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.dtypes.add(out.dtype)
        return out


def test_bf16_makes_every_product_in_bf16() -> None:
    model, batch = decoder("mha").float(), Batch(ids(2, 9), ids(2, 9, seed=2))
    with Products() as seen, precision("bf16", "cpu"):
        causal(model, batch)
    assert seen.dtypes == {torch.bfloat16}


def test_bf16_keeps_updates_that_bf16_weights_would_lose() -> None:
    """The reason for weights in fp32: a step of 1/1000 of a weight is below half a bf16 rounding, and is lost."""
    model = decoder("mha").float()
    rounded = copy.deepcopy(model).bfloat16()
    for which in (model, rounded):
        with torch.no_grad():
            for p in which.parameters():
                p.fill_(1.0)
        optimizer = Optimizer(which, Optim(lr=1e-3, decay=0.0))
        for p in which.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert all((p < 1).all() for p in model.parameters())
    assert all((p == 1).all() for p in rounded.parameters())


def test_precision_names_are_checked() -> None:
    with pytest.raises(UsageError, match="did you mean 'bf16'"):
        precision("b16", "cpu")
    with precision("fp32", "cpu"):
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc alone keeps memory")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    """In a process of its own: the setting is the whole process's."""
    code = """
import resource, torch
from regard.fast.train import keep_freed
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(12 * 2**20)  # 48 MiB: more than glibc keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
before = faults()
keep_freed()
faults()
print(before, faults())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    # Without being kept, even huge pages would be asked for 24 times by each of the 20 tensors.
    if before < 20 * 24:
        pytest.skip("this torch's own allocator keeps freed memory")
    assert after < before / 10


# --- float32 masters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["fp32", "bf16"])
def test_a_half_precision_model_learns_as_its_float32_copy_does(
    tmp_path: Path, dtype: torch.dtype, how: str
) -> None:
    """At 2e-5, the usual rate of fine-tuning, most steps are below half a rounding of a bf16 weight."""
    small, start = toy.model("gpt2").to(dtype), {}

    def trained(name: str, model: Any) -> Trainer:
        checkpoints = Checkpoints(tmp_path / name, lambda m, path: m.save(path))
        steps = toy.config(steps=4, precision=how, optim=Optim(lr=2e-5))
        t = Trainer(model, toy.Toy(), objectives.causal, steps, checkpoints, regard.load)
        start.update({n: p.detach().clone() for n, p in t.model.named_parameters()})
        t.run()
        return t

    wide = trained("wide", copy.deepcopy(small).float())
    got = trained("half", small)
    assert all(torch.equal(x, toy.weights(wide)[n]) for n, x in toy.weights(got).items())
    assert {x.dtype for x in toy.weights(got).values()} == {torch.float32}
    changed = sum(int((p != start[n]).sum()) for n, p in got.model.named_parameters())
    assert changed > 0.8 * sum(p.numel() for p in got.model.parameters())
    saved = regard.load(got.checkpoints.steps()[-1])
    assert {p.dtype for p in saved.parameters()} == {torch.float32}


def test_a_frozen_body_keeps_its_precision_beside_lora() -> None:
    model = adapted(toy.model("gpt2").bfloat16(), Adapt("lora"))
    assert {p.dtype for p in masters(model).parameters() if p.requires_grad} == {torch.float32}
    assert model.embedding.weight.dtype == torch.bfloat16
    tuned = adapted(with_head(toy.model("bert").bfloat16(), Classify(3)), Adapt("lora"))
    assert {p.dtype for p in masters(tuned).parameters()} == {torch.float32}

"""The plan of a run against what really happens: saved activations, optimiser state, checkpoints, FLOPs; and what is
said of a run that cannot fit."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from regard.attention import DSA, GQA, MLA
from regard.fast.train import checkpointed
from regard.machine import duration, free_disk, free_memory, number, size
from regard.mask import Span
from regard.models.mtp import MTP
from regard.moe import MixtureOfExperts, MoE
from regard.position import Rope
from regard.presets import build
from regard.training import plan as module
from regard.training.memory import (
    OTHER,
    Job,
    Pass,
    activations,
    head_bytes,
    memory,
    optimizer_bytes,
)
from regard.training.objectives import causal
from regard.training.optim import Optim, Optimizer
from regard.training.plan import Plan, changes, drawn, refusal, shortage, step_flops
from regard.training.trainer import Train
from tests.train.toy import Toy, trainer
from tests.wide import wide

GIB = 1 << 30
B, T, S = 3, 48, 32
SMALL = dict(dim=64, layers=2, vocab=100)
LLAMA = dict(SMALL, ffn_dim=160)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", dict(SMALL, heads=4, ffn_dim=256)),
    "llama": ("llama", dict(LLAMA, heads=4, kv_heads=2)),
    "qwen3": ("llama", dict(LLAMA, attention=GQA(4, 2, rope=Rope(), qk_norm=1e-6, window=8))),
    "sinks": ("llama", dict(LLAMA, attention=GQA(4, 2, rope=Rope(), sinks=True))),
    "softcap": ("llama", dict(LLAMA, attention=GQA(4, 2, rope=Rope(), softcap=20.0))),
    "mla": ("llama", dict(LLAMA, attention=MLA(4, 32, 16, 8, 16, 24, rope=Rope()))),
    "dsa": ("llama", dict(LLAMA, attention=DSA(MLA(4, 32, 16, 8, 16, rope=Rope()), 2, 16, 8, 8))),
    "experts": ("llama", dict(SMALL, heads=4, kv_heads=2, ffn=MoE(8, 2, 40, shared=1))),
    "mtp": ("llama", dict(LLAMA, heads=4, kv_heads=2, mtp=MTP(2))),
    "bert": ("bert-base", dict(SMALL, heads=4, ffn_dim=256)),
    "vit": ("vit-small", dict(dim=64, layers=2, heads=4, ffn_dim=256, size=64, patch=8)),
    "vaswani": ("vaswani-base", dict(SMALL, heads=4, ffn_dim=256)),
    "bart": ("bart-base", dict(SMALL, heads=4, ffn_dim=256)),
    "t5": ("t5-v1.1-small", dict(SMALL, heads=4, head_dim=16, ffn_dim=256)),
    "gru": ("gru-lm", SMALL),
    "bahdanau": ("bahdanau", dict(dim=64, vocab=100, source_vocab=100)),
    "luong": ("luong", dict(SMALL, source_vocab=100)),
}

RECURRENT = ("gru", "bahdanau", "luong")  # measured in fp32; and pictures have no padding
CASES = [
    (name, masked, precision)
    for name in MODELS
    for masked, precision in ((False, "fp32"), (True, "fp32" if name in RECURRENT else "bf16"))
    if not (name == "vit" and masked)
]
CASES += [("vit", False, "bf16")]
FEW = ("gpt2", "qwen3", "dsa", "experts", "vit", "t5", "bahdanau")


def inputs(name: str, model: Any, masked: bool) -> tuple[Tensor, dict[str, Any], Pass]:
    """What the model is given, and the same in numbers."""
    if name == "vit":
        e = model.config.embedding
        return torch.rand(B, 3, e.size, e.size), {}, Pass(B, e.count + e.extra)
    ids = torch.randint(0, 100, (B, T))
    if name in ("vaswani", "bart", "t5", "bahdanau", "luong"):
        lengths = torch.tensor([S - 1] * B) if masked else None
        more = {"source": torch.randint(0, 100, (B, S)), "source_lengths": lengths}
        return ids, more, Pass(B, T, S, masked)
    more = {"lengths": torch.tensor([T - 1] * B)} if masked else {}
    return ids, more, Pass(B, T, 0, masked, further=name == "mtp")


def saved_bytes(model: nn.Module, ids: Tensor, more: dict[str, Any], bf16: bool) -> int:
    """Bytes that autograd keeps of a forward pass, without the weights and their copies in bf16."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive: list[Tensor] = []
    hooks = saved_tensors_hooks(lambda x: (alive.append(x), x)[1], lambda x: x)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        states = model.hidden(ids, **more)
        for layer in range(2 if getattr(model, "mtp", None) else 0):
            states = model.further(states, ids, Span.run(0, T, ids.device), layer)
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive}
    matrices = [p for m in body(model) for p in m.parameters(False) if p.dim() > 1]
    copies = 2 * sum(p.numel() for p in matrices) if bf16 else 0
    return sum(n for where, n in sizes.items() if where not in own) - copies


def body(model: Any) -> list[nn.Module]:
    head = set() if model.head is None else set(model.head.modules())
    kinds = (nn.Linear, MixtureOfExperts)
    return [m for m in model.modules() if isinstance(m, kinds) and m not in head]


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize(
    "name, masked, precision", wide(CASES, keep=[case for case in CASES if case[0] in FEW])
)
def test_activations_are_what_autograd_saves(name: str, masked: bool, precision: str) -> None:
    bf16 = precision == "bf16"
    preset, settings = MODELS[name]
    model = build(preset, **settings).train()
    ids, more, run = inputs(name, model, masked)
    measured = activations(model.config, replace(run, bf16=bf16)).total()
    assert measured == pytest.approx(saved_bytes(model, ids, more, bf16), rel=0.05)


@pytest.mark.parametrize("name", ["gpt2", "bert", "vaswani", "t5"])
def test_recomputed_blocks_keep_their_inputs(name: str) -> None:
    preset, settings = MODELS[name]
    model = checkpointed(build(preset, **settings).train())
    ids, more, run = inputs(name, model, True)
    found = activations(model.config, run)
    real = saved_bytes(model, ids, more, False)
    real += 4 * 64 * B * run.source  # the memory: blocks hold it, but as no tensor of their own
    assert found.around + sum(found.inputs) == pytest.approx(real, rel=0.05)
    assert found.total(checkpointing=True) == found.around + sum(found.inputs) + max(found.blocks)
    assert found.total(checkpointing=True) < found.total() / 1.5


# --- weights, optimiser, checkpoints, work ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_optimizer_bytes_are_its_state(name: str) -> None:
    model, optim = build("gpt2", **MODELS["gpt2"][1]), Optim(name)
    optimizer = Optimizer(model, optim)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = sum(x.nbytes for what, x in optimizer.state().items() if not what.endswith(":step"))
    assert optimizer_bytes(model, Train(1, optim=optim)) == state
    empty = build("gpt2", device="meta", **MODELS["gpt2"][1])
    assert optimizer_bytes(empty, Train(1, optim=optim)) == state


def test_checkpoint_is_as_large_as_Plan(tmp_path: Path) -> None:
    t = trainer(tmp_path)
    t._step(1)
    t.at.step = 1
    path = t.save()
    real = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    found = Plan(Job(t.model, Pass(6, 8), t.config))
    assert found.checkpoint - module.SPARE < real <= found.checkpoint
    assert found.disk == 4 * found.checkpoint  # two that stay, the best, one that is being written


@pytest.mark.parametrize("name", ["gpt2", "llama", "experts", "mtp"])
def test_flops_are_those_that_run(name: str) -> None:
    preset, settings = MODELS[name]
    model = build(preset, **settings).train()
    ids = torch.randint(0, 100, (4, 16))
    batch = Toy().batch(0)
    batch = replace(batch, ids=ids, labels=ids)
    counter = FlopCounterMode(display=False)
    with counter:
        causal(model, batch)[0].backward()
    job = Job(model, Pass(4, 16), Train())
    assert step_flops(job) == pytest.approx(counter.get_total_flops(), rel=0.1)
    again = replace(job, train=Train(activation_checkpointing=True))
    assert step_flops(again) == step_flops(job) * 4 // 3


def test_flops_of_a_large_model_are_six_a_weight() -> None:
    model = build("llama-2-7b", device="meta")
    weights = sum(p.numel() for p in model.parameters()) - model.embedding.weight.numel()
    assert step_flops(Job(model, Pass(1, 512), Train())) / 512 == pytest.approx(
        6 * weights, rel=0.03
    )


def test_loss_needs_a_chunk_of_logits_not_all() -> None:
    model = build("llama-3.1-8b", device="meta", layers=1)
    run = Pass(16, 1024, device="cuda", bf16=True)
    everything = 16 * 1024 * 128256 * 2
    gradients = (4 + 2) * 128256 * 4096
    assert head_bytes(model, run) - gradients < everything / 4


def test_frozen_body_keeps_nothing() -> None:
    model = build("bert-base", **MODELS["bert"][1])
    model.embedding.requires_grad_(False)
    model.tower.requires_grad_(False)
    need = memory(Job(model, Pass(B, T), Train()))
    assert need.activations == 0 and 0 < need.gradients < need.weights


# --- does it fit --------------------------------------------------------------------------------------------------


def huge(**settings: Any) -> Job:
    model = build("gpt2", device="meta", vocab=1000)
    return Job(model, Pass(256, 1024), Train(**settings))


def test_small_run_fits() -> None:
    model = build("gpt2", device="meta", **MODELS["gpt2"][1])
    plan = Plan(Job(model, Pass(4, 32), Train()))
    assert shortage(plan, GIB, GIB) is None


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that multiplies bf16."""
    monkeypatch.setattr(module, "is_fast", lambda dtype: True)


@pytest.mark.usefixtures("rounding")
def test_huge_run_is_refused_with_the_cheapest_changes_in_order() -> None:
    plan = Plan(huge())
    for free, wanted in ((8, ["micro_batches", "rows"]), (30, ["micro_batches", "rows"])):
        found = changes(plan.job, free * GIB)
        names = [name for change in found for name in change.settings]
        assert [names[0].split(".")[1], names[-1].split(".")[1]] == wanted
        # What is proposed fits.
        assert all(change.total <= free * GIB for change in found)
    parts = changes(plan.job, 8 * GIB)[0]
    fewer = replace(
        plan.job, train=Train(micro_batches=int(parts.settings["train.micro_batches"]) // 2)
    )
    assert memory(fewer).total > 8 * GIB  # no more parts than are needed
    text = shortage(plan, 8 * GIB, GIB << 10)
    assert text is not None and "\n" not in text
    places = [
        text.index(f"--{name}") for change in changes(plan.job, 8 * GIB) for name in change.settings
    ]
    assert places == sorted(places) and "8.0 GiB are free" in text and "activations" in text


@pytest.mark.parametrize("share", [0.95, 0.6, 0.4, 0.3, 0.2, 0.1, 0.05])
def test_whatever_is_proposed_fits(share: float) -> None:
    """For any memory, on a CPU and on a GPU: one change alone, or several together."""
    for device in ("cpu", "cuda"):
        job = replace(huge(), step=Pass(64, 1024, device=device))
        free = int(share * memory(job).total)
        found = changes(job, free)
        assert all(change.total <= free for change in found)
        # All rows at once are what needs most here, so that something always helps.
        assert found or free < memory(replace(job, step=Pass(1, 1024))).total


@pytest.mark.usefixtures("rounding")
def test_bf16_is_proposed_where_it_is_no_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    job = huge()
    free = memory(replace(job, train=Train(precision="bf16"))).total
    assert {"train.precision": "bf16"} in [change.settings for change in changes(job, free)]
    monkeypatch.setattr(module, "is_fast", lambda dtype: False)
    assert {"train.precision": "bf16"} not in [change.settings for change in changes(job, free)]
    gpu = replace(job, step=replace(job.step, device="cuda"))
    free = memory(replace(gpu, train=Train(precision="bf16"))).total
    assert {"train.precision": "bf16"} in [change.settings for change in changes(gpu, free)]


def test_large_model_on_a_gpu_is_shared_by_as_many_as_are_needed() -> None:
    model = build("gpt2-xl", device="meta")
    job = Job(model, Pass(1, 128, device="cuda"), Train())
    need = memory(job)
    (found,) = changes(job, need.total // 3)
    assert found.settings == {"train.parallel.mode": "fsdp"} and found.total <= need.total // 3
    assert "on 4 such GPUs" in found.cost and "torchrun --nproc-per-node 4" in str(found)
    assert changes(replace(job, step=Pass(1, 128)), need.total // 3) == []


def test_each_change_says_what_is_true_of_it() -> None:
    job = huge()
    for change in changes(job, 8 * GIB):
        (name, value), *_ = change.settings.items()
        train: dict[str, Any] = {
            "train.micro_batches": {"micro_batches": int(value) if value.isdigit() else 1},
            "train.activation_checkpointing": {"activation_checkpointing": True},
            "train.precision": {"precision": "bf16"},
        }.get(name, {})
        rows = int(value) if name == "data.rows" else job.step.rows
        changed = replace(job, train=Train(**train), step=replace(job.step, rows=rows))
        assert memory(changed).total == change.total


def test_changes_that_do_not_help_are_left_out() -> None:
    job = replace(huge(precision="bf16", activation_checkpointing=True), sized="data.tokens")
    found = changes(job, 4 * GIB)
    assert [[*change.settings] for change in found] == [["train.micro_batches"], ["data.tokens"]]
    one = replace(job, step=replace(job.step, rows=1))
    assert changes(one, GIB) == []
    text = shortage(Plan(one), GIB, GIB << 10)
    assert text is not None and text.endswith("cheapest first: a smaller model")


def test_several_changes_together_where_none_is_enough() -> None:
    model = build("gpt2", device="meta", vocab=1000, max_len=32768)
    job = Job(model, Pass(2, 16384), Train())
    alone = [change.total for change, _ in module._tried(job, 0)]
    free = min(alone) - (16 << 20)
    (last,) = changes(job, free)
    assert last.cost == "together" and len(last.settings) > 1 and last.total <= free
    text = shortage(Plan(job), memory(replace(job, step=Pass(1, 1))).total // 2, GIB << 10) or ""
    assert text.endswith("cheapest first: a smaller model")


def test_full_disk_is_refused() -> None:
    text = shortage(Plan(huge()), GIB << 10, GIB)
    assert text is not None and "of disk" in text and "1.0 GiB are free" in text


def test_trainer_is_refused_only_when_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = trainer(tmp_path)
    config = SimpleNamespace(
        model={},
        data=SimpleNamespace(rows=6),
        train=t.config,
        adapt=SimpleNamespace(method="full", low_rank=False),
    )
    assert refusal(config, t) is None
    monkeypatch.setattr(module, "free_memory", lambda device: OTHER)
    text = refusal(config, t)
    assert text is not None and text.startswith("it needs about 300 MiB of memory")


def test_step_is_read_off_the_feed() -> None:
    run, learned = drawn(Toy(), build("gpt2", **MODELS["gpt2"][1]), "cpu")
    assert (run, learned) == (Pass(6, 8), 1.0)


# --- what is free -------------------------------------------------------------------------------------------------


def test_free_memory_respects_control_groups(tmp_path: Path) -> None:
    def put(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    cpu = torch.device("cpu")
    put("proc/meminfo", "MemTotal:  9000 kB\nMemAvailable:    8000 kB\n")
    assert free_memory(cpu, tmp_path) == 8000 << 10
    put("proc/self/cgroup", "0::/a/b\n")
    put("sys/fs/cgroup/a/b/memory.max", "max\n")
    put("sys/fs/cgroup/a/b/memory.current", "5\n")
    assert free_memory(cpu, tmp_path) == 8000 << 10
    put("sys/fs/cgroup/a/memory.max", "5000000\n")
    put("sys/fs/cgroup/a/memory.current", "3000000\n")
    put("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 1000000\n")
    assert free_memory(cpu, tmp_path) == 3_000_000
    put("proc/self/cgroup", "4:memory:/x\n3:cpu:/\n")
    put("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "700\n")
    put("sys/fs/cgroup/memory/x/memory.usage_in_bytes", "600\n")
    assert free_memory(cpu, tmp_path) == 100


def test_free_disk_of_a_folder_to_come(tmp_path: Path) -> None:
    assert free_disk(tmp_path / "not" / "yet") > 0


def test_numbers_for_people() -> None:
    assert [size(n) for n in (512, 4096, 1.5 * GIB, 3000 * GIB)] == [
        "512 B", "4.0 KiB", "1.5 GiB", "2.9 TiB",
    ]  # fmt: skip
    assert [number(n).strip() for n in (12, 26_400_000, 2.6e15)] == ["12", "26.4 M", "2.6 P"]
    assert [duration(n) for n in (0.1, 40, 390, 8 * 3600, 1e6)] == [
        "1 s", "40 s", "6.5 min", "8 h", "12 days",
    ]  # fmt: skip

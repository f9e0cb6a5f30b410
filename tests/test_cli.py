"""The command `regard`: what it prints where, what it needs to start, and how each mistake ends."""

import ast
import dataclasses
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import regard
from regard.cli import generate as cli_generate
from regard.cli import shared as cli_parse
from regard.cli.main import COMMANDS, command_of, main
from regard.evaluation import model
from regard.fast.cpu import model as cpu
from regard.models.mtp import MTP
from tests.text import tiny

ROOT = Path(__file__).resolve().parents[1]
SMALL: dict[str, Any] = dict(layers=2, dim=32, heads=4, ffn_dim=48)
CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
HOME = tempfile.TemporaryDirectory(prefix="regard-cli-")


class Done(NamedTuple):
    code: int
    out: str
    err: str


def call(*arguments: Any, stdin: str | bytes | None = b"") -> Done:
    """`regard arguments` in this process, on streams whose encoding is wrong as some terminals' is; stdin=None is a
    closed one."""
    raw = stdin.encode() if isinstance(stdin, str) else stdin or b""
    before = sys.stdin, sys.stdout, sys.stderr
    given, out, err = (io.TextIOWrapper(io.BytesIO(x), encoding="ascii") for x in (raw, b"", b""))
    sys.stdin, sys.stdout, sys.stderr = None if stdin is None else given, out, err  # type: ignore[assignment]
    try:
        code = main([str(a) for a in arguments])
    finally:
        sys.stdin, sys.stdout, sys.stderr = before
    out.flush()
    err.flush()
    written = (x.buffer.getvalue().decode("utf-8") for x in (out, err))  # type: ignore[attr-defined]
    return Done(code, *written)


def command(*arguments: Any) -> dict[str, Any]:
    """What subprocess needs to run `regard arguments`."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""}
    env.pop("NO_COLOR", None)
    return dict(args=[sys.executable, "-m", "regard", *map(str, arguments)], env=env)


def process(*arguments: Any, stdin: str = "") -> Done:
    done = subprocess.run(**command(*arguments), input=stdin.encode(), capture_output=True)
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


@cache
def folder(name: str) -> Path:
    """A tiny model with a tiny tokenizer, saved once: gpt2 (with a chat template), t5, marian; bare, bert and
    captioner have no tokenizer."""
    torch.manual_seed(0)
    path = Path(HOME.name) / name
    if name == "gpt2":
        model = regard.build("gpt2", vocab=400, max_len=96, **SMALL)
        # Larger than at the start of a training, so that an answer depends on all that was read.
        for weight in model.parameters():
            weight.data *= 10 if weight.ndim == 2 else 1
        model.save(path)
        return put(path, tiny.gpt2(chat_template=CHATML))
    if name == "bare":
        return regard.build("gpt2", vocab=50, max_len=40, **SMALL).save(path)
    if name == "bert":
        return regard.build("bert-base", vocab=50, max_len=40, **SMALL).save(path)
    if name == "captioner":
        return regard.build("captioner", size=16, patch=8, vocab=50, **SMALL).save(path)
    vocab = max(json.loads(tiny.marian()["vocab.json"]).values()) + 1 if name == "marian" else 145
    preset = "marian" if name == "marian" else "t5-small"
    model = regard.build(preset, vocab=vocab, **SMALL)
    for p in model.parameters():
        p.data *= 3 if p.dim() > 1 else 1  # so that its answers differ from line to line
    model.save(path)
    start, eos = (vocab - 1, 0) if name == "marian" else (0, 1)
    saved = tiny.dump({"decoder_start_token_id": start, "eos_token_id": eos})
    return put(path, {**tiny.ALL[name](), "generation_config.json": saved})


def put(path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


# --- starting -----------------------------------------------------------------------------------------------------


def test_help_and_typing_mistakes_do_not_import_torch() -> None:
    """Each in a process of its own, forked before any command was looked for."""
    tried = [["--help"], ["--version"], [], *([*name.split(), "--help"] for name in COMMANDS)]
    tried += [["generate", "--max-new-tokns", "3"], ["generat"]]
    script = f"""
import os, sys
from regard.cli.main import main
for arguments in {tried!r}:
    if os.fork() == 0:
        code = main(arguments)
        heavy = {{"torch", "numpy", "tokenizers", "safetensors"}} & set(sys.modules)
        sys.stdout.flush()
        os._exit(code not in (0, 2) or bool(heavy))
    assert os.wait()[1] == 0, arguments
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_names_every_command_and_shows_examples_first() -> None:
    text = call("--help").out
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert text.index("regard generate MODEL") < text.index("commands")
    text = call("generate", "--help").out
    assert text.index("regard generate MODEL") < text.index("usage:") < text.index("--top-k")
    assert all(len(line) <= 120 and line == line.rstrip() for line in text.splitlines())


def test_every_flag_has_a_comment_which_is_its_help() -> None:
    """Beside it or above it: the formatter may move one into a bracket, where tyro does not look."""
    for path in sorted((ROOT / "regard" / "cli").glob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            # Those of `explain` say it in their annotation.
            asked = isinstance(node, ast.ClassDef) and node.name != "Question"
            flags = getattr(node, "body", []) if asked else []
            for flag in (f for f in flags if isinstance(f, ast.AnnAssign)):
                line, above = lines[flag.lineno - 1], lines[flag.lineno - 2]
                group = isinstance(flag.value, ast.Call) or "Folder" in ast.unparse(flag.annotation)
                assert group or "  # " in line or above.startswith("    # "), f"{path}: {line}"


def test_every_setting_of_decoding_is_a_flag_that_is_left_to_the_folder() -> None:
    made = cli_parse.values(cli_generate.Options(model="m"))
    for f in (f for f in dataclasses.fields(regard.Settings) if f.name != "filters"):
        assert made[f.name] is None or made[f.name] == f.default, f.name


def test_threads_sleep_and_are_counted_once_before_a_command_computes() -> None:
    script = f"""
import sys
import regard.cli.main as cli

steps = []
cli.wait_asleep = lambda: steps.append(("asleep", "torch" in sys.modules))
cli.use_threads = lambda: steps.append(("threads", "torch" in sys.modules))
assert cli.main(["generate", {str(folder("gpt2"))!r}, "a", "--max-new-tokens", "2",
                 "--draft-model", {str(folder("gpt2"))!r}]) == 0
assert [name for name, _ in steps] == ["asleep", "threads"] and not steps[0][1], steps
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_flags_may_be_written_with_underscores() -> None:
    kebab = cli_parse.parse(cli_generate.Options, "generate", ["m", "--max-new-tokens", "3"])
    snake = cli_parse.parse(cli_generate.Options, "generate", ["m", "--max_new_tokens", "3"])
    assert kebab == snake and kebab is not None and kebab.max_new_tokens == 3


# --- generate -----------------------------------------------------------------------------------------------------


def test_process_writes_the_text_and_nothing_else(shared: Path) -> None:
    model = shared / "weights" / "stories260K"
    done = process("generate", model, "Once upon a time", "--max-new-tokens", 24)
    text = regard.generate(regard.load(model), "Once upon a time", max_new_tokens=24)[0].text
    assert done == Done(0, f"{text}\n", "")
    assert text.startswith(", there was a little girl")


def test_prompt_comes_from_stdin_without_its_line_end() -> None:
    given = call("generate", folder("gpt2"), "The dog", "--max-new-tokens", 8)
    assert given.code == 0 and given.err == "" and given.out.endswith("\n")
    for dash in ([], ["-"]):
        read = call("generate", folder("gpt2"), *dash, "--max-new-tokens", 8, stdin="The dog\r\n")
        assert read == given


def test_json_holds_the_result() -> None:
    done = call("generate", folder("gpt2"), "The dog", "--max-new-tokens", 8, "--json")
    (want,) = regard.generate(regard.load(folder("gpt2")), "The dog", max_new_tokens=8)
    found = json.loads(done.out)
    assert list(found) == ["text", "ids", "logprobs", "score", "finish"]
    assert (found["text"], found["ids"], found["finish"]) == (want.text, want.ids, want.finish)
    assert found["score"] == pytest.approx(want.score, abs=1e-4)
    assert found["logprobs"] == pytest.approx(want.logprobs, abs=1e-4)


def test_json_holds_the_best_tokens_and_the_prompt() -> None:
    flags = ["--max-new-tokens", 3, "--top-logprobs", 2, "--prompt-logprobs"]
    found = json.loads(call("generate", folder("gpt2"), "The dog", *flags, "--json").out)
    assert [len(tops) for tops in found["top_logprobs"]] == [2] * len(found["ids"])
    assert [tops[0][1] for tops in found["top_logprobs"]] == found["logprobs"]
    assert found["prompt_logprobs"][0] is None and found["prompt_logprobs"][1] < 0
    done = call("generate", folder("gpt2"), "The dog", *flags)
    assert done.code == 2 and "are printed with --json; give it too" in done.err


@pytest.mark.parametrize(
    "flags, count",
    [
        (["--beams", 3, "--n-best", 2], 2),
        (["--samples", 3, "--temperature", 0.9, "--top-k", 40, "--seed", 5], 3),
        (["--lookup", 4], 1),
        (["--beams", 4, "--early-stopping", "first"], 1),
    ],
)
def test_several_answers_are_several_lines_of_json(flags: list[Any], count: int) -> None:
    done = call("generate", folder("gpt2"), "The", "--max-new-tokens", 6, "--json", *flags)
    found = [json.loads(line) for line in done.out.splitlines()]
    settings = {str(k)[2:].replace("-", "_"): v for k, v in zip(flags[::2], flags[1::2])}
    model = regard.load(folder("gpt2"))
    want = regard.generate(model, ["The"], max_new_tokens=6, **settings)
    assert [f["ids"] for f in found] == [r.ids for r in want] and len(found) == count
    plain = call("generate", folder("gpt2"), "The", "--max-new-tokens", 6, *flags)
    assert plain.out == "".join(f["text"] + "\n" for f in found)


def test_flags_about_tokens_have_their_effect() -> None:
    def ids(*flags: Any) -> list[int]:
        return json.loads(
            call("generate", folder("gpt2"), "The", "--max-new-tokens", 5, "--json", *flags).out
        )["ids"]

    plain = ids()
    assert plain[0] not in ids("--banned", plain[0], "--banned", 7)
    assert ids("--logit-bias", "9=100") == [9] * 5
    assert ids("--forced-first", 0, "--eos", 399)[0] == 0
    assert ids("--forced-last", 11)[-1] == 11
    assert ids("--eos", plain[0]) == []
    assert len(ids("--eos", plain[0], "--min-new-tokens", 2)) >= 2
    assert ids("--repetition-penalty", 50.0) != plain


def test_stop_ends_the_text() -> None:
    whole = call("generate", folder("gpt2"), "The dog", "--max-new-tokens", 12).out.rstrip("\n")
    stop = whole[3:5]
    done = call(
        "generate",
        folder("gpt2"),
        "The dog",
        "--max-new-tokens",
        12,
        "--stop",
        "§§",
        f"--stop={stop}",
    )
    assert done.out == whole[: whole.index(stop)] + "\n"


def test_draft_model_changes_no_token() -> None:
    plain = call("generate", folder("gpt2"), "The dog", "--max-new-tokens", 12)
    for more in (["--draft", 2], ["--json"]):
        flags = ["--max-new-tokens", 12, "--draft-model", folder("gpt2"), *more]
        done = call("generate", folder("gpt2"), "The dog", *flags)
        text = json.loads(done.out)["text"] + "\n" if "--json" in more else done.out
        assert (done.code, text) == (0, plain.out)


def test_mtp_layers_change_no_token(tmp_path: Path) -> None:
    model = regard.load(folder("gpt2"))
    made = replace(model.config, mtp=MTP(2)).make()
    made.load_state_dict(model.state_dict(), strict=False)
    made.origin = model.origin
    made.save(tmp_path / "model")
    plain = call("generate", folder("gpt2"), "The dog", "--max-new-tokens", 12)
    for more in ([], ["--draft", 1]):
        flags = ["--max-new-tokens", 12, "--draft-model", "mtp", *more]
        done = call("generate", tmp_path / "model", "The dog", *flags)
        assert (done.code, done.out) == (0, plain.out)


def test_ids_in_and_out_without_a_tokenizer() -> None:
    done = call("generate", folder("bare"), "5, 9 2", "--ids", "--max-new-tokens", 6)
    (want,) = regard.generate(regard.load(folder("bare")), [5, 9, 2], max_new_tokens=6)
    assert done == Done(0, " ".join(map(str, want.ids)) + "\n", "")
    done = call("generate", folder("bare"), "5, 9 2", "--ids", "--max-new-tokens", 6, "--json")
    assert json.loads(done.out)["text"] is None and json.loads(done.out)["ids"] == want.ids


@pytest.mark.parametrize(
    "prompt", ["👩‍👩‍👧 😀", "שלום مرحبا", "e\u0301 你好", "a\tb\nc", "nul\x01", "-5 x"]
)
def test_any_unicode_may_be_a_prompt(prompt: str) -> None:
    done = call("generate", folder("gpt2"), prompt, "--max-new-tokens", 4)
    (want,) = regard.generate(regard.load(folder("gpt2")), [prompt], max_new_tokens=4)
    assert done == Done(0, f"{want.text}\n", "")
    assert call("generate", folder("gpt2"), "--max-new-tokens", 4, stdin=prompt) == done


def test_unicode_survives_a_process_with_another_locale() -> None:
    given = command("generate", folder("gpt2"), "😀 שלום", "--max-new-tokens", 4, "--json")
    given["env"] |= {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii",
    }
    done = subprocess.run(**given, capture_output=True)
    (want,) = regard.generate(regard.load(folder("gpt2")), ["😀 שלום"], max_new_tokens=4)
    if (
        done.returncode == 0
    ):  # without UTF-8 mode the argument arrives as surrogates, which are refused
        assert json.loads(done.stdout)["text"] == want.text
    else:
        assert (done.returncode, b"Unicode" in done.stderr) == (2, True)


@pytest.mark.parametrize("flags", [["--dtype", "bf16"], ["--precision", "fp32", "--device", "cpu"]])
def test_device_and_precision_are_accepted(flags: list[str]) -> None:
    done = call("generate", folder("gpt2"), "The dog", "--max-new-tokens", 3, *flags)
    assert done.code == 0
    assert done.err == "" or ("bf16" in flags and "this CPU does not multiply bf16" in done.err)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_precision_on_a_cpu_is_the_weights_own(
    stored: torch.dtype, fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (model, cpu):
        monkeypatch.setattr(module, "half_is_fast", lambda: fast)
    regard.load(folder("gpt2"), dtype=stored).save(tmp_path / "m")
    opened = model.Opened(str(tmp_path / "m"))
    assert opened.precision == ("bf16" if stored.itemsize == 2 and fast else "fp32")
    asked = model.Opened(str(tmp_path / "m"), dtype="bf16")
    assert asked.precision == ("bf16" if fast else "fp32")


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantize_says_what_it_costs(kind: str) -> None:
    done = call(
        "generate", folder("gpt2"), "The dog runs", "--max-new-tokens", 3, "--quantize", kind
    )
    assert done.code == 0
    assert done.err.startswith(f"{kind}: perplexity of the prompt ") and " -> " in done.err
    assert len(done.err.splitlines()) == 1


def test_encoder_decoder_generates_from_its_source() -> None:
    done = call("generate", folder("t5"), "The dog", "--max-new-tokens", 6)
    (want,) = regard.generate(regard.load(folder("t5")), ["The dog"], max_new_tokens=6)
    assert done == Done(0, f"{want.text}\n", "")


# --- help ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_each_thing_once_and_of_what_it_is(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Groups of flags have the words of their class; what is left out has no default that is called None."""
    assert main([*name.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert "None" not in out
    options, _ = command_of(name.split()[0])
    for f in dataclasses.fields(options):
        if dataclasses.is_dataclass(f.default):
            said = re.search(rf"(?m)^ {f.name} options\n *[-─]+\n +(.+)", out)
            assert said and said[1] == inspect.getdoc(type(f.default)), f.name


@pytest.mark.parametrize("name", [name for name in COMMANDS if " " in name])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_of_a_command_of_two_words(
    name: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name.split()[0], flag]) == main([*name.split(), flag]) == 0
    once = capsys.readouterr().out
    assert once[: len(once) // 2] == once[len(once) // 2 :]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "stroy.toml"],
        ["plan", "stroy.toml"],
        ["data", "peek", "stroy.toml"],
        ["data", "peek", "stroy.txt", "--tokenizer", "demo"],
        ["tokenizer", "train", "stroy.txt", "--out", "tok"],
        ["eval", "demo", "--data", "stroy.txt"],
        ["generate", "stroy", "hi"],
        ["report", "stroy"],
        ["compare", "stroy", "story"],
        ["classify", "stroy", "story.txt"],
        ["finetune", "stroy", "--data", "story.txt"],
        ["finetune", "demo", "--data", "stroy.txt"],
    ],
    ids=" ".join,
)
def test_name_with_a_slip_is_told_with_its_neighbour(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("story.toml", "story.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "story").mkdir()
    assert main(words) in (2, 4)
    (wrong,) = [word for word in words if word.startswith("stroy")]
    assert f"did you mean {wrong.replace('stroy', 'story')}?" in capsys.readouterr().err

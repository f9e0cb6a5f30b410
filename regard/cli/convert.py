"""regard convert: GGUF files and pickled weights become model folders with safetensors; and regard
merge: an adapter and its model become one model folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from regard.cli.shared import check_new_folder, renew, talk
from regard.errors import DATA, RUN, Fault, UsageError, blaming, notice
from regard.files import model_folder, resolve_model


@dataclass(frozen=True)
class Options:
    """Bring in a model that is not stored as safetensors: pickled weights, or a GGUF file with its tokenizer.

    regard convert model-Q4_K_M.gguf model           then: regard generate model "Once upon a time"
    regard convert old-folder new-folder             pytorch_model.bin and the like, with config.json beside it
    """

    # a GGUF file, a folder with config.json and pickled weights, or one such file in it
    source: Annotated[Positional[str], arg(metavar="SOURCE")]
    # the new folder; one that has files in it is refused
    folder: Annotated[Positional[str], arg(metavar="FOLDER")]
    # type of the weights; auto: as they are stored, fp16 for what is quantised
    dtype: Literal["auto", "fp32", "fp16", "bf16"] = "auto"


@dataclass(frozen=True)
class MergeOptions:
    """Write an adapter and the model it stands on as one model folder, which needs neither.

    regard merge runs/tuned merged                   then: regard generate merged "Once upon a time"
    """

    # a run with LoRA, or a folder with adapter_config.json and adapter_model.safetensors: Regard's or PEFT's
    adapter: Annotated[Positional[str], arg(metavar="ADAPTER")]
    # the new folder; one that has files in it is refused
    out: Annotated[Positional[str], arg(metavar="OUT")]


def run(options: Options) -> int:
    import torch

    from regard.checkpoint.convert import find, pickled

    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    out, dtype = Path(options.folder), dtypes.get(options.dtype)
    check_new_folder(out)
    with blaming(DATA):
        model = find(Path(options.source))
        if not model.pickled:
            from regard.checkpoint.gguf import describe, from_gguf, gguf_dtype
            from regard.text.gguf import tokenizer_files

            described = describe(model.weights[0])
            files, notices = tokenizer_files(described.file.metadata)
            for text in notices:
                notice(text)
            stored, most = gguf_dtype(described.file)
            dtype = dtype or stored
            with blaming(RUN):
                from_gguf(described, out, dtype, files, progress)
            kind = described.config["architectures"][0]
            written = str(dtype).removeprefix("torch.")
            notice(f"a {kind}; most of its weights are {most}, written as {written}")
        else:
            if model.left_out:
                notice(f"left out: {', '.join(model.left_out)}")
            if why := pickled(model, out, dtype, progress):
                print(out)
                raise Fault(
                    f"{out} has the weights as safetensors, but Regard does not read the model in it: {why}. "
                    f"If something is missing, add it to {out / 'config.json'}",
                    DATA,
                )
    print(out)
    return 0


def progress(done: int, total: int) -> None:
    renew(f"tensor {done} of {total}" if done < total else "")


def merge(options: MergeOptions) -> int:
    from regard.checkpoint import load
    from regard.checkpoint.adapter import PEFT, is_adapter

    out = Path(options.out)
    check_new_folder(out)
    with blaming(DATA):
        adapter = model_folder(resolve_model(options.adapter))
        if not is_adapter(adapter):
            whole = (adapter / "config.json").is_file() and "; it is a whole model, use it as it is"
            why = f"{adapter} has no {PEFT}: it is not an adapter, nothing to merge"
            raise UsageError(f"{why}{whole or ''}")
        model = load(adapter, dtype="stored")
    with blaming(RUN):
        model.save(out)
    talk(f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters")
    print(out)
    return 0

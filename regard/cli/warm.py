"""regard warm: what a first request would wait for, done before."""

from __future__ import annotations

from dataclasses import dataclass

from regard.cli.shared import Count, Folder, Machine, check_counts, open_model, renew


@dataclass(frozen=True)
class Options:
    """Compile and measure what the first requests of a model would wait for; the next process finds it on disk.

    regard warm MODEL                            while an image is built, or before a server starts
    regard warm MODEL --rows 8 --length 4096     for few rows and short texts, which is quicker
    """

    model: Folder
    rows: Count = None  # answers that are written together; default: as an engine takes them
    length: Count = None  # tokens of the longest text; default: the model's context, up to 32,768
    machine: Machine = Machine()


def run(options: Options) -> int:
    check_counts(options, "rows", "length")
    from regard.decode.runners.steps import why_plain
    from regard.decode.warm import built, triton_folder, warm
    from regard.machine import pick_device

    cpu = pick_device(options.machine.device)[0].type == "cpu"
    if cpu:
        print(built())
    model = open_model(options.model, options.machine).model
    if not model.decodes:
        print("this model writes no text: nothing of it is compiled")
        return 0
    done = warm(model, options.rows, options.length, tell=renew)
    renew("")
    if why := why_plain(model):
        print(f"no graph: {why}")
    else:
        left = f"{done.kernels} kernels compiled, {done.forms} forms measured"
        print(f"1 to {done.rows} rows, texts of up to {done.length:,} tokens: {left} now")
        print(f"{done.graphs} graphs can be recorded; kernels are kept in {triton_folder()}")
    print(
        f"an answer after {done.first:.2f} s, the next after {done.again:.3f} s; {done.seconds:.1f} s in all"
    )
    return 0

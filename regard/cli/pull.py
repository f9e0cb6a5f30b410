"""regard pull: a model from the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from regard.cli.shared import pull


@dataclass(frozen=True)
class Options:
    """Bring a model from the Hugging Face Hub into its cache on this machine; every file is checked.

    regard pull HuggingFaceTB/SmolLM2-135M          then: regard chat HuggingFaceTB/SmolLM2-135M
    regard pull org/name@v1.0                       a branch, a tag or a commit

    Safetensors, configs and tokenizers are taken, and no code. Other commands download nothing. HF_HOME says where the
    cache lies, HF_ENDPOINT which hub is asked.
    """

    name: Annotated[Positional[str], arg(metavar="ORG/NAME")]  # a model on the hub


def run(options: Options) -> int:
    print(pull(options.name))
    return 0

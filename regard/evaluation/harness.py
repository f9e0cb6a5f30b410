"""EleutherAI's lm-eval on our models. Its command knows only the models of its own table, so `main` adds one more,
"regard", and is then that command; in Python, importing this file is enough for
lm_eval.simple_evaluate(model="regard", model_args="pretrained=FOLDER", tasks=...)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval import utils
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from regard.decode.generate import generate
from regard.errors import DATA, Fault, UsageError, nearest
from regard.evaluation.model import Opened, padded
from regard.evaluation.run import task_of
from regard.text import needed
from regard.text.chat import render_chat
from regard.training.measure import context_of

ROWS = 16  # where batch_size is auto
CONTEXT = 2048  # of a model without a limit, as lm-eval has it
ARGUMENTS = ("pretrained", "device", "dtype", "quantize", "batch_size", "max_length")


def main(arguments: Sequence[str]) -> None:
    """lm-eval's own command line; the model is ours where none is named."""
    given = {text.partition("=")[0] for text in arguments}
    other = {"ls", "validate", "--model", "-M", "--config", "-C", "--help", "-h"}
    sys.argv = ["regard lm-eval", *arguments, *([] if given & other else ["--model", "regard"])]
    cli_evaluate()


@register_model("regard")
class Regard(TemplateLM):
    """A language model of a folder, asked as lm-eval asks its model `hf`: the same tokens, windows and cuts."""

    tokenizer_name = ""

    def __init__(
        self,
        pretrained: str = "",
        device: str = "auto",
        dtype: str = "auto",
        quantize: str = "none",
        batch_size: int | str = 1,
        max_length: int | None = None,
        max_batch_size: int | None = None,
        **unknown: Any,
    ):
        super().__init__()
        for name in unknown:
            hint = nearest(name, ARGUMENTS)
            raise UsageError(f"{name} is not one of the model_args of regard; {hint}")
        if not pretrained:
            raise UsageError("name the model's folder: --model_args pretrained=FOLDER")
        # lm-eval says so where nobody did, and means a GPU if there is one.
        device = "auto" if device == "cuda:0" else device
        opened = Opened(str(pretrained), device=device, dtype=dtype, quantize=quantize)
        self.model = opened.model
        if (task := task_of(self.model)) != "lm":
            raise Fault(f"lm-eval asks language models; the task of {pretrained} is {task}", DATA)
        self.words = needed(opened.tokenizer)
        self.tokenizer_name = str(pretrained).replace("/", "__")
        auto = str(batch_size).startswith("auto")
        self.rows = int(max_batch_size or ROWS) if auto else int(batch_size)
        self.max_length = int(max_length or context_of(self.model) or CONTEXT)

    # --- tokens ---

    def _named(self, *names: str) -> int:
        ids = (self.words.core.token_to_id(self.words.tokens.get(name, "")) for name in names)
        return next((i for i in ids if i is not None), (*self.words.special.eos, 0)[0])

    @property
    def eot_token_id(self) -> int:
        return self._named("eos_token")

    @property
    def prefix_token_id(self) -> int:
        return self._named("bos_token", "eos_token")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        if add_special_tokens is None:
            first = self.words.decode([self.prefix_token_id], skip_special=False)
            add_special_tokens = not string.startswith(first)
        return self.words.encode(string, special=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        text = render_chat(self.words, chat_history, reply=add_generation_prompt)
        if add_generation_prompt:
            return text
        # The last message goes on: nothing of the template may stand behind it.
        last = chat_history[-1]["content"]
        return text[: text.rindex(last.strip()) + len(last.lstrip())]

    # --- what is asked ---

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Of each continuation behind its context: the sum of its tokens' log probabilities, and whether each of them
        is the most probable. Contexts that are too long lose their beginning."""
        answers = [(0.0, True)] * len(requests)
        place = next(self.model.parameters()).device
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1] + requests[i][2]))
        for start in range(0, len(order), self.rows):
            numbers = order[start : start + self.rows]
            texts = [(requests[i][1] + requests[i][2])[-self.max_length - 1 :] for i in numbers]
            ids, lengths = padded([torch.tensor(x[:-1]) for x in texts], place)
            hidden = self.model.hidden(ids, lengths)
            for row, (i, text) in enumerate(zip(numbers, texts)):
                end, count = len(text) - 1, len(requests[i][2])
                logits = self.model.logits(hidden[row : row + 1, end - count : end])[0].float()
                target = torch.tensor(text[-count:], device=logits.device)
                each = logits.log_softmax(-1).gather(-1, target[:, None])
                answers[i] = float(each.double().sum()), bool((logits.argmax(-1) == target).all())
        return answers

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows of the model's context, each token once."""
        totals = []
        for (text,) in (request.args for request in requests):
            ids, first = self.tok_encode(text), self.prefix_token_id
            windows = utils.get_rolling_token_windows(ids, first, self.max_length, 1)
            pairs = [(None, *utils.make_disjoint_window(window)) for window in windows]
            totals.append(sum(value for value, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(i)
        texts = [""] * len(requests)
        for numbers in groups.values():
            asked: Any = normalize_gen_kwargs(requests[numbers[0]].args[1])
            stop = [text for text in asked.pop("until", []) if text]
            most = asked.pop("max_gen_toks")
            if not asked.pop("do_sample", False):
                asked["temperature"] = 0.0
            if most >= self.max_length:
                why = f"{most} tokens are to be generated, the context is {self.max_length}"
                raise UsageError(f"{why}; say --gen_kwargs max_gen_toks=N with a smaller N")
            room = self.max_length - most
            prompts = [self.tok_encode(requests[i].args[0])[-room:] for i in numbers]
            more: Any = {"rows": self.rows, "max_new_tokens": most, "beams": 1, **asked}
            results = generate(self.model, prompts, stop=stop, **more)
            for i, result in zip(numbers, results, strict=True):
                # Decoded alone, as `hf` does: without the space that a first word may begin with.
                texts[i] = postprocess_generated_text(self.words.decode(result.ids), stop, None)
        return texts

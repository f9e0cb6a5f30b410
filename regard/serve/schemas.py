"""What a request may say: one struct for each body. A field that is not here is refused by its name, never ignored.

`| None` is for clients that send null for what they leave out. The same structs make /openapi.json. Where tokens are
drawn, every sampling filter of `regard.decode.filters` is a field too."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, defstruct

from regard.decode.filters import FILTERS
from regard.decode.settings import DEFAULTS
from regard.errors import UsageError
from regard.serve.edge import HTTPError

MOST_NEW = 1_000_000
# Values of vLLM's clients that keep all tokens, as the neutral value of a filter does.
NEUTRAL = {"top_k": -1}
# What clients call the engine's settings that have another name here.
CALLED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "samples": "n"}
Text = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1, le=MOST_NEW)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Id = Annotated[int, Meta(ge=0, lt=2**31)]
Ids = Annotated[list[Id], Meta(min_length=1)]
Biases = Annotated[dict[Id, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)]
Stop = Text | Annotated[list[Text], Meta(max_length=16)]
# A text, ids, texts, or lists of ids.
Prompts = str | Annotated[list[str | Id | Ids], Meta(min_length=1, max_length=2048)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Variables = Annotated[dict[str, Any], Meta(max_length=64)]
Texts = str | Annotated[list[str], Meta(min_length=1, max_length=2048)]


class Strict(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A body in which every field is known."""


class Model(Strict):
    model: Text


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Answer(Model):
    """What every body that asks for a text may say."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    # A filter, and the only one that /v1/responses takes.
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # Prompts of different users share no cached pages.
    user: str | None = None
    safety_identifier: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Known, and without a say in the answer: nothing is stored, sold or routed here.
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class Drawing(Answer):
    """How tokens are chosen; the fields are vLLM's, `logit_bias` to `n` OpenAI's. The filters are added by `taken`."""

    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Biases | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    # No end before so many tokens; no end token at all; more of them.
    min_tokens: Annotated[int, Meta(ge=0, le=MOST_NEW)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Id], Meta(max_length=64)] | None = None
    # Prompts of another one share no cached pages.
    cache_salt: str | None = None
    # Known, and only so can be honoured.
    skip_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None


class Completion(Drawing, kw_only=True):
    """POST /v1/completions. An encoder-decoder reads the prompt as its source."""

    prompt: Prompts
    max_tokens: Annotated[int, Meta(ge=0, le=MOST_NEW)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    beams: Annotated[int, Meta(ge=1, le=32)] | None = None
    suffix: None = None


class Part(Strict):
    type: Literal["text"]
    text: str


class Function(Strict):
    name: Text
    arguments: str


class Call(Strict):
    id: Text
    function: Function
    type: Literal["function"] = "function"


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    # What an answer of ours has; a client may send it back.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None


class Schema(Strict):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    strict: bool | None = None
    description: str | None = None


class Format(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class Tool(Strict):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Strict):
    function: Tool
    type: Literal["function"] = "function"


class Named(Strict):
    name: Text


class ChatChoice(Strict):
    function: Named
    type: Literal["function"] = "function"


class Prediction(Strict):
    type: Literal["content"]
    content: str | list[Part]


class Chat(Drawing, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: Format | None = None
    tools: Annotated[list[ChatTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChatChoice | None = None
    parallel_tool_calls: bool | None = None
    # Variables of the chat template; a template may read the effort too.
    chat_template_kwargs: Variables | None = None
    reasoning_effort: Effort | None = None
    # Known, and without a say in the answer.
    verbosity: Literal["low", "medium", "high"] | None = None
    prediction: Prediction | None = None
    # Known, and only so can be honoured.
    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None


class ResponsePart(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Meta(max_length=0)] | None = None


class Item(Strict):
    """A message, a call that the model made, or what the tool said to it."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ResponsePart] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None
    # A label of an assistant's message; its text is in the prompt either way.
    phase: Literal["commentary", "final_answer"] | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseText(Strict):
    format: ResponseFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseTool(Tool):
    type: Literal["function"] = "function"


class ResponseChoice(Named):
    type: Literal["function"] = "function"


class Reasoning(Strict):
    """The chat template may read the effort; there is no summary, as thoughts are part of the answer here."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class Response(Answer, kw_only=True):
    """POST /v1/responses. Nothing is stored, so what needs a stored answer is refused."""

    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: ResponseText | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    # Of tools that a server runs itself, and of thoughts that it hides: there are none.
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    # Known, and only so can be honoured.
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None


class Embedding(Model):
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None


class Translation(Model):
    """POST /v1/translations: one text for each line, by beam search; `align` gives pairs (source word, target word)."""

    input: Texts
    beams: Annotated[int, Meta(ge=1, le=32)] | None = None
    max_tokens: Count | None = None
    length_penalty: Annotated[float, Meta(ge=-100, le=100)] | None = None
    align: bool = False


class Classification(Model):
    """POST /v1/classify: labels and their probabilities, the most probable first. A model that reads pictures takes
    data:image/png;base64,... or data:image/jpeg;base64,..."""

    input: Texts
    top: Annotated[int, Meta(ge=1)] | None = None


class Fill(Model):
    """POST /v1/fill: the words behind the masks of a text."""

    input: Text
    top: Annotated[int, Meta(ge=1, le=1000)] = 5


class Look(Model):
    """POST /v1/look: exact attention of a request that ran (`id`), or of a text; layers, heads and rows, or all."""

    id: str | None = None
    choice: Annotated[int, Meta(ge=0)] = 0
    input: str | Ids | None = None
    source: str | Ids | None = None
    layers: Annotated[list[int | str], Meta(min_length=1)] | None = None
    heads: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)] | None = None
    rows: Annotated[list[int], Meta(min_length=1)] | None = None
    what: Literal["weight", "score", "norm"] = "weight"
    # base64: as the page draws them, with names, weights, scores, and lengths of values.
    encoding_format: Literal["float", "base64"] | None = None


class Tokenize(Model):
    """POST /tokenize: a text, or messages by the chat template. `literal`: special tokens stay text."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    literal: bool = False
    chat_template_kwargs: Variables | None = None


class Detokenize(Model):
    tokens: list[Id]
    skip_special_tokens: bool = False


def taken(body: type[Struct]) -> type[Struct]:
    """The struct of a body as the server takes it: with the filters, where tokens are drawn."""
    if not issubclass(body, Drawing):
        return body
    fields: list[tuple[str, Any, Any]] = []
    for name, row in FILTERS.items():
        low, high = row.limits
        bounds = Meta(ge=NEUTRAL.get(name, low), le=high)
        if name not in body.__struct_fields__:
            fields.append((name, Annotated[type(row.neutral), bounds] | None, None))
    about = {"__doc__": body.__doc__}
    return defstruct(body.__name__, fields, bases=(body,), namespace=about, kw_only=True)


def drawn(given: dict[str, Any]) -> dict[str, Any]:
    """Of a body's fields, those that the engine has, by its names and in its values."""
    named = {theirs: ours for ours, theirs in CALLED.items() if ours.startswith("min")}
    found = {named.get(name, name): value for name, value in given.items()}
    known = DEFAULTS.keys() | FILTERS.keys()
    return {
        name: FILTERS[name].neutral if value == NEUTRAL.get(name) else value
        for name, value in found.items()
        if name in known
    }


def refused(error: UsageError, param: str | None = None) -> HTTPError:
    """A mistake that the library found in a request; without its hints about commands. Where nobody knows the field,
    the sentence may: "top_p is 2; ...", "leave top_k=3 out"."""
    text = re.sub(r" \(--[^()]*\)", "", str(error))
    for ours, theirs in CALLED.items():
        text = re.sub(rf"\b{ours}\b", theirs, text)
    if param is None:
        known = {CALLED.get(name, name) for name in (*DEFAULTS, *FILTERS)} | {"stop"}
        known &= {*Completion.__struct_fields__, *Translation.__struct_fields__, *FILTERS}
        pairs = re.findall(r"^(\w+)(?: is |=)|\bleave (\w+)=", text)
        param = next((name for pair in pairs for name in pair if name in known), None)
    return HTTPError(400, text, param)

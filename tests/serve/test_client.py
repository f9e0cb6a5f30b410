"""The official client against the server: what people use of it."""

import json
from typing import Any

import jsonschema
import pytest

openai = pytest.importorskip("openai")

from tests.serve.running import Client  # noqa: E402

HELLO: Any = [{"role": "user", "content": "Hello"}]
SUM: Any = [{"role": "user", "content": "What is 12 + 30?"}]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "kind": {"enum": ["a", "b"]}},
    "required": ["x", "kind"],
    "additionalProperties": False,
}  # fmt: skip
TOOL: Any = {
    "type": "function",
    "function": {"name": "place", "description": "puts a point", "parameters": POINT},
}
FLAT: Any = {"type": "function", "name": "place", "parameters": POINT, "strict": True}


@pytest.fixture(scope="module")
def client(plain: Client) -> Any:
    return openai.OpenAI(base_url=f"{plain.url}/v1", api_key="none", max_retries=0)


def test_models(client: Any) -> None:
    assert [m.id for m in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "regard"


def test_chat_whole_and_streamed(client: Any) -> None:
    more: Any = {"model": "demo", "messages": SUM, "temperature": 0, "max_completion_tokens": 40}
    answer = client.chat.completions.create(**more, logprobs=True, top_logprobs=3)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and answer.usage.total_tokens > 3
    assert "".join(t.token for t in choice.logprobs.content) == choice.message.content
    assert all(
        len(t.top_logprobs) == 3 and bytes(t.bytes).decode() == t.token
        for t in choice.logprobs.content
    )
    stream = list(
        client.chat.completions.create(**more, stream=True, stream_options={"include_usage": True})
    )
    assert stream[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert text == choice.message.content and stream[-1].usage == answer.usage
    with client.chat.completions.stream(**more) as events:
        assert events.get_final_completion().choices[0].message.content == text


def test_completions_whole_and_streamed(client: Any) -> None:
    more: Any = {
        "model": "demo",
        "prompt": ["12 + 30", [70, 71]],
        "seed": 5,
        "max_tokens": 6,
        "n": 2,
    }
    answer = client.completions.create(**more)
    texts = [""] * 4
    for chunk in client.completions.create(**more, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [c.text for c in answer.choices] == texts


def test_messages_of_every_kind(client: Any) -> None:
    messages: Any = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Put a "}, {"type": "text", "text": "point"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "place", "arguments": '{"x": 1}'}}
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]  # fmt: skip
    answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=4, seed=1)
    again = [*messages, answer.choices[0].message.model_dump(), HELLO[0]]
    assert client.chat.completions.create(model="demo", messages=again, max_tokens=4).choices


def test_structured_output(client: Any) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "point", "schema": POINT, "strict": True},
    }
    for seed in range(4):
        answer = client.chat.completions.create(
            model="demo", messages=HELLO, response_format=form, seed=seed, max_tokens=100, n=2
        )
        for choice in answer.choices:
            jsonschema.validate(json.loads(choice.message.content), POINT)
    answer = client.chat.completions.create(
        model="demo", messages=HELLO, response_format={"type": "json_object"}, seed=2, max_tokens=60,
        logit_bias={"5": 1},
    )  # fmt: skip
    assert answer.choices[0].message.content.startswith("{")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "place"}}]
)
def test_tools(client: Any, choice: Any) -> None:
    more: Any = {
        "model": "demo",
        "messages": HELLO,
        "tools": [TOOL],
        "tool_choice": choice,
        "seed": 3,
    }
    more |= {"max_tokens": 120, "parallel_tool_calls": False}
    answer = client.chat.completions.create(**more).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and call.function.name == "place"
    jsonschema.validate(json.loads(call.function.arguments), POINT)
    streamed = [
        c.choices[0].delta.tool_calls for c in client.chat.completions.create(**more, stream=True)
    ]
    (part,) = [part for calls in streamed for part in calls or ()]
    assert (part.index, part.function) == (0, type(part.function)(**call.function.model_dump()))


def test_tools_that_need_not_be_called(client: Any) -> None:
    more: Any = {"model": "demo", "messages": HELLO, "tools": [TOOL], "max_tokens": 12, "seed": 1}
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(**more, tool_choice=choice).choices[0].message
        assert answer.tool_calls is None and answer.content is not None


def test_responses(client: Any) -> None:
    more: Any = {"model": "demo", "input": "Hello", "temperature": 0, "max_output_tokens": 20}
    answer = client.responses.create(
        **more, instructions="You are a small model.", metadata={"a": "b"}
    )
    assert answer.status in ("completed", "incomplete") and answer.metadata == {"a": "b"}
    answer = client.responses.create(**more)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    events = list(client.responses.create(**more, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert (
        "".join(e.delta for e in events if e.type == "response.output_text.delta")
        == answer.output_text
    )
    assert events[-1].response.output_text == answer.output_text
    with client.responses.stream(**more) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == answer.output_text


def test_responses_of_a_form_and_with_tools(client: Any) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "point", "schema": POINT}}
    answer = client.responses.create(model="demo", input="Hello", text=form, max_output_tokens=80)
    jsonschema.validate(json.loads(answer.output_text), POINT)
    more: Any = {"model": "demo", "tools": [FLAT], "tool_choice": "required", "temperature": 0}
    more |= {"parallel_tool_calls": False, "max_output_tokens": 120}
    items: Any = [{"role": "user", "content": "Put a point"}]
    (call,) = client.responses.create(**more, input=items).output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), POINT)
    events = list(client.responses.create(**more, input=items, stream=True))
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert done.arguments == call.arguments
    items += [call.model_dump(exclude_none=True)]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "done"}]
    more["tool_choice"] = "none"
    assert client.responses.create(**more, input=items).output[0].type == "message"


def test_embeddings(client: Any) -> None:
    coded = client.embeddings.create(model="demo", input=["Hello", "12 + 30"])
    plain = client.embeddings.create(
        model="demo", input=["Hello", "12 + 30"], encoding_format="float"
    )
    assert len(coded.data) == 2 and len(coded.data[0].embedding) == 128
    for a, b in zip(coded.data, plain.data):
        assert a.embedding == pytest.approx(b.embedding)


def test_errors_are_the_clients(client: Any) -> None:
    ask = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        ask(model="none", messages=HELLO)
    assert missing.value.code == "model_not_found" and missing.value.request_id.startswith("req_")
    with pytest.raises(openai.BadRequestError) as wrong:
        ask(model="demo", messages=HELLO, extra_body={"words": 3})
    assert wrong.value.param == "words"
    king: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "king"}}}
    with pytest.raises(openai.BadRequestError) as schema:
        ask(model="demo", messages=HELLO, response_format=king)
    assert schema.value.param == "response_format"


def test_the_document_names_every_route(plain: Client) -> None:
    document = plain.get("/openapi.json")
    assert {"/v1/chat/completions", "/v1/look", "/health"} <= document["paths"].keys()
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"][
        "application/json"
    ]
    assert (
        body["schema"]["$ref"].removeprefix("#/components/schemas/")
        in document["components"]["schemas"]
    )

"""What the server tests of llama.cpp and the compliance cases of Open Responses ask of any server, where no other test
here asks it; docs/scale.md lists the cases that are left out, and why."""

import asyncio
import json
from typing import Any

import pytest

from regard.serve.edge import HTTPError, HTTPRequest, Limits
from tests.serve.running import Client

BOOK = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]
# No token that ends the text.
ENDLESS = {str(i): -100 for i in range(5)}
FULL = "I believe the meaning of life is"
# The fields that every answer of /v1/responses has, and of each event, beside its type and number.
ANSWER = """id object created_at completed_at status incomplete_details model previous_response_id instructions output
error tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs
temperature reasoning usage max_output_tokens max_tool_calls store background service_tier metadata safety_identifier
prompt_cache_key"""
PART = "item_id output_index content_index"
EVENTS = {
    "created": "response",
    "in_progress": "response",
    "completed": "response",
    "incomplete": "response",
    "output_item.added": "output_index item",
    "output_item.done": "output_index item",
    "content_part.added": f"{PART} part",
    "content_part.done": f"{PART} part",
    "output_text.delta": f"{PART} delta",
    "output_text.done": f"{PART} text",
    "function_call_arguments.delta": "item_id output_index delta",
    "function_call_arguments.done": "item_id output_index arguments",
}
BOOLEAN = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
TOOL = {"type": "function", "name": "weather", "parameters": {**BOOLEAN, "additionalProperties": False}}  # fmt: skip


def respond(client: Client, **body: Any) -> Any:
    """An answer of /v1/responses; its stream is the same but for ids and times."""
    body = {"model": "demo", "temperature": 0, "max_output_tokens": 60, **body}
    answer, events = client.post("/v1/responses", body), client.events("/v1/responses", body)
    for number, event in enumerate(events):
        fields = EVENTS[event["type"].removeprefix("response.")].split()
        assert event["sequence_number"] == number and set(fields) <= event.keys()
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{answer['status']}"
    for each in (answer, last):
        assert set(ANSWER.split()) <= each.keys() and each["output"]
        assert (each["completed_at"] is None) == (each["status"] == "incomplete")
    # The second finds pages that the first has left.
    for each in (answer, last):
        each["usage"].pop("input_tokens_details")
    told = ("status", "usage", "tools", "tool_choice", "incomplete_details")
    assert [last[name] for name in told] == [answer[name] for name in told]
    return answer


def test_responses_have_every_field(plain: Client) -> None:
    whole = respond(
        plain, input=[{"type": "message", "role": "user", "content": "What is 12 + 30?"}]
    )
    assert whole["status"] == "completed" and whole["output"][0]["id"].startswith("msg_")
    assert whole["id"].startswith("resp_")
    cut = respond(plain, input="Count", max_output_tokens=2)
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
    drawn = respond(
        plain, input="Hi", presence_penalty=0.5, frequency_penalty=-0.5, service_tier="auto"
    )
    assert (drawn["presence_penalty"], drawn["frequency_penalty"]) == (0.5, -0.5)


def test_responses_read_a_conversation(plain: Client) -> None:
    said = [
        ("system", None),
        ("user", None),
        ("assistant", "commentary"),
        ("assistant", "final_answer"),
    ]
    items = [
        {"type": "message", "role": role, "content": "four", **({"phase": phase} if phase else {})}
        for role, phase in said
    ]
    respond(plain, input=[*items, {"type": "message", "role": "user", "content": "Which number?"}])


def test_responses_call_a_tool_and_hear_of_it(plain: Client) -> None:
    named = {"type": "function", "name": "weather"}
    more: Any = {"tools": [TOOL], "parallel_tool_calls": False, "max_output_tokens": 100}
    answer = respond(plain, input="Hi", tool_choice=named, **more)
    (call,) = answer["output"]
    assert call["type"] == "function_call" and "a" in json.loads(call["arguments"])
    assert answer["tool_choice"] == named
    assert answer["tools"] == [{**TOOL, "description": None, "strict": True}]
    heard = {"type": "function_call_output", "call_id": call["call_id"], "output": "18"}
    items = [{"role": "user", "content": "Hi"}, call, heard]
    assert respond(plain, input=items, tool_choice="none", **more)["output"][0]["type"] == "message"


@pytest.mark.parametrize(
    "field, value",
    [
        ("previous_response_id", "resp_1"),
        ("tools", [{"type": "web_search"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]),
        ("input", [{"role": "user", "content": [{"type": "input_file", "file_data": "data:"}]}]),
        ("input", [{"type": "function_call_output", "output": "no call_id"}]),
        ("input", [{"role": "user"}]),
    ],
)
def test_responses_refuse_what_they_cannot_honour(plain: Client, field: str, value: Any) -> None:
    error = plain.post("/v1/responses", {"model": "demo", "input": "x", field: value}, 400)["error"]
    assert error["param"].startswith(field)


def test_an_error_amid_a_stream_is_an_event() -> None:
    sent: list[bytes] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body", b""))

    async def stream(named: bool) -> bytes:
        x = HTTPRequest({"headers": []}, None, send, Limits())  # type: ignore[arg-type]
        await x.stream()
        await x.events([{"type": "response.created"}], named=named)
        await x.refuse(HTTPError(408, "too late"))
        return sent[-1]

    kind, data = asyncio.run(stream(True)).decode().strip().split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert kind == "event: error" and (event["type"], event["sequence_number"]) == ("error", 1)
    assert set(event["error"]) == {"message", "type", "param", "code"}
    assert asyncio.run(stream(False)).startswith(b"data: ")


def test_the_tokens_of_an_answer_are_its_text(plain: Client) -> None:
    body = {"model": "demo", "messages": BOOK, "temperature": 0, "logprobs": True}
    body |= {"top_logprobs": 10, "max_tokens": 5, "logit_bias": ENDLESS}
    choice = plain.post("/v1/chat/completions", body)["choices"][0]
    listed = choice["logprobs"]["content"]
    assert "".join(t["token"] for t in listed) == choice["message"]["content"]
    assert all(t["logprob"] <= 0 and len(t["top_logprobs"]) == 10 for t in listed)
    first, *chunks = [c["choices"][0] for c in plain.events("/v1/chat/completions", body)]
    assert first["delta"]["role"] == "assistant" and "content" not in chunks[-1]["delta"]
    assert all(c["logprobs"]["content"] and "role" not in c["delta"] for c in chunks[:-1])


@pytest.mark.parametrize(
    "messages",
    [None, "text", [123], [{}], [{"role": 123}], [{"role": "user", "content": 123}], [{"content": "x"}], [*BOOK, {}]],
)  # fmt: skip
def test_messages_that_are_none(plain: Client, messages: Any) -> None:
    error = plain.post("/v1/chat/completions", {"model": "demo", "messages": messages}, 400)[
        "error"
    ]
    assert error["param"].startswith("messages")


def test_forms(plain: Client) -> None:
    def ask(schema: Any, status: int = 200) -> Any:
        form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
        body = {"model": "demo", "messages": BOOK, "response_format": form, "max_tokens": 40}
        return plain.post("/v1/chat/completions", body, status)

    seven = {"type": "array", "prefixItems": [{"const": 7}], "minItems": 1, "items": False}
    for schema in ({"const": "42"}, seven):
        content = ask(schema)["choices"][0]["message"]["content"]
        assert json.loads(content) in ("42", [7])
    for wrong in (123, {"type": 123}, {"type": "hiccup"}):
        assert ask(wrong, 400)["error"]["param"].startswith("response_format")


def test_prompts_and_inputs_of_every_kind(plain: Client) -> None:
    ids = plain.post("/tokenize", {"model": "demo", "prompt": FULL})["tokens"]
    body = {"model": "demo", "temperature": 0, "max_tokens": 5}
    alone = plain.post("/v1/completions", {**body, "prompt": ids})["choices"][0]["text"]
    for prompts in ([ids, ids], [ids, FULL], [FULL, ids]):
        choices = plain.post("/v1/completions", {**body, "prompt": prompts})["choices"]
        assert [choice["text"] for choice in choices] == [alone, alone]
    for given, count in (("a", 1), (ids, 1), (["a", "b"], 2), ([ids, ids], 2), (["a", ids], 2)):
        data = plain.post("/v1/embeddings", {"model": "demo", "input": given})["data"]
        assert len(data) == count
        for row in data:
            assert sum(x * x for x in row["embedding"]) == pytest.approx(1, abs=1e-4)


def test_long_prompts_are_refused_before_a_stream_begins(plain: Client) -> None:
    for more in ({}, {"stream": True}):
        body = {"model": "demo", "messages": BOOK * 100, **more}
        error = plain.post("/v1/chat/completions", body, 400)["error"]
        assert error["code"] == "context_length_exceeded"


def test_seeds(plain: Client) -> None:
    body = {"model": "demo", "prompt": FULL, "max_tokens": 24, "logit_bias": ENDLESS}
    texts = [
        plain.post("/v1/completions", {**body, "seed": seed})["choices"][0]["text"]
        for seed in (0, 0, 1, 2)
    ]
    assert texts[0] == texts[1] and len(set(texts)) == 3


def test_a_method_that_a_path_does_not_take(plain: Client) -> None:
    for path, takes in (("/health", "GET, HEAD"), ("/v1/completions", "POST")):
        for method in ("TRACE", "DELETE", "PUT", "OPTIONS"):
            status, headers, _ = plain.request(method, path)
            assert (status, headers["allow"]) == (405, takes)

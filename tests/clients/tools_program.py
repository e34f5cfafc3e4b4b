# mypy: ignore-errors
"""Calls of tools through LangChain, LiteLLM and LlamaIndex; see the tests of tool calls.

The arguments are the URL and the calls in replies of the model: pairs of a name and arguments.
"""

import json
import sys
from typing import Literal

import litellm
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class At(BaseModel):
    at: Literal["noon", "night"]


def weather(city: str) -> str:
    """Weather of a city."""
    return city


url, model, question, expected = sys.argv[1], "hermes", "Rain in Rome?", json.loads(sys.argv[2])
service = {"api_key": "none", "max_tokens": 250}
plain = ChatOpenAI(model=model, base_url=f"{url}/v1", **service)
chat = plain.bind_tools([weather])
whole, *parts = chat.invoke(question), *chat.stream(question)
streamed = sum(parts[1:], parts[0])
for reply in (whole, streamed):
    assert [[call["name"], call["args"]] for call in reply.tool_calls] == expected
results = [ToolMessage("20", tool_call_id=call["id"]) for call in whole.tool_calls]
assert chat.invoke([HumanMessage(question), whole, *results]).content == whole.content
for method in ("function_calling", "json_schema"):
    assert plain.with_structured_output(At, method=method).invoke(question).at in ("noon", "night")

tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
messages = [{"role": "user", "content": question}]
for name, address in ((f"openai/{model}", f"{url}/v1"), (f"ollama_chat/{model}", url)):
    calls = litellm.completion(name, messages, api_base=address, tools=tools, **service).choices[0].message.tool_calls
    assert [[call.function.name, json.loads(call.function.arguments)] for call in calls] == expected

llama = OpenAILike(model, api_base=f"{url}/v1", is_chat_model=True, is_function_calling_model=True, **service)
reply = llama.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg=question)
(call,) = llama.get_tool_calls_from_response(reply)
assert [call.tool_name, call.tool_kwargs] == expected[0]

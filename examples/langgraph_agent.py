"""LangGraph: a graph of a model and its tools, with memory, over both of OpenAI's APIs.

pip install langgraph langchain-openai
OPENAI_BASE_URL=http://localhost:8080/v1 python examples/langgraph_agent.py
"""

import os
from collections.abc import Callable
from typing import Literal

from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from openai import OpenAI

os.environ.setdefault("OPENAI_BASE_URL", "http://localhost:8080/v1")
os.environ.setdefault("OPENAI_API_KEY", "any")  # required by the library, not by the server

asked: list[str] = []


@tool
def get_weather(city: Literal["Oslo", "Rome"]) -> str:
    """Returns today's weather in a city."""
    asked.append(city)
    return f"It rains in {city}."


def speaking(model: Runnable) -> Callable[[MessagesState], MessagesState]:
    """A node that adds the response of the model."""
    return lambda state: {"messages": [model.invoke(state["messages"])]}


def main() -> None:
    served = OpenAI().models.list().data[0].id
    for responses in (False, True):
        model = ChatOpenAI(
            model=served,
            temperature=0,
            max_completion_tokens=80,
            use_responses_api=responses,
            stream_usage=True,
        )
        caller = model.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
        knowing = model.bind_tools([get_weather], tool_choice="none")

        # The model must call the tool, the tool runs, and the model responds.
        graph = StateGraph(MessagesState)
        graph.add_node("ask", speaking(caller))
        graph.add_node("tools", ToolNode([get_weather]))
        graph.add_node("answer", speaking(knowing))
        for edge in ((START, "ask"), ("ask", "tools"), ("tools", "answer"), ("answer", END)):
            graph.add_edge(*edge)
        app = graph.compile(checkpointer=InMemorySaver())

        # Two turns of one conversation. The second prompt includes the first turn.
        asked.clear()
        memory = {"configurable": {"thread_id": "one"}}
        app.invoke({"messages": [("user", "Does it rain in Oslo?")]}, memory)
        turn = app.invoke({"messages": [("user", "And in Rome?")]}, memory)
        kinds = [message.type for message in turn["messages"]]
        print(f"responses={responses}: {kinds}, asked for {asked}")
        assert kinds == ["human", "ai", "tool", "ai"] * 2
        assert len(asked) == 2
        assert turn["messages"][-1].usage_metadata["output_tokens"] > 0

        # Streamed: message chunks from every node.
        fresh = {"configurable": {"thread_id": "two"}}
        question = {"messages": [("user", "Does it rain in Oslo?")]}
        pieces = list(app.stream(question, fresh, stream_mode="messages"))
        nodes = {place["langgraph_node"] for _, place in pieces}
        print(f"responses={responses}: {len(pieces)} pieces of {sorted(nodes)}")
        assert nodes == {"ask", "tools", "answer"}


if __name__ == "__main__":
    main()

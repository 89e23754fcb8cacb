"""Combines `response_format`, `structured_outputs` and tools into one `OutputConstraints`."""

from typing import Final

from loraplex.grammar.constraints import OutputConstraints, OutputFormat, Tool
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.parameters.request_models import ChatRequest, GenerationRequest
from loraplex.platform.parameters.response_format import Structure
from loraplex.platform.parameters.tools import ToolChoice

_NOTHING: Final = Structure(format=None, close=False)


def build_output_constraints(
    values: GenerationRequest, *, fast_forward: bool = True
) -> OutputConstraints | None:
    """Return the constraints; None means plain text, for which nothing is compiled or parsed.

    `fast_forward`: engines may append several tokens in one step where the grammar allows one continuation.

    Raises `InvalidParameter` for contradictory parameters and for an unknown tool.
    """
    chat = values if isinstance(values, ChatRequest) else None
    structure = values.structured_outputs or _NOTHING
    wanted = _format(chat.response_format if chat else None, structure)
    tools = chat.tools if chat else ()
    choice = chat.tool_choice if chat else None
    choice = choice or ToolChoice("auto" if tools else "none")
    callable_tools = _callable(tools, choice)
    if wanted is None and not callable_tools:
        return None
    if structure.probabilities and callable_tools:
        raise InvalidParameter(
            "`structured_outputs.probabilities` needs an output that is one of the choices, so no tools.",
            param="structured_outputs.probabilities",
        )
    return OutputConstraints(
        format=wanted,
        tools=callable_tools,
        tool_choice=choice.mode if callable_tools else "none",
        parallel=not choice.single and (chat is None or chat.parallel_tool_calls),
        close=structure.close,
        fast_forward=fast_forward,
    )


def _format(response: OutputFormat | None, structure: Structure) -> OutputFormat | None:
    if response is not None and structure.format is not None:
        raise InvalidParameter(
            "`response_format` and `structured_outputs` both give a format; give one.",
            param="structured_outputs",
        )
    return response if response is not None else structure.format


def _callable(tools: tuple[Tool, ...], choice: ToolChoice) -> tuple[Tool, ...]:
    if choice.mode == "none":
        return ()
    if not tools and (choice.mode == "required" or choice.names is not None):
        raise InvalidParameter("`tool_choice` requires a call, but `tools` is empty.", param="tool_choice")
    if choice.names is None:
        return tools
    offered = {tool.name for tool in tools}
    for name in choice.names:
        if name not in offered:
            raise InvalidParameter(
                f"`tool_choice` names {name!r}, which is not in `tools`.", param="tool_choice"
            )
    return tuple(tool for tool in tools if tool.name in choice.names)

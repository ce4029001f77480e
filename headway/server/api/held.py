"""What an answer is held to: the grammar that its body asks for, or that of calls; behind what the model may think."""

from __future__ import annotations

from fastapi import Request

from headway.grammars.compile import SPACING, behind
from headway.grammars.schema import UnsupportedSchema, check_schema
from headway.outputs.choices import TokenizedPrompt
from headway.policy.step.structured_outputs import StructuredOutputs
from headway.server.api.parsed import begins_in_reasoning
from headway.server.api.schemas import ChatBody, CompletionBody
from headway.server.api.serving import RELAXED
from headway.server.api.structures import refused
from headway.server.api.tools import Tool, is_enforced
from headway.server.errors import bad_request
from headway.server.service import Service
from headway.text.calls import grammar as calls


def wanted(
    service: Service, body: CompletionBody | ChatBody, asked: StructuredOutputs | None, prompt: TokenizedPrompt
) -> tuple[StructuredOutputs | None, list[str]]:
    """What the answer is to be held to, not checked yet, and what of tools' schemas is not kept.

    Raises:
        ApiError: 400 where a call is required and another output is asked for, or a tool's schema cannot be kept.
    """
    if not (isinstance(body, ChatBody) and body.tools and is_enforced(body.tool_choice)):
        return asked, []
    if asked is not None:
        raise bad_request(
            "tool_choice asks for a call, and the answer is to be something else; give one", "tool_choice"
        )
    left_out: list[str] = []
    tools = [_kept(tool, f"tools[{number}].function", left_out) for number, tool in enumerate(body.tools)]
    try:
        text = calls.grammar_for(
            service.family,
            tools,
            body.tool_choice,
            is_reasoning=begins_in_reasoning(service, body, prompt),
            parallel=body.parallel_tool_calls is not False,
            token_ids=service.tag_ids,
        )
    except calls.UnsupportedSchema as error:
        raise bad_request(str(error), "tools") from None
    return StructuredOutputs("grammar", text), left_out


async def checked(
    service: Service,
    request: Request,
    body: CompletionBody | ChatBody,
    asked: StructuredOutputs,
    left_out: list[str],
    prompt: TokenizedPrompt,
) -> StructuredOutputs:
    """What the engine is to hold the answer to; a header says what of a schema is left out.

    Raises:
        ApiError: 400 where it cannot be had, 429 where too many others wait.
    """
    found = await service.grammars.check(asked)
    if found.grammar is None:
        if isinstance(body, ChatBody) and is_enforced(body.tool_choice):
            raise bad_request(f"tools: {found.refusal}", "tools")
        raise refused(body, found.refusal)
    request.scope[RELAXED] = ", ".join([*left_out, *found.left_out])
    if not isinstance(body, ChatBody) or is_enforced(body.tool_choice):
        return found.grammar
    before = calls.before_answer(
        service.family,
        begins_in_reasoning(service, body, prompt),
        service.tag_ids,
    )
    return behind(before, found.grammar) if before else found.grammar


def _kept(tool: Tool, path: str, left_out: list[str]) -> dict[str, object]:
    """A tool with the part of its schema that can be kept; all of it where the tool is strict."""
    missing: list[str] | None = None if tool.function.strict else []
    try:
        kept = check_schema(tool.function.parameters or {"type": "object", "properties": {}}, missing)
    except UnsupportedSchema as error:
        raise bad_request(f"{path}.parameters: {error}", f"{path}.parameters") from None
    left_out += [f"{path}.parameters{each}" for each in missing or ()]
    kept["x-guidance"] = {**SPACING, "lenient": not tool.function.strict}
    return {"type": "function", "function": {"name": tool.function.name, "parameters": kept}}

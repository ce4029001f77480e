"""What an answer is held to: the grammar that its body asks for, or that of calls; behind what the model may think."""

from __future__ import annotations

from fastapi import Request

from headway.grammars.compile import SPACING, behind
from headway.grammars.schema import UnsupportedSchema, check_schema
from headway.policy.step.structured_outputs import StructuredOutputs
from headway.server.api.schemas import ChatBody, CompletionBody
from headway.server.api.serving import RELAXED
from headway.server.api.structures import refused
from headway.server.api.tools import Tool, is_enforced
from headway.server.errors import bad_request
from headway.server.generation import clock
from headway.server.service import Service
from headway.server.timings import Stamps
from headway.text.calls import grammar as calls


async def held_to(
    service: Service,
    request: Request,
    body: CompletionBody | ChatBody,
    asked: StructuredOutputs | None,
    is_reasoning: bool,
    stamps: Stamps,
) -> StructuredOutputs | None:
    """What the engine is to hold the answer to; a header says what is left out of a schema, or of all tools.

    Args:
        asked: the output that the body itself asks for.
        is_reasoning: the prompt has begun the reasoning, so the answer begins within it.

    Raises:
        ApiError: 400 where it cannot be had, or a call is required beside it; 429 where too many others wait.
    """
    kind, left_out = "", list[str]()
    if isinstance(body, ChatBody) and body.tools and (kind := _calls_wanted(body, body.tools, asked)):
        asked = _of_calls(service, body, body.tools, kind, is_reasoning, left_out)
    if asked is None and not left_out:
        return None
    stamps.tokenized_ns = clock()
    grammar = None
    if asked is not None:
        found = await service.grammars.check(asked)
        grammar, left_out = found.grammar, [*left_out, *found.left_out]
        if grammar is None and kind == "auto":
            left_out = [f"tools ({found.refusal})"]
        elif grammar is None:
            raise bad_request(f"tools: {found.refusal}", "tools") if kind else refused(body, found.refusal)
    request.scope[RELAXED] = ", ".join(left_out)
    if grammar is not None and not kind and isinstance(body, ChatBody):
        before = calls.before_answer(service.family, is_reasoning, service.tag_ids)
        grammar = behind(before, grammar) if before else grammar
    stamps.compiled_ns = clock()
    return grammar


def _calls_wanted(body: ChatBody, tools: list[Tool], asked: StructuredOutputs | None) -> str:
    """Whether the answer is held to calls of tools, which have to come ("required") or may come ("auto").

    Raises:
        ApiError: 400 where a call is required and another output is asked for.
    """
    if not is_enforced(body.tool_choice):
        is_strict = any(tool.function.strict for tool in tools) and body.tool_choice != "none"
        is_free = asked is None and body.allowed_token_ids is None and not body.continue_final_message
        return "auto" if is_strict and is_free else ""
    if asked is not None:
        message = "tool_choice asks for a call, and the answer is to be something else; give one"
        raise bad_request(message, "tool_choice")
    if body.allowed_token_ids is not None:
        message = "allowed_token_ids and a call that is required are given together; give one"
        raise bad_request(message, "allowed_token_ids")
    return "required"


def _of_calls(
    service: Service, body: ChatBody, tools: list[Tool], kind: str, is_reasoning: bool, left_out: list[str]
) -> StructuredOutputs | None:
    """The grammar of calls; None where they may come, but cannot be kept. `left_out` gets what is not kept."""
    is_required = kind == "required"
    kept = [_kept(tool, f"tools[{number}].function", left_out, is_required) for number, tool in enumerate(tools)]
    try:
        text = calls.grammar_for(
            service.family,
            kept,
            body.tool_choice if is_required else kind,
            is_reasoning=is_reasoning,
            parallel=body.parallel_tool_calls is not False and not isinstance(body.tool_choice, dict),
            token_ids=service.tag_ids,
        )
    except calls.UnsupportedSchema as error:
        if is_required:
            raise bad_request(str(error), "tools") from None
        left_out[:] = [f"tools ({error})"]
        return None
    return StructuredOutputs("grammar", text)


def _kept(tool: Tool, path: str, left_out: list[str], is_required: bool) -> dict[str, object]:
    """A tool with the part of its schema that can be kept; all of it where the tool is strict and a call required."""
    is_whole = is_required and bool(tool.function.strict)
    missing: list[str] | None = None if is_whole else []
    try:
        given = tool.function.parameters
        kept = check_schema(given or {"type": "object", "additionalProperties": given is not None}, missing)
    except UnsupportedSchema as error:
        if not is_required:
            left_out.append(f"{path}.parameters")
            kept = {"type": "object"}
        else:
            raise bad_request(f"{path}.parameters: {error}", f"{path}.parameters") from None
    left_out += [f"{path}.parameters{each}" for each in missing or ()]
    kept["x-guidance"] = {**SPACING, "lenient": not is_whole}
    return {"type": "function", "function": {"name": tool.function.name, "parameters": kept}}

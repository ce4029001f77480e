"""What an answer is held to: the grammar that its body asks for, or that of calls; behind what the model may think."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastapi import Request

from headway.grammars.compile import SPACING, behind
from headway.grammars.schema import UnsupportedSchema, check_schema
from headway.policy.step.structured_outputs import StructuredOutputs
from headway.server.api.schemas import ChatBody, CompletionBody
from headway.server.api.serving import RELAXED
from headway.server.api.structures import refused
from headway.server.api.tools import Tool, is_enforced
from headway.server.errors import bad_request
from headway.server.service import Service
from headway.text.calls import grammar as calls


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an answer is to be held to, not checked yet.

    Args:
        asked: None for any text.
        calls: it is a grammar of calls, which have to come ("required") or may come ("auto").
        left_out: what of tools' schemas is not kept.
    """

    asked: StructuredOutputs | None
    calls: str = ""
    left_out: list[str] = field(default_factory=list)


def wanted(
    service: Service, body: CompletionBody | ChatBody, asked: StructuredOutputs | None, is_reasoning: bool
) -> Wanted:
    """What the answer is to be held to.

    Args:
        is_reasoning: the prompt has begun the reasoning, so the answer begins within it.

    Raises:
        ApiError: 400 where a call is required and another output is asked for, or a tool's schema cannot be kept.
    """
    if not (isinstance(body, ChatBody) and body.tools):
        return Wanted(asked)
    if not is_enforced(body.tool_choice):
        is_strict = any(tool.function.strict for tool in body.tools) and body.tool_choice != "none"
        if not is_strict or asked is not None or body.allowed_token_ids is not None or body.continue_final_message:
            return Wanted(asked)
        return _of_calls(service, body, body.tools, "auto", is_reasoning)
    if asked is not None:
        raise bad_request(
            "tool_choice asks for a call, and the answer is to be something else; give one", "tool_choice"
        )
    if body.allowed_token_ids is not None:
        raise bad_request(
            "allowed_token_ids and a call that is required are given together; give one", "allowed_token_ids"
        )
    return _of_calls(service, body, body.tools, "required", is_reasoning)


def _of_calls(service: Service, body: ChatBody, tools: list[Tool], kind: str, is_reasoning: bool) -> Wanted:
    left_out: list[str] = []
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
        return Wanted(None, kind, [f"tools ({error})"])
    return Wanted(StructuredOutputs("grammar", text), kind, left_out)


async def checked(
    service: Service, request: Request, body: CompletionBody | ChatBody, wanted: Wanted, is_reasoning: bool
) -> StructuredOutputs | None:
    """What the engine is to hold the answer to; a header says what is left out of a schema, or of all tools.

    Raises:
        ApiError: 400 where it cannot be had, 429 where too many others wait.
    """
    grammar, left_out = None, wanted.left_out
    if wanted.asked is not None:
        found = await service.grammars.check(wanted.asked)
        grammar, left_out = found.grammar, [*left_out, *found.left_out]
        if grammar is None and wanted.calls == "auto":
            left_out = [f"tools ({found.refusal})"]
        elif grammar is None:
            raise bad_request(f"tools: {found.refusal}", "tools") if wanted.calls else refused(body, found.refusal)
    request.scope[RELAXED] = ", ".join(left_out)
    if grammar is None or wanted.calls or not isinstance(body, ChatBody):
        return grammar
    before = calls.before_answer(service.family, is_reasoning, service.tag_ids)
    return behind(before, grammar) if before else grammar


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

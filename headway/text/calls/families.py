"""Which family writes calls and reasoning how, and how its chat template shows that."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from headway.text.calls import harmony
from headway.text.calls.syntaxes import BraceCalls, JsonCalls, NamedCalls, PythonicCalls, Syntax, XmlCalls


@dataclass(frozen=True)
class Reasoning:
    """How reasoning is told from the answer that follows it."""

    # begins, ends: tags around it. A prompt may have the first already.
    begins: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    wraps: dict[str, str] | None = None  # tags that may stand around the answer behind it
    is_special: bool = False  # the tags are tokens of their own, and so may come anywhere in an answer
    calls_end_it: bool = False  # so does the tag of a call

    @property
    def tags(self) -> tuple[str, ...]:
        return (*self.begins, *self.ends, *(each for pair in (self.wraps or {}).items() for each in pair))

    def is_begun(self, prompt: str) -> bool:
        """Whether a prompt ends with the tag that begins reasoning."""
        return prompt.rstrip().endswith(self.begins)

    def is_open(self, text: str) -> bool:
        """Whether reasoning has begun in a text and has not ended."""
        return max(map(text.rfind, self.begins)) > max(map(text.rfind, self.ends))


@dataclass(frozen=True)
class CallFamily:
    """How a family writes calls."""

    syntax: Syntax | None  # None for harmony, whose calls are messages
    # Texts that its chat templates have; of several families the first whose signs are all there is taken.
    signs: tuple[tuple[str, ...], ...] = ()
    short_ids: bool = False  # its templates take only call ids of nine letters and digits


@dataclass(frozen=True)
class Family:
    """How one model writes its answers.

    Attributes:
        tags: all that calls and reasoning are told by; tags_without_calls, reasoning alone.
    """

    calls: CallFamily | None = None
    reasoning: Reasoning | None = None
    is_harmony: bool = False
    # Its chat template takes the arguments of earlier calls as a JSON text, not as an object.
    arguments_as_text: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether all that it writes is content, where it is given no tools."""
        return self.reasoning is None and not self.is_harmony

    @property
    def syntax(self) -> Syntax | None:
        return self.calls.syntax if self.calls is not None else None

    @property
    def tags(self) -> tuple[str, ...]:
        return self.tags_without_calls + (self.syntax.tags if self.syntax is not None else ())

    @property
    def tags_without_calls(self) -> tuple[str, ...]:
        found = harmony.TAGS if self.is_harmony else ()
        return (*found, *(self.reasoning.tags if self.reasoning is not None else ()))


_xml = partial(XmlCalls, values=("", "</parameter>"))
_FUNCTION = ("<function=", ">")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")

CALLS = {
    "openai": CallFamily(None, (("<|channel|>", "<|message|>", "<|start|>"),)),
    "minimax_m2": CallFamily(
        _xml(
            ("<minimax:tool_call>",),
            ("</minimax:tool_call>",),
            keys=('<parameter name="', '">'),
            opens=('<invoke name="', '">'),
            closes="</invoke>",
        ),
        (("<minimax:tool_call>",),),
    ),
    "seed_oss": CallFamily(
        _xml(
            ("<seed:tool_call>",),
            ("</seed:tool_call>",),
            keys=("<parameter=", ">"),
            opens=_FUNCTION,
            closes="</function>",
        ),
        (("<seed:tool_call>",), ("seed:tool_call",)),
    ),
    "qwen3_coder": CallFamily(
        _xml(
            ("<tool_call>", "<function="),
            ("</tool_call>",),
            keys=("<parameter=", ">"),
            opens=_FUNCTION,
            closes="</function>",
            in_lines=True,
        ),
        (("<function=", "<parameter="),),
    ),
    "glm45": CallFamily(
        XmlCalls(
            ("<tool_call>",),
            ("</tool_call>",),
            keys=("<arg_key>", "</arg_key>"),
            values=("<arg_value>", "</arg_value>"),
        ),
        (("<arg_key>",),),
    ),
    "kimi_k2": CallFamily(
        NamedCalls(
            _KIMI,
            _KIMI[1],
            arguments=("<|tool_call_argument_begin|>",),
            ends=("<|tool_call_end|>",),
            closes=("<|tool_calls_section_end|>",),
            has_id=True,
        ),
        ((_KIMI[0],), (_KIMI[1],), ("<|im_middle|>",)),
    ),
    "deepseek_v3": CallFamily(
        NamedCalls(
            _DEEPSEEK,
            _DEEPSEEK[1],
            arguments=("<｜tool▁sep｜>",),
            ends=("<｜tool▁call▁end｜>",),
            closes=("<｜tool▁calls▁end｜>",),
        ),
        ((_DEEPSEEK[0],),),
    ),
    "mistral": CallFamily(
        JsonCalls(("[TOOL_CALLS]",), named=NamedCalls(("[TOOL_CALLS]",), arguments=("[ARGS]",), before_id="[CALL_ID]")),
        (("[TOOL_CALLS]",),),
        short_ids=True,
    ),
    "gemma4": CallFamily(BraceCalls(("<|tool_call>",), ("<tool_call|>",), '<|"|>'), (("<|tool_call>",),)),
    "functiongemma": CallFamily(
        BraceCalls(("<start_function_call>",), ("<end_function_call>",), "<escape>"), (("<start_function_call>",),)
    ),
    "lfm2": CallFamily(
        PythonicCalls(("<|tool_call_start|>",), ("<|tool_call_end|>",)),
        (("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    ),
    "olmo3": CallFamily(
        PythonicCalls(("<function_calls>",), ("</function_calls>",), in_list=False), (("<function_calls>",),)
    ),
    "llama3_json": CallFamily(
        JsonCalls(("<|python_tag|>", "<|python_start|>"), bare="{"), (('"parameters": dict',), ("<|python_tag|>",))
    ),
    "llama4_pythonic": CallFamily(
        PythonicCalls(("<|python_start|>",), ("<|python_end|>",), bare="["),
        (("<|python_start|>",), ("<|header_start|>",)),
    ),
    "cohere": CallFamily(
        JsonCalls(("<|START_ACTION|>", "Action: ```json"), ("<|END_ACTION|>", "```")), (("<|START_ACTION|>",),)
    ),
    "hunyuan_a13b": CallFamily(
        JsonCalls(
            ("<tool_calls>",),
            ("</tool_calls>",),
            named=NamedCalls(("<tool_calls>",), "<tool_call>", ends=("</tool_call>",)),
        ),
        (("<tool_calls>",),),
    ),
    "phi4_mini_json": CallFamily(
        JsonCalls(("<|tool_call|>", "functools"), ("<|/tool_call|>",)), (("<|/tool|>",), ("<|/tool_call|>",))
    ),
    "granite": CallFamily(JsonCalls(("<|tool_call|>", "<tool_call>"), ("</tool_call>",)), (("<|tool_call|>",),)),
    "hermes": CallFamily(JsonCalls(("<tool_call>",), ("</tool_call>",)), (("<tool_call>",),)),
    "gemma3": CallFamily(PythonicCalls(("```tool_code",), ("```",), in_list=False), (("tool_code",),)),
    "pythonic": CallFamily(PythonicCalls((), bare="["), (("[func_name1(params_name1=",),)),
}
# Other names of them, most of them vLLM's.
CALL_ALIASES = {
    "ernie45": "hermes",
    "qwen": "hermes",
    "qwen3_xml": "qwen3_coder",
    "glm47": "glm45",
    "deepseek_v31": "deepseek_v3",
    "llama4_json": "llama3_json",
    "granite4": "granite",
    "cohere_command3": "cohere",
    "gpt_oss": "openai",
}

_THINK = Reasoning()
_GRANITE = Reasoning(
    ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
)
_COHERE_WRAPS = {"<|START_RESPONSE|>": "<|END_RESPONSE|>", "<|START_TEXT|>": "<|END_TEXT|>"}
REASONING = {
    "openai": None,  # its messages have channels
    "seed_oss": Reasoning(("<seed:think>",), ("</seed:think>",)),
    "mistral": Reasoning(("[THINK]",), ("[/THINK]",), is_special=True),
    "gemma4": Reasoning(("<|channel>thought",), ("<channel|>",), is_special=True),
    "cohere": Reasoning(("<|START_THINKING|>",), ("<|END_THINKING|>",), _COHERE_WRAPS, is_special=True),
    "granite": _GRANITE,
    "kimi_k2": Reasoning(calls_end_it=True),
    "hunyuan_a13b": Reasoning(wraps={"<answer>": "</answer>"}),
    "ernie45": Reasoning(wraps={"<response>": "</response>"}),
    "think": _THINK,
}
REASONING_ALIASES = {
    **dict.fromkeys(
        ("deepseek_r1", "deepseek_v3", "qwen3", "glm45", "minimax_m2", "olmo3", "smollm3", "step3"), "think"
    ),
    "openai_gptoss": "openai",
    "gpt_oss": "openai",
}
_REASONING_SIGNS = {
    "openai": ("<|channel|>", "<|message|>", "<|start|>"),
    "seed_oss": ("seed:think",),
    "mistral": ("[THINK]",),
    "gemma4": ("<|channel>",),
    "cohere": ("<|START_THINKING|>",),
    "granite": ("Here is my thought process",),
    "kimi_k2": (_KIMI[0], "</think>"),
    "hunyuan_a13b": ("</think>", "<answer>"),
    "ernie45": ("</think>", "<response>"),
    "think": ("</think>",),
}
# What templates do with arguments that are an object.
_OF_OBJECTS = ("tojson", "items()", "is string", "is mapping", "|items", "| items")
CALL_PARSERS = ("auto", "none", *sorted({*CALLS, *CALL_ALIASES}))
REASONING_PARSERS = ("auto", "none", *sorted({*REASONING, *REASONING_ALIASES}))


def family_of(source: str, call_parser: str = "auto", reasoning_parser: str = "auto") -> Family:
    """How a model writes its answers, by names of parsers, or where they are `auto` by its chat template.

    Args:
        source: the template.
    """
    if call_parser == "auto":
        call_parser = next((name for name, each in CALLS.items() if _shows(source, each)), "none")
    call_parser = CALL_ALIASES.get(call_parser, call_parser)
    if reasoning_parser == "auto":
        found = (name for name, signs in _REASONING_SIGNS.items() if all(sign in source for sign in signs))
        reasoning_parser = next(found, "none")
    reasoning_parser = REASONING_ALIASES.get(reasoning_parser, reasoning_parser)
    return Family(
        CALLS.get(call_parser),
        REASONING.get(reasoning_parser),
        is_harmony="openai" in (call_parser, reasoning_parser),
        arguments_as_text=not any(sign in source for sign in _OF_OBJECTS),
    )


def _shows(source: str, family: CallFamily) -> bool:
    return "tool" in source and any(all(sign in source for sign in signs) for signs in family.signs)

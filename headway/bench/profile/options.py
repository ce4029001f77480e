"""What the user of `headway bench profile` asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from headway.engine.config import ModelOptions
from headway.flags import Flag
from headway.load.errors import BenchError
from headway.load.option_values import percentiles, token_counts

# Document 000 measured up to 400 tokens.
DEFAULT_PROMPT_LENS = (16, 64, 128, 256, 400, 1024, 2048)
OWN_ARGUMENTS = ("--host", "--port", "--served-model-name", "--api-key")  # flags that the profiler sets itself
DEFAULT_PERCENTILES = (50.0, 90.0, 95.0, 99.0)


@dataclass(slots=True, kw_only=True)
class ProfileOptions(ModelOptions):
    """One profile: the flags of `headway bench profile`.

    Args:
        prompt_lens: None takes DEFAULT_PROMPT_LENS as far as the model's context goes.
        output_len: at least 2, as the first token comes from the prompt's step.
        percentiles: the percentiles of TTFT, TPOT and TTLT.
        given: names of the flags that were given.
        result_name: an existing folder of that name is replaced.
    """

    model: Annotated[
        str | None, Flag("Folder of a checkpoint, or a Hugging Face id; default: the bundled model.", positional=True)
    ] = None
    base_url: Annotated[
        str | None, Flag("Profile the server at this address, of Headway, vLLM or llama.cpp, instead of starting one.")
    ] = None
    api_key: Annotated[
        str | None,
        Flag("With --base-url: API key, sent as a bearer token.", envvar=("HEADWAY_API_KEY", "OPENAI_API_KEY")),
    ] = field(default=None, repr=False)
    prompt_lens: Annotated[
        tuple[int, ...] | None,
        Flag(
            "Prompt lengths in tokens, such as 16,256,1024. Default: 16 to 2048, within the context.",
            parse=token_counts,
        ),
    ] = None
    output_len: Annotated[int, Flag("Tokens of each answer.", min=2)] = 32
    repeats: Annotated[int, Flag("Requests of each prompt length.", min=1, max=100_000)] = 10
    naive: Annotated[
        bool,
        Flag(
            "Also answer without a KV cache, one pass over the whole text for each token, at the middle prompt length.",
            "--naive",
        ),
    ] = False
    percentiles: Annotated[
        tuple[float, ...],
        Flag("Percentiles to report.", "--metric-percentiles", parse=percentiles, default="50,90,95,99"),
    ] = DEFAULT_PERCENTILES
    serve_arguments: Annotated[
        tuple[str, ...],
        Flag("One more argument for `headway serve`; may be repeated.", "--serve-argument", parse=tuple, repeated=True),
    ] = ()
    calibration: Annotated[
        Path | None, Flag("Output of `python -m headway.calibration`. Default: the machine is measured.")
    ] = None
    result_dir: Annotated[Path, Flag("Folder in which the profile's folder is made.")] = Path("bench-results")
    result_name: Annotated[str | None, Flag("Name of that folder. Default: from the model and time.")] = None
    ready_timeout_s: Annotated[float, Flag("Seconds for the model to load.", "--ready-timeout", min=1)] = 900.0
    request_timeout_s: Annotated[float, Flag("Seconds for each request.", "--timeout", min=1)] = 600.0
    seed: Annotated[int, Flag("Seed of the prompts.", min=0)] = 0
    given: frozenset[str] = frozenset()


def check_options(options: ProfileOptions) -> None:
    """Refuse what could not be measured, before anything is started. Raises BenchError."""
    if options.prompt_lens and min(options.prompt_lens) < 1:
        raise BenchError(f"--prompt-lens has {min(options.prompt_lens)}; a prompt has at least 1 token")
    for flag, seconds in {"--ready-timeout": options.ready_timeout_s, "--timeout": options.request_timeout_s}.items():
        if not 0 < seconds < float("inf"):
            raise BenchError(f"{flag} is {seconds:g}; it must be a number of seconds above 0")
    for argument in options.serve_arguments:
        if argument.partition("=")[0] in OWN_ARGUMENTS:
            raise BenchError(f"--serve-argument {argument} is set by the profile; leave it out")
    name = options.result_name
    if name is not None and (not name or name in (".", "..") or Path(name).name != name):
        raise BenchError(f"--result-name is {name!r}; it must be the plain name of a folder")


def settings_of(options: ProfileOptions) -> dict[str, Any]:
    """JSON-able: what was asked for, without secrets."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
    del settings["given"], settings["api_key"]
    return settings


def fitting_lengths(options: ProfileOptions, max_model_len: int) -> tuple[int, ...]:
    """Prompt lengths to measure, rising, with room for the answer in a context of `max_model_len` tokens.

    Of the default ones those that fit; the longest that does not becomes what fits.

    Raises:
        BenchError: a length that was asked for does not fit, or none does.
    """
    room = max_model_len - options.output_len
    if room < 1:
        raise BenchError(
            f"--output-len {options.output_len} leaves no room for a prompt in a context of {max_model_len} tokens; "
            "lower it"
        )
    if options.prompt_lens is not None:
        longest = max(options.prompt_lens)
        if longest > room:
            raise BenchError(
                f"a prompt of {longest} tokens and an answer of {options.output_len} do not fit in a context of "
                f"{max_model_len} tokens; the longest prompt is {room}"
            )
        return tuple(sorted(set(options.prompt_lens)))
    return _default_lengths(room)


def _default_lengths(room: int) -> tuple[int, ...]:
    fitting: Sequence[int] = [length for length in DEFAULT_PROMPT_LENS if length <= room]
    if len(fitting) < len(DEFAULT_PROMPT_LENS) and room not in fitting:
        # A length next to another one says nothing new.
        fitting = [*(length for length in fitting if length < 0.8 * room), room]
    return tuple(fitting)

"""What may be asked for, and which prompt lengths fit."""

from __future__ import annotations

import dataclasses

import pytest

from headway.bench.profile.options import DEFAULT_PROMPT_LENS, ProfileOptions, check_options, fitting_lengths
from headway.load.errors import BenchError


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt_lens": (16, 0)}, "--prompt-lens has 0; a prompt has at least 1 token"),
        ({"ready_timeout_s": 0}, "--ready-timeout is 0"),
        ({"request_timeout_s": float("inf")}, "--timeout is inf"),
        ({"result_name": "../x"}, "--result-name is '../x'; it must be the plain name of a folder"),
        ({"result_name": ".."}, "--result-name is '..'"),
        ({"serve_arguments": ("--block-size=8", "--port=1")}, "--serve-argument --port=1 is set by the profile"),
    ],
)
def test_nonsense_is_refused(changes, said):
    with pytest.raises(BenchError) as error:
        check_options(dataclasses.replace(ProfileOptions(), **changes))
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_defaults_are_fine():
    check_options(ProfileOptions())


@pytest.mark.parametrize(
    ("context", "lengths"),
    [
        (32768, DEFAULT_PROMPT_LENS),
        (2080, DEFAULT_PROMPT_LENS),
        (1024, (16, 64, 128, 256, 400, 992)),
        (450, (16, 64, 128, 256, 418)),
        (100, (16, 68)),
        (40, (8,)),
        (33, (1,)),
    ],
)
def test_default_lengths_end_with_what_fits(context, lengths):
    """An answer of 32 tokens; a length near the last one is left out."""
    assert fitting_lengths(ProfileOptions(), context) == lengths


def test_lengths_that_were_asked_for_are_sorted_and_must_fit():
    options = ProfileOptions(prompt_lens=(200, 10, 200), output_len=56)
    assert fitting_lengths(options, 256) == (10, 200)
    with pytest.raises(
        BenchError, match=r"a prompt of 200 tokens and an answer of 56 do not fit .* longest prompt is 199"
    ):
        fitting_lengths(options, 255)
    with pytest.raises(BenchError, match="--output-len 56 leaves no room for a prompt in a context of 56 tokens"):
        fitting_lengths(options, 56)

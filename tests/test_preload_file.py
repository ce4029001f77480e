"""The file of preloaded prompts: what it says, and that what is wrong in it is named with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headway.config_files.preload import read_preload_file
from headway.server.api.prompts import preloaded
from headway.text.chat_template import ChatTemplate
from headway.text.tokenizer import Tokenizer
from headway.text.tokenizer_files import TextError
from tests.text.tiny_tokenizers import save_chat_model

GOOD = """\
# what everybody begins with
[[prompt]]
name = "support"
system = "You are a helpful assistant."

[[prompt]]
name = "story"
text = "Once upon a time there was"
cache_salt = "tenant-a"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.toml"
    path.write_text(GOOD)
    return path


def test_prompts_are_what_requests_with_them_begin_with(file: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_chat_model(tmp_path / "model"))
    template = ChatTemplate.load(tokenizer)
    assert template is not None
    system, text = preloaded(read_preload_file(str(file)), tokenizer, template)
    assert system.where == f"{file}, line 2: prompt 'support'"
    for words in ("Hello", "2 + 2?", "assistant"):
        messages = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": words}]
        asked = tokenizer.encode(template.render(messages), add_special_tokens=False)
        assert asked[: len(system.token_ids)] == system.token_ids
    assert tokenizer.decode(system.token_ids, skip_special_tokens=False).count("You are a helpful assistant.") == 1
    assert (text.token_ids, text.cache_salt) == (tokenizer.encode("Once upon a time there was"), "tenant-a")
    with pytest.raises(TextError, match="line 2: the model has no chat template; give text"):
        preloaded(read_preload_file(str(file)), tokenizer, None)


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ('name = "story"', 'name = "support"', 7, "two prompts are named 'support'"),
        ('name = "story"', "", 6, 'a prompt has no name; write name = "..."'),
        ("text =", "words =", 8, "'words' is unknown; a prompt has name, system, text, cache_salt"),
        ('text = "Once upon a time there was"', "text = 5", 8, "text is 5; it must be a string"),
        ('text = "Once upon a time there was"', "", 6, "prompt 'story' needs either system or text"),
        ("cache_salt =", "system =", 6, "prompt 'story' needs either system or text"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(file: Path, old: str, new: str, line: int, says: str) -> None:
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ValueError, match=re.escape(f"{file}, line {line}: {says}")):
        read_preload_file(str(file))


def test_the_example_of_the_docs(file: Path) -> None:
    docs = Path(__file__).parent.parent / "docs" / "memory.md"
    file.write_text(docs.read_text().split("```toml\n")[1].split("```")[0])
    assert [each.name for each in read_preload_file(str(file))] == ["support", "summary"]


def test_a_file_without_prompts_is_refused(file: Path) -> None:
    file.write_text("")
    with pytest.raises(ValueError, match="there are no prompts; write"):
        read_preload_file(str(file))

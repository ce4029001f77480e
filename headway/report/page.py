"""A report as one HTML file: nothing is fetched, nothing is run, and it reads in light, in dark and on paper."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING

from headway import __version__
from headway.files import write_files
from headway.report import style
from headway.report.parts import Page, Picture

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATE = Path(__file__).with_name("page.html.j2")


class ReportError(ValueError):
    """A report that cannot be written; one line that names the file and what to do."""


_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9-]+")


def render(page: Page) -> str:
    """The page as HTML. All texts in it are escaped."""
    names: set[str] = set()

    def drawn(picture: Picture) -> str:
        return style.to_svg(picture.figure, _free_name(picture.name, names), picture.title)

    return _template().render(
        page=page,
        drawn=drawn,
        version=__version__,
        light=style.css_variables(dark=False),
        dark=style.css_variables(dark=True),
        font=style.FONT_STACK,
    )


def write_page(path: Path, page: Page, figures_dir: Path | None = None) -> list[Path]:
    """Write the page and where asked its pictures as PNG, all of them or none. Folders are made.

    Returns:
        All files written, the page first.

    Raises:
        ReportError: a file cannot be written there.
    """
    try:
        for folder in (path.parent, figures_dir or path.parent):  # before seconds of drawing
            folder.mkdir(parents=True, exist_ok=True)
        pictures = {} if figures_dir is None else _pictures(page, figures_dir)
        write_files({**pictures, path: render(page).encode(errors="replace")})
    except OSError as error:
        where = error.filename or path
        raise ReportError(f"cannot write the report {where}: {error.strerror or error}; name another place") from None
    return [path, *pictures]


def _pictures(page: Page, folder: Path) -> dict[Path, bytes]:
    names: set[str] = set()
    shown = [picture for section in page.sections for picture in section.pictures]
    return {folder / f"{_free_name(each.name, names)}.png": style.to_png(each.figure) for each in shown}


def _free_name(wanted: str, taken: set[str]) -> str:
    """A name for a file and for ids, unique in the page."""
    plain = _NOT_IN_A_NAME.sub("-", wanted).strip("-") or "figure"
    name, again = plain, 1
    while name in taken:
        again += 1
        name = f"{plain}-{again}"
    taken.add(name)
    return name


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))

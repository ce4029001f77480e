"""The palette, numbers for people, and figures as SVG and PNG."""

from __future__ import annotations

import io
import re

import pytest

from headway.report import style


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("name", "least"), [("ink", 7), ("muted", 4.5), *((name, 3) for name in style.SERIES)])
def test_text_and_lines_stand_out_from_the_page(name: str, least: float, dark: bool) -> None:
    assert contrast(style.PALETTE[name][dark], style.PALETTE["paper"][dark]) >= least


def test_every_colour_of_the_light_palette_is_its_own_variable() -> None:
    light = [shades[0] for shades in style.PALETTE.values()]
    assert len(set(light)) == len(light)


@style.drawing()
def busy_figure():
    figure, (left, right) = style.new_figure(columns=2)
    for place, name in enumerate(("a $x$ <script>", "日本", "c & d")):
        left.plot(
            [1, 2, 3], [1, 10 + place, 1000], color=style.series_colour(place), ls=style.series_line(place), label=name
        )
    left.set_xlabel("Time (s)")
    left.set_ylabel("Latency (ms)")
    left.fill_between([1, 2], 0, 5, color=style.colour("stall-prefill"), alpha=0.3)
    style.log_axis(left, "y")
    style.legend(left)
    style.nothing_to_show(right, "nothing <here>")
    return figure


@pytest.fixture(scope="module")
def svg() -> str:
    return style.to_svg(busy_figure(), "one", "A title & <more>")


def test_an_svg_takes_all_its_colours_and_its_font_from_the_page(svg: str) -> None:
    assert not re.search(r"#[0-9a-fA-F]{3}", re.sub(r'(href="#|url\(#)[^")]+', "", svg))
    assert "black" not in svg and "font-family" not in svg and "<style" not in svg and "metadata" not in svg
    assert "http" not in svg
    assert "var(--hw-ink)" in svg and "var(--hw-stall-prefill)" in svg
    texts = re.findall(r"<text [^>]*>", svg)
    assert texts and all("fill: var(--hw-" in text for text in texts)


def test_texts_of_an_svg_are_escaped_and_dollars_are_kept(svg: str) -> None:
    assert "<title>A title &amp; &lt;more&gt;</title>" in svg
    assert "a $x$ &lt;script&gt;" in svg and "<script" not in svg and "nothing &lt;here&gt;" in svg


def test_ids_of_two_pictures_do_not_clash(svg: str) -> None:
    both = (svg, style.to_svg(busy_figure(), "two"))
    ids = [set(re.findall(r' id="([^"]+)"', each)) for each in both]
    assert ids[0] and not ids[0] & ids[1]
    for each, own in zip(both, ids, strict=True):
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', each)) <= own


def test_the_same_data_gives_the_same_svg(svg: str) -> None:
    assert style.to_svg(busy_figure(), "one", "A title & <more>") == svg


def test_png() -> None:
    from PIL import Image

    with Image.open(io.BytesIO(style.to_png(busy_figure()))) as image:
        assert image.size == (1200, 540)
        assert image.convert("RGB").getpixel((2, 2)) == (254, 254, 254)


def test_drawing_leaves_the_settings_of_others_alone() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    busy_figure()
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (1.5, "1.5"),
        (9.999, "10"),
        (12.34, "12.3"),
        (100, "100"),
        (1234.5, "1,234"),
        (1e10, "1e+10"),
        (float("nan"), "–"),
        (float("inf"), "–"),
        (-3.25, "-3.25"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert style.number(value) == text


def test_plain_makes_one_printable_line_of_bounded_length() -> None:
    assert style.plain("a\nb\x1b[31m\tc") == "a b [31m c"
    shortened = style.plain("x" * 50 + "y" * 50, 21)
    assert len(shortened) == 21 and shortened.startswith("xxx") and shortened.endswith("yyy") and "…" in shortened


def test_a_wide_range_wants_a_logarithmic_axis() -> None:
    assert style.wants_log([1, 100]) and not style.wants_log([50, 100])
    assert not style.wants_log([0, 0]) and not style.wants_log([])

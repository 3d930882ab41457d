"""SVG elements: numbers, names of attributes, and text that cannot end its element."""

from __future__ import annotations

from plait.pictures.svg_elements import element, inline_svg, path, rect, text_at


def test_attributes_are_rounded_to_hundredths_and_named_as_in_svg() -> None:
    assert path("M0 0H9", class_="grid") == '<path class="grid" d="M0 0H9"/>'
    assert rect(1 / 3, 2.0, 1150, 0.001, data_tp="0", style="", rx=4) == (
        '<rect data-tp="0" rx="4" x="0.33" y="2" width="1150" height="0"/>'
    )


def test_names_of_users_are_escaped_in_text_titles_and_attributes() -> None:
    assert text_at(0, 1, "<a>", "b & c") == '<text x="0" y="1"><title>b &amp; c</title>&lt;a&gt;</text>'
    assert element("g", "<a/>", class_='"') == '<g class="&quot;"><a/></g>'
    assert inline_svg("<name>", 2, 3, ["<a/>", "<b/>"]) == (
        '<svg class="plan" viewBox="0 0 2 3" width="2" height="3" role="img" aria-label="&lt;name&gt;">\n'
        "<a/>\n<b/>\n</svg>"
    )

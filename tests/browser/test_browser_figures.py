"""Every figure draws itself: three widths, both themes, both languages, every model and flow."""

from __future__ import annotations

from typing import Any

import pytest
from opened_page import Opened, Opener

from cedar.planner.request import FLOWS

FIGURES = range(1, 11)

#: For every drawing: its place, its room, its words with their boxes, and broken numbers in it.
LOOK = """() => Array.from({ length: 10 }, (_, i) => {
  const figure = document.getElementById(`figure-${i + 1}`);
  const drawing = figure.querySelector(".drawing svg");
  const box = ({ left, right, top, bottom }) => ({ left, right, top, bottom });
  const words = [...drawing.querySelectorAll("text")].filter((text) => text.textContent.trim());
  return {
    frame: box(figure.getBoundingClientRect()),
    drawing: box(drawing.getBoundingClientRect()),
    shapes: drawing.querySelectorAll("rect, path").length,
    broken: /NaN|undefined|Infinity|null/.test(drawing.outerHTML),
    title: figure.querySelector("h3").textContent,
    caption: figure.querySelector(".caption").textContent,
    named: Boolean(drawing.getAttribute("aria-label")),
    words: words.map((text) => ({ text: text.textContent, ...box(text.getBoundingClientRect()) })),
  };
})"""


def check_figures(opened: Opened) -> list[dict[str, Any]]:
    """All ten are drawn inside their frames, named, and no words lie on other words."""
    figures: list[dict[str, Any]] = opened.page.evaluate(LOOK)
    for number, figure in zip(FIGURES, figures, strict=True):
        frame, drawing = figure["frame"], figure["drawing"]
        assert drawing["bottom"] - drawing["top"] > 100, number
        assert figure["shapes"] > 10, number
        assert not figure["broken"], number
        assert figure["named"], number
        assert figure["title"], number
        assert figure["caption"], number
        for box in (drawing, *figure["words"]):
            assert box["left"] >= frame["left"] - 0.5, (number, box)
            assert box["right"] <= frame["right"] + 0.5, (number, box)
        assert overlaps(figure["words"]) == [], number
    page = "document.documentElement"
    assert opened.page.evaluate(f"{page}.scrollWidth <= {page}.clientWidth")
    return figures


def overlaps(words: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of words whose boxes share more than a hairline."""
    found = []
    for i, one in enumerate(words):
        for other in words[i + 1 :]:
            across = min(one["right"], other["right"]) - max(one["left"], other["left"])
            down = min(one["bottom"], other["bottom"]) - max(one["top"], other["top"])
            if across > 1 and down > 3:
                found.append((one["text"], other["text"]))
    return found


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 820, 1440])
def test_every_figure_renders_at_this_width_and_theme_in_both_languages(
    open_page: Opener, width: int, theme: str
) -> None:
    opened = open_page(width=width, theme=theme)
    english = check_figures(opened)
    opened.page.click('#languages [data-language="zh"]')
    chinese = check_figures(opened)
    for one, other in zip(english, chinese, strict=True):
        assert one["title"] != other["title"]
        assert one["caption"] != other["caption"]
    opened.check()


@pytest.mark.parametrize("model", ["preset:v4.1-flash", "nano"])
@pytest.mark.parametrize("width", [360, 1440])
def test_every_figure_renders_for_this_model_in_every_flow(
    open_page: Opener, model: str, width: int
) -> None:
    opened = open_page(model=model, width=width, input_tokens=1_000_000, output_tokens=9_999)
    for flow in FLOWS:
        opened.choose_flow(flow)
        check_figures(opened)
    opened.check()


def test_prompts_about_as_long_as_the_window_draw_without_a_broken_axis(open_page: Opener) -> None:
    opened = open_page(output_tokens=1)
    assert opened.page.locator("#figure-3 .break").count() == 2
    for tokens in ("1", "127", "128", "129"):
        opened.enter("input_tokens", tokens)
        check_figures(opened)
        assert opened.page.locator("#figure-3 .break").count() == 0
    opened.check()


def test_drawings_follow_the_window_down_to_almost_nothing(open_page: Opener) -> None:
    opened = open_page(width=1280)
    for width in (640, 50, 320, 1280):
        opened.page.set_viewport_size({"width": width, "height": 900})
        opened.page.wait_for_timeout(50)
        opened.check()
    check_figures(opened)


def test_the_two_themes_differ_and_keep_text_readable(open_page: Opener) -> None:
    opened = open_page(theme="light")
    contrasts = []
    for theme in ("light", "dark"):
        opened.page.click(f'#themes [data-theme-name="{theme}"]')
        contrasts.append(opened.page.evaluate(CONTRAST))
    assert contrasts[0] != contrasts[1]
    for pairs in contrasts:
        for name, ratio in pairs.items():
            assert ratio >= 4.5, (name, ratio)


#: Contrast ratio (WCAG 2) of text colours on what they stand on.
CONTRAST = """() => {
  const style = getComputedStyle(document.documentElement);
  const light = (name) => {
    const hex = style.getPropertyValue(name).trim().slice(1);
    const [r, g, b] = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
      .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const pairs = [["--ink", "--paper"], ["--ink", "--panel"], ["--muted", "--paper"],
    ["--muted", "--panel"], ["--encoder", "--panel"], ["--decoder", "--panel"], ["--kv", "--panel"],
    ["--on-kv", "--kv"], ["--ink", "--encoder-soft"], ["--ink", "--decoder-soft"],
    ["--muted", "--encoder-soft"], ["--muted", "--decoder-soft"], ["--warn", "--paper"]];
  return Object.fromEntries(pairs.map(([a, b]) => [`${a} on ${b}`, ratio(a, b)]));
}"""


def test_print_shows_the_figures_in_light_colours_without_controls(open_page: Opener) -> None:
    opened = open_page(theme="dark", width=1440)
    page = opened.page
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#figure-1 svg").get_attribute("width") == "720"
    assert not page.is_visible(".tools")
    assert not page.is_visible("#record-file")
    paper = "getComputedStyle(document.documentElement).getPropertyValue('--panel').trim()"
    assert page.evaluate(paper) == "#ffffff"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert float(page.locator("#figure-1 svg").get_attribute("width")) > 720
    opened.check()


def test_movement_is_reduced_when_asked(open_page: Opener) -> None:
    moving = "getComputedStyle(document.querySelector('.layer')).transitionDuration"
    assert open_page(motion="reduce").page.evaluate(moving) == "0s"
    assert open_page(motion="no-preference").page.evaluate(moving) != "0s"

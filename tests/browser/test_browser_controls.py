"""Every control changes what it should and nothing else; what is not possible is said, not clamped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opened_page import Opened, Opener

from cedar.planner.flows import Planner
from cedar.planner.request import FLOWS, Request
from cedar.planner.source import resolve_model

BY_CONTROL = ("input_tokens", "output_tokens", "tokens_per_turn")


def changed(before: list[str], after: list[str]) -> set[int]:
    return {n for n, (one, other) in enumerate(zip(before, after, strict=True), 1) if one != other}


def test_the_flow_redraws_figures_1_to_6_and_marks_its_own_of_7_to_10(open_page: Opener) -> None:
    opened = open_page()
    before = opened.drawings()
    glance = opened.page.inner_text("#glance")
    opened.choose_flow("none")
    after = opened.drawings()
    assert changed(before, after) == {1, 2, 3, 4, 5, 6}
    assert opened.page.inner_text("#glance") != glance
    titles = ("Neither", "CED", "CSA2", "CED + CSA2")
    for number, (flow, title) in enumerate(zip(FLOWS, titles, strict=True), start=7):
        opened.choose_flow(flow)
        assert opened.page.locator(".figure.chosen").get_attribute("id") == f"figure-{number}"
        assert f"flow {title}," in opened.page.inner_text("#ledger-lead")
    opened.check()


def test_the_model_redraws_every_figure(open_page: Opener) -> None:
    opened = open_page()
    shown = [opened.drawings()]
    for model in ("preset:v4.1-flash", "nano"):
        opened.page.select_option("#model", model)
        shown.append(opened.drawings())
    assert changed(shown[0], shown[1]) == set(range(1, 11))
    assert changed(shown[1], shown[2]) == set(range(1, 11))
    assert "differ" not in opened.page.inner_text("#differences")  # nano is neither of the two
    assert opened.page.locator(".notes:not([hidden])").count() == 0
    opened.check()


@pytest.mark.parametrize(
    ("control", "lines", "still"),
    [
        ("input_tokens", {"prefill_activation", "kv_bytes"}, {"window_bytes", "activated_prefill"}),
        ("output_tokens", {"kv_bytes", "persisted_bytes"}, {"prefill_activation", "window_bytes"}),
        ("tokens_per_turn", {"store.baseline_bytes", "store.share"},
         {"persisted_bytes", "kv_bytes", "prefill_activation"}),
    ],
)  # fmt: skip
def test_a_number_moves_the_lines_that_depend_on_it(
    open_page: Opener, control: str, lines: set[str], still: set[str]
) -> None:
    opened = open_page()
    opened.open_ledger()
    before = opened.values()
    opened.enter(control, "12,345")
    after = opened.values()
    planner = Planner(resolve_model("preset:article"))
    request = {"input_tokens": 30_000, "output_tokens": 1_000, "tokens_per_turn": 760}
    ledger = planner.plan(Request(**(request | {control: 12_345})), "ced+csa2").ledger
    for line in lines:
        assert after["ced+csa2", line] != before["ced+csa2", line]
    for line in still:
        assert after["ced+csa2", line] == before["ced+csa2", line]
    for line in lines | still:
        assert after["ced+csa2", line] == ledger[line]
    opened.check()


def test_a_slider_moves_its_number(open_page: Opener) -> None:
    opened = open_page()
    slider = opened.page.locator("#input_tokens-slider")
    slider.fill("500")  # the middle of a logarithmic scale: the square root of the context
    assert opened.page.input_value("#input_tokens") == "1,000"
    assert opened.values("#glance")["ced+csa2", "kv_bytes"] == 2000 * 890
    slider.fill("0")
    assert opened.page.input_value("#input_tokens") == "1"
    slider.fill("1000")  # two digits of the longest prompt the context has room for
    assert opened.page.input_value("#input_tokens") == "1,000,000"
    assert opened.problem() == ""
    opened.check()


@pytest.mark.parametrize("control", BY_CONTROL)
def test_a_number_that_is_not_possible_is_named_and_nothing_is_clamped(
    open_page: Opener, control: str
) -> None:
    opened = open_page()
    opened.enter(control, "777")
    shown, before = opened.values("#glance"), opened.drawings()
    for value in ("0", "-5", "1.5", "", "many", "1e3", "99999999999999999999"):
        opened.enter(control, value)
        message = opened.problem()
        assert value in message
        assert "whole number" in message
        assert "last request that was possible" in message
        assert opened.page.get_attribute(f"#{control}", "aria-invalid") == "true"
        assert opened.page.input_value(f"#{control}") == value
    assert (opened.values("#glance"), opened.drawings()) == (shown, before)
    opened.enter(control, "777")
    assert opened.problem() == ""
    assert opened.page.get_attribute(f"#{control}", "aria-invalid") == "false"
    opened.check()


def test_a_request_longer_than_the_context_says_the_limit(open_page: Opener) -> None:
    opened = open_page(input_tokens=1_048_000, output_tokens=576)
    assert opened.problem() == ""  # exactly full
    opened.enter("output_tokens", "577")
    message = opened.problem()
    assert "1,048,577" in message
    assert "1,048,576" in message
    opened.check()


@pytest.mark.parametrize(("locale", "tag"), [("zh-TW", "zh-CN"), ("fr-FR", "en")])
def test_the_language_is_the_browsers(browser: Any, page_file: Path, locale: str, tag: str) -> None:
    context = browser.new_context(locale=locale)
    opened = Opened(context.new_page()).open(page_file, {})
    assert opened.page.locator("html").get_attribute("lang") == tag
    context.close()


def test_the_theme_is_the_browsers_until_a_switch_is_pressed(open_page: Opener) -> None:
    for scheme in ("dark", "light"):
        opened = open_page(scheme=scheme)
        root = opened.page.locator("html")
        assert root.get_attribute("data-theme") == scheme
    opened.page.click('#languages [data-language="zh"]')
    assert root.get_attribute("lang") == "zh-CN"
    assert opened.page.title() == "十张图看懂 CEDAR"
    opened.page.click('#themes [data-theme-name="dark"]')
    assert root.get_attribute("data-theme") == "dark"
    pressed = opened.page.locator('[aria-pressed="true"]').all_inner_texts()
    assert pressed == ["中文", "深色"]
    opened.check()


def test_an_impossible_number_in_the_address_is_said_above_a_possible_request(
    open_page: Opener,
) -> None:
    opened = open_page(input_tokens="lots")
    assert "lots" in opened.problem()
    assert opened.page.input_value("#input_tokens") == "lots"
    assert opened.values("#glance")["ced+csa2", "kv_bytes"] == 27_590_000
    opened.page.click('#languages [data-language="zh"]')
    assert "lots" in opened.problem()
    assert opened.page.inner_text("#figure-1 .figure-number") == "图 1"
    opened.check()


def test_the_address_keeps_the_state(open_page: Opener) -> None:
    opened = open_page()
    opened.page.select_option("#model", "nano")
    opened.choose_flow("csa2")
    opened.enter("input_tokens", "4321")
    opened.page.click('#languages [data-language="zh"]')
    opened.page.wait_for_function("location.hash.includes('input_tokens=4321')")
    shown = opened.values()
    opened.page.reload()
    opened.page.wait_for_selector("#figure-10 svg")
    assert opened.values() == shown
    assert opened.page.input_value("#model") == "nano"
    assert opened.page.locator("html").get_attribute("lang") == "zh-CN"
    opened.check()


def test_the_controls_work_from_the_keyboard(open_page: Opener) -> None:
    opened = open_page()
    page = opened.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "figures"
    page.focus('#flow input[value="ced+csa2"]')
    page.keyboard.press("ArrowLeft")
    assert page.locator("#flow input:checked").get_attribute("value") == "csa2"
    assert page.locator(".figure.chosen").get_attribute("id") == "figure-9"
    page.keyboard.press("ArrowLeft")
    assert page.locator(".figure.chosen").get_attribute("id") == "figure-8"
    opened.check()


def test_on_a_phone_the_request_folds_away(open_page: Opener) -> None:
    opened = open_page(width=360)
    assert not opened.page.is_visible("#model")
    assert "30,000 + 1,000" in opened.page.inner_text("#request-summary")
    opened.page.click("#request-summary")
    opened.page.select_option("#model", "nano")
    assert "nano" in opened.page.inner_text("#request-summary")
    opened.check()


def test_a_flow_the_model_cannot_run_is_disabled_with_the_reason(
    open_page: Opener, blocked_file: Path
) -> None:
    opened = open_page(blocked_file)
    for flow in ("ced", "ced+csa2"):
        choice = opened.page.locator(f'#flow input[value="{flow}"]')
        assert choice.is_disabled()
        title = choice.locator("xpath=..").get_attribute("title")
        assert "layer 30 has an Engram" in title
    assert opened.page.locator("#flow input:checked").get_attribute("value") == "csa2"
    assert "layer 30 has an Engram" in opened.page.text_content("#figure-10 .drawing")
    assert "layer 30 has an Engram" in opened.page.inner_text("#figure-5 .caption")
    opened.check()


def test_the_ledger_can_be_filtered(open_page: Opener) -> None:
    opened = open_page()
    opened.open_ledger()
    everything = opened.page.locator("#ledger tbody tr").count()
    assert everything > 200
    opened.page.fill("#ledger input", "store.")
    names = opened.page.locator("#ledger tbody th").all_inner_texts()
    assert 0 < len(names) < everything
    assert all("store." in name for name in names)
    opened.check()

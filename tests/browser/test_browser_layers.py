"""A layer says what it owns, borrows and runs: under the mouse, under a finger, from the keyboard."""

from __future__ import annotations

from opened_page import Opened, Opener

WITH_LAYERS = (1, 3, 4, 6)


def test_pointing_at_a_layer_shows_its_card_and_its_kin(open_page: Opener) -> None:
    opened = open_page(model="preset:v4.1-flash")
    for figure in WITH_LAYERS:
        point_at_layer_26(opened, figure)
    opened.check()


def point_at_layer_26(opened: Opened, figure: int) -> None:
    page = opened.page
    page.locator(f'#figure-{figure} .layer[data-layer="26"]').hover()
    card = page.locator("#layer-card")
    assert card.locator("h3").inner_text() == "Layer 26 · decoder · Reuse"
    assert card.locator("dd").all_inner_texts() == [
        "window 67.58 kB",
        "KV rows of layer 20, selection of layer 24",
        "replay 128 tokens",
        "1,000 tokens; the last reads 128 window rows and 512 selected rows",
    ]
    kin = page.eval_on_selector_all(
        f"#figure-{figure} .layer.is-kin", "all => all.map((one) => Number(one.dataset.layer))"
    )
    assert sorted(kin) == list(range(20, 40))
    source = page.locator(f"#figure-{figure} .layer.is-source")
    assert source.get_attribute("data-layer") == "20"
    page.mouse.move(5, 5)
    assert not card.is_visible()


def test_an_owner_says_what_it_stores_and_a_window_layer_that_it_borrows_nothing(
    open_page: Opener,
) -> None:
    opened = open_page(model="preset:v4.1-flash")
    card = opened.page.locator("#layer-card")
    opened.page.locator('#figure-1 .layer[data-layer="20"]').hover()
    owns, borrows, prefill, decode, also = card.locator("dd").all_inner_texts()
    assert owns == "KV rows and index keys, 356 B a token, 11.04 MB at the end; window 67.58 kB"
    assert (borrows, prefill) == ("nothing", "project 30,000 tokens into KV; replay 128 tokens")
    assert decode.endswith("scores 31,000 index keys")
    assert also == "builds the candidate pool"
    opened.page.locator('#figure-1 .layer[data-layer="1"]').hover()
    texts = card.locator("dd").all_inner_texts()
    assert texts[:3] == ["window 67.58 kB", "nothing", "encode 30,000 tokens"]
    assert texts[-1] == "n-gram memory (Engram) enters here"


def test_arrow_keys_walk_the_layers_with_one_stop_per_figure(open_page: Opener) -> None:
    opened = open_page()
    page = opened.page
    for figure in WITH_LAYERS:
        assert page.locator(f'#figure-{figure} .layer[tabindex="0"]').count() == 1
    page.focus('#figure-6 .layer[tabindex="0"]')
    card = page.locator("#layer-card h3")
    for key, layer in (("ArrowRight", 1), ("ArrowUp", 2), ("ArrowLeft", 1), ("End", 39),
                       ("ArrowRight", 39), ("Home", 0), ("ArrowDown", 0)):  # fmt: skip
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.dataset.layer") == str(layer)
        assert card.inner_text().startswith(f"Layer {layer} ·")
    outline = "getComputedStyle(document.activeElement.querySelector('.hit')).strokeWidth"
    assert page.evaluate(outline) != "0px"
    assert (
        page.evaluate("getComputedStyle(document.activeElement.querySelector('.hit')).stroke")
        != "none"
    )
    page.keyboard.press("Escape")
    assert not page.is_visible("#layer-card")
    opened.check()


def test_focus_stays_on_the_layer_when_the_numbers_change(open_page: Opener) -> None:
    opened = open_page()
    page = opened.page
    page.focus('#figure-4 .layer[tabindex="0"]')
    page.keyboard.press("ArrowUp")
    page.evaluate("""() => {
      const field = document.getElementById("input_tokens");
      field.value = "500";
      field.dispatchEvent(new Event("input", { bubbles: true }));
    }""")
    assert page.evaluate("document.activeElement.dataset.layer") == "1"
    assert "500 tokens" in page.inner_text("#layer-card")


def test_every_layer_has_a_spoken_name_with_all_of_it(open_page: Opener) -> None:
    opened = open_page(language="zh", model="preset:article")
    for figure in WITH_LAYERS:
        labels = opened.page.eval_on_selector_all(
            f"#figure-{figure} .layer", "all => all.map((one) => one.getAttribute('aria-label'))"
        )
        assert len(labels) == 40
        assert all("拥有" in label and "借用" in label and "解码" in label for label in labels)
    roles = opened.page.eval_on_selector_all(
        ".drawing svg", "all => all.map((one) => one.getAttribute('role'))"
    )
    assert set(roles) <= {"group", "img"}
    assert len(roles) == 10


def test_on_a_phone_a_tap_opens_the_card_at_the_foot_and_a_tap_elsewhere_closes_it(
    open_page: Opener,
) -> None:
    opened = open_page(width=360)
    page = opened.page
    page.locator('#figure-6 .layer[data-layer="22"]').click()
    box = page.locator("#layer-card").bounding_box()
    assert box is not None
    assert (box["x"], box["width"]) == (0, 360)
    assert box["y"] + box["height"] == 900
    page.locator("#layer-card .close").click()
    assert not page.is_visible("#layer-card")
    opened.check()

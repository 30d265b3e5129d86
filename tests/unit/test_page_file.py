"""The file itself: whole, self-contained, small, in two languages that say the same things."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cedar.page.page import module_names, render_page, static_files, words, write_page
from cedar.planner.quoted import differences
from cedar.planner.request import Request


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_page(tmp_path_factory.mktemp("page") / "cedar.html").read_text(encoding="utf-8")


def module_text(name: str) -> str:
    return (static_files() / "js" / name).read_text(encoding="utf-8")


def test_the_file_is_one_small_document_that_names_no_other(document: str) -> None:
    assert len(document.encode()) < 1_000_000
    assert not re.search(r"\{\{\w+\}\}", document)
    addresses = set(re.findall(r"https?://[^\s\"'`<>)]+", document))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name of SVG, not an address
    for attribute in re.findall(r"\b(?:src|href)=\"([^\"]*)\"", document):
        assert attribute.startswith(("#", "data:"))
    assert "@import" not in document
    assert "url(" not in document


def test_nothing_inside_a_script_can_end_it(document: str) -> None:
    for name in module_names():
        assert "</script" not in module_text(name)
        assert "<!--" not in module_text(name)
    hostile = {"model": {"name": "</script><script>alert(1)</script><!--"}}
    rendered = render_page({"models": []}, hostile)
    assert "alert(1)" in rendered
    assert "</script><script>alert(1)" not in rendered
    assert rendered.count("</script>") == document.count("</script>")


def test_every_script_is_in_the_file_and_imports_only_scripts_and_names_that_exist(
    document: str,
) -> None:
    for name in module_names():
        assert f'data-module="{name}"' in document
        text = module_text(name)
        for names, source in re.findall(r"import\s+(\{[^}]*\}|\* as \w+) from \"([^\"]+)\"", text):
            file = source.removeprefix("cedar/")
            assert file in module_names(), (name, source)
            exported = set(re.findall(r"export (?:const|function|class) (\w+)", module_text(file)))
            wanted = {n.strip() for n in names.strip("{}").split(",") if n.strip() and "*" not in n}
            assert wanted <= exported, (name, file, wanted - exported)


def test_no_script_evaluates_text_or_asks_the_network() -> None:
    for name in module_names():
        words_used = set(re.findall(r"[\w.]+", module_text(name)))
        assert not words_used & {"eval", "Function", "fetch", "XMLHttpRequest", "WebSocket",
                                 "innerHTML", "localStorage", "document.write"}, name  # fmt: skip


def placeholders(text: str) -> set[str]:
    return set(re.findall(r"\{(\w+)(?::[^}]*)?\}", text))


def test_both_languages_have_the_same_texts_with_the_same_numbers_in_them() -> None:
    english, chinese = words()["en"]["text"], words()["zh"]["text"]
    assert list(english) == list(chinese)
    for key, text in english.items():
        assert placeholders(text) == placeholders(chinese[key]), key
        assert text.strip(), key
        assert chinese[key].strip(), key


def test_every_text_is_used_and_every_text_that_is_used_exists() -> None:
    texts = set(words()["en"]["text"])
    page = (static_files() / "page.html").read_text(encoding="utf-8")
    code = "\n".join(module_text(name) for name in module_names())
    used = set(re.findall(r"data-t(?:-label)?=\"([^\"]+)\"", page)) | {"noscript"}
    used |= set(re.findall(r"\"([a-z0-9_]+(?:\.[a-z0-9_.+-]+)*)\"", code)) & texts
    for pattern in re.findall(r"(?:\bt\(|\"data-t\": )`([^`]+)`", code):
        shape = re.compile(re.sub(r"\\\$\\\{.*?\\\}", ".+", re.escape(pattern)))
        used |= {key for key in texts if shape.fullmatch(key)}
    assert set(re.findall(r"data-t(?:-label)?=\"([^\"]+)\"", page)) <= texts
    assert texts - used == set()


def test_chinese_translates_every_difference_of_article_and_release() -> None:
    translated = words()["zh"]["differences"]
    assert set(translated) == {difference.topic for difference in differences("release")}
    for texts in translated.values():
        assert set(texts) == {"topic", "article", "release"}
        assert all(texts.values())


def test_numbers_in_translated_differences_are_those_of_the_planner() -> None:
    translated = words()["zh"]["differences"]
    for difference in differences("release"):
        for side in ("article", "release"):
            own = re.findall(r"\d[\d,.]*\d|\d{2,}", getattr(difference, side))
            for number in own:
                assert number in translated[difference.topic][side], (difference.topic, number)


def test_a_failed_write_leaves_the_old_file_and_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_page(tmp_path / "cedar.html", models=["preset:tiny"], request=SMALL)
    before = path.read_text(encoding="utf-8")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(Exception, match="No space left on device"):
        write_page(path, models=["preset:nano"], request=SMALL)
    assert path.read_text(encoding="utf-8") == before
    assert [file.name for file in tmp_path.iterdir()] == ["cedar.html"]


SMALL = Request(input_tokens=20, output_tokens=5)


def slot(document: str, name: str) -> Any:
    match = re.search(rf'id="{name}">(.*?)</script>', document, re.DOTALL)
    assert match is not None
    return json.loads(match[1]) if match[1] else None


def test_the_record_has_its_own_slot(tmp_path: Path) -> None:
    record = {"model": {"name": "preset:tiny"}, "request": {"input_tokens": 9, "output_tokens": 2},
              "flows": {"ced": {"measured": {"kv_bytes": 1}}}}  # fmt: skip
    path = write_page(tmp_path / "a.html", compare=record)
    text = path.read_text(encoding="utf-8")
    assert slot(text, "cedar-record") == record
    data = slot(text, "cedar-data")
    assert data["models"][0]["name"] == "preset:tiny"  # its model is shown first
    assert (data["controls"]["input_tokens"], data["controls"]["output_tokens"]) == (9, 2)
    path = write_page(tmp_path / "b.html", compare=record | {"model": "/nowhere"})
    data = slot(path.read_text(encoding="utf-8"), "cedar-data")
    assert data["models"][0]["name"] == "preset:article"

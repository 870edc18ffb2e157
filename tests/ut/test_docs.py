# SPDX-License-Identifier: Apache-2.0
"""The documentation builds as a site, is whole in both languages, and says what the code and the figures say."""

import ast
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest
import typer
import yaml

from vllm_ascend.draft_window.layout import CacheLayout, kept_tokens
from vllm_ascend.draft_window.options import DraftWindowOptions
from vllm_draft_window.cli import app

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PACKAGE = REPOSITORY / "vllm_ascend" / "draft_window"
PAGES = sorted(path.name.removesuffix(".md") for path in DOCS.glob("*.md") if not path.name.endswith(".zh.md"))
needs_mkdocs = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("mkdocs", "material", "mkdocs_static_i18n")),
    reason="needs mkdocs with its theme and plugin: pip install '.[docs]'",
)


def read(page: str, language: str = "en") -> str:
    return (DOCS / (f"{page}.md" if language == "en" else f"{page}.zh.md")).read_text()


def code_blocks(text: str) -> list[str]:
    """Without the comments in them, which may be translated."""
    blocks = re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)
    return [re.sub(r"^#.*\n", "", block, flags=re.MULTILINE) for block in blocks]


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def tables(text: str) -> list[list[list[str]]]:
    """Tables outside of code, as rows of cells, without the rule below the header."""
    blocks = re.findall(r"(?:^\|.*\n?)+", prose(text), re.MULTILINE)
    rows = ([line.strip().strip("|").split("|") for line in block.splitlines()] for block in blocks)
    return [[[cell.strip() for cell in row] for i, row in enumerate(table) if i != 1] for table in rows]


def numbers(cells: list[str]) -> list[str]:
    """Figures with a decimal point or in thousands, which no translation changes."""
    return re.findall(r"\d+\.\d+|\d{1,3},\d{3}", " ".join(cells))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)],
        cwd=REPOSITORY,
        env=os.environ | {"DISABLE_MKDOCS_2_WARNING": "true"},
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    return target


@needs_mkdocs
def test_every_page_is_built_in_both_languages(site):
    for page in PAGES:
        for folder, language in ((site, "en"), (site / "zh", "zh")):
            html = (folder / f"{page}.html").read_text()
            assert html.count("<table>") == len(tables(read(page, language))), (page, language)
            assert f'<html lang="{language}"' in html, page
            # Underscores of a name outside of backticks are not emphasis.
            assert not re.search("[a-z]<em>[a-z]+</em>", html), page


def test_navigation_covers_every_page():
    navigation = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"]
    listed = [page for section in navigation for entries in section.values() for page in entries]
    assert sorted(chain.from_iterable(entry.values() for entry in listed)) == [f"{page}.md" for page in PAGES]


def test_navigation_is_translated():
    config = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())
    (i18n,) = (plugin["i18n"] for plugin in config["plugins"] if "i18n" in plugin)
    (chinese,) = (language for language in i18n["languages"] if language["locale"] == "zh")
    titles = {title for section in config["nav"] for title in section}
    titles |= {title for section in config["nav"] for entries in section.values() for e in entries for title in e}
    assert titles == chinese["nav_translations"].keys()


@pytest.mark.parametrize("page", PAGES)
def test_translation_says_the_same(page):
    english, chinese = read(page), read(page, "zh")
    assert code_blocks(chinese) == code_blocks(english)
    for level in ("# ", "## ", "### "):
        count = [len(re.findall(f"^{level}", prose(text), re.MULTILINE)) for text in (english, chinese)]
        assert count[0] == count[1], level
    assert len(tables(chinese)) == len(tables(english))
    for ours, theirs in zip(tables(english), tables(chinese), strict=True):
        assert [len(row) for row in theirs] == [len(row) for row in ours], ours[0]
        assert [numbers(row) for row in theirs] == [numbers(row) for row in ours], ours[0]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_option_is_documented_with_its_default(language):
    rows = {row[0].strip("`"): row for row in tables(read("options", language))[0][1:]}
    assert rows.keys() == DraftWindowOptions.model_fields.keys()
    for key, field in DraftWindowOptions.model_fields.items():
        if not field.is_required():
            assert rows[key][2] == json.dumps(field.default), key


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_reason_to_be_off_is_documented(language):
    page = read("options", language)
    calls = [
        node
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "WindowOff"
    ]
    for call in calls:
        texts = [node.value for node in ast.walk(call.args[0]) if isinstance(node, ast.Constant)]
        if texts:
            assert max(texts, key=len).strip(" ;") in page, texts
    assert len(calls) > 8


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_row_of_the_options_page_names_the_test_that_reads_its_line(language):
    situations = [row[0] for row in tables(read("options", language))[1]]
    (rows,) = (table for table in tables(read("verified", language)) if table[0][0] == situations[0])
    assert [row[0] for row in rows] == situations
    assert all("tests/" in row[1] for row in rows[1:])


TEXTS = [*DOCS.glob("*.md"), REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "CHANGELOG.md"]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_what_a_page_names_exists(path):
    """Commands of the program, modules of the clone, and the tests behind a promise."""
    text = path.read_text()
    commands = typer.main.get_group(app).commands.keys()
    assert set(re.findall(r"^(?:.*`)?draft-window ([a-z][a-z-]*)", text, re.MULTILINE)) <= commands
    for module in re.findall(r"python -m (tools\.[a-z_.]+)", text):
        assert find_spec(module) is not None, module
    for file, name in re.findall(r"\b(tests/[\w/]+\.py)(?:::(\w+))?", text):
        assert (REPOSITORY / file).exists(), file
        assert f"def {name}" in (REPOSITORY / file).read_text(), f"{file}::{name}"


def test_pre_commit_is_the_lint_of_the_test_command():
    (repo,) = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    extras = re.search(r"^lint = (.*)$", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert {pin for hook in repo["hooks"] for pin in hook["additional_dependencies"]} == set(json.loads(extras))
    lint = re.findall(r"^\.venv-test-0\.27\.1/bin/(.*)$", (REPOSITORY / "tools" / "test.sh").read_text(), re.MULTILINE)
    hooks = [hook["entry"].removesuffix(" --force-exclude") for hook in repo["hooks"]]
    assert [command.removesuffix(" .") for command in lint] == hooks


def test_every_picture_is_shown():
    shown = set(re.findall(r"!\[[^]]+\]\(assets/([^)]+)\)", "".join(map(read, PAGES))))
    assert shown == {path.name for path in (DOCS / "assets").glob("*.png")}


def test_figures_are_those_of_the_model_card():
    metrics = json.loads((REPOSITORY / "checkpoints" / "demo-pair" / "metrics.json").read_text())
    lengths = metrics["drafts"]["dspark"]["mean_accepted_length"]
    for context, *cells in tables(read("choosing_a_size"))[0][1:]:
        assert cells == [f"{lengths[context][window]:.2f}" for window in ("full", "256", "512", "1024")], context


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib: pip install '.[tools]'")
@pytest.mark.parametrize(
    ("name", "picture"),
    [
        ("acceptance", "acceptance_demo_pair"),
        ("house", "house"),
        ("options", "acceptance_options"),
        ("step", "window_in_a_step"),
        ("sweep", "sweep_demo_pair"),
    ],
)
def test_pictures_can_be_drawn_again(name, picture, tmp_path):
    module = import_module(f"tools.figures.{name}")
    assert module.PICTURE.relative_to(DOCS) == Path("assets", f"{picture}.png")
    module.draw(tmp_path / "again.png")
    # Width and height in the PNG's header: the committed picture is of this script.
    assert (tmp_path / "again.png").read_bytes()[16:24] == module.PICTURE.read_bytes()[16:24]


def test_savings_are_those_of_the_layout():
    header, *rows = tables(read("reclaim"))[0]
    contexts = [int(context.split()[0].replace(",", "")) for context in header[1:5]]
    for layers, *cells in rows:
        target, draft = map(int, layers.split(" + "))
        layout = CacheLayout(target_layers=target, draft_layers=draft, block_size=16, kept=kept_tokens(2048, 0, 16))
        assert cells[:4] == [f"{100 * layout.saved(context):.1f}" for context in contexts], layers
        assert cells[4] == str(layout.groups)
        assert cells[5].startswith(f"{layout.costs_below(131072):,} tokens")
        assert ("refused" in cells[5]) == bool(layout.too_little_saved(131072))

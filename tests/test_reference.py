"""The reference pages, and what README.md names: settings, metrics, commands, files that exist."""

import re
import shutil
from pathlib import Path

import pytest
import typer

from config.reference.__main__ import ROOT, differences, main, pages
from config.reference.explanations import comments, docstrings
from config.reference.settings_page import settings_page
from gateway.__main__ import cli
from gateway.config_environment import read_environment
from gateway.config_values import CLASS_NAMES
from gateway.settings import Settings, load_settings
from gateway.telemetry.catalogue import CATALOGUE, METRIC_NAMES, SERIES_NAMES

README = (ROOT / "README.md").read_text(encoding="utf-8")

_LINE = re.compile(r"\| `([\w.]+)`<br>`(QOS_\w+)` \| (.*?) \| (.+) \| (.*) \| (now|reload|restart) \|")


# ── the pages ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_pages_are_as_generated() -> None:
    """`python -m config.reference --check` finds nothing to say."""
    assert differences(ROOT) == []


def test_a_page_that_was_changed_is_found(tmp_path: Path) -> None:
    """So is one that is missing."""
    for name, content in pages().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert differences(tmp_path) == []
    (tmp_path / "config" / "REFERENCE.md").write_text("# Every setting\n", encoding="utf-8")
    (tmp_path / "config" / "prometheus" / "METRICS.md").unlink()
    assert [line.partition(":")[0] for line in differences(tmp_path)] == list(pages())


def test_a_wrong_option_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2 and a word on how it is used; nothing is written."""
    assert main(["--chek"]) == 2
    assert "--check" in capsys.readouterr().err


def test_each_default_on_the_page_is_one_and_is_taken_from_the_environment() -> None:
    """Whoever sets every variable of the page to what stands beside it has the defaults."""
    environ = {}
    for name, variable, default, *_ in _LINE.findall(pages()["config/REFERENCE.md"]):
        if not default or name in ("api_key", "operations_token") or variable.startswith("QOS_TRACING"):
            continue
        shown = re.findall(r"`(.+?)`", default)
        for place, class_name in enumerate(CLASS_NAMES if "__P0__" in variable else CLASS_NAMES[:1]):
            value = shown[min(place, len(shown) - 1)]
            environ[variable.replace("__P0__", f"__{class_name}__")] = value
    del environ["QOS_CLASSES__P2__SLO__TTFT_SECONDS"]  # a promise without targets is another thing than none
    del environ["QOS_CLASSES__P2__SLO__TPOT_SECONDS"]
    del environ["QOS_CLASSES__P2__SLO__MAX_GAP_SECONDS"]
    assert len(environ) > 100
    assert load_settings(None, environ) == Settings()


def test_a_setting_that_nobody_explains_is_an_error(tmp_path: Path) -> None:
    """A new one cannot be left undocumented: neither beside it in the example, nor in the model."""
    for name in ("config/gateway.yaml", "config/keys.example.yaml", "gateway/settings.py", "gateway/keys.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    assert settings_page(tmp_path) == pages()["config/REFERENCE.md"]
    example = tmp_path / "config" / "gateway.yaml"
    text = example.read_text(encoding="utf-8")
    example.write_text(re.sub(r"(  output_weight: 4).*", r"\1", text), encoding="utf-8")
    with pytest.raises(LookupError, match=r"capacity\.output_weight"):
        settings_page(tmp_path)


def test_comments_are_found_with_the_lines_below_them() -> None:
    """In sections, lists and sections that are commented out; a file's own head belongs to nothing."""
    text = """\
# A head: not a comment of anything.
door:                  # where they come in
  wide: true           # first line
                       #   and second
  high: 2
engines:
  - name: one          # its name
tracing: null          # off
#   ratio: 1.0         # a part
"""
    assert comments(text) == {
        ("door",): "where they come in",
        ("door", "wide"): "first line and second",
        ("engines", "name"): "its name",
        ("tracing",): "off",
        ("tracing", "ratio"): "a part",
    }


def test_docstrings_of_attributes_are_found() -> None:
    """Those of a class are not its attributes'."""
    source = '''
class Door(Section):
    """A door."""

    wide: bool = True
    high: int = 2
    """How high
    it is."""
'''
    assert docstrings(source) == {"Door.high": "how high it is"}


def test_every_metric_has_its_line() -> None:
    """With its kind, its labels and what it says."""
    page = pages()["config/prometheus/METRICS.md"]
    lines = [line for line in page.splitlines() if line.startswith("| `qos_gateway_")]
    assert len(lines) == len(CATALOGUE)
    for metric, line in zip(CATALOGUE, lines, strict=True):
        assert line.split(" | ")[:2] == [f"| `{metric.name}`", metric.kind]
        assert line.count("`") == 2 + 2 * len(metric.labels)


# ── what the README names ────────────────────────────────────────────────────────────────────────────────


def test_the_readme_names_metrics_that_exist() -> None:
    named = set(re.findall(r"qos_gateway_[a-z_]+[a-z]", README))
    assert named
    assert named <= METRIC_NAMES | SERIES_NAMES


def test_the_readme_names_variables_that_mean_a_setting() -> None:
    named = set(re.findall(r"QOS_[A-Z0-9_]+[A-Z0-9]", README))
    assert named
    read_environment(dict.fromkeys(named, "1"), Settings)


def test_the_readme_names_commands_that_exist() -> None:
    """Targets of make, and commands of `qos-gateway`."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)(?= |`|$)", _commands(), re.MULTILINE)) <= targets
    commands = typer.main.get_command(cli).commands  # type: ignore[attr-defined]
    assert set(re.findall(r"qos-gateway ([a-z][a-z-]+)", _commands())) <= set(commands)


def _commands() -> str:
    """Lines that are indented as code, and code inside of lines."""
    blocks = re.findall(r"^    .*", README, re.MULTILINE)
    return "\n".join([*blocks, *(f"{each}`" for each in re.findall(r"`([^`\n]+)`", README))])


def test_the_readme_links_to_files_that_exist() -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", README)
    paths = re.findall(r"`((?:config|gateway|grafana|tests)/[\w./-]+)`", README)
    assert links
    assert [each for each in {*links, *paths} if not (ROOT / each).exists()] == []

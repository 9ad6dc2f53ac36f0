"""Pages of the site that are made from files of the repository: mkdocs calls these functions.

Pages link to files of the repository, so that links work in a clone; here they become links to pages.

`COMPATIBILITY.md` becomes two pages, of which one has the arguments by subject, `ARCHITECTURE.md` the first page of the
internals, each example a page, and the first lines of all modules the page "Modules".
"""

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hftrainer.arguments.fields.argument import LAST_SUBJECTS, OWN_SUBJECT, SCRIPT_SUBJECT  # noqa: E402
from hftrainer.arguments.fields.table import ARGUMENTS  # noqa: E402

_ARGUMENTS = "\n## Arguments\n"  # not "### Arguments"
_MOST_USED = (
    *("output_dir", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("learning_rate", "weight_decay", "optim", "lr_scheduler_type", "warmup_steps", "bf16", "gradient_checkpointing"),
    *("eval_strategy", "save_strategy", "save_total_limit", "load_best_model_at_end", "metric_for_best_model"),
    *("logging_steps", "report_to", "seed"),
)
_ABOUT_ARGUMENTS = (
    "What `TrainingArguments` takes, by subject. [How arguments are checked](concepts/arguments.md). "
    "Arguments of transformers are in 4.1 and newer, unless a row names other releases."
)


class RefusedKeywords(griffe.Extension):
    """Hides `**unknown: NoReturn`, by which type checkers refuse other keywords."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Remove the parameter, and its line of the docstring."""
        if "unknown" in func.parameters:
            del func.parameters["unknown"]
            if func.docstring:
                func.docstring.value = re.sub(r"\n +unknown: .*", "", func.docstring.value)


def on_config(config: Any) -> Any:
    """Add the examples to the navigation, by the headings of the gallery and in its order."""
    if not any(map(importlib.util.find_spec, ("black", "ruff"))):
        raise PluginError("The site needs ruff, which breaks the lines of signatures: pip install ruff")
    sections = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8").split("\n## ")
    parts = next(part["Gallery"] for part in config["nav"] if "Gallery" in part)
    for title, section in [("Examples", sections[0]), *(section.split("\n", 1) for section in sections[1:])]:
        examples = [Path(name) for name in re.findall(r"\]\(\.\./(examples/[\w/]+\.(?:py|ipynb))\)", section)]
        parts.append({title: [example.with_suffix(".md").as_posix() for example in examples]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made."""
    _check_members()
    differences, _, arguments = (ROOT / "COMPATIBILITY.md").read_text(encoding="utf-8").partition(_ARGUMENTS)
    body = re.sub(r"(?m)^###", "##", differences.partition("\n## Where hftrainer differs\n")[2])
    measure = "The measure is `transformers` 5.24, and equal means exactly equal."
    pages = {
        "differences.md": f"# Where it differs\n\n{measure}\n{body}",
        "arguments.md": _arguments(arguments),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "packages/modules.md": _modules(),
        "benchmarks.md": (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").replace("](../docs/", "]("),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, "results.png", abs_src_path=str(ROOT / "benchmarks" / "results.png")))
    for example in (ROOT / "examples").rglob("*.*"):
        if example.suffix in (".py", ".ipynb"):
            path, text = example.relative_to(ROOT), example.read_text(encoding="utf-8")
            files.append(File.generated(config, path.as_posix(), content=text))
            files.append(File.generated(config, path.with_suffix(".md").as_posix(), content=_shown(path, text)))
    return files


def _check_members() -> None:
    """The page of Trainer orders its methods by a list, which must have all of them but two old names."""
    tree = ast.parse((ROOT / "hftrainer" / "trainer.py").read_text(encoding="utf-8"))
    trainer = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "Trainer")
    methods = {each.name for each in trainer.body if isinstance(each, ast.FunctionDef) and each.name[0] != "_"}
    listed = re.findall(r"(?m)^- (\w+)$", (ROOT / "docs" / "api" / "trainer.md").read_text(encoding="utf-8"))
    if missing := methods - {*listed, "tokenizer", "fit"}:
        raise PluginError(f"docs/api/trainer.md does not list {', '.join(sorted(missing))}")


def _arguments(text: str) -> str:
    """A page with a table of arguments for each subject: the most used first, those of earlier releases last."""
    intro, _, table = text.partition("\n| argument | type |")
    rows = {row[1]: row.groups() for row in re.finditer(r"(?m)^\| `(\w+)` \| (.*) \| (.*) \| (.*) \| (.*) \|$", table)}
    guides = _guides()
    # Those of `Seq2SeqTrainingArguments` alone are declared in a module that imports torch.
    subjects = dict.fromkeys(rows, "Models that generate") | {
        name: argument.subject for name, argument in ARGUMENTS.items()
    }
    current = [name for name, title in subjects.items() if title not in LAST_SUBJECTS]
    scripts = [name for name, title in subjects.items() if title == SCRIPT_SUBJECT]
    names = sorted(rows, key=[*_MOST_USED, *current, *scripts, *guides, *rows].index)
    parts: dict[str, list[str]] = {subjects[name]: [] for name in names}
    for name in names:
        _, kind, text, default, since = rows[name]
        is_own = since == "hftrainer"
        if is_own and name not in guides:
            raise PluginError(f"the table of docs/concepts/arguments.md lacks {name}")
        about = f"{kind}, default {default}"
        if name == "optim":
            text = re.sub(r" One of '.*'\.", " The names are in the guide.", text)
        if name in guides:
            text += f" Guide: {guides[name]}"
        if not is_own and since != "4.1":
            about += f", in transformers {since}" + ("" if " to " in since else " and newer")
        # A name is a heading, so that the search finds its row.
        link = f'<a class="headerlink" href="#{name}" title="Permanent link">&para;</a>'
        row = f'| <h3 id="{name}"><code>{name}</code>{link}</h3> {about} | {text} |'
        parts[subjects[name]].append(row)
    page = ["# Every argument", _ABOUT_ARGUMENTS]
    page.append("**Most used:** " + " · ".join(f"[`{name}`](#{name})" for name in _MOST_USED))
    subjects_links = " · ".join(f"[{title}](#{_anchor(title)})" for title in parts)
    page.append(f'<div class="subjects" markdown>{subjects_links}</div>')
    links = " · ".join(f'<a href="#{name}">{name}</a>' for name in sorted(rows))
    page.append(f"<details><summary>All names, by alphabet</summary><p>{links}</p></details>")
    page.append(intro.replace(" Arguments of `hftrainer` alone come first.", "").strip())
    for title, lines in parts.items():
        lines = ["| argument | what it does |", "| --- | --- |", *lines]
        page += [f"## {title} {{#{_anchor(title)}}}", '<div class="arguments" markdown>', "\n".join(lines), "</div>"]
    return "\n\n".join(page) + "\n"


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower())


def _guides() -> dict[str, str]:
    """Argument → links to its guide, from the tables of a page, which have all that only hftrainer has."""
    page = (ROOT / "docs" / "concepts" / "arguments.md").read_text(encoding="utf-8").replace("](../", "](")
    most_used, _, rest = page.partition("\n## ")
    own = rest.partition(f"\n## {OWN_SUBJECT}\n")[2].partition("\n## ")[0]
    titles = re.findall(r"- (.+): (\S+\.md)\n", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    title_of = {path: title for title, path in titles}
    found = re.findall(r"(?m)^\| \[.*?\]\((\S+?\.md)(\S*)\) \| (.*) \|$", most_used)
    rows = [(names, f"[{title_of[path]}]({path}{anchor})") for path, anchor, names in found]
    rows += re.findall(r"(?m)^\| (`.*?) \| .* \| (.*) \|$", own)
    return {name: link for names, link in rows for name in re.findall(r"`(\w+)[=`]", names)}


def _modules() -> str:
    """A page with the first line of every module, by package."""
    parts = ["# Modules"]
    for init in [path for top in ("hftrainer", "adapters") for path in sorted((ROOT / top).rglob("__init__.py"))]:
        parts.append(f"## {init.parent.relative_to(ROOT).as_posix()}\n\n{_first_line(init)}")
        modules = sorted(path for path in init.parent.glob("*.py") if path.name not in ("__init__.py", "_version.py"))
        if modules:
            rows = [f"| `{path.name}` | {_first_line(path)} |" for path in modules]
            parts.append("\n".join(["| module | what it does |", "| --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def _shown(path: Path, text: str) -> str:
    """A page with the code of a script or notebook."""
    gallery = "../" * (len(path.parts) - 1) + "gallery.md"
    head = f"`{path.as_posix()}`: [download]({path.name}){{download}}, [gallery]({gallery})"
    code, prose = "\n```python\n{}\n```\n", "\n{}\n"
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
    else:
        title, _, subject = _first_line(ROOT / path).partition(": ")
        source = f"# {title.rstrip('.')}\n\n{subject[:1].upper()}{subject[1:]}\n"
        if commands := re.findall(r"(?m)^    (.+)$", text.split('"""')[1]):
            source += "\n```bash\n{}\n```\n".format("\n".join(commands))
        cells = [{"cell_type": "markdown", "source": source}, {"cell_type": "code", "source": text}]
    parts = [(code if each["cell_type"] == "code" else prose).format("".join(each["source"]).strip()) for each in cells]
    return f"---\nhide: [toc]\nsearch: {{exclude: true}}\n---\n{parts[0]}\n{head}\n{''.join(parts[1:])}"


def _first_sentence(markdown: str) -> str:
    """The first sentence of a page's first paragraph, as plain text."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\n+", markdown))
    sentence = re.split(r"(?<=[.:])\s", next(filter(re.compile(r"(?!```)[\w*`]").match, paragraphs), ""))[0]
    return re.sub(r"\[(.*?)\]\(.*?\)|[`*\"]", r"\1", sentence).replace(":", ".")


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """List only the sections of the page of Trainer beside it, not its 40 methods."""
    if page.file.src_uri == "api/trainer.md":
        for section in [section for title in page.toc for section in title.children]:
            section.children.clear()
    return html


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Include ARCHITECTURE.md in its page, and make links to files of the repository links to pages of the site."""
    if page.file.src_uri.startswith(("packages/", "internals/", "changelog.md", "differences.md")):
        page.meta["search"] = {"boost": 0.2}  # below the guides
    elif page.file.src_uri in ("guides/one-device.md", "troubleshooting.md"):
        page.meta["search"] = {"boost": 2}
    top = "../" * page.file.src_uri.count("/")
    if page.file.src_uri == "internals/index.md":
        markdown = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").replace("](docs/", f"]({top}")

    def link_to_page(link: re.Match[str]) -> str:
        anchor = link[1] or ""
        return f"]({top}arguments.md)" if anchor == "#arguments" else f"]({top}differences.md{anchor})"

    page.meta.setdefault("description", _first_sentence(markdown))
    if page.file.src_uri == "api/trainer.md":  # whose lists name methods
        method = "::: hftrainer.trainer.Trainer.\\1\n    options: {heading_level: 3}\n"
        markdown = re.sub(r"(?m)^- (\w+)$", method, markdown)
    markdown = markdown.replace("](../benchmarks/README.md)", "](benchmarks.md)")
    markdown = re.sub(r"\]\((?:\.\./)+(examples/[\w/]+)\.(?:py|ipynb)\)", rf"]({top}\1.md)", markdown)
    return re.sub(r"\]\((?:\.\./)*COMPATIBILITY\.md(#[\w-]+)?\)", link_to_page, markdown)

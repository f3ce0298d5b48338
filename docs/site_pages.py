"""What the site needs beside its pages: sources as pages of their own, and pictures that follow its colours.

Pages link to files of the repository as they do where the repository is browsed, by relative paths. Those that lie outside of
docs/ become pages under files/, so that every link works without a net and a link that leads nowhere is a warning of the build.
Links inside of pages that come from elsewhere (CONTRIBUTING.md) are followed too.

A comment `<!-- table: PATH -->` stands for the table of that file, such as one that a benchmark wrote.

A page that fetches anything from the net ends the build.

A picture that stands alone in a paragraph, an SVG of ours, is put into the page itself: there it inherits the text's colour, in
light and in dark.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s#:]+)(#[^)\s]*)?\)")
PICTURE = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+\.svg)\)$", re.MULTILINE)
LANGUAGES = {".h": "c", ".c": "c", ".cpp": "cpp", ".py": "python", ".json": "json", ".toml": "toml", ".yml": "yaml"}
TABLE = re.compile(r"^<!-- table: (\S+) -->$", re.MULTILINE)
FETCHED = re.compile(r'<(?:script|link|img|iframe)[^>]*\s(?:src|href)="?((?:https?:)?//[^"\s>]*)')
FENCE = "~~~~~~~~"


def target(page: str, link: str) -> str:
    """The path in the repository of a link on a page that lies at a path of the repository; "" where it leaves the repository."""
    found = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return "" if found.startswith("..") else found


def address(path: str) -> str:
    """Where a file of the repository is on the site, relative to its root; "" where it is no file or folder."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path == "docs":
        return "index.md"
    if not path or not (ROOT / path).exists():
        return ""
    return f"files/{path}" if Path(path).suffix in (".png", ".md") else f"files/{path}.md"


def links(text: str) -> list[str]:
    """What a page's links name, without anchors and what is on the net."""
    return [match[2] for match in LINK.finditer(text) if "://" not in match[2]]


def linked_sources(pages: list[str]) -> set[str]:
    """Files and folders outside of docs/ that these pages link to, and those that the Markdown among them links to."""
    found: set[str] = set()
    while pages:
        page = pages.pop()
        for link in links((ROOT / page).read_text()):
            path = target(page, link)
            if path and not path.startswith("docs") and path not in found and (ROOT / path).exists():
                found.add(path)
                if path.endswith(".md"):
                    pages.append(path)
    return found


def source_page(path: str) -> str:
    """The Markdown of a source's own page."""
    file = ROOT / path
    head = f"---\ntitle: {path}\nsearch:\n  exclude: true\n---\n\n"
    if path.endswith(".md"):
        return head + file.read_text()
    if file.is_dir():
        listed = "\n".join(f"- `{entry.name}`" for entry in sorted(file.iterdir()) if not entry.name.startswith((".", "__")))
        return f"{head}# {path}\n\n{listed}\n"
    text = file.read_text()
    language = LANGUAGES.get(file.suffix, "text") if len(text) < 60000 else "text"
    return f"{head}# {path}\n\n{FENCE}{language}\n{text}\n{FENCE}\n"


def on_files(files: Files, config: Any) -> Files:
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    for path in sorted(linked_sources(pages)):
        where = address(path)
        if where.endswith(".png"):
            files.append(File.generated(config, where, abs_src_path=str(ROOT / path)))
        else:
            files.append(File.generated(config, where, content=source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to sources become links to their pages; pictures of ours, and tables, are put in."""
    uri = page.file.src_uri
    here = uri.removeprefix("files/") if uri.startswith("files/") else f"docs/{uri}"
    if uri.startswith("files/") and not (ROOT / here).is_file():
        return markdown  # a source's own page: its text is no Markdown of ours

    def moved(match: re.Match[str]) -> str:
        path = target(here, match[2])
        if "://" in match[2] or (path.startswith("docs/") and not uri.startswith("files/")):
            return match[0]
        where = address(path)
        if not where:
            return match[0]  # the build says that it leads nowhere
        return f"{match[1]}({posixpath.relpath(where, posixpath.dirname(uri))}{match[3] or ''})"

    def drawn(match: re.Match[str]) -> str:
        file = ROOT / target(here, match[2])
        return f'<figure class="picture" markdown="0" aria-label="{match[1]}">\n{file.read_text().strip()}\n</figure>'

    def tabled(match: re.Match[str]) -> str:
        lines = (ROOT / target(here, match[1])).read_text().splitlines()
        return "\n".join(line for line in lines if line.startswith("|"))

    return LINK.sub(moved, TABLE.sub(tabled, PICTURE.sub(drawn, markdown)))


def on_post_build(config: Any) -> None:
    for page in sorted(Path(config.site_dir).rglob("*.html")):
        for found in FETCHED.findall(page.read_text()):
            raise PluginError(f"{page} fetches {found}; the site must be whole without a net")

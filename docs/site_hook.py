"""What `mkdocs.yml` needs beside its plugins, so that the pages are plain Markdown that also reads well on GitHub.

Links that leave `docs/` work on the site, too: what they lead to (results, notebooks, scripts) is put into it. And
`<!-- api: hf_l2l.attach_l2l -->`, which GitHub does not show, becomes mkdocstrings' lines for that name.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = "docs/"
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")
FENCE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
API = re.compile(r"^<!-- api: (\S+)((?: \([\w ]+\))*) -->$", re.MULTILINE)


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add what pages link to outside `docs/`, and what that links to."""
    waiting = [PAGES + file.src_uri for file in files.documentation_pages()]
    known = {*waiting, *(PAGES + file.src_uri for file in files)}
    while waiting:
        source = waiting.pop()
        for target in _targets(source):
            if target not in known and (ROOT / target).is_file():
                known.add(target)
                files.append(File(target, str(ROOT), config.site_dir, config.use_directory_urls))
                if target.endswith(".md"):
                    waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links as the site has them, and names of the API as mkdocstrings reads them."""
    uri = page.file.src_uri
    outside = Path(str(page.file.src_dir)) == ROOT
    source = uri if outside else PAGES + uri

    def moved(found: re.Match[str]) -> str:
        target = _target(source, found[0])
        return found[0] if target is None else posixpath.relpath(_on_site(target), posixpath.dirname(uri) or ".")

    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(moved, part) for part in parts[::2]]
    return API.sub(_directive, "".join(parts))


def _directive(found: re.Match[str]) -> str:
    """mkdocstrings' lines for a name; in brackets may follow "(no signature)", "(with members)", or which members."""
    options = {"heading_level": "4"}
    for word in re.findall(r"\((.*?)\)", found[2]):
        if word == "no signature":
            options["show_root_heading"] = "false"
        else:
            options["members"] = "true" if word == "with members" else f"[{', '.join(word.split())}]"
    return "\n".join([f"::: {found[1]}", "    options:", *(f"      {key}: {value}" for key, value in options.items())])


def _targets(source: str) -> Iterator[str]:
    """Where the links of a page lead, from the top of the project."""
    text = (ROOT / source).read_text(encoding="utf-8")
    for link in LINK.findall("".join(FENCE.split(text)[::2])):
        target = _target(source, link)
        if target is not None:
            yield target


def _target(source: str, link: str) -> str | None:
    """The file that a link leads to; None for what is not within the project, such as an address."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return None if target.startswith(("..", "/")) else target


def _on_site(target: str) -> str:
    return target.removeprefix(PAGES)

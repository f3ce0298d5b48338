"""A page as a browser shows it: headless Chromium, wide and narrow, in a light or a dark theme; and what tags a page has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

WIDTHS = [1280, 390]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Tags(HTMLParser):
    """What a page has: its tags with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


LOOK = """
<script>
addEventListener('load', () => {
  const shown = [...document.querySelectorAll('.chart svg')].filter(s => s.getBoundingClientRect().width > 0);
  const faults = [];
  if (document.documentElement.scrollWidth > innerWidth) faults.push('the page scrolls sideways');
  for (const svg of shown) {
    const box = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')].filter(t => t.textContent && +getComputedStyle(t).opacity > 0)
      .map(t => [t.textContent, t.getBoundingClientRect()]).filter(([, b]) => b.width > 0);
    for (const [name, b] of texts)
      if (b.left < 0 || b.right > innerWidth || b.top < box.top - 2 || b.bottom > box.bottom + 2) faults.push('clipped: ' + name);
    texts.forEach(([a, p], i) => texts.slice(i + 1).forEach(([b, q]) => {
      const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (wide > 1 && high > 4) faults.push('overlap: ' + a + ' and ' + b);
    }));
  }
  const ground = getComputedStyle(document.body).backgroundColor;
  document.body.setAttribute('data-look', JSON.stringify({width: innerWidth, charts: shown.length, faults, ground}));
});
</script>
"""


def looks_of(page: Path, tmp_path: Path, theme: str) -> list[dict[str, Any]]:
    """At each of WIDTHS: the width, how many charts are shown, the background, and faults: text in charts that is clipped or
    covered, a page that scrolls sideways. Skips where there is no browser."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text())  # which forbids scripts, as the one that looks
    (tmp_path / "inner.html").write_text(text.replace("</body>", LOOK + "</body>"))
    # A window has a least width; a frame has none.
    frames = "".join(f'<iframe src="inner.html" style="width:{width}px;height:3000px;border:0"></iframe>' for width in WIDTHS)
    (tmp_path / "outer.html").write_text(
        f"<body>{frames}<script>addEventListener('load', () => document.body.setAttribute('data-look', '[' + "
        "[0, 1].map(i => frames[i].document.body.getAttribute('data-look')).join() + ']'))</script></body>"
    )
    result = subprocess.run(
        [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
            "--allow-file-access-from-files", "--window-size=1800,3100", "--enable-logging=stderr",
            f"--blink-settings=preferredColorScheme={0 if theme == 'dark' else 1}", "--dump-dom",
            f"file://{tmp_path / 'outer.html'}",
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "CONSOLE" not in result.stderr
    looks: list[dict[str, Any]] = next(
        json.loads(attrs["data-look"] or "") for tag, attrs in Tags(result.stdout).tags if tag == "body"
    )
    return looks

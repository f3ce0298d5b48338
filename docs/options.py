"""The tables of docs/command-line.md, out of the command line itself: `python docs/options.py` writes them anew.

A table stands between `<!-- options: NAME -->` and `<!-- end -->`; tests/test_docs.py holds them equal to what the commands say.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "command-line.md"
MARK = re.compile(r"(<!-- options: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
DEFAULT = re.compile(r"\[default: ([^\]]*)\]")
RANGE = re.compile(r"\[([0-9.<=]*x[<>=0-9.]+)\]")


def command_of(name: str, commands: click.Group) -> click.Command:
    """The command of words such as "bench step"."""
    found: click.Command = commands
    for word in name.split():
        assert isinstance(found, click.Group)
        found = found.commands[word]
    return found


def rows_of(command: click.Command) -> dict[str, str]:
    """A table's row for each option, by its words: what it is, its default, and the range of numbers."""
    context, found = click.Context(command), {}
    for option in command.params:
        record = option.get_help_record(context) if isinstance(option, click.Option) else None
        if record is None:
            continue
        words, text = record
        default, between = DEFAULT.search(text), RANGE.search(text)
        told = ", ".join(match[1] for match in (default, between) if match)
        text = RANGE.sub("", DEFAULT.sub("", text)).strip()
        found[words] = " | ".join(part.replace("|", "\\|") for part in (f"`{words}`", text, told.replace("; ", ", ")))
    return found


def table(command: click.Command, known: dict[str, str]) -> str:
    """Of a command's options, less those whose rows are known."""
    rows = [f"| {row} |" for words, row in rows_of(command).items() if known.get(words) != row]
    return "\n".join(["| option | what it is | default |", "| --- | --- | --- |", *rows]) + "\n"


def with_tables(page: str, commands: click.Group) -> str:
    """The page with every table as the commands say it now; plan's has only what train's has not."""
    shared = rows_of(command_of("train", commands))

    def of(match: re.Match[str]) -> str:
        return match[1] + table(command_of(match[2], commands), shared if match[2] == "plan" else {}) + match[3]

    return MARK.sub(of, page)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from protrain.cli.main import commands

    PAGE.write_text(with_tables(PAGE.read_text(), commands))

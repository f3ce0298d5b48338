"""The peers that there are: a folder each, with peer.toml, run.py and, where a peer needs packages of its own, requirements.txt.

A peer has rows, which are what the table compares: one program in one arrangement (ZeRO-3 with the optimizer on NVMe, say). A row
has settings, of which the search keeps the best.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
REFERENCE = "plain torch"  # its first setting's losses are what all others' are compared with
OURS = "protrain"


@dataclass(frozen=True)
class Row:
    """knobs are the same in every setting, and counted as set by the user like those of the setting, but for those that have the
    value of `defaults`, which nobody need set; offloads: what leaves where
    the model computes, and whereto, "nothing" for none of it; quick: whether the quick run has it; refused: why it is not run at
    all; needs_swap: it runs in a control group that is limited to the budget."""

    name: str
    folder: Path
    documented: str
    settings: list[dict[str, Any]]
    knobs: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    offloads: str = ""
    note: str = ""
    quick: bool = False
    refused: str = ""
    needs_swap: bool = False

    @property
    def peer(self) -> str:
        """The name of its folder."""
        return self.folder.name


def read_rows(folder: Path = FOLDER) -> list[Row]:
    """Every row of every peer, the reference first, protrain last. Raises ValueError for a row that names what no row has."""
    found = []
    for path in sorted(folder.glob("*/peer.toml")):
        peer = tomllib.loads(path.read_text())
        for row in peer.pop("rows"):
            try:
                found.append(Row(folder=path.parent, **{**peer, **row}))
            except TypeError as error:
                raise ValueError(f"{path}: {error}") from None
    return sorted(found, key=lambda row: (row.name != REFERENCE, row.name == OURS))

"""What stands in a dict, as a module has many: whether it is the same still, and put there again."""

from __future__ import annotations

import collections
import operator
from typing import Any


def same_entries(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether both have the same objects under the same keys, in the same order."""
    same = operator.is_
    return len(one) == len(other) and all(map(same, one.values(), other.values())) and all(map(same, one, other))


def put_entries(store: dict[Any, Any], entries: dict[Any, Any]) -> None:
    """`store` has these entries, and no others."""
    if same_entries(store, entries):
        return
    for key in store.keys() - entries.keys():
        del store[key]
    store.update(entries)
    if isinstance(store, collections.OrderedDict):  # hooks, which run in their order
        for key in entries:
            store.move_to_end(key)

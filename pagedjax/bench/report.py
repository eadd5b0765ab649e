"""What a bench shows: a table on the screen, JSON lines in a file, a picture."""

from __future__ import annotations

import datetime as dt
import importlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from pagedjax import __version__

Record = dict[str, Any]
Column = tuple[str, str, Callable[[Any], str]]
"""Heading, key of a record, and how its value is written."""


def header(command: str, **facts: Any) -> Record:
    """What a figure is worth nothing without: device, versions, date and command."""
    device = jax.devices()[0]
    name = device.device_kind if device.platform != "cpu" else f"CPU, {platform.machine()}, {os.cpu_count()} cores"
    versions = {"python": platform.python_version(), "pagedjax": __version__}
    versions |= {package: importlib.metadata.version(package) for package in ("jax", "jaxlib", "numpy")}
    return {"device": name, "versions": versions, "date": dt.datetime.now(dt.UTC).date().isoformat(), "command": command, **facts}


def title(head: Record) -> str:
    """One line for people: device, versions, date."""
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    return f"{head['device']}; {versions}; {head['date']}"


def table(records: Sequence[Record], columns: Sequence[Column]) -> str:
    """Columns that no record has a value for are left out; the first is flush left."""
    columns = [c for c in columns if any(record.get(c[1]) is not None for record in records)]
    rows = [[heading for heading, _, _ in columns]]
    rows += [["" if record.get(key) is None else write(record[key]) for _, key, write in columns] for record in records]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def write_json(path: Path, head: Record, records: Sequence[Record]) -> None:
    """One object a line: the header first."""
    path.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in (head, *records)), encoding="utf-8")


def plot_bars(path: Path, head: Record, records: Sequence[Record], *, label: str, value: str, unit: str, limit: str | None = None) -> None:
    """Horizontal bars, one a record, each perhaps with a mark at the limit that the device sets.

    Args:
      path: of a PNG.
      head: see `header`.
      records: the longest list that is still readable is some thirty.
      label, value, limit: keys of a record.
      unit: of the value.

    Raises:
      ImportError: matplotlib is not installed.
    """
    figure_class = importlib.import_module("matplotlib.figure").Figure
    figure = figure_class(figsize=(9, 1.6 + 0.42 * max(1, len(records))), layout="constrained")
    axis = figure.subplots()
    places = range(len(records))
    bars = axis.barh(places, [record[value] for record in records], height=0.6, color="#3b6ea8")
    axis.bar_label(bars, labels=[f" {number(record[value])}" for record in records], fontsize=9)
    if limit is not None and all(limit in record for record in records):
        axis.scatter(
            [record[limit] for record in records], places, marker="|", s=260, linewidths=2.5, color="#c4472b", label="the device's limit"
        )
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize=9, frameon=False, borderaxespad=0.2)  # above, where no bar is
    axis.set_yticks(places, [_short(record[label]) for record in records], fontsize=9)
    axis.invert_yaxis()
    axis.set_xlabel(unit)
    axis.margins(x=0.14)
    axis.set_xlim(left=0)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(f"{head['model']}, {head['dtype']}\n{title(head)}", fontsize=9, loc="left")
    figure.savefig(path, dpi=130)


def number(value: float) -> str:
    """Three digits or more, thousands parted: ``41,500``, ``312``, ``4.18``, ``0.0312``."""
    if abs(value) >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def percent(value: float) -> str:
    """Of a share: ``37.5 %``."""
    return f"{value * 100:.1f} %"


def _short(text: str, most: int = 48) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"

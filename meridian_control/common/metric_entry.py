"""Defines an entry of the catalogue of metrics, and functions that make entries. The functions are pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """A metric under its exposed name. `text` is the metric's help; `act` is how an operator reacts to a value."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    act: str


def counter(name: str, labels: tuple[str, ...], text: str, act: str) -> Entry:
    return Entry(name, "counter", labels, text, act)


def gauge(name: str, labels: tuple[str, ...], text: str, act: str) -> Entry:
    return Entry(name, "gauge", labels, text, act)


def histogram(name: str, labels: tuple[str, ...], text: str, act: str) -> Entry:
    return Entry(name, "histogram", labels, text, act)

"""HTML and SVG as nested elements. Text is escaped where it enters, so a model's name or a server's message is never markup."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TypeAlias

#: elements that have no end tag in HTML
_VOID = frozenset({"meta", "link", "br", "hr", "input", "img", "col"})
#: control characters that neither HTML nor XML may hold
_CONTROL = dict.fromkeys([*range(9), 11, 12, *range(14, 32), 127, 65534, 65535], "�")


class Markup(str):
    """A string that is markup already; made by :func:`element` and :func:`join` only."""

    __slots__ = ()


Child: TypeAlias = "str | Iterable[Child] | None"
Value: TypeAlias = str | float | int | bool | None


def text(value: str) -> Markup:
    """A text as markup: markup itself stays, anything else is escaped."""
    if isinstance(value, Markup):
        return value
    # translating looks at every character, and nearly no text holds one that is not to be shown
    shown = value if value.isprintable() else value.translate(_CONTROL)
    return Markup(escape(shown, quote=True))


def join(*children: Child) -> Markup:
    """Children one after the other; None is nothing, lists are laid flat."""
    return Markup("".join(_pieces(children)))


def _pieces(children: Iterable[Child]) -> Iterable[str]:
    for child in children:
        if child is None:
            continue
        if isinstance(child, str):
            yield text(child)
        else:
            yield from _pieces(child)


def element(tag: str, *children: Child, **attributes: Value) -> Markup:
    """``<tag attributes>children</tag>``. A trailing underscore of an attribute's name is dropped and inner ones become
    hyphens (``class_``, ``aria_label``); True is an attribute without value, None and False are left out."""
    shown = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in _VOID:
        return Markup(f"<{tag}{shown}>")
    return Markup(f"<{tag}{shown}>{join(*children)}</{tag}>")


def _attribute(name: str, value: Value) -> str:
    if value is None or value is False:
        return ""
    key = name.rstrip("_").replace("_", "-")
    if value is True:
        return f" {key}"
    shown = f"{value:.6g}" if isinstance(value, float) else str(value)
    return f' {key}="{text(shown)}"'

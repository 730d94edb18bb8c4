"""HTML that cannot forget to escape: text becomes markup only through ``element``."""

from __future__ import annotations

import html
from collections.abc import Iterable


class Markup(str):
    """Text that is HTML already. Everything else is escaped where it is put in."""

    __slots__ = ()


Child = str | Markup | None | Iterable["Child"]

_VOID = frozenset({"br", "meta", "hr", "line", "rect", "circle", "path"})


def element(name: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Markup:
    """One element. Children are escaped unless they are markup; ``class_`` is ``class``, ``_`` is ``-``.

    An attribute that is None or False is left out; True stands alone.
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.rstrip("_").replace("_", "-")
        words.append(label if value is True else f'{label}="{html.escape(str(value))}"')
    opening = f"<{' '.join(words)}>"
    if name in _VOID and not children:
        return Markup(f"{opening[:-1]}/>")
    return Markup(f"{opening}{joined(children)}</{name}>")


def joined(children: Iterable[Child]) -> Markup:
    """Children one after the other."""
    return Markup("".join(map(_render, children)))


def _render(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return html.escape(child)
    return joined(child)

"""The rooms of the package and what each imports, drawn from the imports themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from html import escape
from itertools import pairwise

import networkx as nx

from tools.rooms import FLOOR_OF, MODULES, PACKAGE, imported, room_of

WIDTH, HEIGHT, GAP, PASSING, FLOOR = 118, 40, 22, 14, 92  # of a room, between two, of an arrow on its way, of a floor
SWEEPS = 24
Place = tuple[str, int]  # a room, or an arrow passing a floor, and its floor
Points = dict[Place, float]


def imports() -> nx.DiGraph:
    """Return which room imports from which."""
    graph = nx.DiGraph()
    for path in MODULES:
        graph.add_node(room_of(path))
        for name in imported(path):
            first, *rest = name.split(".")
            if first == "flower_privdec" and rest and rest[0] in FLOOR_OF and rest[0] != room_of(path):
                graph.add_edge(room_of(path), rest[0])
    return graph


def levels(graph: nx.DiGraph) -> dict[str, int]:
    """Return each room's floor: the lowest above all rooms that it imports."""
    return {room: level for level, rooms in enumerate(nx.topological_generations(graph.reverse())) for room in rooms}


def ways(graph: nx.DiGraph, level: dict[str, int]) -> dict[tuple[str, str], list[Place]]:
    """Return the path of each arrow down the floors; arrows that follow from others are left out."""
    return {
        (above, below): [
            (above, level[above]),
            *((f"{above}>{below}", floor) for floor in range(level[above] - 1, level[below], -1)),
            (below, level[below]),
        ]
        for above, below in sorted(nx.transitive_reduction(graph).edges)
    }


def arranged(level: dict[str, int], paths: Iterable[list[Place]]) -> list[list[Place]]:
    """Return the places of each floor from left to right, each near those it is joined to."""
    joined = nx.Graph()
    joined.add_nodes_from(level.items())
    for path in paths:
        nx.add_path(joined, path)
    floors = [sorted(place for place in joined if place[1] == floor) for floor in range(max(level.values()) + 1)]
    for sweep in range(SWEEPS):
        at = {place: (i + 0.5) / len(floor) for floor in floors for i, place in enumerate(floor)}
        for floor in floors if sweep % 2 else reversed(floors):
            floor.sort(
                key=lambda place: (sum(at[near] for near in joined[place]) / max(1, joined.degree(place)), place)
            )
            at |= {place: (i + 0.5) / len(floor) for i, place in enumerate(floor)}
    return floors


def middles(floors: list[list[Place]], level: dict[str, int]) -> tuple[Points, float]:
    """Return the x of the middle of each place, and the width of the picture."""
    sizes = [[WIDTH if room in level else PASSING for room, _ in floor] for floor in floors]
    wide = max(sum(row) + GAP * (len(row) + 1) for row in sizes)
    middle_of: Points = {}
    for floor, row in zip(floors, sizes, strict=True):
        gap = (wide - sum(row)) / (len(row) + 1)
        left = gap
        for place, size in zip(floor, row, strict=True):
            middle_of[place] = left + size / 2
            left += size + gap
    return middle_of, wide


def arrow(path: list[Place], x: Points, top: int) -> str:
    """Draw an arrow from the bottom of a room down to the top of another."""
    ends = [(x[place], (top - place[1]) * FLOOR + HEIGHT / 2 + GAP) for place in path]
    points = [(ends[0][0], ends[0][1] + HEIGHT / 2), *ends[1:-1], (ends[-1][0], ends[-1][1] - HEIGHT / 2 - 3)]
    drawn = f"M{points[0][0]:.0f} {points[0][1]:.0f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        half = (y0 + y1) / 2
        drawn += f" C{x0:.0f} {half:.0f} {x1:.0f} {half:.0f} {x1:.0f} {y1:.0f}"
    title = f"{path[0][0]} imports {path[-1][0]}"
    ends_at = f'data-from="{path[0][0]}" data-to="{path[-1][0]}"'
    return f'<path d="{drawn}" {ends_at} marker-end="url(#tip)"><title>{title}</title></path>'


def room(name: str, middle: float, floor: int) -> str:
    """Draw a room."""
    x = middle - WIDTH / 2
    y = floor * FLOOR + GAP
    box = f'<rect x="{x:.0f}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
    text = f'<text fill="currentColor" stroke="none" x="{middle:.0f}" y="{y + HEIGHT / 2 + 5:.0f}">{name}</text>'
    return f'<g data-room="{name}" data-floor="{floor}">{box}{text}<title>{escape(purpose(name))}</title></g>'


def picture() -> str:
    """Return the drawing as SVG, for a page that is light or dark."""
    graph = imports()
    level = levels(graph)
    paths = ways(graph, level)
    top = max(level.values())
    x, wide = middles(arranged(level, paths.values()), level)
    arrows = "".join(arrow(path, x, top) for path in paths.values())
    rooms = "".join(room(name, x[name, floor], top - floor) for name, floor in level.items())
    high = (top + 1) * FLOOR
    return (
        f'<svg class="house" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high}" role="img">'
        "<title>The rooms of the package; an arrow points to what a room imports</title>"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="currentColor" stroke="none"/></marker></defs>'
        f'<g fill="none" stroke="currentColor" stroke-opacity="0.55">{arrows}</g>'
        '<g fill="none" stroke="currentColor" font-family="sans-serif" font-size="15" text-anchor="middle">'
        f"{rooms}</g></svg>"
    )


def purpose(name: str) -> str:
    """Return the first line of a room's docstring."""
    path = PACKAGE / name / "__init__.py"
    text = (path if path.exists() else PACKAGE / f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def room_table() -> str:
    """Return the rooms from the ground up in a table."""
    present = {room_of(path) for path in MODULES}
    rows = [f"| `{name}` | {purpose(name)} |" for name in FLOOR_OF if name in present]
    return "\n".join(["| room | what it is for |", "|---|---|", *rows])

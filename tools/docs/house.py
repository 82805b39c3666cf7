"""The rooms of the package and what each imports, drawn from the imports themselves.

Rooms stand on floors: each on the lowest floor that is above all rooms that it imports. An arrow that passes a floor
has a place on it, as a narrow room would, so that no arrow crosses a room. Within a floor, places are ordered by
sweeps up and down: each moves towards the mean of those that it is joined to, which keeps crossings few (Sugiyama's
layered drawing, with the barycentre rule).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from html import escape
from itertools import pairwise

import networkx as nx

from tools.rooms import FLOOR_OF, MODULES, PACKAGE, imported, room_of

# In pixels.
WIDTH = 118  # of a room
HEIGHT = 40  # of a room
GAP = 22  # between two places
PASSING = 14  # width of the place of an arrow that passes a floor
FLOOR = 92  # from one floor to the next
SWEEPS = 24  # more of them change nothing
Place = tuple[str, int]  # a room, or an arrow passing a floor, and its floor
Points = dict[Place, float]


def imports() -> nx.DiGraph:
    """Return which room imports from which."""
    graph = nx.DiGraph()
    for path in MODULES:
        room_here = room_of(path)
        graph.add_node(room_here)
        for name in imported(path):
            package, _, inside = name.partition(".")
            room_there = inside.partition(".")[0]
            if package == PACKAGE.name and room_there in FLOOR_OF and room_there != room_here:
                graph.add_edge(room_here, room_there)
    return graph


def levels(graph: nx.DiGraph) -> dict[str, int]:
    """Return each room's floor: the lowest above all rooms that it imports."""
    floors = nx.topological_generations(graph.reverse())
    return {room: floor for floor, rooms in enumerate(floors) for room in rooms}


def ways(graph: nx.DiGraph, level: dict[str, int]) -> dict[tuple[str, str], list[Place]]:
    """Return the path of each arrow down the floors.

    An arrow is left out if it follows from others: a room may use what the rooms below it use.
    """
    paths = {}
    for above, below in sorted(nx.transitive_reduction(graph).edges):
        floors_between = range(level[above] - 1, level[below], -1)
        passing = [(f"{above}>{below}", floor) for floor in floors_between]
        paths[above, below] = [(above, level[above]), *passing, (below, level[below])]
    return paths


def arranged(level: dict[str, int], paths: Iterable[list[Place]]) -> list[list[Place]]:
    """Return the places of each floor from left to right, each near those that it is joined to."""
    joined = nx.Graph()
    joined.add_nodes_from(level.items())
    for path in paths:
        nx.add_path(joined, path)

    floors = [sorted(place for place in joined if place[1] == floor) for floor in range(max(level.values()) + 1)]
    position: Points = {}  # of each place on its floor, from 0 to 1
    for floor in floors:
        position |= spread(floor)

    def barycentre(place: Place) -> tuple[float, Place]:
        neighbours = joined[place]
        mean = sum(position[near] for near in neighbours) / max(1, len(neighbours))
        return mean, place  # the name decides between equal means: the picture is the same every time

    for sweep in range(SWEEPS):
        upwards = sweep % 2 == 1
        for floor in floors if upwards else reversed(floors):
            floor.sort(key=barycentre)
            position |= spread(floor)
    return floors


def spread(floor: list[Place]) -> Points:
    """Return the positions of a floor's places, evenly between 0 and 1."""
    return {place: (i + 0.5) / len(floor) for i, place in enumerate(floor)}


def middles(floors: list[list[Place]], level: dict[str, int]) -> tuple[Points, float]:
    """Return the x of the middle of each place, and the width of the picture."""
    sizes = [[WIDTH if name in level else PASSING for name, _ in floor] for floor in floors]
    wide = max(sum(row) + GAP * (len(row) + 1) for row in sizes)
    middle_of: Points = {}

    # What a floor's places leave of the width is shared out between them, so that each floor is centred.
    for floor, row in zip(floors, sizes, strict=True):
        gap = (wide - sum(row)) / (len(row) + 1)
        left = gap
        for place, size in zip(floor, row, strict=True):
            middle_of[place] = left + size / 2
            left += size + gap
    return middle_of, wide


def arrow(path: list[Place], x: Points, top: int) -> str:
    """Draw an arrow from the bottom of a room down to the top of another, upright at each floor that it passes."""
    middle_of_floor = [(top - floor) * FLOOR + HEIGHT / 2 + GAP for _, floor in path]
    points = [(x[place], y) for place, y in zip(path, middle_of_floor, strict=True)]

    room_above, *_, room_below = points
    points[0] = (room_above[0], room_above[1] + HEIGHT / 2)
    points[-1] = (room_below[0], room_below[1] - HEIGHT / 2 - 3)  # the tip ends just above the box

    drawn = f"M{points[0][0]:.0f} {points[0][1]:.0f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        half = (y0 + y1) / 2
        drawn += f" C{x0:.0f} {half:.0f} {x1:.0f} {half:.0f} {x1:.0f} {y1:.0f}"

    above = path[0][0]
    below = path[-1][0]
    title = f"<title>{above} imports {below}</title>"
    return f'<path d="{drawn}" data-from="{above}" data-to="{below}" marker-end="url(#tip)">{title}</path>'


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
    if not path.exists():
        path = PACKAGE / f"{name}.py"
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def room_table() -> str:
    """Return the rooms from the ground up in a table."""
    present = {room_of(path) for path in MODULES}
    rows = [f"| `{name}` | {purpose(name)} |" for name in FLOOR_OF if name in present]
    return "\n".join(["| room | what it is for |", "|---|---|", *rows])

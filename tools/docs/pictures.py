"""Draw every published picture again from the published numbers: `python -m tools.docs.pictures [FOLDER...]`.

A picture of a study shows what stands in its tables and curves (`results/*/table-*.csv`, `curves-*.csv`), so no run is
repeated. Without folders all are drawn; the README's picture is one of them (`tools.docs.leaving_picture`).
"""

from __future__ import annotations

import sys
from collections.abc import Collection

from flower_privdec.studies.publish import drawn
from flower_privdec.studies.study_pictures import looks_of
from tools.docs import leaving_picture
from tools.docs.claims import results


def draw_all(folders: Collection[str] = ()) -> int:
    """Draw the pictures of some published folders, by default of all, and return how many they are."""
    count = 0
    for _, _, folder, parts in results():
        if folders and folder.name not in folders:
            continue
        looks = looks_of(parts)
        for part in parts:
            count += len(drawn(part, folder, looks))

    for drawing in leaving_picture.DRAWINGS:
        if not folders or drawing.folder in folders:
            leaving_picture.draw(drawing)
            count += 1
    return count


if __name__ == "__main__":
    print(f"{draw_all(sys.argv[1:])} pictures drawn")

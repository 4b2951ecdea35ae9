"""Sizes of the models of all recipes, next to those that the paper prints, as a Markdown table.

python benchmarks/sizes.py
"""

from __future__ import annotations

from fixpoint.paper.tables import SHAPES, TABLES
from fixpoint.training import LAYERS, load_recipe, make_model
from fixpoint.training.experiment import size_kb


def main() -> None:
    print("| data | model | units | numbers | KB | paper KB |")
    print("|---|---|---|---|---|---|")
    rows = {row.recipe: row for table in TABLES.values() for row in table}
    for name, row in rows.items():
        options = load_recipe(name).model
        if options.model not in LAYERS:
            continue
        kb = size_kb(make_model(options, SHAPES[row.dataset]))
        print(
            f"| {row.dataset} | {row.algorithm} | {options.hidden} | {round(kb * 256):,} "
            f"| {kb:.1f} | {row.size_kb:g} |"
        )


if __name__ == "__main__":
    main()

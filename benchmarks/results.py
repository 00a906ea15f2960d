"""The tables of the docs, from the figures in docs/results/: one JSON file per topic, from the newest run.

python -m benchmarks.results                                   # rewrite the tables in docs/ and README.md
python benchmark_mm.py --tables quantizers --json docs/results/quantizers.json

A file is what `benchmark_mm.py` and the benchmarks of `qtrain.bench` write with --json. A document names it between
two comments, `<!-- results: quantizers -->` and `<!-- end -->`; the text between them is generated.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

from qtrain.bench.tables import Cell, Table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
_SECTION = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table_of(record: dict[str, Any]) -> Table:
    """The table that `Table.record` described."""
    table = Table(record["title"], record["unit"], record["columns"], record["notes"])
    for row in record["rows"]:
        for column, cell in row["cells"].items():
            table.put(row["name"], column, Cell(cell.get("value"), cell.get("reason"), cell.get("text")))
    return table


def section_of(results: dict[str, Any]) -> str:
    """A document's section: the tables, what they were measured on, and the command."""
    command = results["command"] if isinstance(results["command"], str) else shlex.join(results["command"])
    named = {name: results["versions"].get(name) for name in ("torch", "triton", "transformers", "torchao")}
    versions = ", ".join(f"{name} {version}" for name, version in named.items() if version)
    tables = [table_of(record).markdown() for record in results["tables"]]
    return "\n\n".join([*tables, f"{results['device']}, {versions}, {results['date']}: `{command}`"]) + "\n"


def rendered(text: str) -> str:
    """The text of a document with its sections regenerated from docs/results/."""
    # What lies between the comments is replaced whole: a table is never edited by hand.
    return _SECTION.sub(
        lambda match: match[1] + section_of(json.loads((RESULTS / f"{match[2]}.json").read_text())) + match[3], text
    )


def main() -> None:
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        if (new := rendered(text)) != text:
            path.write_text(new)
            print(f"rewrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

"""`python -m tests.manual`: writes the generated pages and parts of the manual again.

Knows: which page has which part. Must not know: how a part is computed.
"""

from pathlib import Path

from tests.manual import commands_page, memory_tables, option_names
from tests.manual.tables import replace_part

DOCS = Path(__file__).resolve().parents[2] / "docs"


def main() -> None:
    (DOCS / "commands.md").write_text(commands_page.render(), "utf-8")
    memories = [memory_tables.measure(found) for found in memory_tables.list_checkpoints()]
    _replace("memory.md", "models", memory_tables.format_models(memories))
    for part, compute_budget in memory_tables.MACHINE_PARTS.items():
        _replace("memory.md", part, memory_tables.format_machines(memories, compute_budget))
    _replace("migrating.md", "options", option_names.render())


def _replace(page: str, part: str, text: str) -> None:
    path = DOCS / page
    path.write_text(replace_part(path.read_text("utf-8"), part, text), "utf-8")


if __name__ == "__main__":
    main()

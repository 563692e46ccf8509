"""Every reported fault keeps a test with its number, and tests/README.md says which; `python` this file rewrites it."""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
README = HERE / "README.md"
NUMBERS = ("01 03 04 06 07 09 10 12 13 15 16 17 18 19 22 23 24 25 28 29 31 32 33 34 36 37 39 40 41 42 43 45 46 47 49 50"
           " 51 53 54").split()  # fmt: skip
ROW = re.compile(r"^\| BR-(\d\d) \| (.+?) \|(.*)\|$", re.M)


def there_are():
    """(file, function) of every test there is, read and not imported."""
    found = []
    for file in sorted(HERE.glob("test_*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        found += [(file.name, node.name) for node in functions if node.name.startswith("test_")]
    return found


def by_number():
    """Number of a fault -> its tests as `file::function`, sorted."""
    found = {}
    for file, name in there_are():
        for number in re.findall(r"br_?(\d\d)", name):
            found.setdefault(number, []).append(f"{file}::{name}")
    return found


def rows():
    """Number -> (fault, its tests as the table names them)."""
    table = ROW.findall(README.read_text(encoding="utf-8"))
    return {number: (fault, re.findall(r"`([^`]+)`", cell)) for number, fault, cell in table}


def rewrite():
    """Bring the table's last column up to the tests there are."""
    carriers = by_number()

    def line(match):
        names = "<br>".join(f"`{name}`" for name in carriers.get(match[1], []))
        return f"| BR-{match[1]} | {match[2]} | {names} |"

    README.write_text(ROW.sub(line, README.read_text(encoding="utf-8")), encoding="utf-8")


def test_every_reported_fault_has_a_test_with_its_number():
    carriers = by_number()
    assert sorted(rows()) == NUMBERS and [number for number in NUMBERS if number not in carriers] == []


def test_the_table_names_the_tests_there_are_and_no_others():
    assert {number: names for number, (_, names) in rows().items() if names} == by_number()


if __name__ == "__main__":
    rewrite()

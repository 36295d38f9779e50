"""Rules for the repository as a whole: frozen flags, the command reference, documents and their links.

`python tests/test_repository.py --freeze` records the current options of the commands in frozen_flags.json. It
refuses to drop a recorded option, because users' scripts rely on it.
"""

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parent.parent
FROZEN_FLAGS = ROOT / "tests" / "frozen_flags.json"

# Options that are promised to users' scripts, on every command and on single ones.
EVERYWHERE = ["--json", "--device", "--dtype", "--seed", "--threads", "-v", "--debug"]
PROMISED = {
    "prune": (
        "-o --output --overwrite --resume --sparsity --experts --method --scope --uniform --min-experts --merge "
        "--relaxation --epochs --learning-rate --reconstruction-weight --batch-size --statistics"
    ),
    "merge": "-o --output --overwrite --resume --experts --method --data --samples --sequence-length --statistics",
    "densify": (
        "-o --output --overwrite --resume --ffns --select --distill-steps --finetune-steps --data --samples "
        "--sequence-length --statistics"
    ),
    "fit": "-o --output --overwrite --resume --target-size --target-active --fit-to --data --samples",
    "quantize": "-o --output --overwrite --resume --bits --group-size --experts-only --activation-aware --data --samples",
    "plan-run": "--method --sparsity --samples --sequence-length --epochs --relaxation",
    "calibrate": "-o --output --overwrite --data --samples --sequence-length",
    "inspect": "",
    "evaluate": "--data --metric --tasks",
    "generate": "-p -n --temperature --top-p --top-k --stop --skip-threshold",
    "bench": "-p -n -r -d -b -o --skip-threshold --backend --server --concurrency --num-prompts --max-concurrency",
    "serve": "--host --port --api-key --max-queue --max-model-len --kv-cache-memory --max-batch-size --skip-threshold",
    "export": "-o --output --overwrite --format --precision --experts --skip-threshold",
    "push": "--private --overwrite",
    "compare": "-o --output --overwrite --data --samples --tasks -p -n -r --skip-threshold",
}


# Commands


def options_by_command():
    import cli

    return {
        name: sorted(
            flag
            for parameter in command.params
            if isinstance(parameter, click.Option)
            for flag in (*parameter.opts, *parameter.secondary_opts)
        )
        for name, command in sorted(cli.main.commands.items())
    }


@pytest.mark.parametrize("command", PROMISED)
def test_promised_options_exist(command):
    promised = {*PROMISED[command].split(), *EVERYWHERE}
    assert promised <= set(options_by_command()[command])
    assert promised <= set(json.loads(FROZEN_FLAGS.read_text(encoding="utf-8"))[command])


def test_options_are_the_frozen_ones():
    frozen = json.loads(FROZEN_FLAGS.read_text(encoding="utf-8"))
    assert options_by_command() == frozen, "record new options with: python tests/test_repository.py --freeze"


def freeze():
    options = options_by_command()
    frozen = json.loads(FROZEN_FLAGS.read_text(encoding="utf-8")) if FROZEN_FLAGS.exists() else {}
    dropped = [
        f"{command} {flag}" for command, flags in frozen.items() for flag in flags if flag not in options.get(command, [])
    ]
    if dropped:
        sys.exit(f"not frozen: {', '.join(dropped)} would be dropped, and others may script against them")
    FROZEN_FLAGS.write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")


# Documents


def test_command_reference_is_current():
    path = ROOT / "docs" / "generate_cli_reference.py"
    specification = importlib.util.spec_from_file_location("generate_cli_reference", path)
    generator = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(generator)
    assert generator.REFERENCE.read_text(encoding="utf-8") == generator.render(), (
        "write it with: python docs/generate_cli_reference.py"
    )


README_LINES = 120
TOP_FOLDERS = ("benchmarks", "calibrate", "compress", "docs", "engine", "examples", "tests")
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED_PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(TOP_FOLDERS)})/[\w./*-]*[\w*/]")


def documents():
    places = ("docs", "examples", "engine")
    return sorted([*ROOT.glob("*.md"), *(path for place in places for path in (ROOT / place).rglob("*.md"))])


def anchors(page):
    """Return the names under which GitHub shows a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path):
    """Return the relative links of a document to files or headings that do not exist."""
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = path if not name else path.parent / name
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            yield target


def missing_paths(page):
    """Return the paths between backticks, alone or in a command, that do not exist; `*` stands for any name."""
    code = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE))
    for name in (name for own in code for name in NAMED_PATH.findall(own)):
        if not (any(ROOT.glob(name)) if "*" in name else (ROOT / name).exists()):
            yield name


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_of_documents_exist(path):
    assert not [*broken_links(path), *missing_paths(path.read_text(encoding="utf-8"))]


def test_broken_links_and_paths_are_found(tmp_path):
    page = tmp_path / "a.md"
    page.write_text("# One (1) `x`\n[a](#one-1-x) [b](#two) [c](a.md#one-1-x) [d](b.md) [e](https://example.org)")
    assert list(broken_links(page)) == ["#two", "b.md"]
    shown = "`engine/errors.py` `python tests/gone.py` `tests/test_*.py` `docs/none_*.md` `.engine/x` `path/engine/y`"
    assert list(missing_paths(shown)) == ["tests/gone.py", "docs/none_*.md"]


def test_readme_is_short_and_has_each_folder():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= README_LINES
    ignored = re.findall(r"^/?([\w*.-]+)/$", (ROOT / ".gitignore").read_text(encoding="utf-8"), re.MULTILINE)
    folders = {
        path.name
        for path in ROOT.iterdir()
        if path.is_dir() and not path.name.startswith(".") and not any(path.match(own) for own in ignored)
    }
    assert folders == set(TOP_FOLDERS)
    assert {folder for folder in folders if any(line.startswith(f"- `{folder}/`") for line in lines)} == folders


def test_each_room_has_a_docstring_and_is_on_the_map():
    folders = {path.parent for top in ("engine", "compress") for path in (ROOT / top).rglob("*.py")}
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rooms = {folder.relative_to(ROOT).as_posix() for folder in folders}
    without_docstring = {
        room
        for room in rooms
        if ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8"))) is None
    }
    assert not without_docstring
    assert not {room for room in rooms if f"`{room}`" not in page and f"`{room}/`" not in page}


def test_index_lists_each_page_and_its_question():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT / "docs").as_posix()
        if name not in ("README.md", "cli.md"):
            title = path.read_text(encoding="utf-8").splitlines()[0]
            assert title.startswith("# ") and title.endswith("?"), f"the title of {name} is no question"
            assert f"| [{name}]({name}) | {title[2:]} |" in index, f"{name} is not listed with its title"


if __name__ == "__main__":
    if sys.argv[1:] != ["--freeze"]:
        sys.exit("usage: python tests/test_repository.py --freeze")
    sys.path.insert(0, str(ROOT))  # before this folder, which has folders of the same names
    freeze()

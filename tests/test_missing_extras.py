"""Without its optional packages, the program computes another way or ends with one line that names the extra.

One fresh process imports none of the packages of any extra. It carries out every command and call that would use one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import cli

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = {
    "tasks": "lm_eval accelerate rouge_score",
    "hub-data": "datasets",
    "plots": "matplotlib",
    "fast": "numba llvmlite",
    "serve": "fastapi starlette pydantic h11 uvicorn prometheus_client httpx2 llguidance",
    "onnx": "onnx onnxscript onnxruntime onnxruntime_genai",
    "gguf": "gguf",
    "classifiers": "PIL sklearn",
    "images": "PIL",
}
"""The modules of each extra of pyproject.toml."""
MODULES = {"pillow": "PIL", "scikit-learn": "sklearn"}
"""Packages whose modules have other names."""
GENERATE = ["generate", "demo", "--prompt", "def read", "--tokens", "4", "--json", "--dtype"]
CALLS = {
    "generate": [*GENERATE, "float32"],
    "generate in bfloat16": [*GENERATE, "bfloat16"],
    "compare": ["compare", "demo", "--output", "{place}/report"],
    "export": ["export", "demo", "--output", "{place}/exported"],
    "export a GGUF file": ["export", "demo", "--format", "gguf"],
    "run an export": "engine.onnx.runtime:session(Path('{place}/model.onnx'), 1)",
    "serve": ["serve", "demo"],
    "a grammar": "engine.generation.guidance:guidance()",
    "load test": ["bench", "--server", "http://127.0.0.1:9"],
    "tasks": ["evaluate", "demo", "--tasks", "arc_easy"],
    "rouge": "compress.distillation.rouge:scorer()",
    "hub-data": ["evaluate", "demo", "--data", "owner/name"],
    "digits": "calibrate.labelled:labelled('digits')",
    "images": "calibrate.labelled:labelled('{place}/images').read([0])",
    "an image": ["generate", "demo", "--prompt", "x", "--image", "{place}/images/a/1.png"],
}
"""Commands, and calls of functions of a module."""
PROGRAM = """
import contextlib, importlib, io, json, sys
from pathlib import Path
sys.modules.update(dict.fromkeys(sys.argv[1].split()))  # None: importing one of them raises
from cli import main
ended = {}
for name, call in json.loads(sys.argv[2]).items():
    code, said, out = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            if isinstance(call, list):
                main(call)
            else:
                module, _, expression = call.partition(":")
                eval(expression, vars(importlib.import_module(module)) | {"Path": Path})
        except SystemExit as end:
            code = end.code or 0
        except Exception as error:
            code, said = type(error).__name__, io.StringIO(str(error))
    ended[name] = [code, out.getvalue(), said.getvalue()]
print(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int | str, str, str]]:
    """Return how each call ended without the packages: its exit status or its error, its output and its message."""
    place = tmp_path_factory.mktemp("bare")
    for name in ("images/a/1.png", "images/b/2.png"):
        (place / name).parent.mkdir(parents=True)
        (place / name).write_bytes(b"")
    calls = json.dumps(CALLS).replace("{place}", str(place))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, " ".join(EXTRAS.values()), calls],
        env=environment,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert {path.name for path in place.iterdir()} == {"images"}, "what is refused writes nothing"
    return {name: tuple(end) for name, end in found.items()}


def test_every_extra_is_hidden() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {
        extra: [re.split(r"[^\w-]", each)[0] for each in packages] for extra, packages in extras.items() if extra != "dev"
    }
    own = {extra: [MODULES.get(name, name.replace("-", "_")) for name in packages] for extra, packages in names.items()}
    assert own.keys() == EXTRAS.keys()
    assert all(set(modules) <= set(EXTRAS[extra].split()) for extra, modules in own.items())


@pytest.mark.parametrize(
    ("call", "extra"),
    [
        ("compare", "plots"),
        ("export", "onnx"),
        ("export a GGUF file", "gguf"),
        ("run an export", "onnx"),
        ("serve", "serve"),
        ("a grammar", "serve"),
        ("load test", "serve"),
        ("tasks", "tasks"),
        ("rouge", "tasks"),
        ("hub-data", "hub-data"),
        ("digits", "classifiers"),
        ("images", "classifiers"),
        ("an image", "images"),
    ],
)
def test_one_line_names_the_extra(call: str, extra: str, ended: dict[str, tuple[int | str, str, str]]) -> None:
    code, output, message = ended[call]
    assert code == 1 if isinstance(CALLS[call], list) else code == "OptionError"
    assert f"[{extra}]" in message and len(message.splitlines()) == 1 and not output
    assert "install" in message


def test_text_is_generated_without_compiled_kernels(ended: dict[str, tuple[int | str, str, str]]) -> None:
    """In float32, the text is the one of this process. In bfloat16, torch does what the kernels would do."""
    here = CliRunner().invoke(cli.main, [*GENERATE, "float32"])
    (code, exact, _), (other_code, rounded, _) = ended["generate"], ended["generate in bfloat16"]
    assert code == other_code == here.exit_code == 0
    assert json.loads(exact)["text"] == json.loads(here.stdout)["text"] and json.loads(rounded)["text"]

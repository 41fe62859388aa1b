"""The rules of CONTRIBUTING.md that a machine can check."""

import ast
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dlrm_scale

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "dlrm_scale"
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(dlrm_scale.__path__, "dlrm_scale.")
    if not module.name.endswith("__main__")
)

# What importing may not do: rule 6. Each is looked at before and after all imports, in a fresh process.
_IMPORT_ALL = """
import json, logging, os, signal, sys, threading
import numpy, torch, torchrec  # their own effects are not ours
import fbgemm_gpu.split_table_batched_embeddings_ops_training
def state():
    return {
        "root log handlers": len(logging.getLogger().handlers),
        "root log level": logging.getLogger().level,
        "environment": sorted(os.environ.items()),
        "torch dtype": str(torch.get_default_dtype()),
        "torch threads": torch.get_num_threads(),
        "torch random state": hash(torch.get_rng_state().numpy().tobytes()),
        "numpy random state": hash(numpy.random.get_state()[1].tobytes()),
        "process group": torch.distributed.is_initialized(),
        "threads": threading.active_count(),
        "signal handlers": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "files here": sorted(os.listdir(".")),
    }
before = state()
for name in json.loads(sys.argv[1]):
    __import__(name)
after = state()
print(json.dumps({key: [before[key], after[key]] for key in before if before[key] != after[key]}))
"""


def test_imports_point_down_the_layers() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


def test_importing_has_no_effect(tmp_path: Path) -> None:
    done = _python(_IMPORT_ALL, json.dumps(MODULES), cwd=tmp_path)
    assert json.loads(done.splitlines()[-1]) == {}


@pytest.mark.parametrize(
    "modules",
    [
        ["dlrm_scale.cli.app"],
        [
            "dlrm_scale.data.preprocess.preprocess",
            "dlrm_scale.data.synthetic.synthetic",
            "dlrm_scale.data.dataset.dataset",
        ],
        [
            "dlrm_scale.checkpoint.saving.engine",
            "dlrm_scale.checkpoint.restoring.restore",
            "dlrm_scale.checkpoint.verify",
        ],
    ],
    ids=["command line", "preprocessing", "checkpoints"],
)
def test_commands_preprocessing_and_checkpoints_load_without_torchrec(modules: list[str]) -> None:
    code = "import json, sys; [__import__(name) for name in json.loads(sys.argv[1])]; print(sorted(sys.modules))"
    loaded = ast.literal_eval(_python(code, json.dumps(modules)).splitlines()[-1])
    assert not {"torchrec", "fbgemm_gpu"} & set(loaded)


def test_help_starts_without_torch() -> None:
    loaded = ast.literal_eval(_python("import dlrm_scale.cli, sys; print(sorted(sys.modules))").splitlines()[-1])
    assert "torch" not in loaded


@pytest.mark.parametrize("name", MODULES)
def test_all_is_the_public_surface(name: str) -> None:
    module = importlib.import_module(name)
    body = ast.parse(Path(str(module.__file__)).read_text()).body
    if len(body) == 1:
        return  # a package with a docstring and nothing to offer
    assert hasattr(module, "__all__"), f"{name} has no __all__"
    assert [public for public in module.__all__ if not hasattr(module, public)] == []
    assert len(module.__all__) == len(set(module.__all__))
    defined = {
        node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }
    assert defined - set(module.__all__) == set(), "public by name but not in __all__"


def test_no_file_holds_a_second_idea() -> None:
    files = {path.relative_to(REPOSITORY): path for path in PACKAGE.rglob("*.py")}
    long = [str(name) for name, path in files.items() if len(path.read_text().splitlines()) > 500]
    vague = [str(name) for name in files if re.fullmatch(r"(utils?|common|helpers?|misc)\.py", name.name)]
    assert (long, vague) == ([], [])


def test_the_documents_show_the_two_commands() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (REPOSITORY / document).read_text()
        for target in ("demo", "test"):
            assert f"make {target}" in text, f"{document} does not show make {target}"
            assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_every_library_that_is_imported_is_declared_and_pinned() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    needs = project["dependencies"] + project["optional-dependencies"]["cuda"]
    declared = {_import_name(re.split(r"[^\w-]", need)[0]) for need in needs}
    pinned = {_import_name(name) for pins in _pins().values() for name in pins}
    imported = {
        name.split(".")[0]
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _imported(node)
    }
    foreign = imported - set(sys.stdlib_module_names) - {"dlrm_scale"}
    assert (foreign - declared, declared - pinned) == (set(), set())


def test_pins_are_exact_and_the_trio_fits() -> None:
    pins = _pins()
    assert pins["cpu.txt"]["torch"] == pins["cuda.txt"]["torch"]
    minor = int(pins["cpu.txt"]["torch"].split(".")[1]) - 5
    assert pins["cpu-no-deps.txt"] == {"fbgemm-gpu-cpu": f"1.{minor}.0", "torchrec": f"1.{minor}.0"}
    assert pins["cuda.txt"]["fbgemm-gpu"] == pins["cuda.txt"]["torchrec"] == f"1.{minor}.0"


def _pins() -> dict[str, dict[str, str]]:
    """Version by distribution, for each file in requirements."""
    pins: dict[str, dict[str, str]] = {}
    for path in sorted((REPOSITORY / "requirements").glob("*.txt")):
        for line in path.read_text().splitlines():
            if line and not line.startswith(("#", "-r ")):
                name, version = line.split("==")
                pins.setdefault(path.name, {})[name] = version
    return pins


def _import_name(distribution: str) -> str:
    return distribution.lower().replace("-", "_")


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


def _python(code: str, *arguments: str, cwd: Path = REPOSITORY) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

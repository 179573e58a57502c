"""Imports point down only, and the public names are these."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import sb3_hts

PACKAGE = Path(sb3_hts.__file__).parent
LAYERS = [
    ["version", "errors", "interrupts", "heap"],
    ["serialization", "protocol", "seeding"],
    ["shared_arrays"],
    ["storage", "slots", "worker_status", "placement", "tokens"],
    ["processes", "exchange"],
    ["pool"],
    ["registration", "wrapper_states", "env_group", "lean_policy", "randomness", "threads"],
    ["wrappers", "replicas", "lean_training"],
    ["acting", "child"],
    ["inference", "serving", "lockstep"],
    ["rollout_runner"],
    ["local_runner", "executor", "actor"],
    ["worker"],
    ["workforce"],
    ["vec_env"],
    ["collector"],
    ["worker_collector", "thread_collector", "policy_kinds", "publishing"],
    ["replay", "corrections"],
    ["collectors"],
    ["contrib_kinds", "arguments"],
    ["algorithm"],
    ["ppo", "a2c", "contrib"],
    ["__init__"],
]
WITHOUT_TORCH = [
    "errors",
    "heap",
    "protocol",
    "seeding",
    "shared_arrays",
    "storage",
    "slots",
    "tokens",
    "exchange",
    "placement",
    "worker_status",
    "processes",
    "pool",
]


def imports_of(module: str) -> set[str]:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name.removeprefix("sb3_hts.") for name in names if name.startswith("sb3_hts.")}


def test_every_module_has_a_layer() -> None:
    assert sorted(name for layer in LAYERS for name in layer) == sorted(path.stem for path in PACKAGE.glob("*.py"))


def test_imports_point_down() -> None:
    rank = {name: level for level, layer in enumerate(LAYERS) for name in layer}
    for module in rank:
        for imported in imports_of(module):
            assert rank[imported] < rank[module], f"{module} imports {imported}"


def test_the_lower_half_knows_neither_torch_nor_sb3() -> None:
    for module in WITHOUT_TORCH:
        source = (PACKAGE / f"{module}.py").read_text()
        for node in ast.walk(ast.parse(source)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in ("torch", "stable_baselines3", "gymnasium")], module


def test_public_names() -> None:
    assert set(sb3_hts.__all__) == {
        "HTSA2C",
        "HTSPPO",
        "ClosedError",
        "HTSError",
        "HTSVecEnv",
        "ProtocolError",
        "WorkerDied",
        "WorkerError",
        "WorkerRaised",
        "WorkerTimeout",
        "__version__",
    }
    assert all(hasattr(sb3_hts, name) for name in sb3_hts.__all__)


def test_importing_starts_nothing() -> None:
    code = (
        "import sb3_hts, multiprocessing, threading; print(len(multiprocessing.active_children()), threading.active_count())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "0 1\n"

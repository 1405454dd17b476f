"""Nothing that comes over this package's wire is unpickled or run: who may use what could, by name, with the reason."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "refit_transport"
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"}
CALLS = {"eval", "exec", "compile", "__import__"}
# torch's collectives of objects pickle; so does torch.load, unless it is told to take weights only.
METHODS = {
    "all_gather_object", "broadcast_object_list", "broadcast_object", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list", "unsafe_load",
}  # fmt: skip
ALLOWED = {
    # Between an engine's actor and its own child processes, which it has started itself.
    "cluster/async_generation.py": {"pickle", "multiprocessing"},
    # Over Megatron's and vLLM's own process groups, between processes of one role that Ray has started.
    "cluster/training.py": {"all_gather_object"},
    "cluster/training_checkpoint.py": {"broadcast_object_list"},
    "cluster/generation_stages.py": {"broadcast_object"},
    "cluster/gradients.py": {"all_gather_object"},
    # Ray ships functions so in any case; this says that one is to travel whole to actors of another environment.
    "integrations/nemo_rl/groups.py": {"cloudpickle"},
    # Pipes between a benchmark and the processes that it has forked.
    "bench/crew.py": {"multiprocessing"},
    "bench/isolation.py": {"multiprocessing"},
}


def dangers(source: str) -> set[str]:
    """What a module imports or calls of all this."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & MODULES
            found |= {alias.name for alias in node.names} & (MODULES | METHODS)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & (CALLS | METHODS)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found |= {node.func.attr} & METHODS
            if ast.unparse(node.func) in ("torch.load", "yaml.load", "numpy.load", "np.load"):
                found.add(ast.unparse(node.func))
    return found


def test_only_the_listed_modules_use_what_can_run_code_and_no_more_than_listed() -> None:
    found = {
        str(path.relative_to(PACKAGE)): danger
        for path in sorted(PACKAGE.rglob("*.py"))
        if (danger := dangers(path.read_text()))
    }
    assert found == ALLOWED


def test_the_wire_is_among_what_was_searched() -> None:
    for name in ("frames", "store_server", "store_client", "board", "rendezvous", "gloo", "shared_rendezvous"):
        assert (PACKAGE / "fabrics" / f"{name}.py").is_file()
        assert f"fabrics/{name}.py" not in ALLOWED


def test_the_search_finds_what_it_is_for() -> None:
    assert dangers("import pickle as p") == {"pickle"}
    assert dangers("from multiprocessing.connection import Pipe") == {"multiprocessing"}
    assert dangers("torch.load(path)\neval('1')\nre.compile('x')") == {"torch.load", "eval"}
    assert dangers("dist.all_gather_object(a, b)") == {"all_gather_object"}
    assert dangers("import json") == set()

"""Private names of Lightning are touched in `hftrainer_lightning.private_api` alone, each by a function that says why.

Such a name is touched when it is imported, when it is an attribute of anything but `self`, and when a class of ours has
a name that one of its Lightning bases has already. The last is asked of the classes themselves, whose own private names
are theirs to have.
"""

import ast
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
#: What touches Lightning, and the packages of ours whose objects Lightning's are closest to.
SOURCES = sorted(
    path
    for folder in ("hftrainer_lightning", "hftrainer_deepspeed", "hftrainer_xla", "parallel", "strategies")
    for path in (ROOT / ("adapters" if "_" in folder else "hftrainer") / folder).rglob("*.py")
    if path.parent.name != "private_api"
)
_XLA = {"_XLAC": "torch_xla", "_xla_get_tensor_id": "torch_xla", "_metadata": "torch's state dicts"}
#: module → private names of others than Lightning that it touches on their objects, and whose they are.
OF_OTHERS = {
    "hftrainer.parallel.accelerator": {"_orig_mod": "torch, in compiled models"},
    "hftrainer.parallel.process_group": {"_get_default_store": "torch, whose processes have met there"},
    "hftrainer.parallel.rank_errors": {"_get_default_store": "torch, whose processes have met there"},
    "hftrainer_deepspeed.engine_holder": {
        "_copy_recovery_script": "DeepSpeed",
        "_last_lr": "torch's schedules",
        "_zero3_consolidated_16bit_state_dict": "DeepSpeed",
    },
    "hftrainer_deepspeed.settings": {"_rank_info": "our arguments"},
    "hftrainer_deepspeed.strategy": {"_move_model_to_device": "transformers' Trainer, and ours"},
    "hftrainer.strategies.fsdp": {"_fsdp_wrapped_module": "torch's FSDP1"},
    "hftrainer.strategies.fsdp_sharding": {"_no_split_modules": "transformers' models"},
    "hftrainer.strategies.strategy": {
        **dict.fromkeys(("_fsdp_wrapped_module", "_modules"), "torch"),
        **dict.fromkeys(("_load_scaler", "_wrap_model"), "the Trainer"),
    },
    "hftrainer.parallel.plan": {"_is_distributed_loading_by_transformers": "transformers' models"},
    "hftrainer_xla.devices": _XLA,
    "hftrainer_xla.sharding": {"_XLAC": "torch_xla", "_get_xla_sharding_spec": "torch_xla"},
    "hftrainer_lightning.module": {"_get_learning_rate": "the Trainer", "_opt_called": "torch's schedules"},
    "hftrainer_lightning.callbacks": {"_prepare_inputs": "the Trainer"},
    "hftrainer_lightning.launching": {"_exit": "os"},
}
#: Functions that take an attribute by its name.
BY_NAME = ("getattr", "setattr", "hasattr", "delattr")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_of_lightning(name: str) -> bool:
    return name.split(".")[0] in ("lightning", "lightning_fabric", "pytorch_lightning")


def is_self(receiver: ast.expr) -> bool:
    if isinstance(receiver, ast.Call) and isinstance(receiver.func, ast.Name):
        return receiver.func.id == "super"
    return isinstance(receiver, ast.Name) and receiver.id in ("self", "cls")


def private_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        paths = []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        for path in filter(is_of_lightning, paths):
            yield from filter(is_private, path.split("."))


def private_attributes(tree: ast.AST, *, of_self: bool) -> Iterator[str]:
    """Private attributes of `self` (or of anything else) that are read, set or asked for by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            receiver, name = node.value, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            receiver, name = node.args[0], str(getattr(node.args[1], "value", ""))
        else:
            continue
        if is_private(name) and is_self(receiver) is of_self:
            yield name


@functools.cache
def private_names(kind: type) -> frozenset[str]:
    """The private names that a class itself defines, or gives to its instances."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    names = set(private_attributes(tree, of_self=True))
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return frozenset(filter(is_private, names))


def names_shared_with_bases(module: ModuleType) -> Iterator[str]:
    """Private names that a class of this module shares with Lightning; those of its mixins too, wherever they are."""
    constants = {one.value for one in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(one, ast.Constant)}
    for kind in vars(module).values():
        if not isinstance(kind, type) or kind.__module__ != module.__name__:
            continue
        theirs = {name for base in kind.__mro__ if is_of_lightning(base.__module__) for name in private_names(base)}
        yield from theirs & constants  # in a table of names, perhaps
        for base in kind.__mro__:
            is_in_private_api = base.__module__.startswith("hftrainer_lightning.private_api")
            if base.__module__.startswith(("hftrainer_lightning.", module.__name__)) and not is_in_private_api:
                yield from private_names(base) & theirs


def names_in_inner_classes(tree: ast.AST) -> Iterator[str]:
    """Private names in classes that functions make, which cannot be asked for their bases."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for kind in filter(lambda node: isinstance(node, ast.ClassDef), ast.walk(function)):
                yield from private_attributes(kind, of_self=True)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "adapters" else parts).removesuffix(".__init__")


@pytest.mark.parametrize("name", list(map(module_name, SOURCES)))
def test_private_names_of_lightning_are_in_private_api(name):
    module = importlib.import_module(name)
    tree = ast.parse(inspect.getsource(module))
    # As far as they can be told from others'.
    of_lightning = {*private_imports(tree), *names_shared_with_bases(module), *names_in_inner_classes(tree)}
    assert of_lightning == set()
    of_others = set(private_attributes(tree, of_self=False))
    assert {*of_others} == {*OF_OTHERS.get(name, {})}


def test_table_of_other_private_names_lists_existing_modules():
    assert OF_OTHERS.keys() <= set(map(module_name, SOURCES))

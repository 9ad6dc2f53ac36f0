"""Checkpoints of parts (FSDP) with contents that somebody made up: as `test_fuzz.py`, for what torch itself reads."""

import pickle
import shutil

import pytest

from hftrainer.checkpointing.distributed import PARTS, load_model_parts, load_optimizer_parts
from tests.support import fuzz
from tests.support.parts import stepped, write

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    write(folder)
    return folder


def change_list(path, rng, trace):
    """Another value of a field of the list of parts, or of one of the descriptions in it."""
    parts = pickle.loads(path.read_bytes())
    name = rng.choice(list(vars(parts)))
    value = getattr(parts, name)
    described = rng.choice(list(value.values())) if isinstance(value, dict) else value
    if getattr(described, "__dict__", None) and rng.random() < 0.7:
        vars(described)[rng.choice(list(vars(described)))] = fuzz.tensors(rng)
    else:
        setattr(parts, name, fuzz.mutate(value, rng))
    if rng.random() < 0.1:
        parts.planner_data = {"more": fuzz.Mischief(trace)}
    path.write_bytes(pickle.dumps(parts))


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("way", ["values", "bytes of the list", "bytes"])
def test_made_up_parts(source, tmp_path, kind, way, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, trace, name = tmp_path / "checkpoint-1", tmp_path / "trace", f"parts of the {kind}: {way}"
    for seed, rng in fuzz.seeds(name):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        path = folder / PARTS[kind] / ("__0_0.distcp" if way == "bytes" else ".metadata")
        change_list(path, rng, trace) if way == "values" else fuzz.scramble(path, rng)
        model, optimizer = stepped()
        with fuzz.clear(name, seed):
            if kind == "model":
                load_model_parts(model, str(folder))
            else:
                load_optimizer_parts(model, optimizer, str(folder))
        assert not trace.exists(), f"{seed}: code of the checkpoint was run"
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"], seed

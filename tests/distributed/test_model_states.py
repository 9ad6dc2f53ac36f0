"""How FSDP keeps the states of model and optimizer, by the suite that all strategies pass."""

from pathlib import Path

from tests.support.model_states import under_torchrun


def test_fsdp(tmp_path):
    printed = under_torchrun(Path(__file__).with_name("states_of_fsdp.py"), tmp_path)
    assert "passed" in printed and "skipped" not in printed

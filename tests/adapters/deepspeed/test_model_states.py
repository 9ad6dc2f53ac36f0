"""How DeepSpeed keeps the states of model and optimizer, by the suite that all strategies pass."""

from pathlib import Path

from tests.support.model_states import assert_passed_in_ranks


def test_deepspeed_passes_the_suite(processes, tmp_path):
    assert_passed_in_ranks(Path(__file__).with_name("states_of_deepspeed.py"), tmp_path)

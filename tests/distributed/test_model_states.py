"""How FSDP keeps the states of model and optimizer, by the suite that all strategies pass."""

from pathlib import Path

from tests.support.model_states import assert_passed_in_ranks


def test_fsdp_passes_the_suite(processes, tmp_path):
    assert_passed_in_ranks(Path(__file__).with_name("states_of_fsdp.py"), tmp_path)


def test_dcp_passes_the_suite(processes, tmp_path):
    assert_passed_in_ranks(Path(__file__).with_name("states_of_dcp.py"), tmp_path)

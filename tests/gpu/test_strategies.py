"""DDP and both generations of FSDP train like one process, with NCCL on one and two GPUs, or gloo on the CPU."""

import pytest
import torch

from tests.gpu import ranks
from tests.gpu.ranks import STRATEGIES
from tests.gpu.support import DEVICE, HERE, ON_GPU, assert_close, assert_same_weights, train

#: Strategies that share processes: all on the CPU, where it is the imports that take long. On a GPU each has its own,
#: so that an error of NCCL fails one of them.
GROUPS = {name: (name,) for name in STRATEGIES} if ON_GPU else dict.fromkeys(STRATEGIES, tuple(STRATEGIES))
#: Tolerance by whether it is bfloat16, of 8 bits: FSDP rounds weights once a layer, autocast in each operation.
#: In float32, of 24 bits, ranks add up parts of a loss or gradient in another order, and each batch size may have its
#: own kernel: ten steps lose a few bits.
CLOSE = {False: 1e-5, True: 2e-2}
TWO = pytest.param(2, marks=pytest.mark.skipif(ranks.DEVICES < 2, reason="needs two GPUs, one for each rank"))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    found = {}

    def outcome_of(name, count):
        if (name, count) not in found:
            try:
                by_rank = ranks.run(ranks.train_strategies, count, GROUPS[name], tmp_path_factory.mktemp("ranks"))
            except torch.multiprocessing.ProcessException as error:
                found.update({(each, count): error for each in GROUPS[name]})
            else:
                found.update({(each, count): [one[each] for one in by_rank] for each in GROUPS[name]})
        if isinstance(found[name, count], Exception):
            raise found[name, count]
        return found[name, count]

    return outcome_of


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same training in this process, by whether it is bfloat16."""
    folder, settings = tmp_path_factory.mktemp("alone"), {**HERE, "logging_steps": 1}
    settings["per_device_train_batch_size"] = ranks.GLOBAL_BATCH
    return {bf16: train("hftrainer", "llama without dropout", folder, bf16=bf16, **settings) for bf16 in (False, True)}


@pytest.mark.parametrize("count", [1, TWO])
@pytest.mark.parametrize("name", STRATEGIES)
class TestStrategy:
    def test_training_equals_that_of_one_process(self, outcome, alone, name, count):
        bf16 = "bfloat16" in name
        ours, expected = outcome(name, count)[0]["plain"], alone[bf16]
        assert_close(ours["logs"], expected.logs, CLOSE[bf16])
        assert ours["weights"].keys() == expected.weights.keys()
        for key, value in expected.weights.items():
            # AdamW divides a gradient by its size: in bfloat16, one that is nothing but rounding may have either sign.
            if not bf16:
                assert torch.allclose(ours["weights"][key], value.cpu(), rtol=0, atol=CLOSE[bf16]), key

    def test_resume_is_exact(self, outcome, name, count):
        for rank in outcome(name, count):
            assert rank["resumed"]["logs"][:-1] == rank["saving"]["logs"][:-1]  # the last has a mean of its own steps
            assert_same_weights(rank["resumed"]["weights"], rank["saving"]["weights"])

    def test_ranks_have_the_same_logs_and_weights(self, outcome, name, count):
        first, *others = outcome(name, count)
        for run in ("plain", "saving", "resumed"):
            for other in others:
                assert first[run]["logs"] == other[run]["logs"]
                assert_same_weights(first[run]["weights"], other[run]["weights"])

    def test_each_rank_has_its_device_and_backend(self, outcome, name, count):
        """A device for each rank, and its own backend; one rank needs a group for sharding only."""
        found = outcome(name, count)
        devices = [f"cuda:{rank}" for rank in range(count)] if ON_GPU else ["cpu"] * count
        assert [rank["plain"]["device"] for rank in found] == devices
        backend = None if name == "ddp" and count == 1 else {"cuda": "nccl", "cpu": "gloo"}[DEVICE]
        assert {rank["backend"] for rank in found} == {backend}

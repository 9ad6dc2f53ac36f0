import pytest

from hftrainer import Trainer, TrainingArguments
from tests.support.tiny import make_plain, plain_data


@pytest.fixture
def make_trainer(tmp_path):
    def make(model=None, eval_dataset=None, kind=Trainer, trainer=(), **arguments):
        defaults = {"per_device_eval_batch_size": 4, "disable_tqdm": True, "use_cpu": True}
        args = TrainingArguments(str(tmp_path / "out"), **{**defaults, **arguments})
        data = plain_data(19) if eval_dataset is None else eval_dataset
        model = make_plain() if model is None else model
        return kind(model, args, train_dataset=plain_data(), eval_dataset=data, **dict(trainer))

    return make

"""Models of other kinds, made by a function, and one that gets its own output back."""

import pytest

from tests.support.parity import EVERY_STEP, build, compare
from tests.support.tiny import Plain, plain_data


@pytest.mark.parametrize("model", ["tuple", "peft"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_other_models(tmp_path, model, accumulation):
    compare(tmp_path, model, gradient_accumulation_steps=accumulation, **EVERY_STEP, load_best_model_at_end=True)


def test_model_init(tmp_path):
    compare(tmp_path, "plain", trainer={"model_init": lambda: make_plain_unseeded()})


def make_plain_unseeded():
    from tests.support.tiny import Plain

    return Plain()


class Remembers(Plain):
    """Gets its own output back as `mems`, as XLNet does."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x, labels=None, mems=None):
        self.seen.append(None if mems is None else float(mems.detach().sum()))
        outputs = super().forward(x, labels)
        state = outputs["logits"].detach()
        return (outputs["loss"], state) if labels is not None else (state, state)


def test_past_index(tmp_path):
    """As documented until v4.57: an output of each step goes into the next, and begins anew with each epoch."""
    model = Remembers()
    given = {"model": model, "train_dataset": plain_data(8), "eval_dataset": plain_data(16)}
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer=given, past_index=1, logging_steps=1)
    trainer.train()
    first = model.seen[:4]
    assert first[0] is None and first[2] is None  # two epochs of two steps
    assert first[1] is not None and first[3] is not None
    model.seen.clear()
    trainer.evaluate()
    assert model.seen[0] is None and model.seen[1] is not None
    plain, _ = build("hftrainer", "plain", tmp_path, trainer={**given, "model": Remembers()})
    plain.train()
    assert set(plain.model.seen) == {None}

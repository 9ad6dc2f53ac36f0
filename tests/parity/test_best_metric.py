"""Which evaluation is the best so far: not one that equals the best, and none that is not a number."""

import math

import pytest

from tests.support.parity import build

SCORES = (math.nan, 0.5, 0.5, 0.7, math.nan, 0.7, 0.3, 0.3, math.inf, -math.inf)


@pytest.mark.parametrize("greater", [True, False])
def test_which_is_the_best(tmp_path, greater):
    settings = {"metric_for_best_model": "score", "greater_is_better": greater, "save_strategy": "best"}

    def judge(library):
        trainer, _ = build(library, "plain", tmp_path / library, eval_strategy="steps", **settings)
        found = []
        for step, score in enumerate(SCORES):
            trainer.state.global_step = step
            is_new = trainer._determine_best_metric({"eval_score": score}, None)
            found.append([is_new, str(trainer.state.best_metric), trainer.state.best_global_step])
        return found

    ours = judge("hftrainer")
    assert any(is_new for is_new, _, _ in ours)
    assert ours == judge("transformers")

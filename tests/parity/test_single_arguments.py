"""One argument each, on the smallest model that shows it, exactly as transformers does it."""

import pytest

from tests.support.parity import EVALUATED, EVERY_STEP, accuracy, compare


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"logging_strategy": "epoch"}, id="log-epoch"),
        pytest.param({"logging_strategy": "no"}, id="log-no"),
        pytest.param({"logging_first_step": True, "logging_steps": 4}, id="log-first-step"),
        pytest.param({"eval_strategy": "epoch", "save_strategy": "epoch"}, id="epoch-epoch"),
        pytest.param({"eval_strategy": "steps"}, id="eval-steps-from-logging-steps"),
        pytest.param({**EVERY_STEP, "eval_on_start": True}, id="eval-on-start"),
        pytest.param({**EVERY_STEP, "eval_delay": 5}, id="eval-delay-steps"),
        pytest.param({"eval_strategy": "epoch", "eval_delay": 2}, id="eval-delay-epochs"),
        pytest.param(
            {
                "logging_steps": 0.2,
                "eval_strategy": "steps",
                "eval_steps": 0.3,
                "save_strategy": "steps",
                "save_steps": 0.15,
            },
            id="fractional-intervals",
        ),
        pytest.param({"num_train_epochs": 1.35}, id="fractional-epochs"),
        pytest.param({"num_train_epochs": 0.2}, id="part-of-an-epoch"),
        pytest.param({"max_steps": 23}, id="max-steps-beyond-epochs"),
        pytest.param({**EVERY_STEP, "load_best_model_at_end": True}, id="best-by-loss"),
        pytest.param({**EVERY_STEP, "load_best_model_at_end": True, "save_total_limit": 1}, id="best-limit-1"),
        pytest.param({**EVERY_STEP, "load_best_model_at_end": True, "save_total_limit": 2}, id="best-limit-2"),
        pytest.param({**EVERY_STEP, "save_total_limit": 2}, id="limit-2"),
        pytest.param(
            {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best", "metric_for_best_model": "loss"},
            id="save-best",
        ),
        pytest.param({**EVERY_STEP, "save_only_model": True}, id="save-only-model"),
        pytest.param({"max_grad_norm": 0.05}, id="clipped"),
        pytest.param({"max_grad_norm": 0.0}, id="not-clipped"),
        pytest.param({"seed": 7}, id="seed"),
        pytest.param({"data_seed": 7}, id="data-seed"),
        pytest.param({"full_determinism": True}, id="full-determinism"),
        pytest.param({"dataloader_drop_last": True, **EVERY_STEP}, id="drop-last"),
        pytest.param({"dataloader_num_workers": 2, "dataloader_prefetch_factor": 3}, id="workers"),
        pytest.param(
            {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, **EVERY_STEP}, id="persistent-workers"
        ),
        pytest.param({"train_sampling_strategy": "sequential"}, id="sequential"),
        pytest.param({"optim": "adamw_torch", "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}, id="adamw"),
        pytest.param({"logging_nan_inf_filter": False}, id="nan-filter-off"),
        pytest.param({"eval_accumulation_steps": 1, **EVERY_STEP}, id="eval-accumulation"),
        pytest.param({"prediction_loss_only": True, **EVERY_STEP}, id="loss-only"),
        pytest.param({"include_for_metrics": ["loss"], **EVERY_STEP}, id="losses-for-metrics"),
        *(
            pytest.param({"lr_scheduler_type": kind, "warmup_steps": warmup}, id=f"{kind}-{warmup}")
            for kind in ("linear", "cosine", "constant", "constant_with_warmup")
            for warmup in (0, 4, 0.3)
        ),
        pytest.param({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}}, id="cosine-2-cycles"),
    ],
)
def test_argument(tmp_path, settings):
    compare(tmp_path, "plain", trainer={"compute_metrics": accuracy}, **settings)


@pytest.mark.parametrize("settings", [{"max_steps": 0}, {"max_grad_norm": -1}, {"eval_delay": -1, **EVALUATED}])
def test_odd_values(tmp_path, settings):
    compare(tmp_path, "plain", **settings)

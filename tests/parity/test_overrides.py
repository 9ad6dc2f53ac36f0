"""Methods that a subclass puts in the place of ours."""

import os

import pytest
import torch

from tests.support.parity import EVALUATED, EVERY_STEP, accuracy, compare
from tests.support.tiny import make_plain


def compute_loss_full(library):
    class Own(library.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = torch.nn.functional.cross_entropy(outputs["logits"], labels, label_smoothing=0.1)
            return (loss, {"loss": loss, **outputs}) if return_outputs else loss

    return Own


def compute_loss_any_keyword(library):
    class Own(library.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            assert "num_items_in_batch" in kwargs
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)

    return Own


def loss_says_whether_scaled(library):
    class Own(library.Trainer):
        loss_is_scaled_for_ga = True

    return Own


def own_training_step(library):
    class Own(library.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            loss = self.compute_loss(model, inputs) / self.current_gradient_accumulation_steps
            self.accelerator.backward(loss * 1.5)
            return loss.detach()

    return Own


def training_step_calls_super(library):
    class Own(library.Trainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

    return Own


def own_optimizer(library):
    class Own(library.Trainer):
        def create_optimizer(self, *args):
            if self.optimizer is None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate, momentum=0.9)
            return self.optimizer

    return Own


def own_log(library):
    class Own(library.Trainer):
        def log(self, logs, *args, **kwargs):
            logs["twice"] = 2 * logs.get("loss", 0)
            super().log(logs, *args, **kwargs)

    return Own


def own_prediction_step(library):
    class Own(library.Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            with torch.enable_grad():  # forces and the like are gradients, in evaluation too
                x = inputs["x"].clone().requires_grad_()
                (slope,) = torch.autograd.grad(model(x)["logits"].sum(), x)
            return loss + slope.abs().mean(), logits, labels

    return Own


def own_evaluate(library):
    class Own(library.Trainer):
        def evaluate(self, *args, **kwargs):
            metrics = super().evaluate(*args, **kwargs)
            metrics["eval_extra"] = 1.0
            return metrics

    return Own


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    "trainer_class",
    [
        compute_loss_full,
        compute_loss_any_keyword,
        loss_says_whether_scaled,
        own_training_step,
        training_step_calls_super,
        own_optimizer,
        own_log,
        own_prediction_step,
        own_evaluate,
    ],
)
def test_override(tmp_path, trainer_class, accumulation):
    settings = {"trainer": {"compute_metrics": accuracy}, "gradient_accumulation_steps": accumulation, **EVERY_STEP}
    compare(tmp_path, "plain", trainer_class=trainer_class, **settings)


def test_star_arguments(tmp_path):
    def trainer_class(library):
        class Own(library.Trainer):
            def _get_eval_sampler(self, *args, **kwargs):
                return super()._get_eval_sampler(*args, **kwargs)

        return Own

    seen = []

    def model_init(*args):
        seen.append(args)
        return make_plain()

    compare(tmp_path, "plain", trainer_class=trainer_class, trainer={"model_init": model_init}, **EVALUATED)
    assert set(seen) == {(None,)}


def test_folder_names_in_save(tmp_path):
    names = []

    def trainer_class(library):
        class Own(library.Trainer):
            def _save(self, output_dir=None, state_dict=None):
                names.append(os.path.basename(output_dir))
                super()._save(output_dir, state_dict)

        return Own

    compare(tmp_path, "plain", trainer_class=trainer_class, save_strategy="steps", save_steps=5, max_steps=5)
    assert names == ["checkpoint-5", "checkpoint-5"]

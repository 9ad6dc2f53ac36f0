"""The shape of trainer_qa.py and trainer_seq2seq_qa.py: Trainers that turn logits into answers before the metric."""

import math
import time

from transformers import Seq2SeqTrainer, Trainer
from transformers.trainer_utils import PredictionOutput, speed_metrics


def prefixed(metrics, prefix):
    return {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value for name, value in metrics.items()}


class AnswerMixin:
    """Loops without the metric, which is computed from answers afterwards."""

    def __init__(self, *args, eval_examples=None, post_process_function=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.eval_examples = eval_examples
        self.post_process_function = post_process_function

    def loop_without_metric(self, loader, description, ignore_keys, prefix):
        compute_metrics, self.compute_metrics = self.compute_metrics, None
        loop = self.prediction_loop if getattr(self.args, "use_legacy_prediction_loop", False) else self.evaluation_loop
        begin = time.time()
        try:
            output = loop(
                loader,
                description=description,
                prediction_loss_only=True if compute_metrics is None else None,
                ignore_keys=ignore_keys,
                metric_key_prefix=prefix,
            )
        finally:
            self.compute_metrics = compute_metrics
        steps = math.ceil(output.num_samples / (self.args.eval_batch_size * self.args.world_size))
        output.metrics.update(speed_metrics(prefix, begin, num_samples=output.num_samples, num_steps=steps))
        return output

    def answers(self, examples, dataset, output, stage):
        raise NotImplementedError

    def evaluate_answers(self, dataset, examples, ignore_keys, prefix):
        dataset = self.eval_dataset if dataset is None else dataset
        examples = self.eval_examples if examples is None else examples
        output = self.loop_without_metric(self.get_eval_dataloader(dataset), "Evaluation", ignore_keys, prefix)
        metrics = output.metrics
        if self.post_process_function is not None and self.compute_metrics is not None and self.args.should_save:
            metrics = prefixed(self.compute_metrics(self.answers(examples, dataset, output, "eval")), prefix) | metrics
        if self.args.should_log:
            self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict_answers(self, dataset, examples, ignore_keys, prefix):
        output = self.loop_without_metric(self.get_test_dataloader(dataset), "Prediction", ignore_keys, prefix)
        if self.post_process_function is None or self.compute_metrics is None:
            return output
        found = self.answers(examples, dataset, output, "predict")
        metrics = prefixed(self.compute_metrics(found), prefix) | output.metrics
        return PredictionOutput(predictions=found.predictions, label_ids=found.label_ids, metrics=metrics)


class AnswerTrainer(AnswerMixin, Trainer):
    def answers(self, examples, dataset, output, stage):
        return self.post_process_function(examples, dataset, output.predictions, stage)

    def evaluate(self, eval_dataset=None, eval_examples=None, ignore_keys=None, metric_key_prefix: str = "eval"):
        return self.evaluate_answers(eval_dataset, eval_examples, ignore_keys, metric_key_prefix)

    def predict(self, predict_dataset, predict_examples, ignore_keys=None, metric_key_prefix: str = "test"):
        return self.predict_answers(predict_dataset, predict_examples, ignore_keys, metric_key_prefix)


class AnswerSeq2SeqTrainer(AnswerMixin, Seq2SeqTrainer):
    def answers(self, examples, dataset, output, stage):
        return self.post_process_function(examples, dataset, output, stage)

    def evaluate(
        self, eval_dataset=None, eval_examples=None, ignore_keys=None, metric_key_prefix: str = "eval", **gen_kwargs
    ):
        gen_kwargs = gen_kwargs.copy()
        if gen_kwargs.get("max_length") is None and self.args.generation_max_length is not None:
            gen_kwargs["max_length"] = self.args.generation_max_length
        if gen_kwargs.get("num_beams") is None and self.args.generation_num_beams is not None:
            gen_kwargs["num_beams"] = self.args.generation_num_beams
        self._gen_kwargs = gen_kwargs
        return self.evaluate_answers(eval_dataset, eval_examples, ignore_keys, metric_key_prefix)

    def predict(
        self, predict_dataset, predict_examples, ignore_keys=None, metric_key_prefix: str = "test", **gen_kwargs
    ):
        self._gen_kwargs = gen_kwargs.copy()
        return self.predict_answers(predict_dataset, predict_examples, ignore_keys, metric_key_prefix)

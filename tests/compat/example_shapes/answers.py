"""What the question answering scripts share: questions, a metric, and Trainers that turn predictions into answers."""

import time

import parts
from transformers import Trainer
from transformers.trainer_utils import EvalPrediction, PredictionOutput, speed_metrics


def make_questions(data_args):
    """Questions on texts that hold the answer, two words; every third question has none."""

    def context(i):
        return parts.sentence(i, 14 + i % 9)

    def answer(i):
        words = context(i).split()
        return {"text": " ".join(words[i % 8 : i % 8 + 2]) if i % 3 else "", "start": len(" ".join(words[: i % 8])) + 1}

    question = {"question": lambda i: parts.sentence(i + 3, 3)}
    return parts.make_data(data_args, id=lambda i: f"q{i}", context=context, answer=answer, **question)


def features_of(examples, features):
    found = {identity: [] for identity in examples["id"]}
    for place, identity in enumerate(features["example_id"]):
        found[identity].append(place)
    return found


def answer_metric(prediction):
    pairs = zip(prediction.predictions, prediction.label_ids, strict=True)
    return {"common": sum(len(set(found.split()) & set(right.split())) for found, right in pairs)}


class AnswerTrainer(Trainer):
    """As in trainer_qa.py: loops without the metric, which is computed from answers afterwards."""

    def __init__(self, *args, eval_examples=None, post_process_function=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.eval_examples = eval_examples
        self.post_process_function = post_process_function

    def loop_without_metric(self, loader, description, ignore_keys, prefix):
        compute_metrics, self.compute_metrics = self.compute_metrics, None
        begin = time.time()
        try:
            output = self.evaluation_loop(loader, description, ignore_keys=ignore_keys, metric_key_prefix=prefix)
        finally:
            self.compute_metrics = compute_metrics
        output.metrics.update(speed_metrics(prefix, begin, num_samples=output.num_samples))
        return output

    def answered(self, examples, dataset, output, prefix):
        found = self.post_process_function(examples, dataset, output.predictions, prefix)
        prediction = EvalPrediction(predictions=found, label_ids=[answer["text"] for answer in examples["answer"]])
        metrics = {f"{prefix}_{name}": value for name, value in self.compute_metrics(prediction).items()}
        return PredictionOutput(found, prediction.label_ids, {**metrics, **output.metrics})

    def evaluate(self, eval_dataset=None, eval_examples=None, ignore_keys=None, metric_key_prefix="eval", **gen_kwargs):
        self._gen_kwargs = gen_kwargs
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        examples = self.eval_examples if eval_examples is None else eval_examples
        loader = self.get_eval_dataloader(dataset)
        output = self.loop_without_metric(loader, "Evaluation", ignore_keys, metric_key_prefix)
        metrics = self.answered(examples, dataset, output, metric_key_prefix).metrics
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(self, predict_dataset, predict_examples, ignore_keys=None, metric_key_prefix="test", **gen_kwargs):
        self._gen_kwargs = gen_kwargs
        loader = self.get_test_dataloader(predict_dataset)
        output = self.loop_without_metric(loader, "Prediction", ignore_keys, metric_key_prefix)
        return self.answered(predict_examples, predict_dataset, output, metric_key_prefix)

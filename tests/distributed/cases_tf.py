"""A TFTrainer in two ranks, or in one with twice the batch."""

from hftrainer import TFTrainingArguments
from tests.support.tf_models import DenseModel, RecordingTrainer, rows


def train(folder, per_device):
    size = {"per_device_train_batch_size": per_device, "per_device_eval_batch_size": per_device}
    steps = {"max_steps": 7, "gradient_accumulation_steps": 2, "logging_steps": 1, "save_steps": 4}
    args = TFTrainingArguments(str(folder), report_to="none", disable_tqdm=True, use_cpu=True, **size, **steps)
    trainer = RecordingTrainer(DenseModel(), args, train_dataset=rows(40), eval_dataset=rows(11))
    trainer.train()
    trainer.evaluate()
    prediction = trainer.predict(rows(11))
    return {
        "log": trainer.seen,
        "labels": prediction.label_ids.tolist(),
        "predictions": prediction.predictions,
        "weights": trainer.model.state_dict(),
        "sizes": [args.n_replicas, args.train_batch_size, args.eval_batch_size, trainer.total_train_batch_size],
    }

"""Distillation: teach a small network what a larger one knows, by overriding `compute_loss`.

    python examples/distillation.py

Both read the handwritten digits of scikit-learn. The student, with a twentieth of the teacher's parameters, learns
from the labels and from how sure the teacher is of each class. They are right in about 90% and 85% of the cases,
guessing is in 10%.
"""

import os
from dataclasses import replace

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import kl_div, log_softmax, softmax
from transformers import ViTConfig, ViTForImageClassification

from hftrainer import HfArgumentParser, Trainer, TrainingArguments, set_seed


class DistillationTrainer(Trainer):
    """Half of the loss is how far the student's classes are from the teacher's, both softened by `temperature`."""

    def __init__(self, *args, teacher: torch.nn.Module, temperature: float = 3.0, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = teacher.eval()
        self.temperature = temperature

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = softmax(self.teacher(inputs["pixel_values"]).logits / self.temperature, dim=-1)
        guessed = log_softmax(outputs.logits / self.temperature, dim=-1)
        distance = kl_div(guessed, wanted, reduction="batchmean") * self.temperature**2
        loss = 0.5 * outputs.loss + 0.5 * distance
        return (loss, outputs) if return_outputs else loss


def make_model(width: int, layers: int) -> ViTForImageClassification:
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * width,
        num_labels=10,
        initializer_range=0.1,  # small models learn sooner from larger weights
    )
    return ViTForImageClassification(config)


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="demo_output/distillation",
        num_train_epochs=12,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=128,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=40,
        use_cpu=True,
    )
    (args,) = parser.parse_args_into_dataclasses()

    set_seed(args.seed)
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    samples = [{"pixel_values": image, "labels": int(n)} for image, n in zip(pixels, digits.target, strict=True)]
    data = {"train_dataset": samples[:1400], "eval_dataset": samples[1400:], "compute_metrics": accuracy}

    print("The teacher:")
    teacher_args = replace(args, output_dir=os.path.join(args.output_dir, "teacher"))
    teacher = Trainer(make_model(64, 3), teacher_args, **data)
    teacher.train()

    print("The student:")
    student = DistillationTrainer(make_model(16, 2), args, teacher=teacher.model, **data)
    student.train()
    student.save_model()
    student.save_state()
    for name, trainer in (("teacher", teacher), ("student", student)):
        count = trainer.get_num_trainable_parameters()
        print(f"Accuracy of the {name}, {count:,} parameters: {trainer.evaluate()['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()

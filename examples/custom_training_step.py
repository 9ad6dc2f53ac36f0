"""A custom training step: two backward passes a step, by overriding `training_step`.

    python examples/custom_training_step.py

Adversarial training (FGSM): each step shifts every pixel a little to where the loss grows, and learns from these
images as well. On digits that are attacked in this way, it is right in more than 60% of the
cases, and on untouched ones in 90%. Guessing gives 10%.
"""

import torch
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

from hftrainer import HfArgumentParser, Trainer, TrainingArguments, set_seed

SHIFT = 0.25  # of a pixel between -1 and 1


def attacked(model: torch.nn.Module, inputs: dict) -> dict:
    """The same images, shifted against the model."""
    pixels = inputs["pixel_values"].clone().requires_grad_()
    loss = model(**{**inputs, "pixel_values": pixels}).loss
    (slope,) = torch.autograd.grad(loss, pixels)
    return {**inputs, "pixel_values": (pixels + SHIFT * slope.sign()).clamp(-1, 1).detach()}


class AdversarialTrainer(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        """Runs forward and backward for one batch; the gradients of both passes add up."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        total = torch.tensor(0.0, device=self.args.device)
        for batch in (inputs, attacked(model, inputs)):
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, batch) / 2 / self.args.gradient_accumulation_steps
            self.accelerator.backward(loss)
            total += loss.detach()
        return total


def make_model() -> ViTForImageClassification:
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        num_labels=10,
        initializer_range=0.1,  # small models learn sooner from larger weights
    )
    return ViTForImageClassification(config)


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="demo_output/custom_training_step",
        num_train_epochs=5,
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
    trainer = AdversarialTrainer(
        model=make_model(),
        args=args,
        train_dataset=samples[:1400],
        eval_dataset=samples[1400:],
        compute_metrics=accuracy,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()

    model = trainer.model.eval()
    inputs = {"pixel_values": pixels[1400:], "labels": torch.tensor(digits.target[1400:])}
    inputs = {name: value.to(args.device) for name, value in inputs.items()}
    right = model(**attacked(model, inputs)).logits.argmax(-1) == inputs["labels"]
    print(f"Accuracy on untouched images: {trainer.evaluate()['eval_accuracy']:.3f}")
    print(f"Accuracy on attacked images:  {right.float().mean():.3f}")


if __name__ == "__main__":
    main()

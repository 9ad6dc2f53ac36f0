"""LoRA, with PEFT: adapt a model by training few of its weights.

    pip install peft
    python examples/lora.py

A vision transformer learns scikit-learn's handwritten digits, and is then shown them lying on their side: it is no
better than guessing, 10%. Adapters with 3% of its parameters bring it to almost 90%, and are all that is saved.
"""

import os
from dataclasses import replace

import torch
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

from hftrainer import HfArgumentParser, Trainer, TrainingArguments, set_seed


def make_model() -> ViTForImageClassification:
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=10,
        initializer_range=0.1,  # small models learn sooner from larger weights
    )
    return ViTForImageClassification(config)


def make_datasets(turned: bool) -> dict:
    """Images of shape (1, 8, 8) with their labels, to train and to evaluate."""
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    if turned:
        pixels = pixels.rot90(dims=(2, 3)).contiguous()
    samples = [{"pixel_values": image, "labels": int(n)} for image, n in zip(pixels, digits.target, strict=True)]
    return {"train_dataset": samples[:1400], "eval_dataset": samples[1400:]}


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="demo_output/lora",
        num_train_epochs=10,
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
    print("The base model:")
    base_args = replace(args, output_dir=os.path.join(args.output_dir, "base"))
    base = Trainer(make_model(), base_args, compute_metrics=accuracy, **make_datasets(turned=False))
    base.train()
    before = base.evaluate(make_datasets(turned=True)["eval_dataset"])["eval_accuracy"]

    print("Its adapters:")
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.05)
    args.learning_rate *= 5
    model = get_peft_model(base.model, lora)
    model.print_trainable_parameters()
    trainer = Trainer(model, args, compute_metrics=accuracy, **make_datasets(turned=True))
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    after = trainer.evaluate()["eval_accuracy"]
    print(f"Accuracy on digits that lie on their side: {before:.3f} before, {after:.3f} with adapters")


if __name__ == "__main__":
    main()

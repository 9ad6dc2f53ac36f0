"""The shape of run_clip.py: pictures and captions in one model, which is asked for its loss by the batch.

Its arguments are a subclass with a field of its own, as in run_mae.py.
"""

from dataclasses import dataclass, field

import parts
import torch
from pictures import flipped_at_random, make_pictures, vision_sizes
from transformers import CLIPConfig, CLIPModel, Trainer, TrainingArguments


@dataclass
class BaseRateArguments(TrainingArguments):
    base_learning_rate: float = field(default=1e-3, metadata={"help": "The learning rate, times the batch by 256."})


def collate(examples):
    tensors = {name: torch.tensor([row[name] for row in examples]) for name in ("input_ids", "attention_mask")}
    return {**tensors, "pixel_values": torch.stack([row["pixel_values"] for row in examples]), "return_loss": True}


def main():
    model_args, data_args, training_args, checkpoint = parts.begin(BaseRateArguments)
    training_args.learning_rate = training_args.base_learning_rate * training_args.train_batch_size / 256
    tokenizer = parts.word_tokenizer()
    ends = {"eos_token_id": tokenizer.sep_token_id, "bos_token_id": tokenizer.cls_token_id}
    text = {**parts.text_sizes(tokenizer), **ends}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision_sizes(), projection_dim=8))
    if model_args.freeze_text_model:
        for parameter in model.text_model.parameters():
            parameter.requires_grad = False

    def tokenize(rows):
        return tokenizer(rows["caption"], max_length=8, padding="max_length", truncation=True)

    def transform(rows):
        return {**rows, "pixel_values": [flipped_at_random(image) for image in rows["image"]]}

    raw = make_pictures(data_args, caption=lambda i: parts.sentence(i, 4))
    data = parts.prepare(training_args, raw, tokenize, keep=True)
    for split in data.values():
        split.set_transform(transform)
    trainer = Trainer(model=model, args=training_args, **parts.splits(data), data_collator=collate)
    parts.finish(trainer, checkpoint, "contrastive-image-text-modeling")

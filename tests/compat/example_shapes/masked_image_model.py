"""The shape of run_mim.py: masks drawn with numpy as pictures are read."""

import numpy as np
import parts
import torch
from pictures import SIZE, PictureArguments, flipped_at_random, make_pictures, vision_sizes
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForMaskedImageModeling


class MaskMaker:
    """Masks squares of `mask_size` pixels, written down by patches of `patch_size`."""

    def __init__(self, mask_size, patch_size, ratio):
        self.side, self.scale = SIZE // mask_size, mask_size // patch_size
        self.count = int(np.ceil(self.side**2 * ratio))

    def __call__(self):
        mask = np.zeros(self.side**2, dtype=int)
        mask[np.random.permutation(self.side**2)[: self.count]] = 1
        square = mask.reshape(self.side, self.side).repeat(self.scale, axis=0).repeat(self.scale, axis=1)
        return torch.tensor(square.flatten())


def collate(examples):
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    return {"pixel_values": pixel_values, "bool_masked_pos": torch.stack([example["mask"] for example in examples])}


def main():
    _, data_args, training_args, checkpoint = parts.begin(parts.ModelArguments, PictureArguments, TrainingArguments)
    data = make_pictures(data_args.train_samples, data_args.train_val_split)
    config = ViTConfig(**vision_sizes(encoder_stride=4))
    make_mask = MaskMaker(data_args.mask_patch_size, config.patch_size, data_args.mask_ratio)

    def preprocess(rows):
        changed = [flipped_at_random(image) for image in rows["image"]]
        return {**rows, "pixel_values": changed, "mask": [make_mask() for _ in changed]}

    data["train"].set_transform(preprocess)
    data["validation"].set_transform(preprocess)
    trainer = Trainer(
        model=ViTForMaskedImageModeling(config),
        args=training_args,
        **parts.splits(data),
        data_collator=collate,
    )
    parts.finish(trainer, checkpoint, "masked-image-modeling", tags=["masked-image-modeling"])


if __name__ == "__main__":
    main()

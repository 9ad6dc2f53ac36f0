"""TFTrainer: a script of transformers 4 on torch; handwritten digits from tf.data, without a TensorFlow model.

    pip install 'hftrainer[tf]' tensorflow-cpu scikit-learn
    python -m hftrainer run examples/tf_trainer.py

The script knows nothing of hftrainer: `run` gives it TFTrainer, and torch's model for the name of TensorFlow's.
"""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from transformers import TFAutoModelForImageClassification, TFTrainer, TFTrainingArguments, ViTConfig


def dataset(images: np.ndarray, labels: np.ndarray) -> tf.data.Dataset:
    """Pairs (features, label), as TFTrainer takes them."""
    features = {"pixel_values": images.reshape(-1, 1, 8, 8).astype("float32") / 16}
    return tf.data.Dataset.from_tensor_slices((features, labels.astype("int64")))


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    train, test = dataset(images[:1500], labels[:1500]), dataset(images[1500:], labels[1500:])
    args = TFTrainingArguments(
        "demo_output/tf",
        num_train_epochs=8,
        per_device_train_batch_size=32,
        learning_rate=4e-3,
        warmup_steps=20,
        logging_steps=47,
        evaluation_strategy="steps",
        eval_steps=94,
    )
    with args.strategy.scope():
        config = ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            num_labels=10,
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=96,
        )
        model = TFAutoModelForImageClassification.from_config(config)
    trainer = TFTrainer(model, args, train_dataset=train, eval_dataset=test, compute_metrics=accuracy)
    trainer.train()
    trainer.save_model()
    print("test accuracy", trainer.evaluate()["eval_accuracy"])


if __name__ == "__main__":
    main()

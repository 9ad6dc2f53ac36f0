"""The three models of this folder: transformers 4.15.0, tensorflow-cpu 2.7.4, Python 3.9."""

import tensorflow as tf
from transformers import (
    BertConfig,
    TFBertForQuestionAnswering,
    TFBertForSequenceClassification,
    TFBertForTokenClassification,
)

SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 32, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0}
SMALL |= {"attention_probs_dropout_prob": 0.0, "initializer_range": 0.2}
tf.random.set_seed(7)
for name, kind, labels in (
    ("text", TFBertForSequenceClassification, 3),
    ("ner", TFBertForTokenClassification, 3),
    ("qa", TFBertForQuestionAnswering, 2),
):
    model = kind(BertConfig(**SMALL, num_labels=labels))
    model(model.dummy_inputs)
    model.save_pretrained(f"model_{name}")

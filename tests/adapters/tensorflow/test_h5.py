"""`tf_model.h5` of TensorFlow models, read by h5py alone: the torch model computes what TensorFlow's does."""

import importlib
import importlib.util
import os

import numpy as np
import pytest
import torch

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
transformers = importlib.import_module("transformers")
if not hasattr(transformers, "TFPreTrainedModel") or importlib.util.find_spec("tf_keras") is None:
    pytest.skip("this release of transformers has no TensorFlow models", allow_module_level=True)

from hftrainer_tensorflow.h5_weights import torch_class  # noqa: E402

SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SHORT = {"max_position_embeddings": 16}
TEXT = {"input_ids": np.array([[5, 6, 7, 8], [9, 10, 11, 12]]), "attention_mask": np.ones((2, 4), "int64")}
IMAGES = {"pixel_values": np.random.default_rng(0).normal(size=(2, 3, 16, 16)).astype("float32")}
SEQUENCES = {**TEXT, "decoder_input_ids": np.array([[0, 5, 6], [0, 7, 8]])}
VISION = {**SMALL, "image_size": 16, "patch_size": 8}
GPT = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
BART = {
    **{"vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 16},
    **{
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in {"attention_heads": 2, "ffn_dim": 32}.items()
    },
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2},
}
#: Class → its config, and what it computes with.
MODELS = {
    "BertForSequenceClassification": (SMALL | SHORT, TEXT),
    "BertForMaskedLM": (SMALL | SHORT, TEXT),
    "RobertaForTokenClassification": (SMALL | SHORT | {"pad_token_id": 1}, TEXT),
    "DistilBertForQuestionAnswering": (
        {"vocab_size": 64, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
        TEXT,
    ),
    "AlbertForSequenceClassification": (SMALL | SHORT | {"embedding_size": 8}, TEXT),
    "ElectraForTokenClassification": (SMALL | SHORT | {"embedding_size": 8}, TEXT),
    "DebertaV2ForSequenceClassification": (SMALL | SHORT | {"pooler_hidden_size": 16}, TEXT),
    "MPNetForSequenceClassification": (SMALL | SHORT | {"pad_token_id": 1}, TEXT),
    "XLMRobertaForMaskedLM": (SMALL | SHORT | {"pad_token_id": 1}, TEXT),
    "GPT2LMHeadModel": (GPT, TEXT),
    "T5ForConditionalGeneration": (T5, SEQUENCES),
    "BartForConditionalGeneration": (BART, SEQUENCES),
    "MarianMTModel": (BART, SEQUENCES),
    "ViTForImageClassification": (VISION, IMAGES),
    "DeiTForImageClassification": (VISION, IMAGES),
    "ConvNextForImageClassification": (
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
        IMAGES,
    ),
    "MobileBertForSequenceClassification": (
        SMALL | SHORT | {"embedding_size": 8, "intra_bottleneck_size": 8, "true_hidden_size": 8},
        TEXT,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_torch_model_computes_what_tensorflow_does(tmp_path, name):
    settings, inputs = MODELS[name]
    kind = getattr(transformers, f"TF{name}")
    config = kind.config_class(**settings)
    theirs = kind(config)
    expected = theirs(inputs, training=False)
    theirs.save_pretrained(tmp_path)
    assert (tmp_path / "tf_model.h5").is_file()
    ours = torch_class(transformers, f"TF{name}").from_pretrained(tmp_path)
    assert type(ours) is getattr(transformers, name)
    with torch.no_grad():
        found = ours(**{key: torch.from_numpy(value) for key, value in inputs.items()})
    key = "start_logits" if "QuestionAnswering" in name else "logits"
    np.testing.assert_allclose(found[key].numpy(), expected[key].numpy(), atol=2e-5)


def test_model_without_a_head_reads_weights_of_one_with_a_head(tmp_path):
    config = transformers.BertConfig(**SMALL, **SHORT)
    theirs = transformers.TFBertForMaskedLM(config)
    theirs(TEXT)
    theirs.save_pretrained(tmp_path)
    ours = torch_class(transformers, "TFBertModel").from_pretrained(tmp_path, add_pooling_layer=False)
    with torch.no_grad():
        found = ours(**{key: torch.from_numpy(value) for key, value in TEXT.items()}).last_hidden_state
    expected = theirs.bert(TEXT)[0]
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=2e-5)


def test_sharded_weights_are_read(tmp_path):
    config = transformers.BertConfig(**SMALL, **SHORT)
    theirs = transformers.TFBertForMaskedLM(config)
    expected = theirs(TEXT)[0]
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "tf_model.h5.index.json").is_file()
    ours = torch_class(transformers, "TFAutoModelForMaskedLM").from_pretrained(tmp_path)
    with torch.no_grad():
        found = ours(**{key: torch.from_numpy(value) for key, value in TEXT.items()})[0]
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=2e-5)

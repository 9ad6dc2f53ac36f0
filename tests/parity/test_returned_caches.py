"""Evaluations of models that return their cache, which transformers renamed in v5.24, or other objects."""

import pytest
import torch

from tests.support.parity import assert_agree, build
from tests.support.small_models import language_data, make_llama, make_t5, plain_data, t5_data

SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1}


def make_mamba():
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4))


def make_encoder_decoder():
    from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel

    decoder = BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**SIZES), decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return EncoderDecoderModel(config=config)


def make_prefix():
    from peft import PrefixTuningConfig, get_peft_model

    return get_peft_model(make_llama(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def make_llava():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    configs = {
        "vision_config": CLIPVisionConfig(**sizes, image_size=8, patch_size=4),
        "text_config": LlamaConfig(**SIZES),
    }
    return LlavaForConditionalGeneration(LlavaConfig(**configs, image_token_index=49, vision_feature_layer=-1))


def picture_data():
    image = torch.full((4,), 49)
    return [
        {**row, "input_ids": torch.cat([image, row["input_ids"][4:] % 49]), "pixel_values": torch.ones(3, 8, 8)}
        for row in language_data(5)
    ]


def predict(name, folder, make_model, data, **trainer_kwargs):
    torch.manual_seed(0)
    model = make_model()
    model.config.use_cache = True
    trainer_kwargs = {"model": model, "eval_dataset": data, "compute_metrics": largest, **trainer_kwargs}
    trainer, _ = build(name, "plain", folder, trainer=trainer_kwargs, per_device_eval_batch_size=2, use_cache=True)
    metrics = trainer.evaluate()
    found = trainer.predict(data).predictions
    shapes = [part.shape for part in found] if isinstance(found, tuple) else found.shape
    return {key: metrics[key] for key in ("eval_loss", "eval_largest")}, shapes


def largest(prediction):
    logits = prediction.predictions
    return {"largest": float((logits[0] if isinstance(logits, tuple) else logits).max())}


@pytest.mark.parametrize(
    ("make_model", "data"),
    [
        pytest.param(make_llama, language_data(5), id="causal"),
        pytest.param(make_t5, t5_data(5), id="T5"),
        pytest.param(make_mamba, language_data(5), id="state-space"),
        pytest.param(make_encoder_decoder, t5_data(5), id="encoder-decoder"),
        pytest.param(make_prefix, language_data(5), id="prefix-tuning"),
    ],
)
def test_cache_is_left_out_of_predictions(tmp_path, make_model, data):
    """Reported for v5.24, where its key is `cache` and configs no longer name it."""
    assert_agree(lambda name: predict(name, tmp_path / name, make_model, data))


def test_config_may_call_the_cache_past_key_values(tmp_path):
    """A model from the Hub with code of its own lists `past_key_values`; transformers then fails from v5.24 on."""

    def make():
        model = make_llama()
        model.config.keys_to_ignore_at_inference = ["past_key_values"]
        return model

    _, shape = predict("hftrainer", tmp_path, make, language_data(5))
    assert shape == (5, 12, 50)


def test_outputs_without_tensors_are_left_out(tmp_path, caplog):
    """transformers fails at such an output, which LLaVA has."""
    _, shape = predict("hftrainer", tmp_path, make_llava, picture_data())
    warnings = [record.getMessage() for record in caplog.records if "is left out" in record.getMessage()]
    assert shape == (5, 12, 50)
    assert len(warnings) <= 1


class Strange(torch.nn.Module):
    def __init__(self, as_tuple=False):
        super().__init__()
        self.layer = torch.nn.Linear(8, 3)
        self.as_tuple = as_tuple

    def forward(self, x, labels=None):
        logits = self.layer(x)
        outputs = {"loss": logits.mean(), "logits": logits, "memory": object(), "mixed": (logits, None), "pair": (x, x)}
        return tuple(outputs.values()) if self.as_tuple else outputs


@pytest.mark.parametrize("as_tuple", [False, True])
def test_warning_names_each_output_that_is_no_tensor_once(tmp_path, caplog, as_tuple):
    trainer_kwargs = {"model": Strange(as_tuple), "eval_dataset": plain_data(6)}
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer=trainer_kwargs, per_device_eval_batch_size=2)
    output = trainer.predict(plain_data(6))
    logits, (first, second) = output.predictions
    assert logits.shape == (6, 3)
    assert first.shape == second.shape == (6, 8)
    warnings = sorted(record.getMessage() for record in caplog.records if "is left out" in record.getMessage())
    kinds = {"number 2": "an object", "number 3": "None"} if as_tuple else {"'memory'": "an object", "'mixed'": "None"}
    assert [text.partition(", which")[0] for text in warnings] == [
        f"The model's output {name} contains {kind}" for name, kind in kinds.items()
    ]
    assert all(
        "add its key to ignore_keys or to the config's keys_to_ignore_at_inference." in text for text in warnings
    )

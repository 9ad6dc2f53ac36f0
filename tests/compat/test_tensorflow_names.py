"""`install()` gives scripts of v4 the names of TensorFlow's classes, and takes them back."""

import json

import pytest

SCRIPT = """
import json, sys, tempfile, warnings
warnings.simplefilter("ignore")
import hftrainer
if sys.argv[1] == "install first":
    hftrainer.install()
import transformers
before = hasattr(transformers, "TFTrainer")
hftrainer.install()
from transformers import TFTrainer, TFTrainingArguments, create_optimizer
from transformers.trainer_tf import TFTrainer as of_module
from transformers.training_args_tf import TFTrainingArguments as arguments_of_module
from transformers import AutoTokenizer, PreTrainedTokenizerBase
found = {
    "ours": [TFTrainer is hftrainer.TFTrainer is of_module, arguments_of_module is hftrainer.TFTrainingArguments],
    "batch_encode_plus": hasattr(PreTrainedTokenizerBase, "batch_encode_plus"),
    "no such": [name for name in ("TFNothing", "TFBertConfig", "TFAutoNothing") if hasattr(transformers, name)],
}
if int(transformers.__version__.split(".")[0]) >= 5:
    from transformers import TFAutoModelForSequenceClassification, TFBertForSequenceClassification
    small = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=32)
    config = transformers.BertConfig(**small)
    model = TFBertForSequenceClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = TFAutoModelForSequenceClassification.from_pretrained(folder, from_pt=True)
    found["classes"] = [
        type(model) is type(again) is type(TFAutoModelForSequenceClassification.from_config(config))
        is transformers.BertForSequenceClassification,
        TFBertForSequenceClassification.__name__ == "TFBertForSequenceClassification",
        TFBertForSequenceClassification is transformers.TFBertForSequenceClassification,
    ]
hftrainer.uninstall()
found["after"] = [hasattr(transformers, "TFTrainer"), "transformers.trainer_tf" in sys.modules]
print("FOUND", json.dumps(found))
"""


@pytest.mark.parametrize("order", ["install first", "transformers first"])
def test_tensorflow_names_are_added_by_install_and_removed(tmp_path, processes, order):
    done = processes.run("-c", SCRIPT, order, cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))[6:])
    assert found["ours"] == [True, True]
    assert found["batch_encode_plus"]
    assert found["no such"] == []
    assert all(found.get("classes", []))
    assert found["after"] == [False, False]

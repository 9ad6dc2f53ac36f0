"""Every code block, command line and configuration of the documents that hftrainer follows, and what became of it.

python -m tests.docs.documents.blocks             the count by outcome
python -m tests.docs.documents.blocks FOLDER      and whether the documents in a folder have these blocks, and no others

A block is named by its document and its line; `trainer_api_v4.48` is one line, so there it is the number: blocks
between fences first, then the options in the text.
"""

import collections
import re
import sys
from pathlib import Path
from typing import NamedTuple

SAME = "same"
LEDGER = "ledger: "
NOT_OURS = "not the Trainer's: "
INSTALLS = NOT_OURS + "installs a library"
FAIRSCALE = NOT_OURS + "installs FairScale, which hftrainer does without"
CUDA = NOT_OURS + "prepares a compiler for CUDA extensions"
#: Lanes with environments of their own; blocks of "tf" are those of TFTrainer.
LANES = ("deepspeed", "tf", "xla")


class Block(NamedTuple):
    """One block.

    Attributes:
        line: where it begins.
        begins: how, as far as the line has it.
        outcome: SAME (as the document's release), LEDGER with the row of tests/support/differences.py, or NOT_OURS with
            the reason.
        lane: where its test runs, if not in `make docs`.
        test: what tests it, if not the document's file: `document:line` of the same block, or `path::function`.
    """

    line: int
    begins: str
    outcome: str
    lane: str = ""
    test: str = ""


def ledger(row: str) -> str:
    return LEDGER + row


ANY_SIZE = "compute_loss without num_items_in_batch"
OLDER = "older releases (install(), python -m hftrainer run)"
SHARDED_DDP = "sharded_ddp"
FP16 = "fp16 on a CPU"
FSDP1 = "fsdp='no_shard', 'hybrid_shard' and keys that only FSDP1 has"
SPELLED = "fsdp='full shard', backward_prefetch='backward_pos'"
BEAMS = "Seq2SeqTrainer: max_length and num_beams by position"
DEVICES = "tests/unit/parallel/test_devices.py::"
SETTINGS = "tests/unit/parallel/test_deepspeed_settings.py::"
LAUNCHERS = "tests/reliability/machines/test_launchers.py::"
DEFAULTS = "deepspeed: values that differ from an argument's default"

BLOCKS: dict[str, list[Block]] = {
    "trainer_api_v4.1": [
        Block(46, "from transformers import Trainer", ledger("compute_loss without return_outputs")),
        Block(133, "pip install fairscale", FAIRSCALE),
        Block(139, "torch.distributed.launch --nproc_per_node=", SAME, test="trainer_api_v4.1:195"),
        Block(145, "cd examples/seq2seq", ledger(SHARDED_DDP)),
        Block(181, "pip install deepspeed", INSTALLS),
        Block(188, "--deepspeed ds_config.json", SAME, "deepspeed", "trainer_api_v4.1:201"),
        Block(195, "python -m torch.distributed.launch", SAME),
        Block(201, "deepspeed --num_gpus=2", SAME, "deepspeed"),
        Block(212, "cd examples/seq2seq", SAME, "deepspeed"),
        Block(220, "--deepspeed --deepspeed_config", NOT_OURS + "the spelling of DeepSpeed's own documents"),
        Block(245, "{", ledger(DEFAULTS), "deepspeed"),
        Block(292, "{", SAME, "deepspeed"),
        Block(309, "--learning_rate 3e-5", SAME, test=SETTINGS + "test_both_configurations_of_v4_1_mean_the_same"),
        Block(333, "--per_device_train_batch_size 8", SAME, "deepspeed"),
        Block(349, "{", SAME, "deepspeed", "trainer_api_v4.1:292"),
        Block(390, "{", ledger(DEFAULTS), "deepspeed"),
        Block(419, "--lr_scheduler_type constant_with_warmup", SAME, "deepspeed", "trainer_api_v4.1:429"),
        Block(420, "--lr_scheduler_type linear", SAME, "deepspeed", "trainer_api_v4.1:435"),
        Block(429, "--lr_scheduler_type constant_with_warmup", SAME, "deepspeed"),
        Block(435, "--lr_scheduler_type linear", SAME, "deepspeed"),
        Block(448, "{", ledger(DEFAULTS), "deepspeed"),
        Block(468, "--fp16 --fp16_backend amp", ledger(FP16)),
        Block(474, "{", SAME, "deepspeed"),
        Block(
            485,
            "--fp16 --fp16_backend apex --fp16_opt_level 01",
            ledger("fp16_backend='apex', half_precision_backend='apex'"),
        ),
        Block(491, "{", SAME, "deepspeed"),
        Block(503, "--max_grad_norm", SAME, "deepspeed", "trainer_api_v4.1:509"),
        Block(509, "{", SAME, "deepspeed"),
    ],
    "trainer_api_v4.15": [
        Block(32, "from torch import nn", ledger(ANY_SIZE)),
        *(
            Block(line, "(", SAME)
            for line in (
                *(45, 73, 91, 93, 117, 122, 128, 132, 143, 208, 212, 261, 271, 280, 310, 315, 338, 356, 359, 371, 388),
            )
        ),
        Block(220, "init_mem_cpu_alloc_delta", SAME),
        Block(410, "( eval_dataset", ledger(BEAMS)),
        Block(441, "( test_dataset", ledger(BEAMS)),
        *(Block(line, "(", SAME, "tf") for line in (479, 522, 542, 558, 577, 581, 606, 611)),
        *(Block(line, name, SAME, "tf") for line, name in ((624, "COMET_MODE"), (626, "COMET_PROJECT_NAME"))),
        *(Block(line, name, SAME, "tf") for line, name in ((628, "COMET_OFFLINE_DIRECTORY"), (637, "Environment:"))),
        Block(642, "( output_dir", ledger(OLDER)),
        Block(703, "( local = True", SAME),
        Block(729, "( output_dir", ledger(OLDER)),
        Block(804, "( output_dir", SAME, "tf"),
        Block(855, "resume_from_checkpoint=True", SAME),
        Block(856, "which will resume", SAME),
        Block(863, '"checkpoint"', SAME),
        Block(865, '"all_checkpoints"', SAME, test="tests/parity/test_hub.py::test_strategies"),
        Block(889, "[...]", ledger("log_level='passive'")),
        Block(904, "my_app.py ... --log_level warning", SAME),
        Block(906, "my_app.py ... --log_level warning", SAME),
        Block(909, "my_app.py ... --log_level error", SAME),
        Block(927, "pip install fairscale", FAIRSCALE),
        Block(945, "which nvcc", CUDA),
        Block(949, "/usr/local/cuda-10.2", CUDA),
        Block(958, "echo $PATH", CUDA),
        Block(970, "export PATH=", CUDA),
        Block(990, "sudo ln -s", CUDA),
        Block(1011, "pip install fairscale", FAIRSCALE),
        Block(1015, "pip install transformers[fairscale]", FAIRSCALE),
        Block(1024, "pip install fairscale", FAIRSCALE),
        Block(1026, "git clone", FAIRSCALE),
        Block(1034, "pip uninstall -y fairscale", FAIRSCALE),
        Block(1036, "pip install -v", FAIRSCALE),
        Block(1040, "To use the first version", ledger(SHARDED_DDP), test="trainer_api_v4.15:1046"),
        Block(1042, "torch.distributed.launch --nproc_per_node=", SAME, test="trainer_api_v4.1:195"),
        Block(1046, "python -m torch.distributed.launch", ledger(SHARDED_DDP)),
        Block(1062, "--sharded_ddp zero_dp_2", ledger(SHARDED_DDP), test="trainer_api_v4.15:1068"),
        Block(1063, "or--sharded_ddp zero_dp_3", ledger(SHARDED_DDP)),
        Block(1068, "python -m torch.distributed.launch", ledger(SHARDED_DDP)),
        Block(1080, "to enable ZeRO-offload", ledger(SHARDED_DDP)),
        Block(1098, "if you are not doing this", ledger(SHARDED_DDP)),
    ],
    "trainer_api_v4.48": [
        Block(1, "torchrun --nproc_per_node=2", SAME),
        Block(2, "accelerate launch --num_processes 2", SAME),
        Block(3, "deepspeed --num_gpus 2", SAME, "deepspeed"),
        Block(4, "CUDA_VISIBLE_DEVICES=0,2 torchrun", SAME),
        Block(5, "CUDA_VISIBLE_DEVICES=2,0 torchrun", SAME),
        Block(6, "CUDA_VISIBLE_DEVICES=2,0 python", ledger("several visible GPUs, and no launcher")),
        Block(7, "CUDA_VISIBLE_DEVICES= python", SAME),
        Block(8, "export CUDA_VISIBLE_DEVICES=0,2", SAME),
        Block(9, "export CUDA_DEVICE_ORDER=PCI_BUS_ID", SAME),
        Block(10, "export CUDA_DEVICE_ORDER=FASTEST_FIRST", SAME),
        Block(11, "export CUDA_VISIBLE_DEVICES=1,0", SAME),
        Block(12, "pip install deepspeed", INSTALLS),
        Block(13, "which nvcc", CUDA),
        Block(14, "/usr/local/cuda-10.2", CUDA),
        Block(15, "echo $PATH", CUDA),
        Block(16, "export PATH=", CUDA),
        Block(17, "sudo ln -s", CUDA),
        Block(18, "if trainer.is_fsdp_enabled:", ledger("save_model() with SHARDED_STATE_DICT")),
        Block(19, "-m torch.distributed.launch", SAME, test="trainer_api_v4.1:195"),
        *(
            Block(20 + number, f"--fsdp {words}", ledger("fsdp without a GPU"))
            for number, words in enumerate(("full_shard", "shard_grad_op"))
        ),
        *(
            Block(22 + number, f"--fsdp {words}", ledger(FSDP1))
            for number, words in enumerate(("no_shard", "hybrid_shard", "hybrid_shard_zero2"))
        ),
        *(
            Block(25 + number, f'--fsdp "{strategy} {words}"', ledger("fsdp without a GPU"))
            for number, (words, strategy) in enumerate(
                (words, strategy)
                for words in ("offload", "auto_wrap", "offload auto_wrap")
                for strategy in ("full_shard", "shard_grad_op")
            )
        ),
        Block(31, "--fsdp_config", ledger(SPELLED)),
        Block(32, "--predict_with_generate", ledger("generating with a sharded model")),
        Block(33, '--fsdp "full shard"', ledger(SPELLED)),
        Block(34, "--fsdp_config", SAME, "xla", "tests/adapters/xla/test_sharding.py::test_wrapped_trains_as_the_cpu"),
    ],
    "trainer_behaviours_v4.48": [
        Block(21, "`output_dir` set to a directory", SAME),
        Block(24, "default to [`default_data_collator`]", SAME),
        Block(
            33,
            "manually set the seed of this `generator`",
            SAME,
            test="tests/distributed/test_data.py::test_same_as_transformers",
        ),
        Block(38, "dataset prepending the dictionary key", SAME),
        Block(43, "This supercedes the `tokenizer`", SAME),
        Block(48, "The function may have zero argument", SAME),
        Block(52, "A function that accepts the raw model outputs", SAME),
        Block(58, "`True`, your compute_metrics function", SAME),
        Block(65, "If you want to remove one", SAME),
        Block(68, "model and a scheduler given by", SAME),
        Block(71, "Overrides `optim` and `optim_args`", SAME),
        Block(79, "Note that the labels (second parameter)", SAME),
        Block(83, "- **model**", SAME),
        Block(85, "- **model_wrapped**", SAME),
        Block(89, "- **is_model_parallel**", SAME),
        Block(91, "- **place_model_on_device**", SAME),
        Block(94, "- **is_in_train**", SAME),
        Block(99, "Activates the neftune", SAME),
        Block(103, "Deactivates the neftune", SAME),
        Block(106, "Add a callback", SAME),
        Block(116, "If the callback is not found", SAME),
        Block(127, "Remove a callback", SAME),
        Block(138, "Will use no sampler", SAME),
        Block(150, "If a `str`, will use", SAME),
        Block(165, "We provide a reasonable default", ledger("create_optimizer_and_scheduler")),
        Block(170, "Get all parameter names", SAME),
        Block(182, "Get the number of trainable", SAME),
        Block(185, "Returns the learning rate of each", SAME),
        Block(188, "Returns optimizer group", SAME),
        Block(195, "Returns the optimizer class", SAME),
        Block(203, "Setup the scheduler", SAME),
        Block(210, "Helper to get number of samples", SAME),
        Block(214, "Helper to get number of tokens", SAME),
        Block(221, "resume_from_checkpoint", SAME, test="trainer_api_v4.15:855"),
        Block(225, "trial (", ledger("train(trial={...}) outside a search")),
        Block(227, "ignore_keys_for_eval", SAME),
        Block(235, "If args.metric_for_best_model is not set", SAME),
        Block(259, "[`~trainer_utils.default_hp_space_optuna`]", SAME),
        Block(270, '`"minimize"` and `"maximize"`', SAME),
        Block(301, "Prepares one `data`", SAME),
        Block(311, "A helper wrapper that creates", SAME),
        Block(370, "of the datasets. If you, for example", SAME),
        Block(379, "metric_key_prefix", SAME),
        Block(408, "one array. The padding index", SAME),
        Block(414, "- predictions", SAME),
        Block(425, "Gather value of `tensors`", SAME),
        Block(448, "Tuple[Optional[torch.Tensor]", SAME),
        Block(460, "Returns:", SAME),
        Block(
            495,
            "commit_message",
            ledger("the output folder during push_to_hub"),
            test="tests/parity/test_hub.py::test_strategies",
        ),
        Block(519, "Add SageMaker Checkpointing", ledger("methods that only earlier releases have")),
        Block(521, "Sets values in the deepspeed plugin", SAME, "deepspeed"),
    ],
    "trainer_guide_zh_v4.48": [
        Block(46, "from torch import nn", ledger(ANY_SIZE)),
        Block(85, "• resume_from_checkpoint=True", SAME, test="trainer_api_v4.15:855"),
        Block(86, "• resume_from_checkpoint=checkpoint_dir", SAME, test="trainer_api_v4.15:856"),
        Block(90, '• "checkpoint"', SAME, test="trainer_api_v4.15:863"),
        Block(91, '• "all_checkpoints"', SAME, test="trainer_api_v4.15:865"),
        Block(108, "[...]", ledger("log_level='passive'"), test="trainer_api_v4.15:889"),
        Block(128, "my_app.py", SAME, test="trainer_api_v4.15:904"),
        Block(132, "my_app.py", SAME, test="trainer_api_v4.15:906"),
        Block(138, "my_app.py", SAME, test="trainer_api_v4.15:909"),
        Block(154, "python -m torch.distributed.launch", SAME, test="trainer_api_v4.1:195"),
        Block(158, "accelerate launch --num_processes 2", SAME, test="trainer_api_v4.48:2"),
        Block(159, "deepspeed --num_gpus 2", SAME, "deepspeed", "trainer_api_v4.48:3"),
        Block(173, "CUDA_VISIBLE_DEVICES=0,2 python -m torch.distributed.launch", SAME),
        Block(179, "CUDA_VISIBLE_DEVICES=2,0 python -m torch.distributed.launch", SAME),
        Block(
            185,
            "CUDA_VISIBLE_DEVICES=2,0 python",
            ledger("several visible GPUs, and no launcher"),
            test="trainer_api_v4.48:6",
        ),
        Block(189, "CUDA_VISIBLE_DEVICES= python", SAME, test="trainer_api_v4.48:7"),
        Block(193, "export CUDA_VISIBLE_DEVICES=0,2", SAME),
        Block(203, "export CUDA_DEVICE_ORDER=PCI_BUS_ID", SAME, test="trainer_api_v4.48:9"),
        Block(205, "export CUDA_DEVICE_ORDER=FASTEST_FIRST", SAME, test="trainer_api_v4.48:10"),
        Block(211, "export CUDA_VISIBLE_DEVICES=1,0", SAME, test="trainer_api_v4.48:11"),
        Block(233, "pip install deepspeed", INSTALLS),
        *(Block(line, words, CUDA) for line, words in ((247, "which nvcc"), (255, "/usr/local/cuda-10.2"))),
        *(Block(line, words, CUDA) for line, words in ((262, "echo $PATH"), (273, "export PATH="), (290, "sudo ln"))),
        Block(309, "• FULL_SHARD", ledger("fsdp without a GPU"), test="trainer_api_v4.48:20"),
        Block(310, "• SHARD_GRAD_OP", ledger("fsdp without a GPU"), test="trainer_api_v4.48:21"),
        Block(311, "• NO_SHARD", ledger(FSDP1), test="trainer_api_v4.48:22"),
        Block(312, "•", ledger("fsdp without a GPU"), test="trainer_api_v4.48:25"),
        Block(314, "•", ledger("fsdp without a GPU"), test="trainer_api_v4.48:27"),
        Block(316, "•", ledger("fsdp without a GPU"), test="trainer_api_v4.48:29"),
        Block(318, "•", ledger(SPELLED)),
        Block(330, "•", ledger("generating with a sharded model"), test="trainer_api_v4.48:32"),
        Block(340, "", ledger(SPELLED), test="trainer_api_v4.48:33"),
        Block(365, "export TASK_NAME=mrpc", SAME),
        Block(381, "1. ", ledger("PYTORCH_ENABLE_MPS_FALLBACK"), test=DEVICES + "test_hints"),
        Block(395, "1. ", INSTALLS),
        Block(397, "2. ", NOT_OURS + "writes the four files below"),
        Block(401, "compute_environment: LOCAL_MACHINE", ledger(FP16)),
        Block(421, "compute_environment: LOCAL_MACHINE", SAME, test=LAUNCHERS + "test_accelerate_shards"),
        Block(448, "compute_environment: LOCAL_MACHINE", SAME, "deepspeed"),
        Block(467, "compute_environment: LOCAL_MACHINE", SAME, "deepspeed"),
        Block(490, "cd transformers", ledger("fsdp without a GPU")),
        Block(505, "cd transformers", ledger("fsdp without a GPU")),
        Block(540, "from transformers import Trainer, TrainingArguments", SAME),
    ],
}


def counts(document: str) -> collections.Counter[str]:
    """Kind of outcome → number of the document's blocks."""
    found: collections.Counter[str] = collections.Counter()
    for block in BLOCKS[document]:
        kind = block.outcome.partition(":")[0]
        found[f"lane {block.lane}" if block.lane else kind] += 1
    return found


def table() -> list[str]:
    """The counts of all documents, a line each, and their sum."""
    kinds = [SAME, "ledger", *(f"lane {lane}" for lane in LANES), NOT_OURS.rstrip(": ")]
    rows = [("", "blocks", *kinds)]
    every = {name: counts(name) for name in BLOCKS}
    every["all"] = sum(every.values(), collections.Counter())
    for name, found in every.items():
        rows.append((name, str(found.total()), *(str(found[kind]) for kind in kinds)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def pieces(document: str, text: str) -> dict[int, str]:
    """Line → what stands there; of the document that is one line, number → block."""
    if document != "trainer_api_v4.48":
        return {number: line.strip() for number, line in enumerate(text.splitlines(), 1)}
    fenced = re.findall(r"```\w+ (.*?)```", text)
    options = [words for words in re.findall(r"`([^`]*)`", re.sub(r"```.*?```", "", text)) if words.startswith("-")]
    return dict(enumerate([*fenced, *options], 1))


def marked(document: str, text: str) -> set[int]:
    """Where the document marks blocks, if it does."""
    lines = text.splitlines()
    if document == "trainer_api_v4.48":
        return set(pieces(document, text))
    return {number + 2 for number, line in enumerate(lines, 1) if line.strip().startswith(".. code-block::")}


def compare(folder: Path) -> list[str]:
    """What differs between the table and the documents in a folder."""
    wrong = []
    for document, blocks in BLOCKS.items():
        text = (folder / f"{document}.txt").read_text()
        found = pieces(document, text)
        wrong += [f"{document}:{b.line} does not have {b.begins!r}" for b in blocks if b.begins not in found[b.line]]
        missing = marked(document, text) - {block.line for block in blocks}
        wrong += [f"{document}:{line} is not in the table: {found[line][:60]}" for line in sorted(missing)]
    return wrong


if __name__ == "__main__":
    print("\n".join(table()))
    if problems := [each for folder in sys.argv[1:] for each in compare(Path(folder))]:
        sys.exit("\n".join(problems))

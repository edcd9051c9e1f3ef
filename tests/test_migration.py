"""`new --from`: whole training files of other tools become recipes that onecard reads, plans and trains."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from onecard import cli
from onecard.config import AlignConfig, FinetuneConfig, NewConfig
from onecard.errors import ConfigError
from onecard.pipeline import STAGES
from onecard.project import new
from onecard.settings import build, read_toml, relative_to

LLAMA_FACTORY = """\
### model
model_name_or_path: models/base
trust_remote_code: true
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target: q_proj,v_proj
use_rslora: true
loraplus_lr_ratio: 16.0
quantization_bit: 4
deepspeed: examples/deepspeed/ds_z3_config.json
### dataset
dataset_dir: data
dataset: identity,clinic
template: qwen
cutoff_len: 64
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
### output
output_dir: saves/qwen/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
report_to: none
### train
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
optim: adamw_8bit
bf16: true
neftune_noise_alpha: 5
mask_history: true
### eval
val_size: 0.1
eval_strategy: steps
eval_steps: 500
"""
DATASET_INFO = {
    "identity": {"file_name": "identity.json", "columns": {"prompt": "q", "query": "more", "response": "a"}},
    "clinic": {
        "file_name": "clinic.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "talk", "system": "sys", "tools": "tools", "images": "pictures"},
        "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "patient", "assistant_tag": "doctor"},
    },
    "pairs": {
        "file_name": "pairs.json",
        "ranking": True,
        "columns": {"prompt": "q", "chosen": "up", "rejected": "down"},
    },
    "judged": {"file_name": "judged.json", "columns": {"prompt": "q", "response": "a", "kto_tag": "ok"}},
}
AXOLOTL = """\
base_model: Qwen/Qwen2.5-0.5B-Instruct
model_type: AutoModelForCausalLM
load_in_8bit: false
load_in_4bit: true
strict: false
chat_template: chatml
datasets:
  - path: rows/chats.jsonl
    ds_type: json
    type: chat_template
    field_messages: talk
    message_property_mappings: {role: who, content: says}
    roles: {user: [patient, human], assistant: [doctor]}
    roles_to_train: [assistant]
    train_on_eos: turn
  - path: mhenrichsen/alpaca_2k_test
    type: alpaca
  - path: rows/custom.csv
    type: {field_instruction: q, field_output: a, format: "[INST] {instruction} [/INST]"}
  - path: rows/segments.jsonl
    type: input_output
  - path: rows/old.jsonl
    type: sharegpt
dataset_prepared_path: last_run_prepared
val_set_size: 0.05
output_dir: ./outputs/qlora-out
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
sequence_len: 4096
sample_packing: true
pad_to_sequence_len: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: paged_adamw_8bit
lr_scheduler: linear
learning_rate: 0.0002
warmup_steps: 10
train_on_inputs: false
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.01
special_tokens: {pad_token: "<|endoftext|>"}
wandb_project: mine
"""
SCRIPT = """\
from unsloth import FastLanguageModel
import os, torch
open("{proof}", "w").write("this script was run")
max_seq_length = 2048
lr = 2e-4
rank = 8
rank = 16
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/Llama-3.2-1B-Instruct",
    max_seq_length = max_seq_length,
    dtype = None,
    load_in_4bit = True,
    token = "hf_secretsecret",
)
model = FastLanguageModel.get_peft_model(
    model, r = rank, target_modules = ["q_proj", "k_proj"], lora_alpha = 16, lora_dropout = 0, bias = "none",
    use_gradient_checkpointing = "unsloth", random_state = 3407, use_rslora = False, loftq_config = None,
)
from datasets import load_dataset
dataset = load_dataset("json", data_files = "rows.jsonl", split = "train")
dataset = dataset.map(lambda row: row)
from trl import SFTTrainer, SFTConfig
trainer = SFTTrainer(
    model = model, tokenizer = tokenizer, train_dataset = dataset, dataset_text_field = "text",
    args = SFTConfig(
        per_device_train_batch_size = 2, gradient_accumulation_steps = 4, warmup_steps = 5, max_steps = 60,
        learning_rate = lr, fp16 = not torch.cuda.is_bf16_supported(), logging_steps = 1, optim = "adamw_8bit",
        weight_decay = 0.01, lr_scheduler_type = "linear", seed = 3407, output_dir = "outputs", report_to = "none",
    ),
)
from unsloth.chat_templates import train_on_responses_only
trainer = train_on_responses_only(trainer, instruction_part = "<|user|>", response_part = "<|assistant|>")
trainer.train()
"""
STUDIO = {
    "project_name": "clinic",
    "model": {"model_name": "unsloth/Qwen3-0.6B", "max_seq_length": 1024, "load_in_4bit": False},
    "training": {
        "training_type": "LoRA/QLoRA",
        "local_datasets": ["rows.jsonl"],
        "format_type": "auto",
        "num_epochs": 2,
        "batch_size": 4,
        "learning_rate": "2e-4",
        "warmup_ratio": 0.03,
        "random_seed": 7,
        "packing": True,
        "train_on_completions": True,
        "hf_token": "hf_secretsecret",
    },
    "lora": {"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "use_rslora": True, "use_loftq": False},
}


def write(path: Path, content: str | dict[str, Any] | list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return path


def migrated(file: Path) -> tuple[dict[str, Any], Any, str]:
    """The notes, the configuration of the one stage as `onecard run` reads it, and the recipe's text."""
    directory = file.parent / "project"
    notes = new(NewConfig(directory=directory, from_=file))
    recipe = directory / "recipe.toml"
    tables = read_toml(recipe)
    (stage,) = [stage for stage in STAGES if stage.name in tables and stage.name in ("finetune", "align")]
    made = build(stage.configuration, relative_to(directory, stage.configuration, tables[stage.name]))
    return notes, made, recipe.read_text(encoding="utf-8")


def whys(notes: dict[str, Any]) -> dict[str, str]:
    return {note["name"]: note["why"] for note in notes["left"]}


def llama_factory(folder: Path, text: str = LLAMA_FACTORY) -> Path:
    """A checkout with data/dataset_info.json and a training file two folders below, as its examples lie."""
    write(folder / "data" / "dataset_info.json", DATASET_INFO)
    asked = [{"q": f"Who are you, {number}?", "more": "", "a": "A model."} for number in range(8)]
    write(folder / "data" / "identity.json", asked)
    rows = ""
    for number in range(8):
        turns = [{"who": "patient", "says": f"It hurts {number}."}, {"who": "doctor", "says": "Rest."}]
        rows += json.dumps({"talk": turns, "sys": "Be kind.", "tools": ""}) + "\n"
    write(folder / "data" / "clinic.jsonl", rows)
    write(folder / "data" / "pairs.json", [{"q": f"{i}?", "up": "yes", "down": "no"} for i in range(8)])
    write(folder / "data" / "judged.json", [{"q": f"{i}?", "a": "yes", "ok": True} for i in range(8)])
    return write(folder / "examples" / "train.yaml", text)


def test_llama_factory(tmp_path: Path) -> None:
    (tmp_path / "examples" / "models" / "base").mkdir(parents=True)
    notes, made, text = migrated(llama_factory(tmp_path))
    assert isinstance(made, FinetuneConfig)
    assert made.model == tmp_path / "examples" / "models" / "base"
    wanted = {
        "lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": ["q_proj", "v_proj"],
        "rank_stabilised": True, "lora_plus_ratio": 16, "quantization": "nf4", "max_length": 64, "log_every": 10,
        "save_every": 500, "batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": 1e-4, "num_epochs": 3,
        "schedule": "cosine", "warmup_ratio": 0.1, "optimizer": "adamw", "optimizer_states": "8bit",
        "precision": "bf16", "neftune_alpha": 5, "learn": "last_answer", "held_out": 0.1, "evaluate_every": 500,
    }  # fmt: skip
    assert {name: getattr(made, name) for name in wanted} == wanted
    identity, clinic = made.sources
    assert identity.path == str(tmp_path / "data" / "identity.json")
    assert identity.columns == {"instruction": "q", "input": "more", "output": "a"}
    assert clinic.columns == {"conversations": "talk", "system": "sys", "tools": "tools"}
    assert clinic.message_keys == {"role": "who", "content": "says"}
    assert clinic.roles == {"user": "patient", "assistant": "doctor"}
    left = whys(notes)
    assert set(left) == {"trust_remote_code", "deepspeed", "template", "max_samples", "output_dir", "clinic.images"}
    assert "one card" in left["deepspeed"]
    assert {"overwrite_cache", "plot_loss"} <= set(notes["not_needed"])
    # Every name of the file is answered for, once.
    answered = [note["name"] for kind in ("carried", "renamed", "left") for note in notes[kind]] + notes["not_needed"]
    names = [line.partition(":")[0] for line in LLAMA_FACTORY.splitlines() if not line.startswith("#")]
    assert sorted(name for name in answered if "." not in name) == sorted(names)
    assert "num_epochs = 3.0 # num_train_epochs" in text
    assert "#   deepspeed = examples/deepspeed/ds_z3_config.json: onecard trains on one card" in text


def test_what_llama_factory_takes_where_nothing_is_said_is_written_out(tmp_path: Path) -> None:
    file = llama_factory(tmp_path, "model_name_or_path: gpt2\nstage: sft\ndataset: clinic\n")
    notes, made, text = migrated(file)
    assert (made.lora_rank, made.learning_rate, made.batch_size, made.num_epochs) == (8, 5e-5, 8, 3)
    assert made.max_length == 2048
    assert made.model == file.parent / "project" / "models" / "gpt2"
    assert notes["first"] == ["hf download gpt2 --local-dir models/gpt2"]
    assert "5e-05 (default of LLaMA-Factory)" in {note["value"] for note in notes["renamed"]}
    assert "#   hf download gpt2 --local-dir models/gpt2" in text


def test_plain_text_is_cleaned_and_learned_whole(tmp_path: Path) -> None:
    lines = "model_name_or_path: gpt2\nstage: pt\ndataset: identity\n"
    file = llama_factory(tmp_path, lines)
    _, made, text = migrated(file)
    tables = tomllib.loads(text)
    assert (made.text_share, made.sources) == (1, [])
    path = str(tmp_path / "data" / "identity.json")
    assert tables["clean"] == {"sources": [{"path": path, "name": "identity", "columns": {"text": "q"}}]}
    write(tmp_path / "corpus.jsonl", "")
    write(tmp_path / "chats.jsonl", "")
    lines = "base_model: gpt2\nmicro_batch_size: 1\ndatasets:\n"
    lines += "  - {path: corpus.jsonl, type: completion, field: body}\n"
    _, made, text = migrated(write(tmp_path / "axolotl.yml", lines))
    assert (made.text_share, made.sources) == (1, [])
    assert tomllib.loads(text)["clean"] == {"sources": [{"path": str(tmp_path / "corpus.jsonl"), "field": "body"}]}
    write(tmp_path / "both" / "b.yml", lines.replace("corpus", "../corpus") + "  - {path: ../chats.jsonl}\n")
    _, made, text = migrated(tmp_path / "both" / "b.yml")
    assert (made.text_share, len(made.sources), len(tomllib.loads(text)["clean"]["sources"])) == (0.5, 1, 1)


@pytest.mark.parametrize(
    ("lines", "method", "beta", "columns"),
    [
        (
            "stage: dpo\npref_loss: simpo\npref_beta: 2.0\nsimpo_gamma: 0.5\ndataset: pairs\n",
            "simpo",
            2.0,
            {"instruction": "q", "chosen": "up", "rejected": "down"},
        ),
        (
            "stage: kto\npref_beta: 0.2\ndataset: judged\n",
            "kto",
            0.2,
            {"instruction": "q", "output": "a", "kto_tag": "ok"},
        ),
    ],
)
def test_preferences_of_llama_factory(
    tmp_path: Path, lines: str, method: str, beta: float, columns: dict[str, str]
) -> None:
    from onecard.data.preferences import read_comparisons

    _, made, _ = migrated(llama_factory(tmp_path, "model_name_or_path: gpt2\nfinetuning_type: full\n" + lines))
    assert isinstance(made, AlignConfig)
    assert (made.method, made.beta, made.lora_rank, made.sources[0].columns) == (method, beta, 0, columns)
    assert len(list(read_comparisons(made.sources, strict=True, reject=lambda rejection: None))) == 8


def test_axolotl(tmp_path: Path) -> None:
    for name in ("chats.jsonl", "custom.csv", "segments.jsonl", "old.jsonl"):
        write(tmp_path / "rows" / name, "")
    notes, made, text = migrated(write(tmp_path / "config.yml", AXOLOTL))
    assert isinstance(made, FinetuneConfig)
    wanted = {
        "lora_rank": 32, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": [], "quantization": "nf4",
        "max_length": 4096, "packing": True, "batch_size": 2, "gradient_accumulation_steps": 4, "num_epochs": 4,
        "optimizer": "adamw", "optimizer_states": "8bit", "schedule": "wsd", "decay_ratio": 1, "learning_rate": 2e-4,
        "weight_decay": 0.01, "held_out": 0.05, "precision": "auto", "learn": "answers",
    }  # fmt: skip
    assert {name: getattr(made, name) for name in wanted} == wanted
    chats, alpaca, custom, old = made.sources
    assert (chats.path, old.path) == (str(tmp_path / "rows" / "chats.jsonl"), str(tmp_path / "rows" / "old.jsonl"))
    assert chats.columns == {"messages": "talk"}
    assert chats.message_keys == {"role": "who", "content": "says"}
    assert chats.roles == {"user": ["patient", "human"], "assistant": ["doctor"]}
    assert alpaca.path == str(tmp_path / "project" / "data" / "alpaca_2k_test")
    assert custom.columns == {"instruction": "q", "output": "a"}
    left = whys(notes)
    assert "segments" in left["datasets[4].type"]
    assert "not known before the run" in left["warmup_steps"]
    assert {"chat_template", "special_tokens", "saves_per_epoch", "gradient_checkpointing"} < set(left)
    assert notes["first"] == [
        "hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir models/Qwen2.5-0.5B-Instruct",
        "hf download mhenrichsen/alpaca_2k_test --repo-type dataset --local-dir data/alpaca_2k_test",
    ]
    assert 'schedule = "wsd" # lr_scheduler' in text


@pytest.mark.parametrize(
    ("method", "kind", "columns"),
    [
        ("dpo", "chatml.intel", {}),
        ("dpo", "chatml.icr", {"prompt": "input", "chosen": "chosen", "rejected": "rejected"}),
        ("kto", "chatml.intel", {"prompt": "question", "completion": "completion", "label": "label"}),
        ("orpo", "chat_template.argilla", {}),
    ],
)
def test_preferences_of_axolotl(tmp_path: Path, method: str, kind: str, columns: dict[str, str]) -> None:
    write(tmp_path / "rows.jsonl", "")
    text = f"base_model: gpt2\nrl: {method}\nmicro_batch_size: 1\nlearning_rate: 5e-6\ndatasets:\n"
    text += f"  - path: rows.jsonl\n    type: {kind}\n"
    _, made, _ = migrated(write(tmp_path / "a.yml", text))
    assert (made.method, made.learning_rate, made.lora_rank) == (method, 5e-6, 0)
    assert made.sources[0].columns == columns


def test_a_script_of_unsloth_is_read_and_not_run(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    write(tmp_path / "rows.jsonl", "")
    notes, made, text = migrated(write(tmp_path / "train.py", SCRIPT.replace("{proof}", str(proof))))
    assert not proof.exists()
    wanted = {
        "max_length": 2048, "quantization": "nf4", "target_modules": ["q_proj", "k_proj"], "lora_alpha": 16,
        "lora_dropout": 0, "seed": 3407, "batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 60,
        "warmup_ratio": 5 / 60, "learning_rate": 2e-4, "optimizer_states": "8bit", "decay_ratio": 1, "learn": "answers",
    }  # fmt: skip
    assert {name: getattr(made, name) for name in wanted} == wanted
    assert [source.path for source in made.sources] == [str(tmp_path / "rows.jsonl")]
    left = whys(notes)
    # `rank` has two values in the script, and what fp16 becomes is computed: neither is guessed.
    assert left["r"] == left["fp16"] == "the script computes it, and is not run"
    assert made.lora_rank == 16
    assert "hf_secret" not in text + json.dumps(notes)
    assert notes["first"] == ["hf download unsloth/Llama-3.2-1B-Instruct --local-dir models/Llama-3.2-1B-Instruct"]


def test_a_script_that_does_not_say_responses_only_learns_everything_and_is_told_so(tmp_path: Path) -> None:
    script = SCRIPT.replace("train_on_responses_only", "something_else").replace("{proof}", str(tmp_path / "proof"))
    notes, made, _ = migrated(write(tmp_path / "train.py", script))
    assert made.learn == "everything"
    assert "usually better" in next(note["why"] for note in notes["renamed"] if note["setting"] == "learn")


@pytest.mark.parametrize(("trainer", "method"), [("DPO", "dpo"), ("ORPO", "orpo"), ("KTO", "kto")])
def test_trainers_of_preferences_in_a_script(tmp_path: Path, trainer: str, method: str) -> None:
    script = SCRIPT.replace("SFTTrainer", f"{trainer}Trainer").replace("SFTConfig(", f"{trainer}Config(beta = 0.3, ")
    _, made, _ = migrated(write(tmp_path / "train.py", script.replace("{proof}", str(tmp_path / "proof"))))
    assert (made.method, made.beta) == (method, 0.3)


def test_settings_of_unsloth_in_groups(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", "")
    notes, made, text = migrated(write(tmp_path / "studio.json", STUDIO))
    wanted = {
        "max_length": 1024, "lora_rank": 8, "lora_alpha": 16, "rank_stabilised": True, "num_epochs": 2, "batch_size": 4,
        "learning_rate": 2e-4, "warmup_ratio": 0.03, "seed": 7, "packing": True, "learn": "answers",
        "quantization": "none",
    }  # fmt: skip
    assert {name: getattr(made, name) for name in wanted} == wanted
    assert "hf_secret" not in text + json.dumps(notes)


def test_settings_of_unsloth_as_its_command_line_takes_them(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", "")
    text = """\
model: "unsloth/Qwen3-0.6B"
data:
  dataset: "mlabonne/FineTome-100k"
  local_dataset:
    - train.jsonl
  format_type: auto
training: {training_type: full, max_seq_length: 2048, load_in_4bit: true, num_epochs: 3, learning_rate: 0.0002,
  warmup_steps: 5, max_steps: 0, save_steps: 0, train_on_completions: false, gradient_checkpointing: none}
lora: {lora_r: 64, lora_alpha: 16, target_modules: "q_proj,k_proj", vision_all_linear: false}
logging: {enable_wandb: false, wandb_project: mine}
"""
    notes, made, _ = migrated(write(tmp_path / "config.yaml", text))
    assert (made.lora_rank, made.quantization, made.num_epochs, made.learn) == (0, "none", 3, "everything")
    assert (made.max_steps, made.save_every) == ("auto", "auto")
    assert [source.path.rpartition("/")[2] for source in made.sources] == ["FineTome-100k", "train.jsonl"]
    assert set(whys(notes)) == {"warmup_steps", "format_type"}


def test_a_converted_recipe_trains(tmp_path: Path, tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onecard.train import session

    monkeypatch.setattr(session, "_time_updates", lambda *_: 0.01)
    monkeypatch.setattr("onecard.report.Page.figure", lambda *_, **__: None)
    text = LLAMA_FACTORY.replace("models/base", str(tiny_model_directory)).replace("quantization_bit: 4\n", "")
    text = text.replace("num_train_epochs: 3.0", "max_steps: 2").replace("bf16: true", "bf16: false")
    migrated(llama_factory(tmp_path, text))
    recipe = tmp_path / "examples" / "project" / "recipe.toml"
    changes = ["--set", "finetune.compile=false", "--set", "finetune.precision=fp32"]
    assert cli.main(["run", str(recipe), "--quiet", *changes]) == 0
    run = recipe.parent / "run" / "finetune"
    result = json.loads((run / "onecard.json").read_text(encoding="utf-8"))["result"]
    assert result["updates"] == 2
    assert (result["rows"]["read"], result["rows"]["kept"]) == (16, 16)
    assert (run / "adapter" / "adapter_config.json").is_file()


def test_what_stands_in_a_file_cannot_write_settings_of_its_own(tmp_path: Path) -> None:
    evil = 'x"\ntrust = true\n[clean]\n#'
    values = {"model_name_or_path": "a\nb/c; rm", "dataset": "d", "stage": "sft", "template": evil, evil: 1}
    _, made, text = migrated(llama_factory(tmp_path, json.dumps(values)))
    assert set(tomllib.loads(text)) == {"output", "finetune"}
    assert "trust" not in tomllib.loads(text)
    assert made.sources[0].name == "d"


def test_a_value_that_onecard_refuses_is_left_with_the_reason(tmp_path: Path) -> None:
    file = llama_factory(tmp_path, LLAMA_FACTORY.replace("lora_dropout: 0.05", "lora_dropout: 1.5"))
    notes, made, _ = migrated(file)
    assert made.lora_dropout == 0
    assert "less than 1" in whys(notes)["lora_dropout"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "- 1\n", "holds no settings"),
        ("a.yaml", "x: 1\ny: 2\n", "of no tool that is known"),
        ("a.yaml", "a: [1\nb: 2\n", "line 2: neither YAML nor JSON"),
        ("a.yaml", "a: !!python/object/apply:os.system ['true']\n", "neither YAML nor JSON"),
        ("a.py", "def (:\n", "is not Python"),
        ("a.yaml", "model_name_or_path: gpt2\nstage: ppo\n", "reward model"),
        ("a.yaml", "base_model: gpt2\nmicro_batch_size: 1\nrl: grpo\n", "no method of onecard"),
        ("a.yaml", "base_model: gpt2\nmicro_batch_size: 1\nreward_model: true\n", "trains a reward model"),
        ("a.py", "trainer = GRPOTrainer(model = 1)\n", "learns from rewards"),
        ("a.yaml", "stage: sft\ncutoff_len: 20\n", "names no model"),
    ],
)
def test_what_cannot_be_converted_says_why(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        migrated(write(tmp_path / name, text))
    assert not (tmp_path / "project").exists()


def test_the_flag_is_called_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = llama_factory(tmp_path)
    assert cli.main(["new", str(tmp_path / "made"), "--from", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tool"] == "LLaMA-Factory"
    assert {note["setting"] for note in document["carried"]} >= {"lora_rank", "learning_rate"}
    assert cli.main(["new", str(tmp_path / "other"), "--from", str(tmp_path / "none.yaml")]) == 2


def test_secrets_inside_tables_are_not_shown(tmp_path: Path) -> None:
    secrets = "env: {WANDB_API_KEY: verysecret}\nextra: [{hf_token: verysecret}]\n"
    notes, _, text = migrated(llama_factory(tmp_path, LLAMA_FACTORY + secrets))
    assert "verysecret" not in text + json.dumps(notes)


def test_a_folder_that_may_not_be_read_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = Path.exists

    def refused(path: Path) -> bool:
        if "forbidden" in str(path):
            raise PermissionError(13, "Permission denied")
        return exists(path)

    monkeypatch.setattr(Path, "exists", refused)
    file = llama_factory(tmp_path, LLAMA_FACTORY.replace("models/base", "/forbidden/base"))
    _, _, text = migrated(file)
    assert "/forbidden/base" in text


def test_the_scale_of_unsloth_is_written_out(tmp_path: Path) -> None:
    script = """\
FastLanguageModel.from_pretrained(model_name = "a/c")
FastLanguageModel.get_peft_model(model, r = 32)
SFTTrainer(train_dataset = load_dataset("a/b"))
"""
    _, _, text = migrated(write(tmp_path / "train.py", script))
    assert "lora_alpha = 16" in text and "lora_rank = 32" in text


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", {"schedule": "wsd", "decay_ratio": 1.0, "warmup_ratio": 0.0}),
        ("lr_scheduler_type: cosine\n", {"schedule": "cosine", "warmup_ratio": 0.0}),
        ("lr_scheduler_type: cosine\nwarmup_ratio: 0.1\n", {"schedule": "cosine", "warmup_ratio": 0.1}),
        # In either order, a constant rate has no warm-up.
        ("lr_scheduler_type: constant\nwarmup_ratio: 0.1\n", {"schedule": "wsd", "warmup_ratio": 0.0}),
        ("warmup_ratio: 0.1\nlr_scheduler_type: constant\n", {"schedule": "wsd", "warmup_ratio": 0.0}),
    ],
)
def test_the_shape_of_the_rate_is_the_trainer_s(tmp_path: Path, lines: str, expected: dict[str, Any]) -> None:
    plain = LLAMA_FACTORY.replace("lr_scheduler_type: cosine\nwarmup_ratio: 0.1\n", lines)
    _, made, _ = migrated(llama_factory(tmp_path, plain))
    assert {name: getattr(made, name) for name in expected} == expected

"""A configuration of Axolotl (YAML) becomes a draft."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onecard.migration.draft import Draft, Note, Rule, no, number, of_no_effect, to, whole
from onecard.migration.trainer import ONE_CARD, OWN_TEMPLATE, TRAINER, checkpointing, held_out_share, modules

TOOL = "Axolotl"
SIGNS = ("base_model", "micro_batch_size", "sequence_len", "datasets", "adapter", "val_set_size", "sample_packing")
_METHODS = ("dpo", "ipo", "orpo", "kto", "simpo")
# Rows of preferences under names that onecard knows as they are, by the second half of their type; and the others.
_PAIRS = {"icr": {"prompt": "input", "chosen": "chosen", "rejected": "rejected"}}
_JUDGED = {"intel": {"prompt": "question", "completion": "completion", "label": "label"}}
_TEXT = ("completion", "pretrain")
_PLAIN = ("alpaca", "sharegpt", "chat_template", "oasst", "alpaca_chat")


def draft(file: Path, values: Mapping[str, Any]) -> Draft:
    """The draft of a configuration; ConfigError for methods and rows that onecard cannot train on."""
    made = Draft(TOOL, file)
    method = values.get("rl")
    if method in _METHODS:
        made.table = "align"
        made.put("rl", str(method), "method", given=method)
    elif method:
        raise made.refuse(f"rl: {method} is no method of onecard.", f"It aligns with {', '.join(_METHODS)}.")
    if values.get("reward_model") or values.get("process_reward_model"):
        raise made.refuse("it trains a reward model.", f"onecard aligns with {', '.join(_METHODS)}.")
    made.read(values, RULES)
    made.assume("num_epochs", 1.0, "num_epochs")
    return made


# --- rules --------------------------------------------------------------------------------------------------------


def _model(made: Draft, name: str, value: Any, _: Mapping[str, Any]) -> None:
    made.model(name, value)


def _adapter(made: Draft, name: str, value: Any, values: Mapping[str, Any]) -> None:
    if value not in ("lora", "qlora"):
        made.leave(name, value, "adapters are LoRA")
        return
    made.put(name, whole(values.get("lora_r") or 8), "lora_rank", given=f"{value}, lora_r = {values.get('lora_r')}")
    if value == "qlora" or values.get("load_in_4bit") is True:
        made.put(name, "nf4", "quantization", given=value)


def _of_adapters(ours: str, convert: Any = None) -> Rule:
    carry = to(ours, convert)

    def rule(made: Draft, name: str, value: Any, values: Mapping[str, Any]) -> None:
        if values.get("adapter"):
            carry(made, name, value, values)
        else:
            made.pass_over(name)

    return rule


def _prompts_too(made: Draft, name: str, value: Any, _: Mapping[str, Any]) -> None:
    if value is True:
        made.put(name, "everything", "learn", given=value)
    else:
        made.pass_over(name)


def _datasets(made: Draft, name: str, value: Any, values: Mapping[str, Any]) -> None:
    entries = value if isinstance(value, list) else [value]
    found: list[dict[str, Any]] = []
    for number_, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or "path" not in entry:
            made.leave(f"{name}[{number_}]", entry, "it names no path")
            continue
        if _is_text(entry) and made.table == "finetune" and name == "datasets":
            field = {"field": str(entry["field"])} if entry.get("field") else {}
            made.texts += [made.rows(place, field) for place in _places(made, f"{name}[{number_}]", entry)]
            why = "text, learned whole: text_share"
            made.renamed.append(Note(f"{name}[{number_}]", str(entry["path"]), "sources of [clean]", why))
            continue
        settings = _settings(made, f"{name}[{number_}]", entry, judged=values.get("rl") == "kto")
        if settings is not None:
            found += [made.rows(place, settings) for place in _places(made, f"{name}[{number_}]", entry)]
    if name == "datasets":
        if not found and made.texts:
            return
        if not found:
            raise made.refuse("not one of its datasets holds rows that onecard can learn.", "See its documents.")
        made.put(name, found, "sources", given=[str(entry.get("path")) for entry in entries if isinstance(entry, dict)])
    elif made.table == "finetune":
        made.evaluated += found
        made.renamed.append(Note(name, "", "questions of [evaluate]", "the model answers some after training"))
    else:
        made.leave(name, value, "a share of the rows is held out instead (held_out)")


def _is_text(entry: Mapping[str, Any]) -> bool:
    return isinstance(entry.get("type"), str) and entry["type"].partition(":")[0] in _TEXT


def _places(made: Draft, name: str, entry: Mapping[str, Any]) -> list[str]:
    """The files of an entry: its path, or the data_files in it."""
    path, files = str(entry["path"]), entry.get("data_files")
    if not files:
        return [path]
    names = [files] if isinstance(files, str) else [str(file) for file in files]
    if path in ("json", "csv", "parquet", "text") and made.place(path) is None:
        return names
    if made.place(path) is None:
        made.leave(f"{name}.data_files", files, "the whole dataset is brought: name the files in sources then")
        return [path]
    return [f"{path.rstrip('/')}/{file}" for file in names]


def _settings(made: Draft, name: str, entry: Mapping[str, Any], *, judged: bool) -> dict[str, Any] | None:
    """The settings of a source for the rows of an entry; None for rows that onecard cannot learn."""
    kind = entry.get("type", "chat_template")
    for key in ("split", "name", "shards", "revision", "train_on_split", "preprocess_shards"):
        if entry.get(key) not in (None, "train"):
            made.leave(f"{name}.{key}", entry[key], "a source of onecard is all the rows of a file or folder")
    for key in ("roles_to_train", "train_on_eos", "train_on_eot"):
        if entry.get(key) not in (None, "turn", ["assistant"], ["gpt"]):
            made.leave(f"{name}.{key}", entry[key], "each answer is learned, and its end (learn = answers)")
    if isinstance(kind, dict):
        return _named_fields(made, name, kind)
    first, _, rest = str(kind).partition(".")
    first = first.partition(":")[0]
    if made.table == "align":
        return _preference(entry, (_JUDGED if judged else _PAIRS).get(rest))
    if first not in _PLAIN:
        why = "rows of segments or token ids have no chat that a template could write"
        made.leave(f"{name}.type", kind, why if first in ("input_output", "") else "rows of this kind are not known")
        return None
    if first == "alpaca":
        made.leave(f"{name}.type", kind, "the rows are read; they are written with the chat template of the model")
    return _chat(entry)


def _chat(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Columns, keys and roles of a dataset of conversations, where they are not those that onecard knows."""
    settings: dict[str, Any] = {}
    columns = {
        ours: str(entry[theirs])
        for theirs, ours in (("field_messages", "messages"), ("field_system", "system"), ("field_tools", "tools"))
        if entry.get(theirs) and entry[theirs] not in (ours, "conversations")
    }
    if columns:
        settings["columns"] = {"messages": str(entry.get("field_messages", "messages")), **columns}
        for theirs, ours in (("field_system", "system"), ("field_tools", "tools")):
            if entry.get(theirs) == ours:
                settings["columns"][ours] = ours
    keys = dict(entry.get("message_property_mappings") or {})
    for theirs, ours in (("role", "role"), ("content", "content"), ("training", "train")):
        if entry.get(f"message_field_{theirs}"):
            keys.setdefault(ours, entry[f"message_field_{theirs}"])
    known = ("role", "from", "content", "value", "train", "training", "weight")
    unknown = {ours: str(theirs) for ours, theirs in keys.items() if theirs not in known and theirs != ours}
    if unknown:
        settings["message_keys"] = unknown
    if isinstance(entry.get("roles"), dict):
        settings["roles"] = {
            ours: [str(theirs)] if isinstance(theirs, str) else [str(part) for part in theirs]
            for ours, theirs in entry["roles"].items()
        }
    return settings


def _named_fields(made: Draft, name: str, kind: Mapping[str, Any]) -> dict[str, Any]:
    """A type that says itself which column is what."""
    for key in ("format", "no_input_format", "system_format", "system_prompt"):
        if kind.get(key):
            made.leave(f"{name}.{key}", kind[key], OWN_TEMPLATE)
    if made.table == "align":
        columns = {ours: kind.get(f"field_{ours}") or ours for ours in ("prompt", "chosen", "rejected")}
        return {"columns": {ours: str(theirs) for ours, theirs in columns.items()}}
    columns = {ours: kind.get(f"field_{ours}") for ours in ("instruction", "input", "output", "system")}
    return {"columns": {ours: str(theirs) for ours, theirs in columns.items() if theirs}}


def _preference(entry: Mapping[str, Any], usual: dict[str, str] | None) -> dict[str, Any]:
    """Columns of pairs or of judged answers: those that are named, or those that rows of this type have."""
    named = {ours: entry.get(f"field_{ours}") for ours in ("messages", "prompt", "chosen", "rejected")}
    settings = _chat({**entry, "field_messages": None})
    columns = {ours: str(theirs) for ours, theirs in named.items() if theirs}
    if any(ours != theirs for ours, theirs in columns.items()):
        settings["columns"] = {"chosen": "chosen", "rejected": "rejected", **columns}
    elif usual is not None:
        settings["columns"] = usual
    return settings


def _beta(made: Draft, name: str, value: Any, values: Mapping[str, Any]) -> None:
    made.put(name, number(value), "beta", given=None if name == "beta" else value)


_NO_EFFECT = (
    "reward_model", "process_reward_model",
    "rl", "lora_r", "model_type", "tokenizer_type", "strict", "dataset_prepared_path", "dataset_processes",
    "pad_to_sequence_len", "load_in_4bit", "flash_attention", "xformers_attention", "sdp_attention",
    "eager_attention", "flex_attention", "flash_attn_cross_entropy", "flash_attn_rms_norm", "flash_attn_fuse_mlp",
    "s2_attention", "debug", "is_llama_derived_model", "is_mistral_derived_model", "wandb_project", "wandb_entity",
    "wandb_name", "wandb_watch", "wandb_log_model", "wandb_run_id", "wandb_mode", "mlflow_tracking_uri",
    "mlflow_experiment_name", "use_mlflow", "use_tensorboard", "comet_project_name", "lora_target_linear",
    "lora_fan_in_fan_out", "train_on_eos", "plugins", "liger_rope", "liger_rms_norm", "liger_glu_activation",
    "liger_layer_norm", "liger_fused_linear_cross_entropy", "cut_cross_entropy", "lora_mlp_kernel",
    "lora_qkv_kernel", "lora_o_kernel", "eval_batch_size", "shuffle_merged_datasets", "eval_table_size",
    "eval_max_new_tokens", "tokenizer_use_fast", "low_cpu_mem_usage", "local_rank", "eval_causal_lm_metrics",
    "multipack_real_batches", "sample_packing_eff_est", "eval_sample_packing", "save_first_step", "bfloat16",
    "float16",
)  # fmt: skip
RULES: dict[str, Rule] = {
    **TRAINER,
    **dict.fromkeys(_NO_EFFECT, of_no_effect),
    "base_model": _model,
    "datasets": _datasets,
    "test_datasets": _datasets,
    "adapter": _adapter,
    "micro_batch_size": to("batch_size", whole),
    "sequence_len": to("max_length", whole),
    "val_set_size": held_out_share,
    "sample_packing": to("packing"),
    "train_on_inputs": _prompts_too,
    "lora_alpha": _of_adapters("lora_alpha", number),
    "lora_dropout": _of_adapters("lora_dropout", number),
    "lora_target_modules": _of_adapters("target_modules", modules),
    "peft_use_dora": _of_adapters("decomposed"),
    "peft_use_rslora": _of_adapters("rank_stabilised"),
    "loraplus_lr_ratio": _of_adapters("lora_plus_ratio", number),
    "peft_init_lora_weights": TRAINER["init_lora_weights"],
    "noisy_embedding_alpha": to("neftune_alpha", number),
    "early_stopping_patience": to("early_stopping", whole),
    "max_grad_norm": to("max_grad_norm", number),
    "gradient_checkpointing": checkpointing,
    "rl_beta": _beta,
    "orpo_alpha": _beta,
    "dpo_label_smoothing": to("label_smoothing", number),
    "simpo_gamma": to("simpo_margin", number),
    "cpo_alpha": to("likelihood_weight", number),
    "rpo_alpha": to("likelihood_weight", number),
    "saves_per_epoch": no("updates are saved about once a minute (save_every)"),
    "evals_per_epoch": no("held-out rows are measured as often as is cheap (evaluate_every)"),
    "load_in_8bit": no("frozen weights lie as they are or in 4 bits (quantization = nf4)"),
    "chat_template": no(OWN_TEMPLATE),
    "chat_template_jinja": no(OWN_TEMPLATE),
    "special_tokens": no("see `onecard tokenizer extend`"),
    "tokens": no("see `onecard tokenizer extend`"),
    "added_tokens_overrides": no("see `onecard tokenizer extend`"),
    "lora_model_dir": no("adapters are begun anew: merge those into the model first"),
    "lora_modules_to_save": no("besides adapters nothing is trained"),
    "unfrozen_parameters": no("all weights are trained, or adapters"),
    "pretraining_dataset": no("`onecard pretrain` trains from nothing on a corpus"),
    "base_model_config": no("the configuration in the model's folder is used"),
    "relora_steps": no("adapters are merged once, at the end"),
    "rope_scaling": no("the model keeps its own positions"),
    "rope_theta": no("the model keeps its own positions"),
    "kto_desirable_weight": no("both kinds of answers count as their rows do"),
    "kto_undesirable_weight": no("both kinds of answers count as their rows do"),
    "sequence_parallel_degree": no(ONE_CARD),
    "context_parallel_size": no(ONE_CARD),
    "tensor_parallel_size": no(ONE_CARD),
}

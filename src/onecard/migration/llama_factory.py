"""A training file of LLaMA-Factory (YAML) with its dataset_info.json becomes a draft.

The names of columns and tags, and what stands for them where the file says nothing, are those of its data/README.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onecard.migration.draft import Draft, Note, Rule, no, number, of_no_effect, to, whole
from onecard.migration.trainer import ONE_CARD, OWN_TEMPLATE, TRAINER, held_out_share, modules, shape_of_the_rate

TOOL = "LLaMA-Factory"
SIGNS = ("model_name_or_path", "finetuning_type", "stage", "cutoff_len", "dataset_dir", "template", "dataset")
# Their names for columns, and the names by which onecard knows what stands there.
_COLUMNS = {
    "prompt": "instruction", "query": "input", "response": "output", "history": "history", "system": "system",
    "tools": "tools", "messages": "conversations", "chosen": "chosen", "rejected": "rejected", "kto_tag": "kto_tag",
}  # fmt: skip
_OTHER_MEDIA = ("images", "videos", "audios")
# The roles of tags, and what onecard takes for them without being told.
_TAGS = {
    "user_tag": ("user", ("human", "user")),
    "assistant_tag": ("assistant", ("gpt", "assistant")),
    "observation_tag": ("tool", ("observation", "tool")),
    "function_tag": ("function_call", ("function_call", "tool_call")),
    "system_tag": ("system", ("system",)),
}
_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
_DEFAULTS = (
    ("learning_rate", 5e-5, "learning_rate"),
    ("per_device_train_batch_size", 8, "batch_size"),
    ("gradient_accumulation_steps", 1, "gradient_accumulation_steps"),
    ("cutoff_len", 2048, "max_length"),
)


def draft(file: Path, values: Mapping[str, Any]) -> Draft:
    """The draft of a training file; ConfigError for a stage that onecard does not have."""
    made = Draft(TOOL, file)
    stage = str(values.get("stage", "sft"))
    if stage in ("rm", "ppo"):
        raise made.refuse(f"stage: {stage} learns from a reward model.", "onecard aligns with pairs: dpo, orpo, kto.")
    if stage in ("dpo", "kto"):
        made.table = "align"
        method = "kto" if stage == "kto" else _LOSSES.get(str(values.get("pref_loss", "sigmoid")))
        if method is None:
            raise made.refuse(f"pref_loss: {values['pref_loss']} is not known here.", "One of: dpo, ipo, simpo, orpo.")
        made.put("stage", method, "method", given=f"{stage}, pref_loss = {values.get('pref_loss', 'sigmoid')}")
    made.read(values, RULES)
    kind = str(values.get("finetuning_type", "lora"))
    if kind == "lora":
        made.assume("lora_rank", 8, "lora_rank")
    elif kind != "full":
        made.leave("finetuning_type", kind, "onecard trains all weights or adapters (LoRA): all weights are set")
    for name, value, ours in _DEFAULTS:
        made.assume(name, value, ours)
    shape_of_the_rate(made, values)
    if "max_steps" not in made.settings:
        made.assume("num_train_epochs", 3.0, "num_epochs")
    return made


# --- rules --------------------------------------------------------------------------------------------------------


def _model(made: Draft, name: str, value: Any, _: Mapping[str, Any]) -> None:
    made.model(name, value)


def _adapters_only(ours: str, convert: Any = None) -> Rule:
    """Settings of adapters mean nothing where all weights are trained."""
    carry = to(ours, convert)

    def rule(made: Draft, name: str, value: Any, values: Mapping[str, Any]) -> None:
        if values.get("finetuning_type", "lora") == "lora":
            carry(made, name, value, values)
        else:
            made.pass_over(name)

    return rule


def _bits(made: Draft, name: str, value: Any, _: Mapping[str, Any]) -> None:
    if whole(value) == 4:
        made.put(name, "nf4", "quantization", given=value)
    else:
        made.leave(name, value, "frozen weights lie as they are or in 4 bits (quantization = nf4)")


def _prompts_too(made: Draft, name: str, value: Any, _: Mapping[str, Any]) -> None:
    if value is True:
        made.put(name, "everything" if name == "train_on_prompt" else "last_answer", "learn", given=value)
    else:
        made.pass_over(name)


def _pissa(made: Draft, name: str, value: Any, _: Mapping[str, Any]) -> None:
    if value is True:
        made.put(name, "pissa", "lora_start", given=value)
    else:
        made.pass_over(name)


def _datasets(made: Draft, name: str, value: Any, values: Mapping[str, Any]) -> None:
    names = [part.strip() for part in value.split(",")] if isinstance(value, str) else [str(part) for part in value]
    described, folder = _descriptions(made, values)
    found = [source for part in names for source in _source(made, part, described, folder)]
    if str(values.get("stage")) == "pt" and name != "eval_dataset":
        made.texts += [_as_text(source) for source in found]
        made.renamed.append(Note(name, str(value), "sources of [clean]", "text alone, learned whole: text_share = 1"))
    elif str(values.get("stage")) == "pt":
        made.leave(name, value, "a share of the documents is held out instead (held_out of [clean])")
    elif name != "eval_dataset":
        made.put(name, found, "sources", given=value)
    elif made.table == "finetune":
        made.evaluated += found
        made.renamed.append(Note(name, str(value), "questions of [evaluate]", "the model answers some after training"))
    else:
        made.leave(name, value, "a share of the rows is held out instead (held_out)")


def _descriptions(made: Draft, values: Mapping[str, Any]) -> tuple[dict[str, Any], Path]:
    """The entries of dataset_info.json, and its folder: looked for here, beside the file, and above it."""
    given = Path(os.path.expanduser(str(values.get("dataset_dir", "data"))))  # noqa: PTH111 - does not raise
    folders = [Path.cwd() / given, made.file.parent, *(parent / given for parent in made.file.resolve().parents)]
    for folder in folders:
        path = folder / "dataset_info.json"
        if os.path.isfile(path):  # noqa: PTH113 - no, where it may not be looked
            try:
                found = json.loads(path.read_text(encoding="utf-8-sig"))
            except ValueError as fault:
                raise made.refuse(f"{path} is not JSON ({fault}).", "Mend it.") from None
            if isinstance(found, dict):
                return found, folder
    return {}, made.file.parent


def _source(made: Draft, name: str, described: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    entry = described.get(name)
    if not isinstance(entry, dict):
        made.to_do.append(f"# say in sources where the rows of the dataset {name!r} lie: no dataset_info.json has it")
        return [{"path": f"data/{Path(name).name}", "name": name}]
    known = {"file_name", "formatting", "columns", "tags", "ranking", "hf_hub_url", "ms_hub_url", "split"}
    for key in entry.keys() - known:
        made.leave(f"{name}.{key}", entry[key], "a source of onecard is all the rows of a file or folder")
    settings: dict[str, Any] = {"name": name}
    columns = entry.get("columns") or {}
    for key in _OTHER_MEDIA:
        if key in columns:
            made.leave(f"{name}.{key}", columns[key], "onecard trains on text alone")
    renamed = {_COLUMNS[key]: str(theirs) for key, theirs in columns.items() if key in _COLUMNS}
    tags = entry.get("tags") or {}
    if renamed:
        settings["columns"] = renamed
    settings |= _messages(tags)
    place = str(entry.get("file_name") or entry.get("hf_hub_url") or entry.get("ms_hub_url") or "")
    if not place:
        made.leave(f"{name}", entry, "it names no file")
        return []
    return [made.rows(place, settings, folder)]


def _as_text(source: dict[str, Any]) -> dict[str, Any]:
    """A source of documents: what pretraining reads of its rows is the column of prompts."""
    columns = source.pop("columns", {})
    return {**source, "columns": {"text": columns["instruction"]}} if "instruction" in columns else source


def _messages(tags: Mapping[str, Any]) -> dict[str, Any]:
    """The keys and roles of messages that onecard would not recognise."""
    settings: dict[str, Any] = {}
    keys = {"role": str(tags.get("role_tag", "from")), "content": str(tags.get("content_tag", "value"))}
    unknown = {ours: theirs for ours, theirs in keys.items() if theirs not in ("role", "from", "content", "value")}
    roles = {ours: str(tags[tag]) for tag, (ours, known) in _TAGS.items() if tag in tags and tags[tag] not in known}
    if unknown:
        settings["message_keys"] = unknown
    if roles:
        settings["roles"] = roles
    return settings


_NO_EFFECT = (
    "stage", "finetuning_type", "pref_loss", "dataset_dir", "media_dir", "overwrite_cache", "preprocessing_num_workers",
    "preprocessing_batch_size", "plot_loss", "flash_attn", "enable_liger_kernel", "use_unsloth", "use_unsloth_gc",
    "include_num_input_tokens_seen", "cache_dir", "print_param_status", "low_cpu_mem_usage", "use_cache",
    "quantization_method", "double_quantization", "quantization_type", "bnb_4bit_compute_dtype", "upcast_layernorm",
    "upcast_lmhead_output", "use_swanlab", "disable_gradient_checkpointing", "tokenized_path", "ref_model",
    "neat_packing", "lora_target_linear", "eval_on_start", "do_predict", "use_fast_tokenizer", "streaming",
)  # fmt: skip
RULES: dict[str, Rule] = {
    **TRAINER,
    **dict.fromkeys(_NO_EFFECT, of_no_effect),
    "model_name_or_path": _model,
    "dataset": _datasets,
    "eval_dataset": _datasets,
    "cutoff_len": to("max_length", whole),
    "val_size": held_out_share,
    "lora_rank": _adapters_only("lora_rank", whole),
    "lora_alpha": _adapters_only("lora_alpha", number),
    "lora_dropout": _adapters_only("lora_dropout", number),
    "lora_target": _adapters_only("target_modules", modules),
    "loraplus_lr_ratio": _adapters_only("lora_plus_ratio", number),
    "pissa_init": _pissa,
    "quantization_bit": _bits,
    "train_on_prompt": _prompts_too,
    "mask_history": _prompts_too,
    "pref_beta": to("beta", number),
    "pref_ftx": to("likelihood_weight", number),
    "dpo_label_smoothing": to("label_smoothing", number),
    "simpo_gamma": to("simpo_margin", number),
    "pure_bf16": TRAINER["bf16"],
    "template": no(OWN_TEMPLATE),
    "max_samples": no("all rows are read; give a file with fewer"),
    "adapter_name_or_path": no("adapters are begun anew: merge those into the model first"),
    "additional_target": no("besides adapters nothing is trained"),
    "resize_vocab": no("see `onecard tokenizer extend`"),
    "new_special_tokens": no("see `onecard tokenizer extend`"),
    "mix_strategy": no("each row of each source is passed over equally often"),
    "interleave_probs": no("each row of each source is passed over equally often"),
    "rope_scaling": no("the model keeps its own positions"),
    "shift_attn": no("attention is whole"),
    "kto_chosen_weight": no("both kinds of answers count as their rows do"),
    "kto_rejected_weight": no("both kinds of answers count as their rows do"),
    "use_galore": no("see optimizer"),
    "use_badam": no("see optimizer"),
    "use_apollo": no("see optimizer"),
    "use_muon": no("set optimizer = muon"),
    "ray_num_workers": no(ONE_CARD),
}

"""Settings of Unsloth become a draft: a plain file of its Studio (JSON, YAML), or the literal arguments of a script.

A script is parsed and never run: of calls such as get_peft_model(r=16) the arguments that are written out are read, and
names that a single assignment gives a value. What the script computes is named as such.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onecard.migration.draft import Draft, Rule, no, number, of_no_effect, to, whole
from onecard.migration.trainer import OWN_TEMPLATE, TRAINER, modules, shape_of_the_rate

TOOL = "Unsloth"
SIGNS = (
    "model_name",
    "max_seq_length",
    "load_in_4bit",
    "r",
    "lora_r",
    "hf_dataset",
    "local_datasets",
    "use_loftq",
    "train_on_completions",
)
# Calls whose keyword arguments are settings.
_CALLS = {
    "from_pretrained", "get_peft_model", "SFTConfig", "SFTTrainer", "TrainingArguments", "UnslothTrainingArguments",
    "UnslothTrainer", "DPOConfig", "DPOTrainer", "ORPOConfig", "ORPOTrainer", "KTOConfig", "KTOTrainer", "CPOConfig",
}  # fmt: skip
_METHODS = {"DPO": "dpo", "ORPO": "orpo", "KTO": "kto", "CPO": "simpo"}
_FILES = ("json", "csv", "parquet", "text")
COMPUTED = object()
"""Stands for a value that the script computes."""


def draft(file: Path, values: Mapping[str, Any]) -> Draft:
    """The draft of a plain file, whose settings may stand in groups."""
    return _draft(file, dict(_leaves(values)), method=None, answers_only=values_of(values, "train_on_completions"))


def values_of(values: Mapping[str, Any], name: str) -> bool:
    """Whether a setting is on, wherever it stands."""
    return any(key == name and value is True for key, value in _leaves(values))


def _leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and key not in ("lr_scheduler_kwargs", "loftq_config", "format_mapping"):
            yield from _leaves(value)
        else:
            yield str(key), value


def draft_of_script(file: Path, text: str) -> Draft:
    """The draft of a Python script; ConfigError for one that is not Python."""
    made = Draft(TOOL, file)
    try:
        tree = ast.parse(text, filename=str(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as fault:
        raise made.refuse(f"it is not Python ({fault}).", "A notebook: save it as a script (.py) first.") from None
    constants = _constants(tree)
    values: dict[str, Any] = {}
    method, answers_only = None, False
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = _name(call.func)
        if name == "train_on_responses_only":
            answers_only = True
        if name.startswith("GRPO"):
            raise made.refuse(f"{name} learns from rewards.", "onecard aligns with pairs: dpo, orpo, simpo, kto.")
        method = method or next((ours for theirs, ours in _METHODS.items() if name == f"{theirs}Trainer"), None)
        if name == "load_dataset":
            values.setdefault("load_dataset", []).append(_arguments(call, constants))
        elif name in _CALLS and not (name == "from_pretrained" and "Fast" not in ast.unparse(call.func)):
            found = _arguments(call, constants)
            if name == "from_pretrained" and "0" in found:
                found.setdefault("model_name", found["0"])
            for key, value in found.items():
                if not key.isdecimal() and not (key in values and value is COMPUTED):
                    values[key] = value
    return _draft(file, values, method=method, answers_only=answers_only)


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Names that the script gives one literal value, once."""
    found: dict[str, list[Any]] = {}
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.NamedExpr):
            targets = [node.target]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Name):
                    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) and part is target else None
                    found.setdefault(part.id, []).append(_literal(value, {}))
    return {name: values[0] for name, values in found.items() if len(values) == 1 and values[0] is not COMPUTED}


def _literal(node: ast.expr | None, constants: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return constants.get(node.id, COMPUTED)
    try:
        return COMPUTED if node is None else ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return COMPUTED


def _arguments(call: ast.Call, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments by name, positional ones by number; computed ones as COMPUTED."""
    made = {str(place): _literal(value, constants) for place, value in enumerate(call.args)}
    made |= {word.arg: _literal(word.value, constants) for word in call.keywords if word.arg is not None}
    return made


def _draft(file: Path, values: dict[str, Any], *, method: str | None, answers_only: bool) -> Draft:
    made = Draft(TOOL, file)
    if method is not None:
        made.table = "align"
        made.put("trainer", method, "method", given=method.upper())
    for name in [name for name, value in values.items() if value is COMPUTED]:
        # `model = model` hands an object on; the name of the model stands elsewhere.
        if name in RULES and RULES[name] is not of_no_effect and name != "model":
            made.leave(name, "(computed)", "the script computes it, and is not run")
        del values[name]
    made.read(values, RULES)
    shape_of_the_rate(made, values)
    if not _all_weights(values):
        made.assume("r", 16, "lora_rank")
        made.assume("lora_alpha", 16, "lora_alpha")
    if made.table == "finetune" and not answers_only:
        made.put(
            "train_on_responses_only",
            "everything",
            "learn",
            given="not called",
            why="questions are learned too, as there; learn = answers is the default here and usually better",
        )
    return made


def _all_weights(values: Mapping[str, Any]) -> bool:
    return (
        values.get("full_finetuning") is True
        or values.get("use_lora") is False
        or str(values.get("training_type", "")).lower().startswith("full")
    )


# --- rules --------------------------------------------------------------------------------------------------------


def _model(made: Draft, name: str, value: Any, _: Mapping[str, Any]) -> None:
    made.model(name, value)


def _of_adapters(ours: str, convert: Any = None) -> Rule:
    carry = to(ours, convert)

    def rule(made: Draft, name: str, value: Any, values: Mapping[str, Any]) -> None:
        if _all_weights(values):
            made.pass_over(name)
        else:
            carry(made, name, value, values)

    return rule


def _four_bits(made: Draft, name: str, value: Any, values: Mapping[str, Any]) -> None:
    if value is True and not _all_weights(values):
        made.put(name, "nf4", "quantization", given=value)
    else:
        made.pass_over(name)


def _loaded(made: Draft, name: str, value: Any, _: Mapping[str, Any]) -> None:
    """The calls of load_dataset: ("json", data_files=...) or a name on a hub."""
    found: list[dict[str, Any]] = []
    for call in value:
        first, files = call.get("0", call.get("path")), call.get("data_files")
        if isinstance(files, dict):
            files = files.get("train")
        if first in _FILES and isinstance(files, str | list):
            found += [made.rows(str(file), {}) for file in ([files] if isinstance(files, str) else files)]
        elif isinstance(first, str) and first not in _FILES:
            found.append(made.rows(first, {}))
        else:
            made.leave(name, "(computed)", "the script computes which rows are read, and is not run")
    if found:
        made.put(name, found, "sources", given=[source["path"] for source in found])
        made.leave("map(...)", "(a function)", "rows are recognised by their usual names, or by columns of the source")


def _rows(made: Draft, name: str, value: Any, values: Mapping[str, Any]) -> None:
    names = [value] if isinstance(value, str) else [str(part) for part in value]
    before = made.settings.get("sources", [])
    made.put(name, [*before, *(made.rows(part, {}) for part in names)], "sources", given=value)


_NO_EFFECT = (
    "dtype", "bias", "tokenizer", "processing_class", "train_dataset", "args", "full_finetuning", "use_lora",
    "training_type", "eval_dataset", "data_collator", "max_prompt_length", "max_completion_length", "callbacks",
    "fast_inference", "gpu_memory_utilization", "max_lora_rank", "train_on_completions", "enable_wandb", "device_map",
    "enable_tensorboard", "wandb_project", "tensorboard_dir", "dataset_kwargs", "formatting_func", "is_dataset_image",
    "finetune_language_layers", "finetune_attention_modules", "finetune_mlp_modules", "layers_to_transform",
    "dataset_text_field", "attn_implementation", "use_exact_model_name", "project_name", "precompute_ref_log_probs",
)  # fmt: skip
RULES: dict[str, Rule] = {
    **TRAINER,
    **dict.fromkeys(_NO_EFFECT, of_no_effect),
    "model": _model,
    "model_name": _model,
    "base_model": _model,
    "load_dataset": _loaded,
    "dataset": _rows,
    "local_dataset": _rows,
    "hf_dataset": _rows,
    "local_datasets": _rows,
    "max_seq_length": to("max_length", whole),
    "max_length": to("max_length", whole),
    "load_in_4bit": _four_bits,
    "load_in_8bit": no("frozen weights lie as they are or in 4 bits (quantization = nf4)"),
    "load_in_16bit": of_no_effect,
    "r": _of_adapters("lora_rank", whole),
    "lora_r": _of_adapters("lora_rank", whole),
    "lora_rank": _of_adapters("lora_rank", whole),
    "lora_alpha": _of_adapters("lora_alpha", number),
    "lora_dropout": _of_adapters("lora_dropout", number),
    "target_modules": _of_adapters("target_modules", modules),
    "use_rslora": _of_adapters("rank_stabilised"),
    "use_dora": _of_adapters("decomposed"),
    "random_state": to("seed", whole),
    "random_seed": to("seed", whole),
    "batch_size": to("batch_size", whole),
    "use_gradient_checkpointing": TRAINER["gradient_checkpointing"],
    "beta": to("beta", number),
    "simpo_gamma": to("simpo_margin", number),
    "label_smoothing": to("label_smoothing", number),
    "loftq_config": no("adapters begin at nothing, or by lora_start = pissa"),
    "use_loftq": no("adapters begin at nothing, or by lora_start = pissa"),
    "modules_to_save": no("besides adapters nothing is trained"),
    "embedding_learning_rate": no("one learning rate for all that is trained"),
    "token": no("onecard fetches nothing"),
    "wandb_token": no("onecard reports to nobody"),
    "chat_template": no(OWN_TEMPLATE),
    "format_type": no("the shape of rows is recognised; columns of the source name others"),
    "finetune_vision_layers": of_no_effect,
    "vision_all_linear": no("onecard trains on text alone"),
    "train_split": no("a source of onecard is all the rows of a file or folder"),
    "subset": no("a source of onecard is all the rows of a file or folder"),
}

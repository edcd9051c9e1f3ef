"""What pruning saves and costs on a real model: forms of SmolLM2-135M-Instruct beside the original, as one table.

`python benchmarks/compress.py --text FILE ...`: the text is cleaned into a corpus, whose training part decides what
goes and heals, and whose held-out part measures. Each form is made by `onecard prune` itself and kept in the folder
`--output`, so that its page and its answers can be looked at; forms that are there already are not made again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from measurement import say
from onecard import artifact, console
from onecard.compress.prune import prune
from onecard.config import CleanConfig, PruneConfig
from onecard.data.clean import clean
from sft import smollm2

HEALED: dict[str, Any] = {"heal_updates": 40, "heal_tokens": 1024}
# Name of the form, what a reader calls it, settings of `prune`.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "layers-similarity": ("4 of 30 layers out, by similarity", {"drop_layers": 4, "layers_by": "similarity"}),
    "layers-similarity-healed": (
        "the same, healed",
        {"drop_layers": 4, "layers_by": "similarity", **HEALED},
    ),
    "width": ("1,152 of 1,536 channels stay", {"intermediate_size": 1152}),
    "width-healed": ("the same, healed", {"intermediate_size": 1152, **HEALED}),
    "heads": ("2 of 3 key/value heads stay", {"key_value_heads": 2}),
    "layers-loss": ("4 of 30 layers out, by loss", {"drop_layers": 4, "calibration_rows": 2}),
    "half": ("half of all weights 0", {"sparsity": 0.5}),
    "2-4": ("2:4 zeros", {"sparsity": "2:4"}),
}
COMMON: dict[str, Any] = {"question_count": 16, "max_new_tokens": 32, "text_kilobytes": 40, "calibration_rows": 16}


def row(name: str, found: dict[str, Any]) -> str:
    """One line of the table."""
    before, now = found["original"], found["made"]
    bits = now["bits_per_byte"]["all"]
    cells = [
        FORMS[name][0],
        f"{now['parameters'] / 1e6:.1f}M",
        f"{now['weight_bytes'] / before['weight_bytes']:.2f}",
        f"{now['peak_memory_bytes'] / before['peak_memory_bytes']:.2f}",
        f"{now['tokens_per_second'] / before['tokens_per_second']:.2f}",
        f"{bits:.3f} ({bits / before['bits_per_byte']['all'] - 1:+.1%})",
        f"{found['asked'] - found['different_answers']} of {found['asked']}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Make what is missing and print the table of all that is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", nargs="+", required=True, help="text files: what matters is measured on them")
    parser.add_argument("--model", type=Path, help="a model directory (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--output", type=Path, default=Path("compressed"), help="where the forms are kept")
    parser.add_argument("--only", nargs="+", choices=FORMS, default=list(FORMS), help="which forms are made")
    arguments = parser.parse_args()
    model, corpus = arguments.model or smollm2(), arguments.output / "corpus"
    if not corpus.exists():
        clean(CleanConfig.model_validate({"sources": arguments.text, "output": corpus}))
    for name in arguments.only:
        output = arguments.output / name
        if not output.exists():
            say(name)
            settings = {**COMMON, **FORMS[name][1], "model": model, "corpus": corpus, "output": output}
            prune(PruneConfig.model_validate(settings))
    console.result("| form | parameters | bytes | peak memory | tokens/s | bits per byte | same answers |")
    console.result("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in FORMS:
        if (arguments.output / name).exists():
            console.result(row(name, artifact.read_manifest(arguments.output / name, "model").result))


if __name__ == "__main__":
    main()

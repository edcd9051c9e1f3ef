"""Pruned model directories: what is chosen, what is written, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from onecard import artifact
from onecard.compress.calibration import input_lengths, sample_rows
from onecard.compress.importance import best_channels, best_heads, column_scores, layer_changes, mean_loss
from onecard.compress.prune import prune
from onecard.compress.sparsity import kept_weights
from onecard.compress.structure import Shape
from onecard.config import PruneConfig
from onecard.errors import ArtifactError, ConfigError
from onecard.model.load import load_model, load_tokenizer


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_directory: Path) -> Path:
    """Four layers whose heads, channels and inputs are of different use; the second layer does nearly nothing."""
    tokenizer = load_tokenizer(tiny_tokenizer_directory)
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
            initializer_range=0.2, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.rand(parameter.shape[-1]))
        model.model.layers[1].self_attn.o_proj.weight.mul_(1e-3)
        model.model.layers[1].mlp.down_proj.weight.mul_(1e-3)
    directory = tmp_path_factory.mktemp("prune") / "model"
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def pruned(model: Path, corpus: Path, output: Path, **settings: Any) -> dict[str, Any]:
    made = {"model": model, "corpus": corpus, "output": output, "question_count": 2, "max_new_tokens": 4}
    made |= {"calibration_rows": 4, "calibration_tokens": 32}
    return prune(PruneConfig.model_validate({**made, **settings}))


def rows_of(model: Path, corpus: Path) -> list[torch.Tensor]:
    return sample_rows(corpus, load_tokenizer(model), 4, 32)


# --- which ones ---------------------------------------------------------------------------------------------------


def test_layers_go_by_the_loss_without_them(model_directory: Path, tiny_corpus: Path, tmp_path: Path) -> None:
    found = pruned(model_directory, tiny_corpus, tmp_path / "p", drop_layers=2)
    rows = rows_of(model_directory, tiny_corpus)

    def loss_without(gone: tuple[int, ...]) -> float:
        model: Any = load_model(model_directory)
        model.model.layers = torch.nn.ModuleList([x for i, x in enumerate(model.model.layers) if i not in gone])
        model.config.num_hidden_layers = 4 - len(gone)
        with torch.no_grad():
            losses = [cross_entropy(model(input_ids=row, use_cache=False).logits[0, :-1], row[0, 1:]) for row in rows]
        return float(torch.stack(losses).mean())

    first = min(range(4), key=lambda i: loss_without((i,)))
    second = min(sorted({0, 1, 2, 3} - {first}), key=lambda i: loss_without((first, i)))
    assert found["dropped_layers"] == [first, second]
    assert found["loss"] == pytest.approx(loss_without(()), rel=1e-5)
    assert found["losses"] == pytest.approx([loss_without((first,)), loss_without((first, second))], rel=1e-5)
    assert found["read_back_deviation"] < 1e-5
    assert found["made"]["parameters"] < found["original"]["parameters"]
    made: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "p", dtype=torch.float32).eval()
    assert mean_loss(made, rows) == pytest.approx(loss_without((first, second)), rel=1e-5)
    assert artifact.verify(tmp_path / "p").kind == "model"
    assert (tmp_path / "p" / "report.html").is_file()
    assert load_tokenizer(tmp_path / "p").chat_template == load_tokenizer(model_directory).chat_template


def test_layers_go_by_what_they_change(model_directory: Path, tiny_corpus: Path, tmp_path: Path) -> None:
    found = pruned(model_directory, tiny_corpus, tmp_path / "p", drop_layers=1, layers_by="similarity")
    assert found["dropped_layers"] == [1]
    model: Any = load_model(model_directory)
    rows = rows_of(model_directory, tiny_corpus)
    with torch.no_grad():
        states = [model.model(input_ids=row, output_hidden_states=True).hidden_states for row in rows]
    for index in range(3):  # the last state is that after the norm
        ends = [(a[index].double(), a[index + 1].double()) for a in states]
        cosines = torch.cat([(x * y).sum(-1) / x.norm(dim=-1) / y.norm(dim=-1) for x, y in ends])
        assert found["layer_changes"][index] == pytest.approx(float(1 - cosines.mean()), rel=1e-6)
    assert layer_changes(model, rows) == found["layer_changes"]


def test_heads_and_channels_by_hand() -> None:
    # Two inputs of length 3 and 1; columns of length 5 and 2.
    weight = torch.tensor([[3.0, 2.0], [4.0, 0.0]])
    assert column_scores(weight, torch.tensor([3.0, 1.0])).tolist() == [15.0, 2.0]
    assert best_channels(torch.tensor([1.0, 5.0, 2.0, 5.0, 0.0]), 3) == [1, 2, 3]
    assert best_channels(torch.ones(4), 2) == [0, 1]
    # Six heads of 2, three to a key/value head: squares 2, 8, 18 and 50, 0, 2.
    shape = Shape(layers=1, heads=6, key_value_heads=2, head_dim=2, channels=1)
    scores = torch.tensor([1.0, 2, 3, 5, 0, 1]).repeat_interleave(2)
    assert best_heads(scores, shape, 4, 2) == ([1, 2, 3, 5], [0, 1])
    assert best_heads(scores, shape, 2, 2) == ([2, 3], [0, 1])
    assert best_heads(scores, shape, 3, 1) == ([3, 4, 5], [1])
    assert best_heads(scores, shape, 1, 1) == ([3], [1])


def test_width(model_directory: Path, tiny_corpus: Path, tmp_path: Path) -> None:
    found = pruned(model_directory, tiny_corpus, tmp_path / "p", heads=2, intermediate_size=20)
    assert found["shape"] == {"layers": 4, "heads": 2, "key_value_heads": 2, "head_dim": 8, "channels": 20}
    assert found["read_back_deviation"] < 1e-5
    original: Any = load_model(model_directory)
    lengths = input_lengths(original, rows_of(model_directory, tiny_corpus))
    kept = json.loads((tmp_path / "p" / "pruning.json").read_text())
    stored = load_file(tmp_path / "p" / "model.safetensors")
    for number in range(4):
        name = f"model.layers.{number}.mlp.down_proj"
        down = original.get_submodule(name).weight.detach()
        scores = [float(down[:, i].double().norm() * lengths[name][i]) for i in range(48)]
        assert kept["channels"][str(number)] == sorted(sorted(range(48), key=lambda i: -scores[i])[:20])
        assert torch.equal(stored[f"{name}.weight"], down[:, kept["channels"][str(number)]])
        # One query head of each pair stays.
        assert [head // 2 for head in kept["heads"][str(number)]] == [0, 1]
        assert stored[f"model.layers.{number}.self_attn.q_proj.weight"].shape == (16, 32)
        assert stored[f"model.layers.{number}.self_attn.k_proj.weight"].shape == (16, 32)
    assert "lm_head.weight" not in stored


def test_input_lengths_are_those_of_the_text(model_directory: Path, tiny_corpus: Path) -> None:
    model: Any = load_model(model_directory)
    rows = rows_of(model_directory, tiny_corpus)
    name = "model.layers.2.mlp.up_proj"
    seen = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].double()))
    with torch.no_grad():
        for row in rows:
            model(input_ids=row)
    hook.remove()
    assert torch.allclose(input_lengths(model, rows)[name].double(), torch.cat(seen).norm(dim=0), rtol=1e-6)


# --- zeros --------------------------------------------------------------------------------------------------------


def test_wanda_by_hand() -> None:
    weight = torch.tensor([[1.0, -4.0, 2.0, 3.0], [0.5, 0.1, -9.0, 1.0]])
    lengths = torch.tensor([10.0, 1.0, 1.0, 2.0])
    # Scores: 10 4 2 6 and 5 0.1 9 2.
    assert kept_weights(weight, lengths, 0.5).tolist() == [[True, False, False, True], [True, False, True, False]]
    assert kept_weights(weight, lengths, 0.26).tolist() == [[True, True, False, True], [True, False, True, True]]
    wide = torch.tensor([[1.0, 2, 3, 4, 8, 7, 6, 5]])
    alike = torch.ones(8)
    assert kept_weights(wide, alike, "2:4").int().tolist() == [[0, 0, 1, 1, 1, 1, 0, 0]]
    assert kept_weights(wide, alike, 0.5).int().tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]
    assert kept_weights(torch.ones(1, 4), torch.ones(4), "2:4").tolist() == [[False, False, True, True]]


@pytest.mark.parametrize("sparsity", [0.6, "2:4"])
def test_zeros_stand_where_the_text_says(
    model_directory: Path, tiny_corpus: Path, tmp_path: Path, sparsity: float | str
) -> None:
    found = pruned(model_directory, tiny_corpus, tmp_path / "p", sparsity=sparsity)
    stored, before = load_file(tmp_path / "p" / "model.safetensors"), load_file(model_directory / "model.safetensors")
    assert stored.keys() == before.keys()
    zeros = 0
    for name, tensor in stored.items():
        if "proj" not in name:
            assert torch.equal(tensor, before[name])
            continue
        kept = tensor != 0
        assert torch.equal(tensor[kept], before[name][kept])
        zeros += int((~kept).sum())
        if sparsity == "2:4":
            assert (kept.reshape(-1, 4).sum(1) == 2).all()
        else:
            assert ((~kept).sum(1) == int(0.6 * tensor.shape[1])).all()
    assert (found["zeros"], found["made"]["weight_bytes"]) == (zeros, found["original"]["weight_bytes"])
    # The last layer's scores are those of what the emptied layers before it give.
    made: Any = load_model(tmp_path / "p")
    name = "model.layers.3.self_attn.q_proj"
    lengths = input_lengths(made, rows_of(model_directory, tiny_corpus))[name]
    meant = kept_weights(before[f"{name}.weight"], lengths, 0.6 if sparsity == 0.6 else "2:4")
    assert torch.equal(stored[f"{name}.weight"] != 0, meant)
    page = (tmp_path / "p" / "report.html").read_text()
    assert "Zeros alone save neither bytes nor time" in page


def test_everything_at_once(model_directory: Path, tiny_corpus: Path, tmp_path: Path) -> None:
    found = pruned(
        model_directory, tiny_corpus, tmp_path / "p",
        drop_layers=1, key_value_heads=1, intermediate_size=24, sparsity=0.5,
    )  # fmt: skip
    assert found["shape"] == {"layers": 3, "heads": 2, "key_value_heads": 1, "head_dim": 8, "channels": 24}
    stored = load_file(tmp_path / "p" / "model.safetensors")
    assert stored["model.layers.2.mlp.down_proj.weight"].shape == (32, 24)
    assert ((stored["model.layers.2.mlp.down_proj.weight"] == 0).sum(1) == 12).all()


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "Nothing is said to be left out"),
        ({"drop_layers": 4}, "one at least stays"),
        ({"heads": 3}, "cannot share 2 key/value heads"),
        ({"heads": 4, "key_value_heads": 1}, "each has 2 here"),
        ({"intermediate_size": 49}, "more than the 48"),
        ({"drop_layers": 1, "corpus": None}, "measured on text"),
    ],
)
def test_what_cannot_be(
    model_directory: Path, tiny_corpus: Path, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        pruned(**{"model": model_directory, "corpus": tiny_corpus, "output": tmp_path / "p", **settings})
    assert not (tmp_path / "p").exists()


def test_an_output_is_kept_unless_told_otherwise(model_directory: Path, tiny_corpus: Path, tmp_path: Path) -> None:
    pruned(model_directory, tiny_corpus, tmp_path / "p", drop_layers=1, layers_by="similarity")
    with pytest.raises(ArtifactError, match="already exists"):
        pruned(model_directory, tiny_corpus, tmp_path / "p", sparsity=0.5)
    found = pruned(model_directory, tiny_corpus, tmp_path / "p", sparsity=0.5, overwrite=True)
    assert json.loads((tmp_path / "p" / "config.json").read_text())["num_hidden_layers"] == 4
    assert found["zeros"] > 0

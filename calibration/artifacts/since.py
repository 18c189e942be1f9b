"""Since when vLLM takes a flag or a value of one: the first release whose parser was read and has it.

Read in ``engine/arg_utils.py``, ``entrypoints/openai/cli_args.py`` (0.32: ``entrypoints/launchers/cli_args.py``) and
``config/cache.py`` of the releases 0.8.5, 0.9.0 to 0.9.2, 0.10.0 to 0.10.2, 0.11.0, 0.11.2, 0.12 to 0.15, 0.17 to 0.20,
0.24, 0.28 and 0.32.0. What was seen first in a release after a gap may have come earlier; before it is refused.
"""

from __future__ import annotations

from calibration.errors import Unsupported
from calibration.vllm_defaults import Version

#: flags younger than 0.8.5; those used here and not listed are as old
FLAGS: dict[str, Version] = {
    "--data-parallel-size": (0, 8, 5),
    "--data-parallel-size-local": (0, 9, 0),
    "--data-parallel-backend": (0, 9, 1),
    "--disable-hybrid-kv-cache-manager": (0, 9, 1),
    "--kv-cache-memory-bytes": (0, 10, 2),
    "--mamba-ssm-cache-dtype": (0, 10, 1),
}

#: values of --kv-cache-dtype younger than 0.8.5
KV_DTYPES: dict[str, Version] = {
    "fp8_inc": (0, 10, 0),
    "bfloat16": (0, 11, 0),
    "fp8_ds_mla": (0, 11, 2),
    "float16": (0, 18, 0),
    "nvfp4": (0, 20, 0),
    "int8_per_token_head": (0, 20, 0),
    "fp8_per_token_head": (0, 20, 0),
    "int4_per_token_head": (0, 28, 0),
    "nvfp4_ds_mla": (0, 32, 0),
}

#: values of --mamba-ssm-cache-dtype
STATE_DTYPES: dict[str, Version] = {"float32": (0, 10, 1), "float16": (0, 13, 0), "bfloat16": (0, 24, 0)}

#: --block-size was a choice of these (256 from 0.11.2 on); any number from 0.18 on
BLOCK_SIZES = (1, 8, 16, 32, 64, 128)
BLOCK_SIZE_256: Version = (0, 11, 2)
ANY_BLOCK_SIZE: Version = (0, 18, 0)

#: requests are logged unless --disable-log-requests says otherwise, before this; after it they are not, and the flag
#: went (0.17 refuses it: "unrecognized arguments", exit 2)
LOGS_NO_REQUESTS: Version = (0, 10, 1)

#: --quantization fp8 quantised a 16-bit checkpoint as it loads; from here on the name for it is fp8_per_tensor, and 0.32
#: refuses the old one (Fp8Config)
ONLINE_NAMES: Version = (0, 20, 0)

#: the CPU backend takes --kv-cache-memory-bytes; before it, only VLLM_CPU_KVCACHE_SPACE (CpuPlatform)
CPU_POOL_FLAG: Version = (0, 20, 0)

#: the official image comes without Ray (gpustack issue 5430; vLLM issue 33445)
NO_RAY_IN_IMAGE: Version = (0, 18, 0)


def require(what: str, since: Version, version: Version, hint: str = "") -> None:
    """Refuse what a release does not take.

    Raises:
        Unsupported: ``version`` is older than ``since``.
    """
    if version < since:
        raise Unsupported(f"{what} with vLLM {_text(version)}, expected vLLM {_text(since)} or later", hint)


def _text(version: Version) -> str:
    return ".".join(map(str, version))

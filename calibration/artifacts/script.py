"""``run_vllm_cluster.sh``: starts vLLM, waits a bounded time until it is healthy, stays with it; over nodes by Ray.

The parts are plain bash; what a deployment decides (model, flags, numbers) is set once at the top, each value quoted.
"""

from __future__ import annotations

from shlex import quote

from calibration.artifacts.launch import SCRIPT_NAME, Launch
from calibration.artifacts.text import comment

_USAGE_ONE = """#   ./run_vllm_cluster.sh [serve] [more vLLM flags]   start vLLM here, wait until it is healthy, stay with it
#   ./run_vllm_cluster.sh check                       exit 0 when it is healthy, 1 when not
"""

_USAGE_CLUSTER = """# on the first node:       ./run_vllm_cluster.sh head [more vLLM flags]
# on each of the others:   ./run_vllm_cluster.sh worker ADDRESS_OF_THE_FIRST
# on the first, any time:  ./run_vllm_cluster.sh check       exit 0 when it is healthy, 1 when not
#
# NODE_ADDRESS, where set, is the address of this node that the others reach. Keep Ray's port inside the cluster: whoever
# reaches it runs code there.
"""

_ENVIRONMENT = """#
# Taken from the environment: SERVE_HOST, SERVE_PORT, START_TIMEOUT_S; HF_TOKEN where the model asks for one; VLLM_API_KEY,
# the key that clients must send. The last two are not written here. When vLLM ends, so does this script, with its exit
# code; it starts nothing again.
set -euo pipefail
"""

_COMMON = r"""
say() { printf 'run_vllm_cluster: %s\n' "$*" >&2; }
refuse() { say "$*"; exit 2; }

[[ $SERVE_PORT =~ ^[1-9][0-9]{0,4}$ ]] || refuse "SERVE_PORT = $SERVE_PORT, expected a port"
[[ $START_TIMEOUT_S =~ ^[1-9][0-9]{0,8}$ ]] || refuse "START_TIMEOUT_S = $START_TIMEOUT_S, expected whole seconds"

health_host=$SERVE_HOST
case $SERVE_HOST in
  0.0.0.0) health_host=127.0.0.1 ;;
  ::) health_host=::1 ;;
esac
health="$health_host port $SERVE_PORT, /health"

healthy() {
  timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1" && printf "GET /health HTTP/1.0\r\nHost: %s\r\n\r\n" "$0" >&3 &&
    read -r _ status _ <&3 && [[ $status == 200 ]]' "$health_host" "$SERVE_PORT" 2>/dev/null
}

check() {
  healthy || { say "not healthy: $health"; exit 1; }
  say "healthy: $health"
}

stop_server() {
  kill -TERM "$server" 2>/dev/null || true
  for _ in {1..30}; do
    kill -0 "$server" 2>/dev/null || return 0
    sleep 1
  done
  kill -KILL "$server" 2>/dev/null || true
}

serve() {
  [[ -n $MODEL && $MODEL != -* ]] || refuse "MODEL = '$MODEL', expected $MODEL_WANTED"
  command -v vllm >/dev/null || refuse "no vllm on PATH: install vllm==$VLLM_VERSION, or use docker-compose.yml"
  if healthy; then refuse "something answers on $health already"; fi
  if [[ -z ${VLLM_API_KEY:-} && $SERVE_HOST != 127.0.0.1 && $SERVE_HOST != localhost ]]; then
    say "VLLM_API_KEY is not set: whoever reaches port $SERVE_PORT may use the server"
  fi
  local code=0 deadline=$((SECONDS + START_TIMEOUT_S))
  vllm serve "$MODEL" "${FLAGS[@]}" --host "$SERVE_HOST" --port "$SERVE_PORT" "$@" &
  server=$!
  trap 'kill -TERM "$server" 2>/dev/null || true' TERM INT
  until healthy; do
    if ! kill -0 "$server" 2>/dev/null; then
      wait "$server" || code=$?
      say "vLLM ended with exit code $code before it was healthy"
      exit "$code"
    fi
    if ((SECONDS >= deadline)); then
      say "not healthy after $START_TIMEOUT_S s, stopped: $health"
      stop_server
      exit 1
    fi
    sleep 1
  done
  say "healthy: $health"
  # a signal ends the first wait; vLLM then takes its time to finish
  wait "$server" || code=$?
  while kill -0 "$server" 2>/dev/null; do
    code=0
    wait "$server" || code=$?
  done
  exit "$code"
}
"""

_MAIN_ONE = """
case ${1:-serve} in
  serve) shift || true; serve "$@" ;;
  -*) serve "$@" ;;
  check) check ;;
  *) refuse "$1: expected serve or check" ;;
esac
"""

_CLUSTER = r"""
[[ $RAY_PORT =~ ^[1-9][0-9]{0,4}$ ]] || refuse "RAY_PORT = $RAY_PORT, expected a port"
node=()
if [[ -n $NODE_ADDRESS ]]; then
  node=(--node-ip-address "$NODE_ADDRESS")
  export VLLM_HOST_IP=$NODE_ADDRESS
fi

need_ray() { command -v ray >/dev/null || refuse "no ray on PATH: pip install 'ray[cgraph]'"; }

cluster_gpus() {
  local seen
  seen=$(python3 -c 'import ray
ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
print(int(ray.cluster_resources().get("GPU", 0)))' 2>/dev/null) || seen=0
  [[ $seen =~ ^[0-9]+$ ]] || seen=0
  printf '%s' "$seen"
}

run_head() {
  need_ray
  local found=0 deadline=$((SECONDS + START_TIMEOUT_S))
  ray start --head --port "$RAY_PORT" "${node[@]}"
  trap 'ray stop >/dev/null 2>&1 || true' EXIT
  until found=$(cluster_gpus); ((found >= GPUS)); do
    ((SECONDS < deadline)) || { say "Ray has $found of $GPUS GPUs after $START_TIMEOUT_S s"; exit 1; }
    say "Ray has $found of $GPUS GPUs: start the workers"
    sleep 2
  done
  serve "$@"
}

run_worker() {
  need_ray
  local head=${1:-$HEAD_ADDRESS} deadline=$((SECONDS + START_TIMEOUT_S))
  [[ $head =~ ^[A-Za-z0-9][A-Za-z0-9.-]*$ ]] || refuse "worker '$head': expected the address of the first node"
  until timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$head" "$RAY_PORT" 2>/dev/null; do
    ((SECONDS < deadline)) || { say "no Ray on $head:$RAY_PORT after $START_TIMEOUT_S s"; exit 1; }
    sleep 2
  done
  exec ray start --address "$head:$RAY_PORT" "${node[@]}" --block
}

case ${1:-} in
  head) shift; run_head "$@" ;;
  worker) shift; run_worker "$@" ;;
  check) check ;;
  *) refuse "expected head, worker or check" ;;
esac
"""


def launch_script(launch: Launch) -> str:
    """The text of ``run_vllm_cluster.sh``."""
    cluster = launch.nodes.is_cluster
    parts = [
        # values stand in single quotes so that nothing in them is expanded
        "#!/usr/bin/env bash\n# shellcheck disable=SC1003,SC2016\n",
        _lines(comment(f"{launch.headline}. Written by `vllm-harness plan --write`.")),
        *(_lines(["#", *comment(f"Note: {note}.")]) for note in launch.notes),
        "#\n",
        _USAGE_CLUSTER if cluster else _USAGE_ONE,
        _ENVIRONMENT,
        _settings(launch),
        _COMMON,
        _CLUSTER if cluster else _MAIN_ONE,
    ]
    return "".join(parts).replace("run_vllm_cluster.sh", SCRIPT_NAME)


def _lines(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _settings(launch: Launch) -> str:
    """Model, flags and numbers."""
    lines = ["", *_model(launch), "FLAGS=("]
    lines += [f"  {line}" for line in _flag_lines(launch.flags)]
    lines += [")", *_environment(launch), f"VLLM_VERSION={quote(launch.version)}"]
    lines += ["SERVE_HOST=${SERVE_HOST:-0.0.0.0}", "SERVE_PORT=${SERVE_PORT:-8000}"]
    lines.append(f"START_TIMEOUT_S=${{START_TIMEOUT_S:-{launch.start_timeout_s}}}")
    if launch.nodes.is_cluster:
        lines += [f"GPUS={launch.deployment.gpus}", "RAY_PORT=${RAY_PORT:-6379}"]
        lines += ["NODE_ADDRESS=${NODE_ADDRESS:-}", "HEAD_ADDRESS=${HEAD_ADDRESS:-}"]
    return _lines(lines)


def _model(launch: Launch) -> list[str]:
    """The model; where only the operator can name it, from the environment, and what it must be."""
    model = launch.checkpoint.model
    value = "${MODEL:-}" if model is None else quote(model)
    return [f"MODEL={value}", f"MODEL_WANTED={quote(launch.checkpoint.wanted)}"]


def _environment(launch: Launch) -> list[str]:
    lines = [f"export {name}={quote(value)}" for name, value in launch.environment.items()]
    if launch.deployment.device == "cpu" and not launch.environment:
        lines.append("unset VLLM_CPU_KVCACHE_SPACE  # it would go before --kv-cache-memory-bytes")
    return lines


def _flag_lines(flags: tuple[str, ...]) -> list[str]:
    """A flag and its values a line, each quoted."""
    lines: list[str] = []
    for item in flags:
        if item.startswith("--"):
            lines.append(quote(item))
        else:
            lines[-1] += f" {quote(item)}"
    return lines

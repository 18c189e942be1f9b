"""The command tree, loaded lazily: a command's module is imported when that command is called, so `plan` never pays
for aiohttp or pandas. A command is a module ``harness.cli.<name>`` with a typer-annotated function ``command``, or with a
function ``run(argv)`` that parses its own options (``harness.cli.QUICK``).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from harness.cli.ends import guarded

#: command -> what it does, in the order of the help page
COMMANDS: dict[str, str] = {
    "demo": "The whole loop on the embedded twin: plan, ramp, calibrate, compare, report.",
    "probe": "What is running there: version, model, context, KV pool, flags that matter, what is missing.",
    "plan": "Analytical sizing: memory, limits on users, what binds.",
    "ramp": "Raise concurrent streaming users against a live server and measure.",
    "report": "A run as one HTML file that opens offline.",
    "calibrate": "Fit correction factors to a server: run the stages that tell them, or take finished runs.",
    "predict": "What users get under a load nobody ran, with intervals.",
    "compare": "Measured beside predicted, or one run beside another as a gate.",
    "exporter": "Prometheus metrics of a finished run or a calibration.",
    "export": "Runs in other tools' formats, and their results as runs.",
    "metrics": "Read a /metrics text (file or URL) the way a ramp does.",
    "twin": "Serve the twin: vLLM's scheduler behind the OpenAI API, no GPU.",
    "ui": "The page: size with sliders, look at runs, watch a ramp.",
    "profiles": "List the load profiles there are.",
    "models": "List the models of the catalog.",
    "gpus": "List the GPUs of the catalog.",
    "selftest": "How true this client is on this machine, by stream count.",
    "accuracy": "Score the model on a table of measurements.",
}


#: hands every argument on, --help too
_UNPARSED: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def _passes_on(run: Callable[[list[str]], None]) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        run(context.args)

    # typer reads annotations by name
    command.__annotations__ = {"context": typer.Context, "return": None}
    return command


class LazyGroup(TyperGroup):
    """A group that knows its commands by name and imports a command's module only to run or explain it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        app = typer.Typer(add_completion=False)
        module = import_module(f"harness.cli.{cmd_name}")
        if hasattr(module, "run"):
            app.command(name=cmd_name, context_settings=_UNPARSED)(_passes_on(module.run))
        else:
            app.command(name=cmd_name, help=COMMANDS[cmd_name])(module.command)
        return typer.main.get_command(app)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The overview, from the table alone: no module is imported to print a line about it."""
        width = max(map(len, COMMANDS))
        lines = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
        formatter.write(
            "\nvllm-harness: how many people can stream from a vLLM server at once, what stops them first,"
            f" and how sure that is.\n\nUsage: vllm-harness COMMAND [OPTIONS]\n\nCommands:\n{lines}\n\n"
            "vllm-harness COMMAND --help explains one. Exit codes: 0 done, 1 failure of the tool, 2 usage or bad\n"
            "input file, 3 a gate or comparison failed, 4 the run is invalid or vacuous, 5 the server cannot be\n"
            "reached or used, 130 interrupted with results written.\n"
        )


app = typer.Typer(cls=LazyGroup, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def root() -> None:
    """vllm-harness."""


def main() -> None:
    """Run the command, turn our errors into one line and an exit code."""
    guarded(lambda: app(prog_name="vllm-harness"))
